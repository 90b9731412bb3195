"""The simulator: an engine without weights that keeps an engine's rules about slots, batches, steps and loading time.

It answers what it heard and through which adapter, as its card says (`engine: sim`), so that a test or a demo can tell
by the text which base and which adapter answered.  One task steps all running requests together: a step gives each
of them one word, takes time, and holds at most `max_adapters_per_batch` different adapters; others wait their turn.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec

from lorelay.proto.codec import UNREADABLE
from lorelay.proto.records import ModelFacts
from lorelay.worker.engine.base import EngineAdapter, EngineDeadError, EngineError, EngineLimits, Receive, Scope, Send

ROUTES = ("/v1/chat/completions", "/v1/completions")
VERSION = "1"
DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
DEFAULT_MAX_TOKENS = 16
BYTES_PER_SECOND = 2 << 30
"""How fast the simulator reads an adapter's weights."""


@dataclass(frozen=True, slots=True)
class SimTiming:
    """How long the simulator takes, in seconds."""

    step_s: float = 0.002
    """A step with one request."""
    step_per_request_s: float = 0.000_05
    """Added for each further request in the step."""
    load_s: float = 0.005
    """Loading an adapter, plus the time to read its bytes."""


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    model: str
    messages: list[_Message] | None = None
    prompt: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    ignore_eos: bool = False


@dataclass(eq=False, slots=True)
class _Running:
    """A request in the batch."""

    adapter: str | None
    words: Iterator[str]
    budget: int
    out: deque[str] = field(default_factory=deque)
    stepped: anyio.Event = field(default_factory=anyio.Event)
    finish: str | None = None


class SimEngine:
    """See the module.  Made by `start_sim`."""

    def __init__(self, facts: ModelFacts, limits: EngineLimits, timing: SimTiming) -> None:
        self._facts = facts
        self._limits = limits
        self._timing = timing
        self._adapters: dict[str, EngineAdapter] = {}
        self._running: deque[_Running] = deque()
        self._work = anyio.Event()
        self._closed = False
        self.steps = 0
        """Steps made so far."""

    @property
    def facts(self) -> ModelFacts:
        """What is true of the model whose config.json was given."""
        return self._facts

    @property
    def limits(self) -> EngineLimits:
        """As configured."""
        return self._limits

    async def load(self, adapter: EngineAdapter) -> None:
        """See `Engine.load`.  Takes the time of reading the adapter's bytes; a folder without weights is refused."""
        self._check_alive()
        weights = anyio.Path(adapter.path / "adapter_model.safetensors")
        if not await weights.is_file():
            raise EngineError(f"{adapter.path} holds no adapter_model.safetensors")
        held = self._adapters.get(adapter.name)
        if held is None and len(self._adapters) >= self._limits.max_adapters:
            raise EngineError(f"all {self._limits.max_adapters} slots are taken")
        await anyio.sleep(self._timing.load_s + (await weights.stat()).st_size / BYTES_PER_SECOND)
        self._adapters[adapter.name] = adapter

    async def unload(self, adapter: EngineAdapter) -> None:
        """See `Engine.unload`."""
        self._check_alive()
        held = self._adapters.get(adapter.name)
        if held is not None and held.engine_id == adapter.engine_id:
            del self._adapters[adapter.name]

    async def loaded_ids(self) -> frozenset[int]:
        """See `Engine.loaded_ids`."""
        self._check_alive()
        return frozenset(adapter.engine_id for adapter in self._adapters.values())

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        self._check_alive()

    async def aclose(self) -> None:
        """Stop stepping.  Idempotent."""
        self._closed = True
        self._work.set()

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("the simulator has been closed")

    async def run(self) -> None:
        """Step until closed."""
        while not self._closed:
            if not self._running:
                self._work = anyio.Event()
                await self._work.wait()
                continue
            batch = self._next_batch()
            timing = self._timing
            await anyio.sleep(timing.step_s + timing.step_per_request_s * (len(batch) - 1))
            self.steps += 1
            for request in batch:
                self._step(request)

    def _next_batch(self) -> list[_Running]:
        """Choose who is in the next step, oldest turn first; who was chosen goes to the end of the queue."""
        adapters: set[str] = set()
        batch: list[_Running] = []
        waiting: list[_Running] = []
        for request in self._running:
            new = request.adapter is not None and request.adapter not in adapters
            if len(batch) >= self._limits.max_concurrent_requests or (
                new and len(adapters) >= self._limits.max_adapters_per_batch
            ):
                waiting.append(request)
                continue
            if request.adapter is not None:
                adapters.add(request.adapter)
            batch.append(request)
        self._running = deque(waiting + batch)
        return batch

    def _step(self, request: _Running) -> None:
        if request not in self._running:
            return  # its client went during the step
        word = next(request.words, None) if request.budget else None
        if word is not None:
            request.out.append(word)
            request.budget -= 1
        else:
            request.finish = "stop" if request.budget else "length"
            self._running.remove(request)
        request.stepped.set()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `/v1/chat/completions` and `/v1/completions` as OpenAI's API shapes them."""
        chat = scope["path"] == "/v1/chat/completions"
        data = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        try:
            body = msgspec.json.decode(data, type=_Body)
            prompt = _prompt(body, chat=chat)
            limit = _limit(body, 256 if chat else DEFAULT_MAX_TOKENS)
        except (*UNREADABLE, ValueError) as error:
            await _respond(send, 400, _error(str(error), 400))
            return
        adapter = self._adapters.get(body.model)
        if adapter is None and body.model not in (self._facts.name, *self._facts.aliases):
            await _respond(send, 404, _error(f"The model `{body.model}` does not exist.", 404))
            return
        request = _Running(
            adapter=body.model if adapter else None,
            words=_words(self._facts.name, adapter, prompt, endless=body.ignore_eos),
            budget=limit,
        )
        usage = body.stream_options is not None and body.stream_options.include_usage
        answer = _Answer(chat=chat, model=body.model, prompt_tokens=len(prompt.split()), usage=usage)
        self._running.append(request)
        self._work.set()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stop_when_gone, receive, tasks.cancel_scope)
                if body.stream:
                    await self._stream(request, answer, send, usage=usage)
                else:
                    text = "".join([word async for word in self._generated(request)])
                    await _respond(send, 200, answer.whole(text, request.finish or "stop"))
                tasks.cancel_scope.cancel()
        finally:
            if request in self._running:
                self._running.remove(request)

    async def _stream(self, request: _Running, answer: _Answer, send: Send, *, usage: bool) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for word in self._generated(request):
            await send({"type": "http.response.body", "body": answer.event(word, None), "more_body": True})
        tail = answer.event("", request.finish or "stop")
        if usage:
            tail += answer.usage_event()
        await send({"type": "http.response.body", "body": tail + b"data: [DONE]\n\n", "more_body": False})

    async def _generated(self, request: _Running) -> AsyncIterator[str]:
        while True:
            while request.out:
                yield request.out.popleft()
            if request.finish is not None:
                return
            request.stepped = anyio.Event()
            await request.stepped.wait()


