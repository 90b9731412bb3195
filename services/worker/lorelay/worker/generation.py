"""The life of one request on a worker: receive, acknowledge, hold the adapter, call the engine, send frames, release.

The engine's application is called in process as ASGI.  The body goes to it as the client sent it, but for the model's
name; what comes back goes out as it comes, with the model's name put back to what the client sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import msgspec
import structlog

from lorelay.proto.codec import UNREADABLE, MalformedMessageError, pack, unpack
from lorelay.proto.errors import ErrorCode, LorelayError, WireError
from lorelay.proto.generation import MAX_BODY_BYTES, Acknowledgement, Cancel, Frame, GenerateRequest, RequestPart
from lorelay.proto.identity import verify
from lorelay.runtime.bus import Message
from lorelay.runtime.telemetry import span, traceparent
from lorelay.worker.engine.base import Engine, Message as AsgiMessage
from lorelay.worker.outbox import Outbox
from lorelay.worker.residency import Residency, Want

log = structlog.get_logger()

MAX_ASSEMBLIES = 64
"""Requests in parts that may be arriving at once."""
MAX_ASSEMBLY_BYTES = 8 * MAX_BODY_BYTES
"""Bytes of theirs that may lie here."""
ASSEMBLY_TIMEOUT_S = 30.0
MAX_EARLY_CANCELS = 1024
"""Cancels that are remembered because the request they are for may come after them."""
ABORT_GRACE_S = 2.0
"""How long the engine's application may take to end after its client has gone."""

