"""The header of a safetensors file, read more strictly than any library does, before any library sees the file.

A file that passes has a header of bounded length that is strict JSON, in which every tensor's dtype, shape and offsets
agree, and whose tensors cover the data exactly: no gap, no overlap, nothing after them.  So nothing can hide in the
file, and no reader can see other tensors than this one saw.

Source: the format's specification, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import BinaryIO, TypeGuard

from lorelay.resolver.reasons import Findings, Reason, show
from lorelay.resolver.strict_json import StrictJSONError, loads

MAX_HEADER_BYTES = 16 << 20
"""Enough for 100 000 tensors with long names; the library's own limit is 100 MB."""
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_NAME = re.compile(r"[\x21-\x7e]{1,512}")
_FIELDS = {"dtype", "shape", "data_offsets"}

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element.  Types smaller than a byte are left out: no adapter has them."""

# What else is found under the name of a safetensors file, by its first bytes.
_IMPOSTORS = (
    ((b"PK\x03\x04",), "pickle_not_allowed", "a zip archive, as torch.save writes (it holds a pickle)"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "pickle_not_allowed", "a pickle"),
    ((b"version https://git-lfs",), "git_lfs_pointer", "a Git LFS pointer; fetch the real file into the source"),
    ((b"GGUF",), "not_safetensors", "a GGUF file"),
    ((b"\x93NUMPY",), "not_safetensors", "a NumPy file"),
    ((b"\x1f\x8b",), "not_safetensors", "a gzip stream"),
    ((b"<",), "not_safetensors", "an HTML or XML page"),
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int
    """Offset behind its last byte in the file."""


class HeaderError(ValueError):
    """The file is not a safetensors file we accept; `reasons` says everything that is wrong."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


def read_header(file: BinaryIO, size_bytes: int, name: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, in the order of their data.

    Reads the header only, whatever it claims about its length.

    Args:
        file: Open at its first byte.
        size_bytes: The file's size.
        name: What reasons call the file.

    Raises:
        HeaderError: It breaks a rule.
    """
    start = file.read(_LENGTH_BYTES)
    if len(start) < _LENGTH_BYTES:
        raise _refuse(b"", "not_safetensors", f"{name} has {len(start)} bytes: too few for a header.")
    length = int.from_bytes(start, "little")
    # The first bytes of the header tell what the file really is, so they are read even if the length is absurd.
    header = file.read(min(length, size_bytes - _LENGTH_BYTES, MAX_HEADER_BYTES))
    if length > MAX_HEADER_BYTES or length > size_bytes - _LENGTH_BYTES:
        raise _refuse(
            start + header[:32],
            "header_length",
            f"{name} claims a header of {length} bytes; expected at most"
            f" {min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES)}.",
            name,
        )
    if not header.startswith(b"{"):
        raise _refuse(start + header[:32], "not_safetensors", f"{name} has a header that is no JSON object.", name)
    try:
        value = loads(header.rstrip(b" "))
    except StrictJSONError as error:
        raise _refuse(b"", "header_json", f"{name} has a header that is not strict JSON: {error}.", name) from error
    findings = Findings()
    tensors = _tensors(value, findings, name)
    if not findings:
        _check_cover(tensors, size_bytes - _LENGTH_BYTES - length, findings, name)
    if findings:
        raise HeaderError(findings.reasons())
    data = _LENGTH_BYTES + length
    return {t.name: Tensor(t.name, t.dtype, t.shape, t.begin + data, t.end + data) for t in tensors}


def _refuse(start: bytes, code: str, sentence: str, name: str = "") -> HeaderError:
    for magics, impostor, what in _IMPOSTORS:
        if start.startswith(magics):
            return HeaderError((Reason(impostor, f"{name} is not a safetensors file but {what}."),))
    return HeaderError((Reason(code, sentence),))


def _tensors(value: object, findings: Findings, name: str) -> list[Tensor]:
    """Return the header's well-formed tensors, sorted by offset; what is not well-formed goes to `findings`."""
    if not isinstance(value, dict):  # it began with a brace and is followed by something else
        findings.add("header_json", f"{name} has a header that is no JSON object.")
        return []
    metadata = value.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        findings.add("header_json", f"{name}: {_METADATA} must map strings to strings.")
    if len(value) > MAX_TENSORS:
        findings.add("header_json", f"{name} has {len(value)} tensors; expected at most {MAX_TENSORS}.")
        return []
    tensors = [_tensor(key, entry, findings, name) for key, entry in value.items()]
    return sorted((t for t in tensors if t is not None), key=lambda t: (t.begin, t.end))


def _tensor(key: str, entry: object, findings: Findings, file: str) -> Tensor | None:
    if _NAME.fullmatch(key) is None:
        findings.add("tensor_name", f"{file}: {show(key)} is not a tensor name of 1 to 512 printable ASCII characters.")
        return None
    where = f"{file}: tensor {show(key)}"
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        findings.add("header_json", f"{where} must have exactly dtype, shape and data_offsets.", group="fields")
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        findings.add("tensor_dtype", f"{where} has the unknown dtype {show(dtype)}.", group=show(dtype))
    elif not _is_naturals(shape) or len(shape) > MAX_DIMENSIONS:
        findings.add(
            "tensor_shape",
            f"{where} has the shape {show(shape)}; expected at most {MAX_DIMENSIONS} whole numbers from 0.",
            group="shape",
        )
    elif not _is_naturals(offsets) or len(offsets) != len(("begin", "end")) or offsets[0] > offsets[1]:
        findings.add(
            "tensor_offsets", f"{where} has the data_offsets {show(offsets)}; expected [begin, end].", group="offsets"
        )
    elif offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        findings.add(
            "tensor_size",
            f"{where} ({dtype} {show(shape)}) has {offsets[1] - offsets[0]} bytes; expected"
            f" {show(math.prod(shape) * DTYPE_BYTES[dtype])}.",
            group="size",
        )
    else:
        return Tensor(key, dtype, tuple(shape), offsets[0], offsets[1])
    return None


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    # `type` and not isinstance: True is an int.
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _check_cover(tensors: list[Tensor], data_bytes: int, findings: Findings, file: str) -> None:
    """Check that tensors, sorted by offset, lie side by side from the first byte of the data to its last."""
    at = 0
    for tensor in tensors:
        if tensor.begin != at:
            what = "overlaps the tensor before it" if tensor.begin < at else "leaves a gap before it"
            findings.add(
                "tensor_offsets",
                f"{file}: tensor {show(tensor.name)} begins at byte {tensor.begin} and {what}; expected {at}.",
                group="cover",
            )
        at = max(at, tensor.end)
    if at != data_bytes:
        findings.add(
            "data_length",
            f"{file}: tensors end at byte {at} of the data, which has {data_bytes} bytes; expected the same.",
        )