@asynccontextmanager
async def start_sim(
    model: Path, names: tuple[str, ...], limits: EngineLimits, timing: SimTiming | None = None
) -> AsyncIterator[SimEngine]:
    """Run a simulator of the model whose config.json lies in `model`.

    Raises:
        ValueError: config.json is not there or not readable.
    """
    try:
        raw = await anyio.Path(model / "config.json").read_bytes()
        config = msgspec.json.decode(raw, type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{model}/config.json cannot be read: {error}") from error
    facts = ModelFacts(
        name=names[0],
        aliases=names[1:],
        path_fingerprint=hashlib.sha256(raw).hexdigest(),
        architecture=next(iter(config.get("architectures") or []), ""),
        dimensions={name: config[name] for name in DIMENSIONS if isinstance(config.get(name), int)},
        dtype="none",
        max_context_tokens=int(config.get("max_position_embeddings") or 2048),
        routes=ROUTES,
        engine="sim",
        engine_version=VERSION,
    )
    engine = SimEngine(facts, limits, timing or SimTiming())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        try:
            yield engine
        finally:
            await engine.aclose()


class _Answer:
    """One response's JSON."""

    def __init__(self, *, chat: bool, model: str, prompt_tokens: int, usage: bool) -> None:
        self._chat = chat
        self._no_usage: dict[str, object] = {"usage": None} if usage else {}
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._begun = False
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{hashlib.sha256(str(id(self)).encode()).hexdigest()[:24]}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def event(self, word: str, finish: str | None) -> bytes:
        """Return the SSE event that adds `word`, or ends the choice with `finish`."""
        self._completion_tokens += bool(word)
        choice: dict[str, object] = {"index": 0}
        if self._chat:
            delta = {"content": word} if word else {}
            if not self._begun:
                delta = {"role": "assistant", **delta}
            choice["delta"] = delta
        else:
            choice["text"] = word
        self._begun = True
        return self._event([{**choice, "logprobs": None, "finish_reason": finish}], **self._no_usage)

    def usage_event(self) -> bytes:
        """Return the SSE event that `stream_options.include_usage` asks for."""
        return self._event([], usage=self._usage())

    def whole(self, text: str, finish: str) -> dict[str, object]:
        """Return the unstreamed response."""
        self._completion_tokens = len(text.split())
        said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return {**self._head, "choices": [choice], "usage": self._usage()}

    def _event(self, choices: list[dict[str, object]], **more: object) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return b"data: " + msgspec.json.encode({**self._head, "object": kind, "choices": choices, **more}) + b"\n\n"

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }


def _prompt(body: _Body, *, chat: bool) -> str:
    if not chat:
        if not isinstance(body.prompt, str):
            raise ValueError("the simulator takes `prompt` as one string")
        return body.prompt
    if not body.messages:
        raise ValueError("`messages` must hold at least one message")
    content = body.messages[-1].content
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content)
    return content or ""


def _limit(body: _Body, default: int) -> int:
    """Return how many words may be said."""
    if body.n not in (None, 1):
        raise ValueError("the simulator gives one choice: `n` must be 1")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit is not None and limit < 1:
        raise ValueError(f"`max_tokens` must be at least 1, got {limit}")
    return default if limit is None else limit


def _words(base: str, adapter: EngineAdapter | None, prompt: str, *, endless: bool) -> Iterator[str]:
    """Yield the answer: who speaks, then what was heard; through an adapter also its snapshot's name."""
    speaker = f"Simulated {base}" + (f" through adapter {adapter.path.name[-12:]}" if adapter else "")
    yield from (word + " " for word in f"{speaker} heard:".split())
    heard = prompt.split() or ["nothing."]
    yield from (word + " " for word in heard[:-1])
    yield heard[-1]
    while endless:
        yield " again"


def _error(message: str, status: int) -> dict[str, object]:
    kind = "NotFoundError" if status == 404 else "BadRequestError"  # noqa: PLR2004 - vLLM's names
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _respond(send: Send, status: int, value: dict[str, object]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(value)})


async def _stop_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
