"""The simulator keeps an engine's rules and OpenAI's shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lorelay.worker.engine.base import EngineAdapter, EngineDeadError, EngineError, EngineLimits
from lorelay.worker.engine.sim import SimEngine, SimTiming, start_sim
from support.engines import QUICK, Engine
from support.fleet import DEMO_BASE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        yield made
        await made.aclose()


async def ask(engine: SimEngine, body: object, path: str = CHAT, gone: anyio.Event | None = None) -> tuple[int, bytes]:
    data = [body if isinstance(body, bytes) else json.dumps(body).encode()]
    status, out = 0, b""

    async def receive() -> dict[str, Any]:
        if data:
            return {"type": "http.request", "body": data.pop()}
        await (gone or anyio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, out
        status = message.get("status", status)
        out += message.get("body", b"")

    await engine.app({"type": "http", "path": path}, receive, send)
    return status, out


def chat(model: str = "base", content: Any = "hello you", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def chunks(stream: bytes) -> list[Any]:
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


def adapter(name: str, engine_id: int, path: str = "/snapshots/sha256-aaaaaaaaaaaa") -> EngineAdapter:
    return EngineAdapter(name, engine_id, Path(path))


async def test_it_says_what_it_heard_and_through_what(engine: Engine) -> None:
    await engine.load(adapter("key", 1))
    for path, body in ((CHAT, chat()), (TEXT, {"model": "base", "prompt": "hello you"})):
        status, out = await ask(engine, body, path)
        choice = json.loads(out)["choices"][0]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert (status, text, choice["finish_reason"]) == (200, "Simulated base heard: hello you", "stop")
        _, out = await ask(engine, {**body, "model": "key"}, path)
        assert b"through adapter aaaaaaaaaaaa heard: hello you" in out
    assert b"heard: hello you" in (await ask(engine, chat(content=[{"type": "text", "text": "hello you"}])))[1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_says_the_same_as_a_whole_response(engine: Engine, path: str) -> None:
    """G5: exactly one finish reason."""
    body = {**chat(), "prompt": "hello you", "stream": True}
    got = chunks((await ask(engine, body, path))[1])
    choices = [choice for chunk in got for choice in chunk["choices"]]
    text = "".join(c["text"] if path == TEXT else c["delta"].get("content", "") for c in choices)
    assert text == "Simulated base heard: hello you"
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert all("usage" not in chunk for chunk in got)
    if path == CHAT:
        assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_is_in_a_last_chunk_and_null_in_the_others(engine: Engine, path: str) -> None:
    """G3."""
    body = {**chat(), "prompt": "hello you", "stream": True, "stream_options": {"include_usage": True}}
    got = chunks((await ask(engine, body, path))[1])
    assert got[-1]["choices"] == []
    whole = json.loads((await ask(engine, {**body, "stream": False, "stream_options": None}, path))[1])
    assert got[-1]["usage"] == whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert [chunk["usage"] for chunk in got[:-1]] == [None] * (len(got) - 1)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_ends_with_length(engine: Engine, field: str) -> None:
    """G10."""
    answer = json.loads((await ask(engine, {**chat(ignore_eos=True), field: 3}))[1])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    both = json.loads((await ask(engine, chat(max_tokens=3, max_completion_tokens=4)))[1])
    assert both["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"[]",
        b'{"messages":' + b"[" * 100_000,
        {"model": "base"},
        {"model": "base", "messages": []},
        chat(max_tokens=0),
        chat(max_tokens=-1),
        chat(max_completion_tokens=0, max_tokens=5),
        chat(n=2),
        chat(n=5_000_000),
        chat(max_tokens="x"),
        {"messages": []},
    ],
)
async def test_what_it_cannot_do_is_400_and_not_ignored(engine: Engine, body: object) -> None:
    """G9, G12, G15."""
    status, out = await ask(engine, body)
    assert status == 400
    assert set(json.loads(out)["error"]) == {"message", "type", "param", "code"}


async def test_a_name_it_does_not_hold_is_404(engine: Engine) -> None:
    """C12."""
    assert (await ask(engine, chat("key")))[0] == 404
    await engine.load(adapter("key", 1))
    assert (await ask(engine, chat("key")))[0] == 200
    await engine.unload(adapter("key", 1))
    assert (await ask(engine, chat("key")))[0] == 404
    assert (await ask(engine, chat("alias")))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_leaves_no_running_request(engine: Engine, *, stream: bool) -> None:
    """G21."""
    gone = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, chat(stream=stream, ignore_eos=True, max_tokens=1 << 30), CHAT, gone)
        while not engine.batch:
            await checkpoint()
        gone.set()
    assert engine.batch == 0


async def test_a_step_holds_no_more_different_adapters_than_fit(engine: Engine) -> None:
    """D10: N adapters and the base at once wait their turn, and all are answered."""
    for number in range(4):
        await engine.load(adapter(f"k{number}", number + 1))
    statuses = []

    async def one(model: str) -> None:
        statuses.append((await ask(engine, chat(model)))[0])

    async with anyio.create_task_group() as tasks:
        for model in ("k0", "k1", "k2", "k3", "base"):
            for _ in range(3):
                tasks.start_soon(one, model)
        while engine.batch < 15:
            await checkpoint()
        batch = engine._next_batch()  # noqa: SLF001 - the rule itself
        assert len({request.adapter for request in batch} - {None}) == engine.limits.max_adapters_per_batch
    assert statuses == [200] * 15


async def test_requests_of_one_step_share_it(engine: Engine) -> None:
    before = engine.steps
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(ask, engine, chat())
    assert engine.steps - before < 20


async def test_slots_are_real_and_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """D22."""
    limits = EngineLimits(max_adapters=1, max_adapters_per_batch=1, max_rank=8, max_concurrent_requests=4)
    async with start_sim(DEMO_BASE, ("base", "alias"), limits, QUICK) as engine:
        with pytest.raises(EngineError):
            await engine.load(EngineAdapter("a", 1, tmp_path))
        (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
        await engine.load(EngineAdapter("a", 1, tmp_path))
        with pytest.raises(EngineError):
            await engine.load(EngineAdapter("b", 2, tmp_path))
        assert await engine.loaded_ids() == {1}
        await engine.unload(EngineAdapter("a", 7, tmp_path))  # another load's: not there, no error
        assert await engine.loaded_ids() == {1}
        await engine.unload(EngineAdapter("a", 1, tmp_path))
        await engine.load(EngineAdapter("b", 2, tmp_path))
        assert engine.facts.aliases == ("alias",)
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_a_model_folder_without_a_config_is_one_clear_error(tmp_path: Path) -> None:
    limits = EngineLimits(max_adapters=1, max_adapters_per_batch=1, max_rank=8, max_concurrent_requests=4)
    with pytest.raises(ValueError, match=r"config\.json"):
        async with start_sim(tmp_path, ("base",), limits, SimTiming()):
            pass
