"""Frames leave in one message per frontend and step, and none is lost without its frontend being told."""

from __future__ import annotations

from typing import cast

import anyio
import anyio.lowlevel
import pytest

from lorelay.proto.codec import unpack
from lorelay.proto.errors import ErrorCode, WireError
from lorelay.proto.generation import Frame, FrameBatch
from lorelay.runtime.bus import Bus, BusUnavailableError
from lorelay.worker import outbox
from lorelay.worker.outbox import Outbox

pytestmark = pytest.mark.anyio

WORKER = f"{1:016x}"
ONE, TWO = f"{2:016x}", f"{3:016x}"


class Wire:
    """A bus that keeps what is published."""

    max_message_bytes = 4096

    def __init__(self) -> None:
        self.sent: list[tuple[str, FrameBatch]] = []
        self.is_away = False

    async def publish(self, subject: str, payload: bytes) -> None:
        """Keep it."""
        assert len(payload) <= self.max_message_bytes
        await anyio.lowlevel.checkpoint()
        if self.is_away:
            raise BusUnavailableError("away")
        self.sent.append((subject.split(".")[3], unpack(FrameBatch, payload)))


def made() -> tuple[Wire, Outbox]:
    wire = Wire()
    return wire, Outbox(cast("Bus", wire), "test", WORKER)


def frame(stream: int, sequence: int = 0, body: bytes = b"x", *, last: bool = False) -> Frame:
    return Frame(stream=stream, sequence=sequence, body=body, last=last)


async def settle() -> None:
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


async def test_what_one_step_wakes_leaves_in_one_message_per_frontend() -> None:
    wire, box = made()
    step = anyio.Event()

    async def request(stream: int) -> None:
        await step.wait()
        box.put(ONE if stream % 2 else TWO, frame(stream))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        for stream in range(20):
            tasks.start_soon(request, stream)
        await settle()
        step.set()
        await settle()
        assert sorted((frontend, len(batch.frames)) for frontend, batch in wire.sent) == [(ONE, 10), (TWO, 10)]
        assert {batch.worker for _, batch in wire.sent} == {WORKER}
        assert box.messages == 2
        tasks.cancel_scope.cancel()


async def test_a_batch_is_never_larger_than_a_message() -> None:
    wire, box = made()
    reasons = tuple("r" * 100 for _ in range(20))
    failed = Frame(
        stream=9,
        sequence=0,
        last=True,
        error=WireError(code=ErrorCode.INVALID_LORA_ADAPTER, message="m", reasons=reasons),
    )
    for stream in range(20):
        box.put(ONE, frame(stream, body=bytes(box.max_body_bytes)))
        box.put(ONE, failed)
    await box.flush()
    assert sum(len(batch.frames) for _, batch in wire.sent) == 40


async def test_a_stream_keeps_its_order_though_two_flush() -> None:
    wire, box = made()
    async with anyio.create_task_group() as tasks:
        for sequence in range(10):
            box.put(ONE, frame(1, sequence, bytes(1000)))
            tasks.start_soon(box.flush)
            await anyio.lowlevel.checkpoint()
    assert [each.sequence for _, batch in wire.sent for each in batch.frames] == list(range(10))


async def test_frames_that_the_bus_did_not_take_are_an_error_once_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """F8: the last frame of a response has nothing after it, so no gap would tell."""
    monkeypatch.setattr(outbox, "RETRY_S", 0.001)
    wire, box = made()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run)
        wire.is_away = True
        for _ in range(3):
            box.put(ONE, frame(1, 5, last=True))
            box.put(TWO, frame(2, 0))
            await anyio.sleep(0.005)
        wire.is_away = False
        with anyio.fail_after(2):
            while len(wire.sent) < 2:  # noqa: ASYNC110 - played
                await anyio.sleep(0.001)
        told = {frontend: batch.frames for frontend, batch in wire.sent}
        assert [len(frames) for frames in told.values()] == [1, 1]
        assert all(each.last and each.error is not None for frames in told.values() for each in frames)
        await anyio.sleep(0.005)
        assert len(wire.sent) == 2
        tasks.cancel_scope.cancel()
