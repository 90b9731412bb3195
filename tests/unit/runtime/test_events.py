"""The outbox of events: bounded, in order, patient, and never in a request's way."""

from __future__ import annotations

from typing import cast

import anyio
import anyio.lowlevel
import pytest

from lorelay.proto.codec import from_json
from lorelay.proto.events import EventKind, LoraEvent
from lorelay.proto.identity import select
from lorelay.runtime import events
from lorelay.runtime.bus import Bus, BusUnavailableError, MessageTooLargeError
from lorelay.runtime.events import EventLog

pytestmark = pytest.mark.anyio

INSTANCE = f"{1:016x}"


class Stream:
    """A stream that is away when a test says so; it drops what it has already, as JetStream does."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[str, LoraEvent]] = {}
        self.fails: Exception | None = None
        self.confirms = True
        self.ensured = 0

    async def ensure_stream(self, *_: object, **__: object) -> None:
        """Count."""
        await anyio.lowlevel.checkpoint()
        self.ensured += 1

    async def store(self, subject: str, payload: bytes, *, message_id: str) -> None:
        """Store, fail, or store without saying so."""
        await anyio.lowlevel.checkpoint()
        if self.fails is not None:
            raise self.fails
        self.stored.setdefault(message_id, (subject, from_json(LoraEvent, payload)))
        if not self.confirms:
            raise BusUnavailableError("no confirmation")

    @property
    def revisions(self) -> list[str]:
        """What was stored, in order."""
        return [event.revision for _, event in self.stored.values()]


def made() -> tuple[Stream, EventLog]:
    stream = Stream()
    return stream, EventLog(cast("Bus", stream), "test", "worker", INSTANCE)


def emit(log: EventLog, number: int, source: str = "s3://b/a") -> None:
    log.emit(EventKind.LOADED, select("base", source), revision=str(number))


async def settle() -> None:
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


async def test_events_are_stored_in_order_under_their_subject() -> None:
    stream, log = made()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.run)
        for number in range(5):
            emit(log, number)
            await anyio.lowlevel.checkpoint()
        await settle()
        tasks.cancel_scope.cancel()
    assert stream.revisions == [str(number) for number in range(5)]
    subject, event = next(iter(stream.stored.values()))
    assert subject == f"lorelay.test.lora.loaded.{select('base', 's3://b/a').key}"
    assert (event.instance, event.component, event.scheme) == (INSTANCE, "worker", "s3")
    assert event.time.endswith("Z")


async def test_a_lost_confirmation_is_neither_a_repeat_nor_a_loss() -> None:
    stream, log = made()
    stream.confirms = False
    for number in range(3):
        emit(log, number)
    await log.flush()
    stream.confirms = True
    await log.flush()
    assert stream.revisions == ["0", "1", "2"]


async def test_a_full_outbox_drops_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "OUTBOX_EVENTS", 3)
    stream, log = made()
    for number in range(10):
        emit(log, number)
    await log.flush()
    assert stream.revisions == ["7", "8", "9"]
    assert log.dropped_events == 7


async def test_an_event_that_can_never_be_stored_does_not_hold_up_the_others() -> None:
    stream, log = made()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.run)
        stream.fails = MessageTooLargeError("too large")
        emit(log, 0)
        await settle()
        stream.fails = None
        emit(log, 1)
        await settle()
        tasks.cancel_scope.cancel()
    assert stream.revisions == ["1"]


async def test_a_bus_that_is_away_at_the_stop_does_not_hold_it_up() -> None:
    stream, log = made()
    stream.fails = BusUnavailableError("away")
    emit(log, 0)
    with anyio.fail_after(1):
        await log.flush()


async def test_an_event_holds_no_secret() -> None:
    stream, log = made()
    emit(log, 0, "https://user:secret@host/x?token=secret")
    await log.flush()
    assert "secret" not in repr(stream.stored)
