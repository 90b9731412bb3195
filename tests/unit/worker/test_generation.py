"""One request on a worker, from the bus to the bus; the bus is a list."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio
import msgspec
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, strategies as st

from lorelay.proto.codec import pack, unpack
from lorelay.proto.errors import ErrorCode, LorelayError, WireError
from lorelay.proto.generation import Acknowledgement, Cancel, Frame, GenerateRequest, RequestPart
from lorelay.proto.identity import AdapterSelection, select
from lorelay.worker import generation
from lorelay.worker.generation import Generation, _Rename, _with_model
from support.engines import BASE, Engine, World, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lorelay.runtime.bus import Message
    from lorelay.worker.outbox import Outbox

pytestmark = pytest.mark.anyio

FRONTEND = f"{7:016x}"
CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1 << 30}


class Asked:
    """A message from the bus."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.replies: list[Acknowledgement] = []

    async def reply(self, payload: bytes) -> None:
        """Book the answer."""
        self.replies.append(unpack(Acknowledgement, payload))


class Frames:
    """An outbox that keeps what is put."""

    max_body_bytes = 1000

    def __init__(self) -> None:
        self.all: list[tuple[str, Frame]] = []

    def put(self, frontend: str, frame: Frame) -> None:
        """Keep it."""
        self.all.append((frontend, frame))

    def of(self, stream: int) -> list[Frame]:
        """Return a stream's frames, whose sequence must be right."""
        frames = [frame for _, frame in self.all if frame.stream == stream]
        assert [frame.sequence for frame in frames] == list(range(len(frames)))
        assert not any(frame.last for frame in frames[:-1])
        return frames


class Here:
    """A worker's requests on a simulator."""

    def __init__(self, around: World, made: Generation, frames: Frames) -> None:
        self.world = around
        self.engine = around.engine
        self.generation = made
        self.frames = frames

    async def send(self, data: bytes) -> Asked:
        """Let a message arrive."""
        asked = Asked(data)
        await self.generation.on_generate(cast("Message", asked))
        return asked

    async def ask(self, request: GenerateRequest) -> list[Frame]:
        """Let a request arrive, be acknowledged and end; return its frames."""
        assert (await self.send(pack(request))).replies == [Acknowledgement()]
        await self.until(lambda: any(frame.last for frame in self.frames.of(request.stream)))
        await self.until(lambda: self.generation.running == 0)
        return self.frames.of(request.stream)

    async def cancel(self, stream: int) -> None:
        """Let a cancel arrive."""
        await self.generation.on_control(cast("Message", Asked(pack(Cancel(FRONTEND, stream)))))

    async def until(self, condition: Any) -> None:
        """Wait for something that needs no clock."""
        with anyio.fail_after(5):
            while not condition():
                await checkpoint()


@asynccontextmanager
async def worker(*, is_runtime_lora: bool = True, max_requests: int = 64) -> AsyncIterator[Here]:
    async with world() as around, anyio.create_task_group() as tasks:
        frames = Frames()
        made = Generation(
            around.engine,
            around.table,
            cast("Outbox", frames),
            tasks,
            is_runtime_lora=lambda: is_runtime_lora,
            max_requests=max_requests,
        )
        tasks.start_soon(around.engine.run)
        yield Here(around, made, frames)
        tasks.cancel_scope.cancel()


def request(
    number: int = 1,
    *,
    model: str = BASE,
    selection: AdapterSelection | None = None,
    body: bytes | None = None,
    content: str = "hi",
    **more: Any,
) -> GenerateRequest:
    if body is None:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more}).encode()
    return GenerateRequest(
        stream=number,
        frontend=FRONTEND,
        request_id="r",
        timeout_ms=5000,
        traceparent="",
        endpoint=CHAT,
        model=model,
        base=BASE,
        selection=selection,
        body=body,
    )


