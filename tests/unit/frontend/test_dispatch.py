"""A response's frames on their way from the bus to its client."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lorelay.frontend.dispatch import MAX_BUFFERED_BYTES, MAX_WHOLE_BYTES, Stream
from lorelay.proto.errors import ErrorCode, WireError
from lorelay.proto.generation import Frame

pytestmark = pytest.mark.anyio

SSE = "text/event-stream"
LOST = WireError(code=ErrorCode.WORKER_LOST, message="gone")


def frame(sequence: int, body: bytes = b"", *, last: bool = False, kind: str = "") -> Frame:
    status = 200 if sequence == 0 else 0
    return Frame(stream=1, sequence=sequence, status=status, content_type=kind, body=body, last=last)


async def everything(stream: Stream) -> tuple[bytes, Frame]:
    body = b""
    while True:
        got = await stream.next(0)
        body += got.body
        if got.last:
            return body, got


@pytest.mark.parametrize("order", [(1,), (0, 2), (0, 0), (0, 1, 1), (0, 1, 3)])
async def test_a_frame_out_of_sequence_is_an_error_and_nothing_after_it_is_spliced(order: tuple[int, ...]) -> None:
    stream = Stream(1, "w")
    for sequence in (*order, order[-1] + 1, order[-1] + 2):
        stream.feed(frame(sequence, str(sequence).encode()))
    body, last = await everything(stream)
    assert last.error is not None
    assert last.error.code is ErrorCode.WORKER_LOST
    assert b"".join(str(n).encode() for n in range(4)).startswith(body)
    assert not stream.complete


async def test_frames_that_wait_are_joined_into_one() -> None:
    stream = Stream(1, "w")
    for sequence in range(5):
        stream.feed(frame(sequence, b"ab", last=sequence == 4, kind=SSE if not sequence else ""))
    got = await stream.next(0)
    assert (got.body, got.status, got.content_type, got.last) == (b"ab" * 5, 200, SSE, True)
    assert stream.complete


@given(pieces=st.lists(st.tuples(st.binary(max_size=5), st.booleans()), min_size=1, max_size=20), fails=st.booleans())
async def test_what_is_read_is_what_was_fed_however_reads_fall(
    pieces: list[tuple[bytes, bool]], *, fails: bool
) -> None:
    stream, read, ended, error = Stream(1, "w"), b"", False, None
    for sequence, (body, reads) in enumerate(pieces):
        stream.feed(frame(sequence, body, last=not fails and sequence == len(pieces) - 1))
        if reads:
            got = await stream.next(0)
            read, ended = read + got.body, got.last
    if fails:
        stream.fail(LOST)
    while not ended:
        got = await stream.next(0)
        read, ended, error = read + got.body, got.last, got.error
    assert read == b"".join(body for body, _ in pieces)
    assert error == (LOST if fails else None)


async def test_a_failure_comes_after_what_arrived_before_it_and_only_once() -> None:
    stream = Stream(1, "w")
    stream.feed(frame(0, b"text"))
    stream.fail(LOST)
    stream.fail(WireError(code=ErrorCode.INTERNAL_ERROR, message="later"))
    stream.feed(frame(1, b"late", last=True))
    assert await everything(stream) == (b"text", Frame(stream=1, sequence=1, last=True, error=LOST))


async def test_a_complete_stream_cannot_fail() -> None:
    stream = Stream(1, "w")
    stream.feed(frame(0, b"text", last=True))
    stream.fail(LOST)
    assert (await everything(stream))[1].error is None


@pytest.mark.parametrize(("kind", "bound"), [(SSE, MAX_BUFFERED_BYTES), ("application/json", MAX_WHOLE_BYTES)])
async def test_a_client_that_reads_slowly_costs_bounded_memory(kind: str, bound: int) -> None:
    """F6."""
    stream = Stream(1, "w")
    piece = bytes(1 << 20)
    for sequence in range((bound >> 20) + 20):
        stream.feed(frame(sequence, piece, kind=kind if not sequence else ""))
    body, last = await everything(stream)
    assert len(body) <= bound
    assert last.error is not None


async def test_a_client_that_keeps_up_may_read_without_bound() -> None:
    stream = Stream(1, "w")
    piece = bytes(1 << 20)
    for sequence in range(20):
        stream.feed(frame(sequence, piece, kind=SSE if not sequence else ""))
        assert (await stream.next(0)).error is None


async def test_a_read_without_a_frame_times_out_and_can_be_repeated() -> None:
    stream = Stream(1, "w")
    with pytest.raises(TimeoutError):
        await stream.next(0)
    stream.feed(frame(0, b"x", last=True))
    assert (await stream.next(0)).body == b"x"
