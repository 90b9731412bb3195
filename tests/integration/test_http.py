"""The HTTP server's bounds on a request that is not whole, on real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from lorelay.runtime import http
from lorelay.runtime.http import Receive, Scope, Send

pytestmark = pytest.mark.anyio


async def echo(_scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connection() -> AsyncIterator[anyio.abc.SocketStream]:
    """Connect to a server that echoes."""
    sock = http.bind("127.0.0.1", 0)
    host, port = sock.getsockname()
    async with http.serving(echo, sock, grace_s=1), await anyio.connect_tcp(host, port) as stream:
        yield stream


async def read_all(stream: anyio.abc.SocketStream) -> bytes:
    """Read until the server closes."""
    data = b""
    with anyio.fail_after(10):
        while True:
            try:
                data += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return data


async def test_an_offer_to_upgrade_is_ignored_and_the_body_kept() -> None:
    """What `curl --http2` sends."""
    async with connection() as stream:
        await stream.send(
            b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\nContent-Length: 5\r\n\r\nhello"
        )
        with anyio.fail_after(5):
            answer = await stream.receive()
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"hello")


async def flood(stream: anyio.abc.SocketStream) -> None:
    """Send a header that has no end."""
    await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
    for _ in range(4096):
        await stream.send(b"a" * 16_384)


async def test_headers_without_end_are_cut_off() -> None:
    async with connection() as stream:
        with pytest.raises(anyio.BrokenResourceError):  # closed while we still send
            await flood(stream)


async def test_large_headers_are_told_so() -> None:
    async with connection() as stream:
        await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * http.MAX_HEAD_BYTES)
        answer = await read_all(stream)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhel"])
async def test_a_request_that_never_becomes_whole_ends(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow-loris."""
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.3)
    async with connection() as stream:
        if begun:
            await stream.send(begun)
        assert (await read_all(stream)).startswith(b"HTTP/1.1 408 ")


async def test_a_whole_request_is_not_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for reading a request, not for answering it or for the pause before the next one."""
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.3)
    async with connection() as stream:
        for _ in range(2):
            await stream.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
            with anyio.fail_after(5):
                assert (await stream.receive()).endswith(b"hi")
            await anyio.sleep(0.6)
