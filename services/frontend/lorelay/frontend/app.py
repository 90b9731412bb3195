"""The frontend's HTTP: an ASGI application of a few routes, without a framework on the hot path.

A POST becomes one request on the bus; its response's status and content type are the worker's, its body is forwarded
as it comes.  Every other outcome is OpenAI's error envelope with the status of its code.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

import anyio
import msgspec
import structlog

from lorelay.frontend.catalog import Catalog, Listed, Target
from lorelay.frontend.dispatch import Dispatcher, Stream
from lorelay.proto.codec import UNREADABLE
from lorelay.proto.errors import ErrorCode, LorelayError, WireError, envelope
from lorelay.proto.generation import MAX_BODY_BYTES, Frame
from lorelay.runtime.http import Receive, Scope, Send
from lorelay.runtime.telemetry import span

log = structlog.get_logger()

OPENAI_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Known even while no worker is there to list them."""
SHOWN_CHARS = 512
"""How much of a client's text an error repeats."""
SEND_TIMEOUT_S = 60.0
"""How long one write to a client may block."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_JSON = b"application/json"


class _Head(msgspec.Struct):
    """The only fields the frontend reads of a body."""

    model: str | None = None


_head = msgspec.json.Decoder(_Head)


class ClientGoneError(Exception):
    """The client closed the connection."""


class App:
    """The ASGI application."""

    def __init__(
        self,
        catalog: Catalog,
        dispatcher: Dispatcher,
        *,
        max_requests: int,
        missing: Callable[[], list[str]],
        started_unix_s: int,
    ) -> None:
        """Make the application.

        Args:
            catalog: What is served.
            dispatcher: Where requests go.
            max_requests: Requests in flight; more are refused.
            missing: Says what keeps this frontend from being ready; empty: it is.
            started_unix_s: `created` of `/v1/models`.
        """
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._max_requests = max_requests
        self._missing = missing
        self._started = started_unix_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        response = _Response(send, _request_id(scope))
        try:
            await self._route(scope, receive, response)
        except ClientGoneError:
            log.info("client gone", request_id=response.request_id)
        except LorelayError as error:
            await self._refuse(response, error)
        except Exception:
            log.exception("request failed", request_id=response.request_id)
            await response.fail(LorelayError(ErrorCode.INTERNAL_ERROR, "The frontend failed on this request.").wire)

    async def _route(self, scope: Scope, receive: Receive, response: _Response) -> None:
        method, path = scope["method"], scope["path"]
        if path in OPENAI_ROUTES or path in self._catalog.routes:
            _allow(method, "POST")
            await self._generate(scope, receive, response)
        elif path == "/v1/models":
            _allow(method, "GET")
            await response.json(200, {"object": "list", "data": [self._model(m) for m in self._catalog.listed()]})
        elif path.startswith("/v1/models/"):
            _allow(method, "GET")
            await response.json(200, self._named_model(_models_in_path(scope)))
        elif path in ("/live", "/ready", "/health"):
            _allow(method, "GET")
            missing = [] if path == "/live" else self._missing()
            await response.json(
                503 if missing else 200,
                {"status": "missing" if missing else "ok", "missing": missing, "models": list(self._catalog.bases)},
            )
        else:
            raise LorelayError(
                ErrorCode.ROUTE_NOT_FOUND, f"There is no {method} {path}; see GET /v1/models and the README."
            )

    def _model(self, model: Listed) -> dict[str, object]:
        return {
            "id": model.id,
            "object": "model",
            "created": self._started,
            "owned_by": "lorelay",
            "root": model.root,
            "parent": model.parent,
        }

    def _named_model(self, names: list[str]) -> dict[str, object]:
        listed = {model.id: model for model in self._catalog.listed()}
        for name in names:
            if name in listed:
                return self._model(listed[name])
        raise LorelayError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The model {names[0][:SHOWN_CHARS]!r} does not exist; GET /v1/models lists those that do.",
            param="model",
        )

    async def _generate(self, scope: Scope, receive: Receive, response: _Response) -> None:
        body = await _read_body(scope, receive)
        model = _read_model(body)
        endpoint = scope["path"]
        if self._dispatcher.open_streams >= self._max_requests:
            raise LorelayError(ErrorCode.NO_WORKER_AVAILABLE, "Too many requests are in flight here; try again.")

        def find() -> Target:
            target = self._catalog.target(model)
            self._check_route(endpoint, target)
            return target

        headers = dict(scope["headers"])
        with span(
            "frontend.request",
            headers.get(b"traceparent", b"").decode("ascii", "replace"),
            endpoint=endpoint,
            request_id=response.request_id,
        ):
            gone = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch_client, receive, gone, tasks.cancel_scope)
                try:
                    async with self._dispatcher.open(
                        find, model=model, endpoint=endpoint, body=body, request_id=response.request_id
                    ) as (stream, frame):
                        await self._forward(stream, frame, response)
                except LorelayError as error:
                    await self._refuse(response, error)
                except ClientGoneError:
                    gone.set()
                tasks.cancel_scope.cancel()
            if gone.is_set() and not response.complete:
                raise ClientGoneError

    async def _refuse(self, response: _Response, error: LorelayError) -> None:
        log.info("request refused", request_id=response.request_id, code=error.code.value, error=str(error))
        await response.fail(error.wire)

    def _check_route(self, endpoint: str, target: Target) -> None:
        worker = self._catalog.worker(target.workers[0]) if target.workers else None
        if worker is not None and worker.card is not None and endpoint not in worker.card.facts.routes:
            raise LorelayError(ErrorCode.ROUTE_NOT_FOUND, f"The model {target.base!r} does not answer POST {endpoint}.")

    async def _forward(self, stream: Stream, frame: Frame, response: _Response) -> None:
        await response.start(frame.status, frame.content_type.encode(), whole=frame.body if frame.last else None)
        while True:
            if frame.error is not None:
                log.warning("response broken off", request_id=response.request_id, code=frame.error.code.value)
                await response.fail(frame.error)
                return
            await response.write(frame.body, more=not frame.last)
            if frame.last:
                return
            try:
                frame = await stream.next(self._dispatcher.idle_timeout_s)
            except TimeoutError:
                stream.fail(LorelayError(ErrorCode.WORKER_LOST, "The worker went silent in the middle.").wire)


class _Response:
    """What has been sent of one response, so that a failure finds its right form."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.started = False
        self.complete = False
        """True once its last byte was handed over: a client that leaves now, as the server says of each, has it all."""
        self._sse = False

    async def start(
        self, status: int, content_type: bytes, whole: bytes | None = None, retry_s: int | None = None
    ) -> None:
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        if whole is not None:
            headers.append((b"content-length", str(len(whole)).encode()))
        if retry_s is not None:
            headers.append((b"retry-after", str(retry_s).encode()))
        self._sse = content_type.startswith(b"text/event-stream")
        if self._sse:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        self.complete = not more
        try:
            with anyio.fail_after(SEND_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise ClientGoneError from None

    async def json(self, status: int, value: object) -> None:
        body = msgspec.json.encode(value)
        await self.start(status, _JSON, whole=body)
        await self.write(body, more=False)

    async def fail(self, error: WireError) -> None:
        """Send `error` in the form that what was sent already leaves.

        Nothing sent: the whole response.  An event stream: its last event, without `[DONE]`.  Anything else: an end
        before its time.
        """
        body = envelope(error)
        if not self.started:
            await self.start(error.status, _JSON, whole=body, retry_s=error.retry_after_s)
            await self.write(body, more=False)
        elif self._sse:
            await self.write(b"data: " + body + b"\n\n", more=False)
        else:
            raise ClientGoneError  # uvicorn closes a connection whose response was not completed


async def _watch_client(receive: Receive, gone: anyio.Event, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()
    scope.cancel()


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    too_large = LorelayError(
        ErrorCode.REQUEST_TOO_LARGE, f"The request's body is larger than {MAX_BODY_BYTES >> 20} MiB."
    )
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _read_model(body: bytes) -> str:
    try:
        head = _head.decode(body)
    except msgspec.ValidationError as error:
        where = "model" if "model" in str(error) else None
        raise LorelayError(
            ErrorCode.INVALID_REQUEST, f"The request's JSON does not fit: {error}.", param=where
        ) from error
    except RecursionError as error:
        raise LorelayError(ErrorCode.INVALID_REQUEST, "The request's JSON nests too deeply.") from error
    except UNREADABLE as error:
        what = f"is not valid JSON: {error}" if body else "is empty"
        raise LorelayError(ErrorCode.INVALID_REQUEST, f"The request's body {what}.") from error
    if head.model is None:
        raise LorelayError(ErrorCode.INVALID_REQUEST, "The request must name a model.", param="model")
    return head.model


def _allow(method: str, allowed: str) -> None:
    if method != allowed and not (method == "HEAD" and allowed == "GET"):
        raise LorelayError(ErrorCode.METHOD_NOT_ALLOWED, f"Use {allowed}, not {method}, here.")


def _models_in_path(scope: Scope) -> list[str]:
    """Return what the path may name, likeliest first: a client may send an id encoded or as it is listed.

    So the bytes are decoded exactly once, or not at all, and a `?` may belong to the id.
    """
    path, _, query = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")
    name = path.removeprefix(b"/v1/models/")
    names = [unquote_to_bytes(name), name]
    query = query or scope.get("query_string", b"")
    if query:
        names += [unquote_to_bytes(name + b"?" + query), name + b"?" + query]
    return [each.decode(errors="replace") for each in names]


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(16)
