"""Serve an ASGI application with uvicorn (uvloop, httptools) inside a service's task group.

The service owns signals and shutdown order; uvicorn only serves.  The socket is bound first, so that an address in use
is one clear line instead of an exit from within the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import anyio
import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lorelay.proto.errors import ErrorCode, LorelayError, envelope
from lorelay.runtime.process import StartError

log = structlog.get_logger()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


MAX_HEAD_BYTES = 64 << 10
"""What a request line and its headers may take."""
READ_TIMEOUT_S = 120.0
"""How long a client may take from connecting, or from the first byte of a later request, until a request is whole."""

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class AddressError(StartError):
    """The address cannot be listened on; `str()` says which and why."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds on a request that is not whole yet, and without upgrades.

    The parser joins the pieces of a header anew for each, so an endless one would freeze the process; and on an
    `Upgrade` (curl --http2 offers h2c) it drops the body, where RFC 9110 lets a server just ignore the offer.
    """

    _head_bytes = 0
    _is_head = True
    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_head:
            self._head_bytes += len(data)
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        super().data_received(data)
        if self._is_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._end(431, f"The request's headers are larger than {MAX_HEAD_BYTES >> 10} KiB.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._overdue is None:
            self._watch()

    def on_headers_complete(self) -> None:
        self._is_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._unwatch()
        self._is_head, self._head_bytes = True, 0
        super().on_message_complete()

    def _watch(self) -> None:
        self._overdue = self.loop.call_later(READ_TIMEOUT_S, self._give_up)

    def _unwatch(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._overdue = None
        if not self.transport.is_closing():
            self._end(408, f"The request was not whole after {READ_TIMEOUT_S:g} s.")

    def _end(self, status: int, message: str) -> None:
        """Answer, unless a response is under way, and close."""
        body = envelope(LorelayError(ErrorCode.INVALID_REQUEST, message).wire)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            phrase = http.HTTPStatus(status).phrase
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            self.transport.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
        self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port`; port 0 takes a free one.

    Raises:
        AddressError: In use, not ours, or no such host.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    sock.setblocking(False)  # noqa: FBT003 - the socket module's signature
    return sock


@contextlib.asynccontextmanager
async def serving(app: App, sock: socket.socket, *, grace_s: float) -> AsyncIterator[None]:
    """Serve `app` on `sock` for the length of the block; afterwards give open requests `grace_s` seconds.

    Cancellation: connections are closed after the same grace.
    """
    config = uvicorn.Config(
        app,
        loop="none",
        http=_Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Server(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve, server, sock)
        while not server.started:  # noqa: ASYNC110 - uvicorn has only the flag
            await anyio.sleep(0.005)
        try:
            yield
        finally:
            server.should_exit = True


async def _serve(server: _Server, sock: socket.socket) -> None:
    with anyio.CancelScope(shield=True):  # it ends by itself when should_exit is set, within the grace
        await server.serve(sockets=[sock])
