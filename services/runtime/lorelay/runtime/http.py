"""Serve an ASGI application with uvicorn (uvloop, httptools) inside a service's task group.

The service owns signals and shutdown order; uvicorn only serves.  The socket is bound first, so that an address in use
is one clear line instead of an exit from within the server.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import anyio
import structlog
import uvicorn

from lorelay.runtime.process import StartError

log = structlog.get_logger()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AddressError(StartError):
    """The address cannot be listened on; `str()` says which and why."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


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
        http="httptools",
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