def parts(whole: GenerateRequest, size: int = 40) -> list[bytes]:
    data = pack(whole)
    count = -(-len(data) // size)
    return [
        pack(RequestPart(FRONTEND, whole.stream, index, count, data[index * size : (index + 1) * size]))
        for index in range(count)
    ]


def text(frames: list[Frame]) -> bytes:
    return b"".join(frame.body for frame in frames)


def code(error: WireError | None) -> str:
    assert error is not None
    return error.code.value


async def test_a_base_request_is_acknowledged_and_answered() -> None:
    async with worker() as here:
        frames = await here.ask(request())
        assert (frames[0].status, frames[0].content_type) == (200, "application/json")
        assert json.loads(text(frames))["model"] == BASE
        assert {frontend for frontend, _ in here.frames.all} == {FRONTEND}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapters_answer_says_the_model_that_the_client_sent(*, stream: bool) -> None:
    model = 'base|s3://b/"ü"\\a'
    async with worker() as here:
        selection = select(BASE, 's3://b/"ü"\\a')
        whole = text(await here.ask(request(model=model, selection=selection, stream=stream)))
        assert b"through adapter" in whole.replace(b" ", b"") or b"through " in whole
        assert selection.key.encode() not in whole.replace(b"through adapter " + selection.key[-12:].encode(), b"")
        events = whole.split(b"\n\n")[:-2] if stream else [whole]
        assert {json.loads(event.removeprefix(b"data: "))["model"] for event in events} == {model}


async def test_text_that_looks_like_the_models_name_is_left_alone() -> None:
    async with worker() as here:
        key = select(BASE, "s3://b/a").key
        said = f'"model":"{key}" and {key}'
        frames = await here.ask(request(selection=select(BASE, "s3://b/a"), model="mine", content=said))
        answer = json.loads(text(frames))
        assert answer["model"] == "mine"
        assert answer["choices"][0]["message"]["content"].endswith(said)


@given(st.text(), st.text(min_size=1), st.text(min_size=1))
def test_renaming_changes_the_member_and_nothing_else(said: str, old: str, new: str) -> None:
    rename = _Rename(old, new)
    document = {"id": said, "model": old, "choices": [{"text": f'"model":"{old}"' + said}]}
    renamed = msgspec.json.decode(rename(msgspec.json.encode(document)))
    assert renamed == {**document, "model": new}


def test_only_the_model_changes_in_a_body() -> None:
    body = b'{"a": 1.50, "model" : "x", "b":{"model":"x"}, "mod\\u0065l":"y", "c":"\\u00fc"}'
    changed = _with_model(body, "key")
    assert changed == b'{"a":1.50,"model":"key","b":{"model":"x"},"c":"\\u00fc"}'


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'"x"', b'{"a":' + b"[" * 100_000])
async def test_a_body_that_is_not_an_object_is_the_clients_error(body: bytes) -> None:
    async with worker() as here:
        frames = await here.ask(request(body=body))
        assert len(frames) == 1
        assert code(frames[0].error) == "invalid_request"


async def test_a_large_response_is_split_into_frames_that_fit() -> None:
    async with worker() as here:
        frames = await here.ask(request(content="x" * 5000))
        assert len(frames) > 5
        assert max(len(frame.body) for frame in frames) <= Frames.max_body_bytes
        assert json.loads(text(frames))["choices"][0]["message"]["content"].endswith("x" * 5000)


async def test_an_engines_refusal_keeps_its_status() -> None:
    async with worker() as here:
        frames = await here.ask(request(max_tokens=0, stream=True))
        assert frames[0].status == 400
        assert "error" in json.loads(text(frames))


async def test_an_adapter_that_cannot_be_brought_is_one_frame_with_its_reason() -> None:
    async with worker() as here:
        here.world.materialize_fails = LorelayError(ErrorCode.LORA_NOT_FOUND, "no")
        frames = await here.ask(request(selection=select(BASE, "s3://b/a"), stream=True))
        assert [code(frame.error) for frame in frames] == ["lora_not_found"]
        assert here.engine.batch == 0


