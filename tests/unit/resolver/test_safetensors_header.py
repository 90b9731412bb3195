"""Row H9: the header parser accepts what the format's specification says, and nothing else, whatever the bytes."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from pathlib import Path

import pytest
import safetensors
from hypothesis import example, given, strategies as st

from lorelay.resolver.safetensors_header import DTYPE_BYTES, MAX_HEADER_BYTES, HeaderError, Tensor, read_header
from support.adapters import Data, pairs, raw_safetensors, safetensors as write


def read(data: bytes) -> dict[str, Tensor]:
    return read_header(io.BytesIO(data), len(data), "w.safetensors")


def load(data: bytes) -> list[str]:
    """Return the names that the library finds."""
    found: list[tuple[str, object]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return [name for name, _ in found]


def codes(data: bytes) -> list[str]:
    with pytest.raises(HeaderError) as caught:
        read(data)
    return [reason.code for reason in caught.value.reasons]


@st.composite
def tensor(draw: st.DrawFn) -> Data:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    count = DTYPE_BYTES[dtype]
    for size in shape:
        count *= size
    return Data(dtype, shape, bytes(count))


NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
FILES = st.dictionaries(NAMES, tensor(), max_size=5)


@given(FILES)
def test_what_is_written_is_read_back(tensors: dict[str, Data]) -> None:
    """Every well-formed file is accepted, with its tensors where they lie."""
    data = write(tensors)
    found = read(data)
    assert {name: (t.dtype, t.shape, data[t.begin : t.end]) for name, t in found.items()} == {
        name: (t.dtype, t.shape, t.data) for name, t in tensors.items()
    }


@given(FILES, st.data())
def test_a_damaged_file_is_refused_or_means_what_the_library_reads(
    tensors: dict[str, Data], data: st.DataObject
) -> None:
    """We are never more lenient than the library, and never fail in another way than by reasons."""
    file = bytearray(write(tensors))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(file) - 1))
        file[at] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(file))
    except HeaderError:
        return
    assert set(load(bytes(file))) == set(found)


@given(st.binary(max_size=300))
@example(b"\xff" * 8)
@example(struct.pack("<Q", 2) + b"{}")
def test_any_bytes_are_refused_or_accepted(data: bytes) -> None:
    """No input makes the parser raise anything else."""
    with contextlib.suppress(HeaderError):
        read(data)


@given(st.integers(0, 2**64 - 1))
def test_no_claim_makes_it_read_more_than_there_is(length: int) -> None:
    """A header length of 2^63 costs nothing."""

    class Counting(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1) -> bytes:
            assert size is not None
            Counting.largest = max(Counting.largest, size)
            return super().read(size)

    data = raw_safetensors(b"{}", length=length)
    with contextlib.suppress(HeaderError):
        read_header(Counting(data), len(data), "w")
    assert Counting.largest <= len(data)


def test_a_header_beyond_the_cap_is_refused_even_if_it_is_there() -> None:
    """The cap holds for honest lengths too, before any JSON is parsed."""
    size = MAX_HEADER_BYTES + 1
    file = io.BytesIO(struct.pack("<Q", size) + b"{")
    with pytest.raises(HeaderError, match="header_length"):
        read_header(file, size + 8, "w")


def test_all_reasons_are_given_at_once() -> None:
    """A file with three things wrong is mended once, not three times."""
    header = {
        "a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        "c": {"dtype": "F32", "shape": -1, "data_offsets": [0, 4]},
    }
    assert codes(raw_safetensors(json.dumps(header).encode(), b"1234")) == [
        "tensor_dtype",
        "tensor_size",
        "tensor_shape",
    ]


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":{"format":1}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":{},"__metadata__":{}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % ("9" * 5000),
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,NaN]}}',
        '{"a":[]}',
        '{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_what_other_parsers_let_through(header: str) -> None:
    """Each of these passes some JSON parser, or some safetensors reader."""
    assert codes(raw_safetensors(header.encode(), b"1234"))


def test_a_full_cover_may_be_in_any_order() -> None:
    """The order of names in the header is not the order of the data."""
    header = {
        "late": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        "early": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    assert list(read(raw_safetensors(json.dumps(header).encode() + b"   ", bytes(8)))) == ["early", "late"]


def test_the_library_reads_what_the_tests_write(tmp_path: Path) -> None:
    """The tests' own writer is honest."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(write(pairs()))
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(pairs())