_body = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False, slots=True)
class _Call:
    """One request while it runs."""

    request: GenerateRequest
    gone: anyio.Event = field(default_factory=anyio.Event)
    """Set when the client has gone or the worker must stop."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    sequence: int = 0
    status: int = 0
    content_type: str = ""
    ended: bool = False


@dataclass(slots=True)
class _Assembly:
    """A request of which some parts have arrived."""

    parts: list[bytes]
    size: int
    deadline: float


class Generation:
    """All requests of one worker."""

    def __init__(
        self,
        engine: Engine,
        residency: Residency,
        outbox: Outbox,
        tasks: anyio.abc.TaskGroup,
        *,
        is_runtime_lora: Callable[[], bool],
        max_requests: int,
    ) -> None:
        """Make it.

        Args:
            engine: Who answers.
            residency: Who brings adapters.
            outbox: Where frames go.
            tasks: Where requests run.
            is_runtime_lora: Whether adapters may be brought at request time.
            max_requests: Requests that may run or wait here at once; more are refused.
        """
        self._engine = engine
        self._residency = residency
        self._outbox = outbox
        self._tasks = tasks
        self._is_runtime_lora = is_runtime_lora
        self._max_requests = max_requests
        self._calls: dict[tuple[str, int], _Call] = {}
        self._assemblies: dict[tuple[str, int], _Assembly] = {}
        self._assembly_bytes = 0
        self._early_cancels: dict[tuple[str, int], None] = {}
        self._idle = anyio.Event()
        self.draining = False
        """True: refuse what is new."""

    @property
    def running(self) -> int:
        """Requests here now."""
        return len(self._calls)

    async def on_generate(self, message: Message) -> None:
        """Take a request, or a part of one, from the bus."""
        try:
            request = self._receive(message.data)
            if request is None or (request.frontend, request.stream) in self._early_cancels:
                return  # nobody waits for an answer
            self._check(request)
        except MalformedMessageError as error:
            log.warning("request not readable", error=str(error))
            refusal = LorelayError(ErrorCode.INTERNAL_ERROR, "The worker could not read the request.")
            await message.reply(pack(Acknowledgement(refusal.wire)))
        except LorelayError as error:
            log.info("request refused", code=error.code.value, error=str(error))
            await message.reply(pack(Acknowledgement(error.wire)))
        else:
            call = _Call(request)
            self._calls[request.frontend, request.stream] = call
            self._tasks.start_soon(self._run, call)
            await message.reply(pack(Acknowledgement()))

    async def on_control(self, message: Message) -> None:
        """Take a cancel from the bus.  It comes by another subscription than its request, so it may come first."""
        try:
            cancel = unpack(Cancel, message.data)
        except MalformedMessageError as error:
            log.warning("cancel not readable", error=str(error))
            return
        key = (cancel.frontend, cancel.stream)
        call = self._calls.get(key)
        if call is not None:
            call.gone.set()
            return
        self._drop_assembly(key)
        self._early_cancels[key] = None
        if len(self._early_cancels) > MAX_EARLY_CANCELS:
            del self._early_cancels[next(iter(self._early_cancels))]

    async def drain(self, grace_s: float) -> None:
        """Refuse what is new, wait `grace_s` for what runs, then end it with an error.  Idempotent."""
        self.draining = True
        with anyio.move_on_after(grace_s):
            await self._until_idle()
        lost = LorelayError(ErrorCode.WORKER_LOST, "The worker stopped before the response was complete.").wire
        for call in list(self._calls.values()):
            self._fail(call, lost)
            call.gone.set()
        with anyio.move_on_after(ABORT_GRACE_S + 1):
            await self._until_idle()

    def fail_all(self) -> None:
        """End every request with `worker_lost`: the engine is dead."""
        lost = LorelayError(ErrorCode.WORKER_LOST, "The worker's engine has died.").wire
        for call in list(self._calls.values()):
            self._fail(call, lost)
            call.scope.cancel()

    def _receive(self, data: bytes) -> GenerateRequest | None:
        """Return the request that is complete with `data`, if one is."""
        message = _unpack(data)
        if isinstance(message, GenerateRequest):
            return message
        key = (message.frontend, message.stream)
        self._forget_old_assemblies()
        assembly = self._assemblies.get(key)
        if message.index == 0 and assembly is None:
            if len(self._assemblies) >= MAX_ASSEMBLIES or self._assembly_bytes >= MAX_ASSEMBLY_BYTES:
                raise LorelayError(ErrorCode.NO_WORKER_AVAILABLE, "The worker has too many large requests; try again.")
            assembly = self._assemblies[key] = _Assembly([], 0, anyio.current_time() + ASSEMBLY_TIMEOUT_S)
        if assembly is None or len(assembly.parts) != message.index or not message.index < message.count:
            self._drop_assembly(key)
            if message.index + 1 < message.count:
                return None  # the last part's sender is told
            raise LorelayError(ErrorCode.WORKER_LOST, "A part of the request was lost on the way; try again.")
        assembly.parts.append(message.data)
        assembly.size += len(message.data)
        self._assembly_bytes += len(message.data)
        is_last = message.index + 1 == message.count
        if assembly.size > MAX_BODY_BYTES + 65_536 or self._assembly_bytes > MAX_ASSEMBLY_BYTES:
            self._drop_assembly(key)
            if is_last:
                raise LorelayError(ErrorCode.NO_WORKER_AVAILABLE, "The worker has too many large requests; try again.")
            return None
        if not is_last:
            return None
        self._drop_assembly(key)
        whole = _unpack(b"".join(assembly.parts))
        if not isinstance(whole, GenerateRequest):
            raise MalformedMessageError("parts within parts")
        return whole

    def _drop_assembly(self, key: tuple[str, int]) -> None:
        assembly = self._assemblies.pop(key, None)
        if assembly is not None:
            self._assembly_bytes -= assembly.size

    def _forget_old_assemblies(self) -> None:
        now = anyio.current_time()
        for key in [k for k, a in self._assemblies.items() if a.deadline < now]:
            self._drop_assembly(key)

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what this worker must not serve, before anything is looked up by it."""
        if self.draining:
            raise LorelayError(ErrorCode.WORKER_LOST, "The worker is stopping; try again.")
        if (request.frontend, request.stream) in self._calls:
            raise MalformedMessageError("its stream number is in use")
        if len(self._calls) >= self._max_requests:
            raise LorelayError(ErrorCode.NO_WORKER_AVAILABLE, "The worker has too many requests; try again.")
        base = self._engine.facts.name
        if request.endpoint not in self._engine.facts.routes:
            raise LorelayError(ErrorCode.ROUTE_NOT_FOUND, f"The model does not answer POST {request.endpoint}.")
        if request.selection is not None:
            verify(request.selection, base)
            if not self._is_runtime_lora() and self._residency.keyed(request.selection.key) is None:
                raise LorelayError(
                    ErrorCode.RUNTIME_LORA_UNSUPPORTED, "This worker does not load adapters at request time."
                )
        elif request.base != base:
            raise LorelayError(ErrorCode.MODEL_NOT_FOUND, "This worker does not serve the model.", param="model")

    async def _run(self, call: _Call) -> None:
        request = call.request
        try:
            with (
                call.scope,
                span("worker.generate", request.traceparent, endpoint=request.endpoint, request_id=request.request_id),
            ):
                await self._serve(call)
        except LorelayError as error:
            log.info("request failed", request_id=request.request_id, code=error.code.value, error=str(error))
            self._fail(call, error.wire)
        except Exception:
            log.exception("request failed", request_id=request.request_id)
            self._fail(call, LorelayError(ErrorCode.INTERNAL_ERROR, "The worker failed on this request.").wire)
        finally:
            if not call.ended:
                self._fail(call, LorelayError(ErrorCode.WORKER_LOST, "The response was broken off.").wire)
            del self._calls[request.frontend, request.stream]
            if not self._calls:
                self._idle.set()
                self._idle = anyio.Event()

    async def _serve(self, call: _Call) -> None:
        request = call.request
        async with AsyncExitStack() as stack:
            name = self._engine.facts.name
            if request.selection is not None:
                want = Want(
                    selection=request.selection,
                    deadline=anyio.current_time() + request.timeout_ms / 1000,
                    request_id=request.request_id,
                    traceparent=traceparent(),
                )
                if not await self._unless_gone(call, lambda: stack.enter_async_context(self._residency.hold(want))):
                    call.ended = True
                    return
                name = request.selection.key
                log.info("adapter request", adapter_key=name, request_id=request.request_id, endpoint=request.endpoint)
            await self._call_engine(call, name)

    async def _unless_gone(self, call: _Call, wait: Callable[[], Awaitable[Any]]) -> bool:
        """Await `wait()` unless the client goes first; return whether it finished."""
        finished = False
        failures: list[LorelayError] = []
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                await call.gone.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave)
            try:
                await wait()
                finished = True
            except LorelayError as error:
                failures.append(error)
            tasks.cancel_scope.cancel()
        if failures:
            raise failures[0]
        return finished

    async def _call_engine(self, call: _Call, name: str) -> None:
        request = call.request
        body = _with_model(request.body, name)
        bodies = [body]

        async def receive() -> AsgiMessage:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await call.gone.wait()
            return {"type": "http.disconnect"}

        rename = _Rename(name, request.model)

        async def send(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                call.content_type = _content_type(message["headers"])
            elif message["type"] == "http.response.body":
                part = rename(message.get("body", b""))
                last = not message.get("more_body")
                if part or last:
                    self._send(call, part, last=last)

        async def abort_when_gone() -> None:
            await call.gone.wait()
            await anyio.sleep(ABORT_GRACE_S)
            log.warning("engine's application did not end", request_id=request.request_id)
            call.scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort_when_gone)
            await self._engine.app(_scope(request, len(body)), receive, send)
            tasks.cancel_scope.cancel()
        if call.gone.is_set():
            log.info("request aborted", request_id=request.request_id)
            call.ended = True

    def _send(self, call: _Call, body: bytes, *, last: bool) -> None:
        """Put `body` into frames; a large one into several, since a message has a largest size."""
        if call.ended:
            return
        size = self._outbox.max_body_bytes
        for start in range(0, max(1, len(body)), size):
            piece = body[start : start + size]
            is_last = last and start + size >= len(body)
            self._put(call, piece, last=is_last)
        call.ended = last

    def _put(self, call: _Call, body: bytes, *, last: bool = False, error: WireError | None = None) -> None:
        first = call.sequence == 0
        self._outbox.put(
            call.request.frontend,
            Frame(
                stream=call.request.stream,
                sequence=call.sequence,
                status=call.status if first else 0,
                content_type=call.content_type if first else "",
                body=body,
                last=last,
                error=error,
            ),
        )
        call.sequence += 1

    def _fail(self, call: _Call, error: WireError) -> None:
        if not call.ended:
            call.ended = True
            self._put(call, b"", last=True, error=error)

    async def _until_idle(self) -> None:
        while self._calls:
            await self._idle.wait()