async def test_what_this_worker_must_not_serve_is_refused_before_it_runs() -> None:
    good = select(BASE, "s3://b/a")
    forged = AdapterSelection(base=BASE, source="s3://b/a", key=select(BASE, "s3://b/b").key)
    version = AdapterSelection(base=BASE, source="s3://b/a", key=good.key, version=3)
    async with worker() as here:
        for selection in (forged, version, select("other", "s3://b/a")):
            replies = (await here.send(pack(request(selection=selection)))).replies
            assert code(replies[0].error) == "runtime_lora_identity_mismatch"
        for wrong, expected in (
            (msgspec.structs.replace(request(), base="other"), "model_not_found"),
            (msgspec.structs.replace(request(), endpoint="/v1/embeddings"), "route_not_found"),
        ):
            assert code((await here.send(pack(wrong))).replies[0].error) == expected
        for data in (b"", b"\xc1", b"\x90", b"\x91" * 10_000, pack(Acknowledgement())):
            assert code((await here.send(data)).replies[0].error) == "internal_error"
        assert here.generation.running == 0
        assert here.world.materialized == {}
    async with worker(is_runtime_lora=False) as here:
        replies = (await here.send(pack(request(selection=good)))).replies
        assert code(replies[0].error) == "runtime_lora_unsupported"


async def test_a_stream_number_in_use_is_refused_and_its_owner_goes_on() -> None:
    async with worker() as here:
        await here.send(pack(request(1, **ENDLESS)))
        await here.until(lambda: here.engine.batch)
        assert code((await here.send(pack(request(1)))).replies[0].error) == "internal_error"
        assert here.generation.running == 1


async def test_requests_here_are_bounded() -> None:
    async with worker(max_requests=2) as here:
        for stream in (1, 2):
            await here.send(pack(request(stream, **ENDLESS)))
        assert code((await here.send(pack(request(3)))).replies[0].error) == "no_worker_available"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancel_stops_the_engine_and_nothing_more_is_sent(*, stream: bool) -> None:
    """F23, G21: before the first byte (not streamed) and after it."""
    async with worker() as here:
        await here.send(pack(request(1, **ENDLESS, stream=stream)))
        await here.until(lambda: here.engine.batch and (not stream or here.frames.all))
        await here.cancel(1)
        await here.until(lambda: here.generation.running == 0)
        assert here.engine.batch == 0
        assert not any(frame.last for frame in here.frames.of(1))


async def test_a_cancel_during_a_load_lets_go_of_it() -> None:
    """D4."""
    async with worker() as here:
        here.world.may_materialize = anyio.Event()
        await here.send(pack(request(selection=select(BASE, "s3://b/a"))))
        await here.until(lambda: here.world.materialized)
        await here.cancel(1)
        await here.until(lambda: here.generation.running == 0)
        await here.until(lambda: here.world.stopped)
        assert here.frames.all == []


async def test_a_cancel_that_comes_before_its_request_counts() -> None:
    """Another subscription carries it, so it may."""
    async with worker() as here:
        await here.cancel(1)
        await here.send(pack(request(1, **ENDLESS)))
        assert here.generation.running == 0
        await here.ask(request(2))
        for stream in range(10, 10 + 2 * generation.MAX_EARLY_CANCELS):
            await here.cancel(stream)
        assert len(vars(here.generation)["_early_cancels"]) == generation.MAX_EARLY_CANCELS


async def test_a_held_adapter_is_let_go_at_the_end_however_it_ends() -> None:
    async with worker() as here:
        selection = select(BASE, "s3://b/a")
        await here.ask(request(1, selection=selection))
        await here.send(pack(request(2, selection=selection, **ENDLESS)))
        await here.until(lambda: here.engine.batch)
        assert [r.holders for r in here.world.table.residents()] == [1]
        await here.cancel(2)
        await here.until(lambda: here.generation.running == 0)
        assert [r.holders for r in here.world.table.residents()] == [0]


async def test_draining_refuses_what_is_new_and_finishes_what_runs() -> None:
    """I2."""
    async with worker() as here, anyio.create_task_group() as tasks:
        await here.send(pack(request(1, content="x " * 50)))
        tasks.start_soon(here.generation.drain, 10.0)
        await here.until(lambda: here.generation.draining)
        assert code((await here.send(pack(request(2)))).replies[0].error) == "worker_lost"
        await here.until(lambda: here.generation.running == 0)
        assert here.frames.of(1)[-1].error is None


async def test_a_drain_that_takes_too_long_ends_with_an_error() -> None:
    """F15."""
    async with worker() as here:
        await here.send(pack(request(1, **ENDLESS | {"stream": True})))
        await here.until(lambda: here.frames.all)
        await here.generation.drain(0)
        assert code(here.frames.of(1)[-1].error) == "worker_lost"
        assert here.engine.batch == 0
        await here.generation.drain(0)


