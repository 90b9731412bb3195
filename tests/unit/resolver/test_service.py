"""The resolver's side of the bus, without a bus: every message is answered, and what workers hold is known."""

from __future__ import annotations

from typing import cast

import anyio
import pytest

from lorelay.proto.adapters import MaterializeReply, MaterializeRequest
from lorelay.proto.codec import from_json, to_json
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.records import AdapterState, ResidencyRecord
from lorelay.resolver import service as module
from lorelay.resolver.materialization import Materialization
from lorelay.resolver.service import Holdings, Service
from lorelay.runtime.bus import Bus, Message
from lorelay.runtime.discovery import Change
from support.adapters import request


class Inbox:
    """Stands for the bus, a message, and the materialization behind them."""

    def __init__(self, data: bytes = b"", answer: MaterializeReply | Exception | None = None) -> None:
        self.data = data
        self.answer = answer or MaterializeReply(resolver="r")
        self.go = anyio.Event()
        self.replies = list[MaterializeReply]()
        self.is_subscribed = True

    async def reply(self, payload: bytes) -> None:
        """Take a reply."""
        self.replies.append(from_json(MaterializeReply, payload))

    async def unsubscribe_all(self) -> None:
        """Note it."""
        self.is_subscribed = False

    async def materialize(self, asked: MaterializeRequest) -> MaterializeReply:
        """Wait, then answer."""
        assert asked.request_id == "test"
        await self.go.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def service(self, tasks: anyio.abc.TaskGroup) -> Service:
        """Return a service between all three."""
        return Service(cast("Bus", self), cast("Materialization", self), tasks, "r")

    @property
    def message(self) -> Message:
        """Itself, as a message."""
        return cast("Message", self)


ASKED = to_json(request("s3://b/a"))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("data", "answer", "code"),
    [
        (ASKED, None, None),
        (ASKED, LorelayError(ErrorCode.LORA_NOT_FOUND, "no"), ErrorCode.LORA_NOT_FOUND),
        (ASKED, KeyError("defect"), ErrorCode.INTERNAL_ERROR),
        (b"{", None, ErrorCode.INVALID_REQUEST),
        (b'{"selection": 1}', None, ErrorCode.INVALID_REQUEST),
    ],
)
async def test_every_message_is_answered(data: bytes, answer: Exception | None, code: ErrorCode | None) -> None:
    """A worker waits for a reply, whatever happened."""
    inbox = Inbox(data, answer)
    inbox.go.set()
    async with anyio.create_task_group() as tasks:
        await inbox.service(tasks).on_message(inbox.message)
    (reply,) = inbox.replies
    assert (reply.error.code if reply.error else None) == code
    assert reply.resolver == "r"
    assert "defect" not in str(reply)


@pytest.mark.anyio
async def test_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row H16: the one too many is told so at once."""
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    inbox = Inbox(ASKED)
    async with anyio.create_task_group() as tasks:
        service = inbox.service(tasks)
        for _ in range(3):
            await service.on_message(inbox.message)
        assert [reply.error.code for reply in inbox.replies if reply.error] == [ErrorCode.LORA_CAPACITY_EXCEEDED]
        inbox.go.set()
    assert len(inbox.replies) == 3


@pytest.mark.anyio
async def test_a_drain_takes_nothing_new_and_answers_what_is_here() -> None:
    """Row I2: and gives up when its time is over."""
    inbox = Inbox(ASKED)
    async with anyio.create_task_group() as tasks:
        service = inbox.service(tasks)
        await service.on_message(inbox.message)
        await service.drain(0.01)
        assert not inbox.is_subscribed
        assert inbox.replies == []
        inbox.go.set()
        with anyio.fail_after(5):
            await service.drain(60)
        assert len(inbox.replies) == 1


def record(digest: str) -> bytes:
    return to_json(ResidencyRecord(worker="w", key="k", base="b", digest=digest, state=AdapterState.LOADED, bytes=1))


def test_holdings_follow_the_records() -> None:
    """Unknown until all is read; a digest is held while any record has it."""
    holdings = Holdings()
    assert holdings.digests() is None
    holdings.apply([Change("w1/a", record("1")), Change("w2/a", record("1")), Change("w2/b", record("2"))])
    holdings.known()
    assert holdings.digests() == frozenset({"1", "2"})
    holdings.apply([Change("w1/a", None), Change("w2/b", record("3")), Change("w3/x", b"not a record")])
    assert holdings.digests() == frozenset({"1", "3"})
    holdings.apply([Change("w2/a", None)])
    assert holdings.digests() == frozenset({"3"})
