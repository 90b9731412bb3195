"""The resolver on the bus: requests in, replies out, and what discovery must know of it."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Iterable

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread
import structlog

from lorelay.proto import keys, subjects
from lorelay.proto.adapters import MaterializeReply, MaterializeRequest
from lorelay.proto.codec import MalformedMessageError, from_json, to_json
from lorelay.proto.errors import ErrorCode, LorelayError, WireError
from lorelay.proto.events import EventKind
from lorelay.proto.identity import select
from lorelay.proto.records import InstanceRecord, ResidencyRecord, ResolverRecord
from lorelay.resolver.cache import Cache, Reference
from lorelay.resolver.materialization import Materialization
from lorelay.resolver.plugin import Chain
from lorelay.resolver.settings import ResolverSettings
from lorelay.runtime import telemetry
from lorelay.runtime.bus import Bus, Message
from lorelay.runtime.discovery import Change, Registration
from lorelay.runtime.events import EventLog

log = structlog.get_logger()

MAX_REQUESTS = 4096
"""Requests that may wait here; each is small, and those for one adapter share its flight."""
RECORD_INTERVAL_S = 30.0
"""Between two looks at how much room the cache has."""


class Holdings:
    """Digests that live workers hold, from their residency records.  `apply` takes discovery's changes."""

    def __init__(self) -> None:
        self._by_key: dict[str, str] = {}
        self._is_known = False

    def apply(self, changes: Iterable[Change]) -> None:
        """Take residency records that appeared, changed or went."""
        for change in changes:
            self._by_key.pop(change.key, None)
            if change.value is None:
                continue
            try:
                self._by_key[change.key] = from_json(ResidencyRecord, change.value).digest
            except MalformedMessageError as error:
                log.warning("record ignored", key=change.key, error=str(error))

    def known(self) -> None:
        """Note that everything there is has been applied."""
        self._is_known = True

    def digests(self) -> frozenset[str] | None:
        """Return what is held, or None while that is not known.  May be called from any thread."""
        return frozenset(self._by_key.copy().values()) if self._is_known else None


def tell_pruned(events: EventLog, key: str, reference: Reference) -> None:
    """Emit `pruned` from a thread of the event loop's."""
    selection = select(reference.base, reference.source)
    if selection.key != key:
        return
    anyio.from_thread.run_sync(
        functools.partial(events.emit, EventKind.PRUNED, selection, digest=reference.snapshot.digest)
    )


class Service:
    """Answers requests on this resolver's subject."""

    def __init__(self, bus: Bus, materialization: Materialization, tasks: anyio.abc.TaskGroup, resolver: str) -> None:
        self._bus = bus
        self._materialization = materialization
        self._tasks = tasks
        self._resolver = resolver
        self._request_count = 0
        self._idle = anyio.Event()

    async def on_message(self, message: Message) -> None:
        """Start answering a request."""
        if self._request_count >= MAX_REQUESTS:
            error = LorelayError(ErrorCode.LORA_CAPACITY_EXCEEDED, "The resolver has too many requests.")
            await self._refuse(message, error.wire)
            return
        try:
            request = from_json(MaterializeRequest, message.data)
        except MalformedMessageError as error:
            log.warning("request refused", error=str(error))
            failure = LorelayError(ErrorCode.INVALID_REQUEST, "The resolver could not read the request.")
            await self._refuse(message, failure.wire)
            return
        self._request_count += 1
        self._tasks.start_soon(self._answer, message, request)

    async def drain(self, limit_s: float) -> None:
        """Take no new requests; wait, at most `limit_s`, until those that are here are answered."""
        await self._bus.unsubscribe_all()
        with anyio.move_on_after(limit_s):
            while self._request_count:
                self._idle = anyio.Event()
                await self._idle.wait()

    async def _answer(self, message: Message, request: MaterializeRequest) -> None:
        try:
            with telemetry.span("materialize", request.traceparent, key=request.selection.key) as span:
                reply = await self._reply(request)
                if reply.error is not None:
                    span.set_attribute("error.code", reply.error.code.value)
            await message.reply(to_json(reply))
        finally:
            self._request_count -= 1
            if not self._request_count:
                self._idle.set()

    async def _reply(self, request: MaterializeRequest) -> MaterializeReply:
        try:
            return await self._materialization.materialize(request)
        except LorelayError as error:
            return MaterializeReply(error=error.wire, resolver=self._resolver)
        except Exception:
            log.exception("resolver defect", key=request.selection.key)
            failure = LorelayError(ErrorCode.INTERNAL_ERROR, "The resolver failed.")
            return MaterializeReply(error=failure.wire, resolver=self._resolver)

    async def _refuse(self, message: Message, error: WireError) -> None:
        await message.reply(to_json(MaterializeReply(error=error, resolver=self._resolver)))


class Advertisement:
    """The records of one resolver."""

    def __init__(self, settings: ResolverSettings, chain: Chain, cache: Cache, registration: Registration) -> None:
        self._settings = settings
        self._chain = chain
        self._cache = cache
        self._registration = registration
        self._namespace = settings.process.namespace
        self._resolver = settings.process.instance
        self._started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")

    @property
    def subject(self) -> str:
        """Where this resolver takes requests."""
        return subjects.resolver_materialize(self._namespace, self._settings.cache_domain, self._resolver)

    async def publish(self, *, draining: bool = False) -> None:
        """Say that this resolver is there."""
        instance = InstanceRecord(
            component="resolver",
            instance=self._resolver,
            subject=self.subject,
            started=self._started,
            draining=draining,
        )
        await self._registration.put(keys.instance(self._namespace, "resolver", self._resolver), to_json(instance))
        await self._put_record()

    async def run(self) -> None:
        """Keep the record's free room current, for ever."""
        while True:
            await anyio.sleep(RECORD_INTERVAL_S)
            await self._put_record()

    async def _put_record(self) -> None:
        try:
            free_bytes = await anyio.to_thread.run_sync(self._cache.free_bytes)
        except OSError as error:
            log.warning("cache not readable", error=str(error))
            free_bytes = 0
        record = ResolverRecord(
            resolver=self._resolver,
            domain=self._settings.cache_domain,
            subject=self.subject,
            schemes=tuple(sorted(self._chain.schemes)),
            plugin=self._chain.name,
            free_cache_bytes=free_bytes,
        )
        key = keys.resolver(self._namespace, self._settings.cache_domain, self._resolver)
        await self._registration.put(key, to_json(record))