async def test_a_dead_engine_fails_everybody_at_once() -> None:
    async with worker() as here:
        for stream in (1, 2):
            await here.send(pack(request(stream, **ENDLESS)))
        await here.until(lambda: here.engine.batch == 2)
        here.generation.fail_all()
        await here.until(lambda: here.generation.running == 0)
        for stream in (1, 2):
            assert code(here.frames.of(stream)[-1].error) == "worker_lost"


async def test_an_engine_that_breaks_is_an_error_and_not_an_end() -> None:
    async with worker() as here:

        async def breaks(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            raise RuntimeError("secret")

        here.engine.app = breaks  # type: ignore[method-assign]
        frames = await here.ask(request())
        assert code(frames[-1].error) == "internal_error"
        assert b"secret" not in pack(frames[-1])


async def test_parts_are_put_together_though_requests_interleave() -> None:
    """F4."""
    async with worker() as here:
        first, second = parts(request(1, content="a" * 300)), parts(request(2, content="b" * 300))
        for one, two in zip(first[:-1], second[:-1], strict=True):
            assert (await here.send(one)).replies == (await here.send(two)).replies == []
        for last in (second[-1], first[-1]):
            assert (await here.send(last)).replies == [Acknowledgement()]
        await here.until(lambda: here.generation.running == 0)
        assert b"a" * 300 in text(here.frames.of(1))
        assert b"b" * 300 in text(here.frames.of(2))


@given(lost=st.sets(st.integers(0, 99), min_size=1, max_size=4), swap=st.none() | st.integers(0, 99))
async def test_parts_that_were_lost_or_swapped_are_never_spliced(lost: set[int], swap: int | None) -> None:
    async with worker() as here:
        whole = parts(request(1, content="a" * 200))
        sent = list(whole)
        if swap is None:
            sent = [part for index, part in enumerate(whole) if index not in {each % (len(whole) - 1) for each in lost}]
        else:
            where = swap % (len(whole) - 2)
            sent[where], sent[where + 1] = sent[where + 1], sent[where]
        replies = [reply for part in sent for reply in (await here.send(part)).replies]
        assert [code(reply.error) for reply in replies] == ["worker_lost"]
        assert here.generation.running == 0
        state = vars(here.generation)
        assert (state["_assemblies"], state["_assembly_bytes"]) == ({}, 0)


async def test_parts_are_bounded_in_number_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_ASSEMBLY_BYTES", 10_000)
    monkeypatch.setattr(generation, "MAX_ASSEMBLIES", 8)
    async with worker() as here:
        state = vars(here.generation)
        for index in range(8):
            for stream in range(16):
                await here.send(pack(RequestPart(FRONTEND, stream, index, 9, bytes(1000))))
                assert state["_assembly_bytes"] <= 10_000
                assert len(state["_assemblies"]) <= 8
        last = await here.send(pack(RequestPart(FRONTEND, 1, 8, 9, b"")))
        assert last.replies
        assert last.replies[0].error is not None
        monkeypatch.setattr(generation, "ASSEMBLY_TIMEOUT_S", -1)
        for assembly in state["_assemblies"].values():
            assembly.deadline = 0
        await here.send(pack(RequestPart(FRONTEND, 99, 0, 2, b"x")))
        assert len(state["_assemblies"]) == 1


async def test_a_cancel_drops_the_parts_that_are_here() -> None:
    async with worker() as here:
        await here.send(parts(request(1, content="a" * 300))[0])
        await here.cancel(1)
        assert vars(here.generation)["_assemblies"] == {}


@pytest.mark.parametrize("part", [(0, 0), (5, 5), (-1, 1), (0, -1)])
async def test_parts_that_do_not_count_are_refused(part: tuple[int, int]) -> None:
    async with worker() as here:
        await here.send(pack(RequestPart(FRONTEND, 1, *part, b"x")))
        assert here.generation.running == 0
        assert vars(here.generation)["_assemblies"] == {}


async def test_parts_within_parts_are_refused() -> None:
    async with worker() as here:
        inner = pack(RequestPart(FRONTEND, 1, 0, 1, b"x"))
        asked = await here.send(pack(RequestPart(FRONTEND, 1, 0, 1, inner)))
        assert code(asked.replies[0].error) == "internal_error"


__all__ = ["Engine"]
