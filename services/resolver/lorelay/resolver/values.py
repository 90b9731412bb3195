"""Numbers that cannot be served: NaN, infinities, and what becomes infinite in the engine's type.

One such number in an adapter turns every answer through it into the same token.  The scan reads in chunks, so its
memory does not grow with the adapter, and compares bits, so it converts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import BinaryIO

import numpy as np

from lorelay.proto.adapters import WEIGHTS_FILE
from lorelay.resolver.reasons import Findings, show
from lorelay.resolver.safetensors_header import Tensor

CHUNK_BYTES = 4 << 20

# dtype: (bits as an unsigned integer, mask of all bits but the sign, the least magnitude that is infinite or NaN).
_BITS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
}
# (dtype, engine's dtype): the least magnitude that rounds to infinity.
_OVERFLOWS = {
    ("F32", "float16"): 0x477FF000,
    ("BF16", "float16"): 0x4780,
    ("F32", "bfloat16"): 0x7F7F8000,
}


def check_values(
    file: BinaryIO,
    tensors: Iterable[Tensor],
    engine_dtype: str,
    findings: Findings,
    still_wanted: Callable[[], None],
) -> None:
    """Look at every number of `tensors`, all of F16, BF16 or F32.

    Args:
        file: The safetensors file.
        tensors: Its tensors.
        engine_dtype: What the engine computes in, e.g. `bfloat16`; unknown types only rule out NaN and infinities.
        findings: Gets what is wrong.
        still_wanted: Called before each chunk; raises to stop.
    """
    buffer = bytearray(CHUNK_BYTES)
    for tensor in tensors:
        bits, mask, non_finite = _BITS[tensor.dtype]
        limit = _OVERFLOWS.get((tensor.dtype, engine_dtype.removeprefix("torch.")), non_finite)
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            still_wanted()
            size = min(left, CHUNK_BYTES)
            _read_exactly(file, memoryview(buffer)[:size])
            magnitudes = np.frombuffer(buffer, bits, count=size // np.dtype(bits).itemsize) & bits(mask)
            largest = int(magnitudes.max())
            if largest >= limit:
                _refuse(tensor, largest, non_finite, engine_dtype, findings)
                break
            left -= size


def _refuse(tensor: Tensor, magnitude: int, non_finite: int, engine_dtype: str, findings: Findings) -> None:
    if magnitude > non_finite:
        what = "NaN"
    elif magnitude == non_finite:
        what = "an infinite number"
    else:
        what = f"a number that is infinite in the base's {engine_dtype}"
    findings.add(
        "non_finite",
        f"{WEIGHTS_FILE}: tensor {show(tensor.name)} holds {what}; expected finite numbers only.",
        group=what,
    )


def _read_exactly(file: BinaryIO, target: memoryview) -> None:
    """Fill `target`.

    Raises:
        OSError: The file ends before: it was cut since its header was read.
    """
    at = 0
    while at < len(target):
        count = file.readinto(target[at:])  # type: ignore[attr-defined]
        if not count:
            raise OSError("the file was cut while it was read")
        at += count