class _Rename:
    """Puts the client's model id back into what the engine says.

    The engine writes its own name for the model as a JSON member, `"model":"NAME"`.  Within a JSON string quotes are
    escaped, so these bytes can stand nowhere else, and no chunk needs to be parsed.
    """

    def __init__(self, engine_name: str, client_name: str) -> None:
        self._pairs: list[tuple[bytes, bytes]] = []
        if engine_name != client_name:
            old, new = _encode(engine_name), _encode(client_name)
            self._pairs = [(b'"model":' + blank + old, b'"model":' + blank + new) for blank in (b"", b" ")]

    def __call__(self, body: bytes) -> bytes:
        for old, new in self._pairs:
            body = body.replace(old, new)
        return body


def _unpack(data: bytes) -> GenerateRequest | RequestPart:
    """Return a request or a part: both are msgpack arrays, told apart by their length."""
    try:
        length = len(msgspec.msgpack.decode(data, type=list[msgspec.Raw]))
    except UNREADABLE as error:
        raise MalformedMessageError(f"not a request: {error}") from error
    return unpack(RequestPart, data) if length == len(RequestPart.__struct_fields__) else unpack(GenerateRequest, data)


def _with_model(body: bytes, name: str) -> bytes:
    """Return the JSON object `body` with its `model` set to `name` and every other member's bytes as they were."""
    try:
        members = _body.decode(body)
    except UNREADABLE as error:
        raise LorelayError(ErrorCode.INVALID_REQUEST, f"The request's body is not a JSON object: {error}.") from error
    members["model"] = msgspec.Raw(_encode(name))
    return _encode(members)


def _scope(request: GenerateRequest, length: int) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.endpoint,
        "raw_path": request.endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"engine"),
            (b"content-type", b"application/json"),
            (b"content-length", str(length).encode()),
            (b"x-request-id", request.request_id.encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
    }


def _content_type(headers: Any) -> str:  # noqa: ANN401 - ASGI's
    return next((bytes(v).decode("latin-1") for k, v in headers if bytes(k).lower() == b"content-type"), "")
