"""The management API of one worker, on its own listener: one registry of operations behind two surfaces.

`POST /engine/update/{load_lora,unload_lora,list_loras}` is Dynamo's; `GET|POST /v1/loras` and `DELETE /v1/loras/{name}`
are the shim in front of the same operations, so both answer the same status.  The listener is guarded by a token
unless it is on loopback.  `/live`, `/ready` and `/health` are open.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import anyio
import msgspec
import structlog

from lorelay.proto.codec import UNREADABLE
from lorelay.proto.errors import ErrorCode, LorelayError, WireError, envelope
from lorelay.proto.identity import KEY_PREFIX, check_model_id, check_source, select
from lorelay.proto.records import ModelFacts
from lorelay.runtime.http import Receive, Scope, Send
from lorelay.worker.residency import Residency, Resident, Want

log = structlog.get_logger()

MAX_BODY_BYTES = 1 << 20
UNLOAD_TIMEOUT_S = 30.0
"""How long an unload waits for requests that use the adapter."""

Operation = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class Management:
    """The ASGI application of a worker's management listener."""

    def __init__(
        self,
        facts: ModelFacts,
        *,
        token: str,
        load_timeout_s: float,
        is_ready: Callable[[], bool],
    ) -> None:
        """Make it without operations; `open` adds them.

        Args:
            facts: Of the served base.
            token: Demanded as `Authorization: Bearer …`; empty: nothing is demanded.
            load_timeout_s: How long a load may take.
            is_ready: Whether this worker serves.
        """
        self._facts = facts
        self._token = token
        self._load_timeout_s = load_timeout_s
        self._is_ready = is_ready
        self._residency: Residency | None = None
        self._operations: dict[str, Operation] = {}

    def open(self, residency: Residency) -> None:
        """Offer the adapter operations: called once the engine's records can be published."""
        self._residency = residency
        self._operations = {"load_lora": self._load, "unload_lora": self._unload, "list_loras": self._list}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            status, value = await self._route(scope, receive)
        except LorelayError as error:
            log.info("management call refused", path=scope["path"], code=error.code.value, error=str(error))
            await _respond(send, error.wire.status, envelope(error.wire), error.wire)
        except Exception:
            log.exception("management call failed", path=scope["path"])
            failure = LorelayError(ErrorCode.INTERNAL_ERROR, "The worker failed on this call.").wire
            await _respond(send, failure.status, envelope(failure), failure)
        else:
            await _respond(send, status, msgspec.json.encode(value))

    async def _route(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        method, path = scope["method"], scope["path"]
        if path in ("/live", "/ready", "/health"):
            is_ready = path == "/live" or self._is_ready()
            return (200 if is_ready else 503), {"status": "ok" if is_ready else "not ready"}
        self._authorize(scope)
        raw_path: bytes = (scope.get("raw_path") or path.encode()).partition(b"?")[0]
        if path == "/v1/loras" and method == "GET":
            return 200, await self._operate("list_loras", {})
        if path == "/v1/loras" and method == "POST":
            return 200, await self._operate("load_lora", await _read_object(receive))
        if raw_path.startswith(b"/v1/loras/") and method == "DELETE":
            name = unquote_to_bytes(raw_path.removeprefix(b"/v1/loras/")).decode(errors="replace")
            return 200, await self._operate("unload_lora", {"lora_name": name})
        if path.startswith("/engine/update/") and method == "POST":
            return 200, await self._operate(path.removeprefix("/engine/update/"), await _read_object(receive))
        raise LorelayError(ErrorCode.ROUTE_NOT_FOUND, f"There is no {method} {path} on a worker.")

    def _authorize(self, scope: Scope) -> None:
        if not self._token:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self._token.encode()):
            raise LorelayError(ErrorCode.UNAUTHORIZED, "Management needs 'Authorization: Bearer TOKEN'.")

    async def _operate(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        operation = self._operations.get(name)
        if operation is None:
            message = (
                f"There is no operation {name!r}; there are: {', '.join(self._operations)}."
                if self._operations
                else "Adapters are not available on this worker."
            )
            raise LorelayError(ErrorCode.ROUTE_NOT_FOUND, message)
        return await operation(arguments)

    async def _load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name, source = _text(arguments, "lora_name"), _source(arguments)
        check_model_id(name)
        if name.startswith(KEY_PREFIX):
            raise LorelayError(
                ErrorCode.INVALID_REQUEST, f"A name must not begin with {KEY_PREFIX!r}: keys do.", param="lora_name"
            )
        if name.casefold() in {own.casefold() for own in (self._facts.name, *self._facts.aliases)}:
            raise LorelayError(
                ErrorCode.LORA_NAME_CONFLICT, f"{name!r} is the base's own name, or reads like it.", param="lora_name"
            )
        check_source(source)
        want = Want(
            selection=select(self._facts.name, source),
            deadline=anyio.current_time() + self._load_timeout_s,
            request_id=f"load {name}"[:128],
        )
        resident = await self._table.load(want, name)
        return {"status": "success", "message": f"{name} is loaded.", **_line(resident)}

    async def _unload(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = _text(arguments, "lora_name")
        resident = self._table.named(name) or self._table.keyed(name)
        if resident is None:
            raise LorelayError(ErrorCode.LORA_NOT_FOUND, f"No adapter {name!r} is loaded here.", param="lora_name")
        await self._table.unload(resident, anyio.current_time() + UNLOAD_TIMEOUT_S)
        gone = {"lora_id": resident.adapter.engine_id, "key": resident.selection.key}
        return {"status": "success", "message": f"{name} is unloaded.", "lora_name": name, **gone}

    async def _list(self, _arguments: Mapping[str, Any]) -> dict[str, Any]:
        lines = [_line(resident) for resident in self._table.residents()]
        return {
            "status": "success",
            "loras": {str(line["lora_name"]): line["lora_id"] for line in lines},
            "adapters": lines,
            "count": len(lines),
        }

    @property
    def _table(self) -> Residency:
        assert self._residency is not None  # noqa: S101 - operations exist only after `open`
        return self._residency


def _line(resident: Resident) -> dict[str, Any]:
    return {
        "lora_name": resident.name or resident.selection.key,
        "lora_id": resident.adapter.engine_id,
        "key": resident.selection.key,
        "base": resident.selection.base,
        "digest": resident.digest,
        "state": resident.state.value,
        "pinned": resident.pinned,
        "holders": resident.holders,
        "bytes": resident.size_bytes,
    }


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value:
        raise LorelayError(ErrorCode.INVALID_REQUEST, f"{name!r} must be a non-empty string.", param=name)
    return value


def _source(arguments: Mapping[str, Any]) -> str:
    source = arguments.get("source")
    if isinstance(source, dict):
        return _text(source, "uri")
    raise LorelayError(
        ErrorCode.INVALID_REQUEST, "'source' must be an object with the adapter's 'uri'.", param="source"
    )


async def _read_object(receive: Receive) -> Mapping[str, Any]:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise LorelayError(ErrorCode.INVALID_REQUEST, "The caller left before the call's body was complete.")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise LorelayError(ErrorCode.REQUEST_TOO_LARGE, "The call's body is larger than 1 MiB.")
        if not message.get("more_body"):
            break
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except UNREADABLE as error:
        raise LorelayError(ErrorCode.INVALID_REQUEST, f"The call's body must be a JSON object: {error}.") from error


async def _respond(send: Send, status: int, body: bytes, error: WireError | None = None) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error is not None and error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
