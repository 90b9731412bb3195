"""Mends vLLM's LoRA on a CPU, where a request to the base could be answered by somebody's adapter.

A row of a batch without an adapter has the slot -1.  vLLM's Triton kernels skip it; the PyTorch operations that stand
in for them on a CPU index the stacked weights with it, so it gets the *last* slot's adapter whenever it shares a step
with a request to any adapter.  Source: vLLM 0.32, lora/ops/torch_ops/lora_ops.py; vllm-project/vllm#48421 and #49656
propose to mend it there.  Goes when the oldest supported version has one of them.

The operations here also multiply once per adapter in the batch instead of copying an adapter's weights once per token.

Runs in vLLM's worker processes, by way of `vllm_extension`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mend() -> None:
    """Put the operations of this module in place of vLLM's, in this process."""
    from vllm.lora.ops.torch_ops import lora_ops  # noqa: PLC0415 - only with vLLM
    from vllm.lora.punica_wrapper import punica_cpu  # noqa: PLC0415 - only with vLLM

    for operation in (bgmv_expand, bgmv_expand_slice, bgmv_shrink):
        for module in (lora_ops, punica_cpu):
            if not hasattr(module, operation.__name__):
                raise RuntimeError(f"vLLM's {module.__name__} has no {operation.__name__} any more")
            setattr(module, operation.__name__, operation)


def bgmv_shrink(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    scaling: float = 1.0,
) -> None:
    """Multiply each row with its adapter's A; zero for a row without one.

    Args:
        inputs: Shape [rows, in_features].
        lora_b_weights: All slots' A (the name is vLLM's), shape [slots, (1,) rank, in_features].
        output_tensor: Written, shape [rows, at least rank].
        lora_indices_tensor: Each row's slot, -1 for none, shape [rows].
        scaling: Of the result.
    """
    rank = lora_b_weights.shape[-2]
    output_tensor[:, :rank] = 0
    for slot, rows in _rows_by_slot(lora_indices_tensor):
        weights = _slot_weights(lora_b_weights, slot, output_tensor)
        output_tensor[rows, :rank] = scaling * (inputs[rows].to(output_tensor.dtype) @ weights.T)


def bgmv_expand(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    add_inputs: bool = True,  # noqa: FBT001, FBT002 - vLLM's signature
) -> None:
    """Multiply each row with its adapter's B, onto `output_tensor`; leave a row without one alone.

    Args:
        inputs: Shape [rows, rank].
        lora_b_weights: All slots' B, shape [slots, (1,) out_features, rank].
        output_tensor: Written, shape [rows, out_features], give or take padding.
        lora_indices_tensor: Each row's slot, -1 for none, shape [rows].
        add_inputs: True: add to what is there; False: replace it.
    """
    # Adapter and model may pad their outputs differently.
    width = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, width, add_inputs)


def bgmv_expand_slice(  # noqa: PLR0917 - vLLM's signature
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,  # noqa: FBT001, FBT002 - vLLM's signature
) -> None:
    """Do as `bgmv_expand` onto the columns of `output_tensor` that begin at `slice_offset`."""
    target = output_tensor[:, slice_offset : slice_offset + slice_size]
    for slot, rows in _rows_by_slot(lora_indices_tensor):
        weights = _slot_weights(lora_b_weights, slot, output_tensor)[:slice_size]
        delta = inputs[rows].to(output_tensor.dtype) @ weights.T
        if add_inputs:
            target[rows] += delta
        else:
            target[rows] = delta


def _rows_by_slot(slots: Tensor) -> list[tuple[int, Tensor | slice]]:
    """Return each slot in use with the rows that use it; a slice when all rows do, which copies nothing."""
    used = slots.unique().tolist()
    if len(used) == 1:
        return [(used[0], slice(None))] if used[0] >= 0 else []
    return [(slot, (slots == slot).nonzero().flatten()) for slot in used if slot >= 0]


def _slot_weights(stacked: Tensor, slot: int, like: Tensor) -> Tensor:
    weights = stacked[slot]
    return (weights.squeeze(0) if weights.dim() == 3 else weights).to(like.dtype)  # noqa: PLR2004 - [1, out, in]
