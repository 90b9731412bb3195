"""NATS: publish, request one reply, subscribe, and keep events.  The only module that speaks NATS.

Core NATS is at-most-once, and nats-py lets calls on a lost connection succeed or hang (docs/explanation/bus.md): here
every call fails at once when the connection is down, every wait has a deadline, and the client reconnects for ever.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio
import nats
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StreamConfig
from nats.js.errors import NotFoundError

from lorelay.runtime.settings import BusSettings

log = structlog.get_logger()

HEADROOM_BYTES = 512
"""Kept free below max_payload: the server cuts a connection whose headers and payload together exceed it."""


class BusError(Exception):
    """The bus could not do it."""


class BusUnavailableError(BusError):
    """There is no connection to NATS now; it is being made anew."""


class NobodyListensError(BusError):
    """Nobody is subscribed to the subject: the peer has gone."""


class ReplyTimeoutError(BusError):
    """The peer did not answer in time; it may or may not have acted."""


class MessageTooLargeError(BusError):
    """The payload is larger than the server takes; sending it again cannot help."""


class Message:
    """A message that arrived, and the way to answer it."""

    __slots__ = ("_msg", "data")

    def __init__(self, msg: Msg) -> None:
        self._msg = msg
        self.data: bytes = msg.data

    async def reply(self, payload: bytes) -> None:
        """Answer; dropped silently if the asker wanted no answer or the connection is down (it has a deadline)."""
        if self._msg.reply:
            with contextlib.suppress(nats.errors.Error):
                await self._msg.respond(payload)


class Bus:
    """One connection to NATS.  An async context manager; use it inside the process's event loop only."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._client = nats.NATS()
        self._js: JetStreamContext | None = None
        self._is_connecting = True
        self.on_disconnect: Callable[[], None] = lambda: None
        """Called when the connection is lost: messages to us may be lost from then on."""
        self.dropped_messages = 0
        """Messages that were lost because a subscription's queue was full."""

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            BusUnavailableError: No server answered within the settings' `connect_timeout_s`, or one refused us.
        """
        settings = self._settings
        try:
            with anyio.fail_after(settings.connect_timeout_s):
                await self._connect()
        except TimeoutError as error:
            raise BusUnavailableError(
                f"no NATS server answered at {_shown(settings.servers)} within {settings.connect_timeout_s:g} s"
                " (NATS_SERVER)"
            ) from error
        except BusUnavailableError:
            await self._client.close()
            raise
        self._is_connecting = False
        self._js = self._client.jetstream(timeout=5)
        return self

    async def _connect(self) -> None:
        settings = self._settings
        while True:
            try:
                await self._client.connect(
                    servers=list(settings.servers),
                    name=self._name,
                    user=settings.user or None,
                    password=settings.password or None,
                    token=settings.token or None,
                    user_credentials=settings.credentials_file or None,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.25,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    connect_timeout=2,
                    drain_timeout=5,
                    pending_size=8 << 20,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                )
            except (OSError, nats.errors.NoServersError, nats.errors.TimeoutError) as error:
                log.warning("bus not reachable yet", servers=_shown(settings.servers), error=str(error))
                await anyio.sleep(0.25)
            except nats.errors.Error as error:
                raise BusUnavailableError(f"NATS refused the connection: {error}") from error
            else:
                return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush what was published, at most two seconds, and close."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(3):
            if self._client.is_connected:
                with contextlib.suppress(nats.errors.Error):
                    await self._client.flush(timeout=2)
            await self._client.close()

    @property
    def connected(self) -> bool:
        """True while there is a connection."""
        return bool(self._client.is_connected)

    @property
    def max_message_bytes(self) -> int:
        """The largest payload that may be published."""
        return int(self._client.max_payload) - HEADROOM_BYTES

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send without an answer; delivery is not promised.

        Raises:
            BusUnavailableError: No connection, or too much is waiting to be sent on it.
            MessageTooLargeError: `payload` is larger than `max_message_bytes`.
        """
        self._check(payload)
        try:
            await self._client.publish(subject, payload)
        except nats.errors.Error as error:
            raise BusUnavailableError(f"publish failed: {type(error).__name__}") from error

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Send and return the one reply.

        Raises:
            NobodyListensError: Nobody is subscribed to `subject`.
            ReplyTimeoutError: No reply within `timeout_s`.
            BusUnavailableError: No connection.
            MessageTooLargeError: `payload` is larger than `max_message_bytes`.

        Cancellation: the peer may act all the same; its reply is dropped.
        """
        self._check(payload)
        try:
            reply = await self._client.request(subject, payload, timeout=timeout_s)
        except nats.errors.NoRespondersError as error:
            raise NobodyListensError(f"nobody listens on {subject}") from error
        except nats.errors.TimeoutError as error:
            raise ReplyTimeoutError(f"no reply on {subject} within {timeout_s:g} s") from error
        except nats.errors.Error as error:
            raise BusUnavailableError(f"request failed: {type(error).__name__}") from error
        return bytes(reply.data)

    async def subscribe(self, subject: str, handler: Callable[[Message], Awaitable[None]]) -> None:
        """Call `handler` with each message on `subject`, in order, one after the other.

        A handler must return quickly (start a task for anything that waits).  What it raises is logged.
        """

        async def on_message(msg: Msg) -> None:
            try:
                await handler(Message(msg))
            except Exception:
                log.exception("message handler failed", subject=subject)

        await self._client.subscribe(subject, cb=on_message)

    async def unsubscribe_all(self) -> None:
        """Take no new messages; handlers of those that are here finish."""
        for sid in list(self._client._subs):  # noqa: SLF001 - nats-py offers no public list
            subscription = self._client._subs.get(sid)  # noqa: SLF001
            if subscription is not None:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()

    async def ensure_stream(self, name: str, subjects: str, *, keep_s: float, max_bytes: int) -> None:
        """Make the JetStream stream `name` exist; one that exists is left as its operator made it.

        Raises:
            BusUnavailableError: JetStream is off or did not answer.
        """
        self._check()
        assert self._js is not None  # noqa: S101 - set on entry
        try:
            await self._js.stream_info(name)
        except NotFoundError:
            config = StreamConfig(
                name=name,
                subjects=[subjects],
                max_age=keep_s,
                max_bytes=max_bytes,
                discard=DiscardPolicy.OLD,
                duplicate_window=min(120.0, keep_s),  # the server takes no longer one
            )
            try:
                await self._js.add_stream(config)
            except nats.errors.Error as error:
                raise BusUnavailableError(f"JetStream did not make the stream {name}: {error}") from error
        except nats.errors.Error as error:
            raise BusUnavailableError(f"JetStream did not answer; is it on (nats-server -js)? {error}") from error

    async def store(self, subject: str, payload: bytes, *, message_id: str, timeout_s: float = 5.0) -> None:
        """Publish into the stream of `subject` and wait until it is stored; repeating one `message_id` is harmless.

        Raises:
            BusUnavailableError: It was not confirmed.
            MessageTooLargeError: `payload` is larger than `max_message_bytes`.
        """
        self._check(payload)
        assert self._js is not None  # noqa: S101 - set on entry
        try:
            await self._js.publish(subject, payload, timeout=timeout_s, headers={"Nats-Msg-Id": message_id})
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailableError(f"not stored: {type(error).__name__}") from error

    def _check(self, payload: bytes = b"") -> None:
        if not self._client.is_connected:
            raise BusUnavailableError("not connected to NATS")
        if len(payload) > self.max_message_bytes:
            raise MessageTooLargeError(f"{len(payload)} bytes are more than the {self.max_message_bytes} of a message")

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.dropped_messages += 1
        if self._is_connecting and "authorization" in str(error).lower():
            # nats-py would try for ever; what its callback raises leaves its `connect`.
            raise BusUnavailableError("NATS refused our credentials (NATS_AUTH_*)")
        log.warning("bus error", error=str(error) or type(error).__name__)

    async def _on_disconnect(self) -> None:
        if not self._client.is_closed:
            log.warning("bus disconnected")
            self.on_disconnect()

    async def _on_reconnect(self) -> None:
        log.info("bus reconnected")


def _shown(servers: tuple[str, ...]) -> str:
    """Return the servers for a log: a URL may hold a user and a password."""
    return ", ".join(re.sub(r"(^|//)[^/]*@", r"\1…@", server) for server in servers)
