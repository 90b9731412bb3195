"""The operations that replace vLLM's on a CPU: what each row of a mixed batch gets."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from lorelay.worker.engine import vllm_cpu_lora

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # torch's
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

BATCHES = ([2, -1, 0, 0, -1, 2], [-1, -1], [1, 1, 1], [1], [-1], [0, 1, 2])


def _stacks(dimensions: int) -> tuple[Any, Any]:
    """Return A and B of three slots, as vLLM stacks them: rank 4, from 16 features to 12."""
    import torch  # noqa: PLC0415 - heavy, and only with the CPU extra

    torch.manual_seed(0)
    middle = (1,) * (dimensions - 3)
    return torch.randn(3, *middle, 4, 16), torch.randn(3, *middle, 12, 4)


@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("slots", BATCHES)
def test_each_row_gets_its_own_adapter_and_no_other(slots: list[int], dimensions: int) -> None:
    """vLLM's own give a row without an adapter (-1) the last slot's."""
    import torch  # noqa: PLC0415 - as above

    stacked_a, stacked_b = _stacks(dimensions)
    rows = len(slots)
    inputs, before = torch.randn(rows, 16), torch.randn(rows, 20)
    indices = torch.tensor(slots)
    low = torch.full((rows, 4), 9.0)  # left from another step
    out = before.clone()
    vllm_cpu_lora.bgmv_shrink(inputs, stacked_a, low, indices, 0.5)
    vllm_cpu_lora.bgmv_expand_slice(low, stacked_b, out, indices, 5, 12)
    whole = before[:, :12].clone()
    vllm_cpu_lora.bgmv_expand(low, stacked_b, whole, indices)
    for row, slot in enumerate(slots):
        wanted = before[row].clone()
        if slot >= 0:
            a, b = stacked_a[slot].reshape(4, 16), stacked_b[slot].reshape(12, 4)
            delta = b @ (0.5 * (a @ inputs[row]))
            wanted[5:17] += delta
            torch.testing.assert_close(whole[row], before[row, :12] + delta)
        else:
            torch.testing.assert_close(whole[row], before[row, :12], rtol=0, atol=0)
        torch.testing.assert_close(out[row], wanted)


def test_the_output_s_type_is_kept() -> None:
    import torch  # noqa: PLC0415 - as above

    stacked_a, stacked_b = _stacks(4)
    indices = torch.tensor([1, -1])
    low, out = torch.zeros(2, 4), torch.zeros(2, 12, dtype=torch.bfloat16)
    inputs = torch.randn(2, 16, dtype=torch.bfloat16)
    vllm_cpu_lora.bgmv_shrink(inputs, stacked_a.bfloat16(), low, indices)
    vllm_cpu_lora.bgmv_expand(low, stacked_b.bfloat16(), out, indices, add_inputs=False)
    assert out.dtype == torch.bfloat16
    assert out[0].any()
    assert not out[1].any()
