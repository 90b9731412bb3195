"""Calls to an etcd cluster: which member to ask, with which token, for how long, and what its errors mean.

The only module that knows gRPC; no error of gRPC leaves it.  `lorelay.runtime.store` gives the calls their meaning.

There is one channel per endpoint, and the connection moves between them itself: gRPC's own balancing takes several
addresses of one name, not several names, and goes on using a frozen member to which it has a connection.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import grpc

from lorelay.runtime import etcd_pb2 as pb
from lorelay.runtime.store_settings import EtcdSettings, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

T = TypeVar("T")
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_POLL_S = 0.02
_SHUN_S = 1.0
"""How long an endpoint that failed is passed over if there are others."""
_CHANNEL_OPTIONS = (
    # A call to a frozen or vanished member ends after about eight seconds, also one that has no end, a watch.
    # etcd refuses pings more often than every 5 s, or with no call in progress (--grpc-keepalive-min-time);
    # grpcio 1.85 needs ping_timeout_ms for what keepalive_timeout_ms promises.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),  # 0: no limit; a quiet watch goes on pinging
    ("grpc.min_reconnect_backoff_ms", 1000),  # also bounds one attempt to connect
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.enable_http_proxy", 0),
)

# etcd tells these apart by text only.  Source: etcd 3.5, api/v3rpc/rpctypes/error.go
_HISTORY_GONE = frozenset(
    {
        "etcdserver: mvcc: required revision has been compacted",
        "etcdserver: mvcc: required revision is a future revision",
    }
)
_REFUSED = frozenset(
    {
        "etcdserver: authentication failed, invalid user ID or password",
        "etcdserver: invalid auth token",
        "etcdserver: permission denied",
        "etcdserver: revision of auth store is old",
        "etcdserver: user name is empty",
    }
)
_AUTH_DISABLED = "etcdserver: authentication is not enabled"
_PASSING = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)


class StoreError(Exception):
    """etcd refused a call, or could not be asked."""


class StoreUnavailableError(StoreError):
    """etcd did not answer in time; a write may or may not have been applied.  Later may be better."""


class StoreAuthError(StoreError):
    """etcd does not know these credentials, or they do not reach this key."""


class LeaseGoneError(StoreError):
    """The lease has expired or was revoked, and its keys with it."""


class CompactedError(StoreError):
    """The history from the needed revision on is not in the store (any more): list again, and go on from there.

    It was compacted, or the store's data was replaced by a younger state (wiped, or restored from a snapshot).
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd does not have the needed history; its oldest revision is {revision or 'unknown'}")
        self.revision = revision
        """The oldest revision that can still be watched; 0: unknown."""


class ReplyTooLargeError(StoreError):
    """A reply is larger than what the channel receives; ask for less."""


class _AuthDisabledError(StoreError):
    """etcd runs without authentication."""


@dataclass(frozen=True, slots=True)
class Method(Generic[T]):
    """A method of etcd's API."""

    path: str
    reply: type[T]
    is_repeatable: bool = False
    """Doing it twice does no harm, so a call may be repeated on another endpoint."""


_LOGIN = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)


def is_refusal(reason: str) -> bool:
    """Say whether etcd's text, with or without "rpc error: code = ... desc =", is about who is asking."""
    return reason.rpartition(" desc = ")[2] in _REFUSED


class Connection:
    """Channels to all endpoints.  Entering connects to none, so it succeeds while etcd is down."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._targets = [parse_endpoint(url) for url in settings.endpoints]
        if len({is_tls for _, is_tls in self._targets}) != 1:
            raise ValueError("etcd endpoints must be given, and be all http:// or all https://")
        self._channels: list[Any] = []
        self._current: int = 0
        self._shunned_until = [0.0] * len(self._targets)
        self._token: str | None = None
        self._login = anyio.Lock()

    async def __aenter__(self) -> Self:
        """Prepare the channels.

        Raises:
            OSError: A certificate or key file cannot be read.
        """
        credentials = None
        if self._targets[0][1]:
            files = (self._settings.ca_file, self._settings.key_file, self._settings.cert_file)
            contents = [await anyio.Path(file).read_bytes() if file else None for file in files]
            credentials = grpc.ssl_channel_credentials(*contents)
        for target, _ in self._targets:
            if credentials is None:
                channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
            self._channels.append(channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        channels, self._channels = self._channels, []
        with anyio.CancelScope(shield=True):
            for channel in channels:
                await channel.close()

    async def call(self, method: Method[T], request: Any) -> T:  # noqa: ANN401 (a message of etcd_pb2)
        """Return etcd's reply.

        Cancellation: the call may have been carried out, or may still be.
        """

        async def send(endpoint: int, metadata: Metadata, timeout_s: float) -> T:
            return await self._send(endpoint, method, request, metadata, timeout_s)

        return await self.attempt(method, send)

    async def attempt(self, method: Method[Any], send: Callable[[int, Metadata, float], Awaitable[T]]) -> T:
        """Return `send(endpoint, metadata, timeout_s)`, called for an endpoint that has a connection.

        It is called again with a new token if the old one was refused, and, for a method that may be repeated, with
        another endpoint (or the same, if it is the only one) if etcd was unavailable.

        Raises:
            StoreError: What `send` raised last; `StoreUnavailableError` after `timeout_s` in all.
        """
        may_log_in = bool(self._settings.username)
        share_s = self._settings.timeout_s / (len(self._targets) if method.is_repeatable else 1)
        try:
            with anyio.fail_after(self._settings.timeout_s) as whole:
                while True:
                    endpoint = await self._connected()
                    token: str | None = None
                    try:
                        with anyio.fail_after(min(share_s, whole.deadline - anyio.current_time())) as part:
                            token = await self._log_in(endpoint, part.deadline - anyio.current_time())
                            metadata = (("token", token),) if token else ()
                            return await send(endpoint, metadata, part.deadline - anyio.current_time())
                    except StoreAuthError:
                        # It expired, or the user changed.  Before etcd 3.5.9 a watch only says "permission denied".
                        if token is None or not may_log_in:
                            raise
                        may_log_in = False
                        self._token = None if self._token == token else self._token
                    except (StoreUnavailableError, TimeoutError):
                        self.shun(endpoint)
                        if not method.is_repeatable:
                            raise
                        await anyio.sleep(_POLL_S)
        except TimeoutError as error:
            raise StoreUnavailableError(f"etcd {method.path}: no answer in time") from error

    async def _send(self, endpoint: int, method: Method[T], request: Any, metadata: Metadata, timeout_s: float) -> T:  # noqa: ANN401
        call = self._channels[endpoint].unary_unary(
            method.path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=method.reply.FromString,  # type: ignore[attr-defined]  # T is a message
        )
        reply: T = await _awaited(call(request, timeout=timeout_s, metadata=metadata), method.path)
        return reply

    def stream(self, endpoint: int, method: Method[T], metadata: Metadata) -> Stream[T]:
        """Begin a call that goes on until it is cancelled; for use inside `attempt`."""
        call = self._channels[endpoint].stream_stream(
            method.path,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=method.reply.FromString,  # type: ignore[attr-defined]  # T is a message
        )
        # hasleader: a member cut off from the others ends the stream instead of keeping silent.
        return Stream(call(metadata=(*metadata, ("hasleader", "true"))), endpoint, method.path)

    async def _connected(self) -> int:
        """Wait for an endpoint with a live connection; the caller bounds the wait."""
        count = len(self._targets)
        while True:
            if not self._channels:
                raise StoreError("the store is not open")
            now = anyio.current_time()
            for step in range(count):
                endpoint = (self._current + step) % count
                state = self._channels[endpoint].get_state(try_to_connect=True)
                is_ready = state is grpc.ChannelConnectivity.READY
                if is_ready and (count == 1 or self._shunned_until[endpoint] <= now):
                    self._current = endpoint
                    return endpoint
            await anyio.sleep(_POLL_S)

    def shun(self, endpoint: int) -> None:
        """Pass over the endpoint for a while: a member can be connected and still not answer."""
        self._shunned_until[endpoint] = anyio.current_time() + _SHUN_S

    async def _log_in(self, endpoint: int, timeout_s: float) -> str:
        """Return the token, a new one if there is none; empty: etcd wants none."""
        if not self._settings.username:
            return ""
        async with self._login:  # one login for all that wait
            if self._token is None:
                user = pb.AuthenticateRequest(name=self._settings.username, password=self._settings.password)
                try:
                    self._token = (await self._send(endpoint, _LOGIN, user, (), timeout_s)).token
                except _AuthDisabledError:
                    self._token = ""
            return self._token


class Stream(Generic[T]):
    """A call with many requests and replies."""

    def __init__(self, call: Any, endpoint: int, path: str) -> None:  # noqa: ANN401 (grpc has no types)
        self._call = call
        self._path = path
        self.endpoint = endpoint

    async def write(self, request: Any) -> None:  # noqa: ANN401 (a message of etcd_pb2)
        """Send a request.  Nothing happens if the stream has ended; `read` says why."""
        with suppress(asyncio.InvalidStateError):
            await _awaited(self._call.write(request), self._path)

    async def read(self) -> T:
        """Return the next reply, however long it takes.

        Raises:
            StoreError: The stream has ended.
        """
        reply: T = await _awaited(self._call.read(), self._path)
        if reply is grpc.aio.EOF:
            raise StoreUnavailableError(f"etcd {self._path}: ended by etcd")
        return reply

    def cancel(self) -> None:
        """End the stream on both sides."""
        self._call.cancel()


async def _awaited(operation: Awaitable[Any], path: str) -> Any:  # noqa: ANN401 (grpc has no types)
    """Await something of gRPC's; its errors become ours, and a cancellation becomes anyio's again.

    gRPC takes a cancellation and raises one of its own making, which the cancel scope that caused it does not know
    and would let through.
    """
    try:
        return await operation
    except asyncio.CancelledError as error:
        await anyio.lowlevel.checkpoint_if_cancelled()
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StoreError(f"etcd {path}: the store was closed during the call") from error
    except grpc.aio.AioRpcError as error:
        raise _translated(error, path) from error


def _translated(error: Any, path: str) -> StoreError:  # noqa: ANN401 (grpc has no types)
    """Say in our words what gRPC's error means."""
    code, details = error.code(), error.details() or ""
    message = f"etcd {path}: {code.name}: {details}"
    known: type[StoreError] = StoreUnavailableError if code in _PASSING else StoreError
    if details in _HISTORY_GONE:
        return CompactedError(0)
    if is_refusal(details):
        known = StoreAuthError
    elif details == _AUTH_DISABLED:
        known = _AuthDisabledError
    elif code is grpc.StatusCode.NOT_FOUND:
        known = LeaseGoneError  # of what we call, only leases are not found
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        known = ReplyTooLargeError
    return known(message)
