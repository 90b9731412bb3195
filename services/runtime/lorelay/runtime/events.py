"""Tell the fleet what happens to adapters: a bounded outbox in front of the stream LORA_EVENTS.

Telling never delays or fails a request: `emit` only puts into the outbox, and `run` stores what is there, again and
again while NATS is away.  A full outbox drops its oldest event and says so in the log.
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections import deque
from typing import Protocol

import anyio
import structlog

from lorelay.proto.codec import to_json
from lorelay.proto.errors import WireError
from lorelay.proto.events import EventKind, LoraEvent
from lorelay.proto.identity import AdapterSelection, redact
from lorelay.proto.subjects import EVENT_STREAM, EVENT_SUBJECTS, event as event_subject
from lorelay.runtime.bus import Bus, BusError, MessageTooLargeError
from lorelay.runtime.telemetry import trace_id

log = structlog.get_logger()

OUTBOX_EVENTS = 4096
KEEP_S = 7 * 86_400
KEEP_BYTES = 1 << 30


class Emit(Protocol):
    """How a part of a service tells an event: `EventLog.emit`.  Never waits, never raises."""

    def __call__(
        self,
        kind: EventKind,
        selection: AdapterSelection,
        *,
        digest: str = "",
        revision: str = "",
        size_bytes: int | None = None,
        stages_ms: dict[str, float] | None = None,
        error: WireError | None = None,
        request_id: str = "",
    ) -> None:
        """Tell one event."""


class EventLog:
    """The outbox of one process."""

    def __init__(self, bus: Bus, namespace: str, component: str, instance: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._component = component
        self._instance = instance
        self._outbox: deque[LoraEvent] = deque()
        self._filled = anyio.Event()
        self.dropped_events = 0

    def emit(
        self,
        kind: EventKind,
        selection: AdapterSelection,
        *,
        digest: str = "",
        revision: str = "",
        size_bytes: int | None = None,
        stages_ms: dict[str, float] | None = None,
        error: WireError | None = None,
        request_id: str = "",
    ) -> None:
        """Put an event into the outbox.  Never waits, never raises."""
        if len(self._outbox) >= OUTBOX_EVENTS:
            self._outbox.popleft()
            self.dropped_events += 1
            if self.dropped_events & (self.dropped_events - 1) == 0:  # 1, 2, 4, 8 …: no flood
                log.warning("events dropped", count=self.dropped_events)
        self._outbox.append(
            LoraEvent(
                kind=kind,
                time=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                id=secrets.token_hex(12),
                key=selection.key,
                base=selection.base,
                scheme=selection.source.partition(":")[0].lower(),
                source=redact(selection.source),
                instance=self._instance,
                component=self._component,
                digest=digest,
                revision=revision,
                bytes=size_bytes,
                stages_ms=stages_ms or {},
                code=error.code.value if error else "",
                message=error.message if error else "",
                reasons=error.reasons if error else (),
                trace_id=trace_id(),
                request_id=request_id,
            )
        )
        self._filled.set()

    async def run(self) -> None:
        """Store events for ever, in order.  Cancellation: `flush` can still store what is left."""
        ensured = False
        delay_s = 0.1
        while True:
            if not self._outbox:
                self._filled = anyio.Event()
                await self._filled.wait()
            try:
                if not ensured:
                    await self._bus.ensure_stream(EVENT_STREAM, EVENT_SUBJECTS, keep_s=KEEP_S, max_bytes=KEEP_BYTES)
                    ensured = True
                await self._store_oldest()
            except MessageTooLargeError as error:
                oldest = self._outbox.popleft()
                log.error("event dropped", kind=oldest.kind.value, key=oldest.key, error=str(error))  # noqa: TRY400
            except BusError as error:
                log.warning("events wait for the bus", waiting=len(self._outbox), error=str(error))
                ensured = False
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)
            else:
                delay_s = 0.1

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Store what is left, for a process that stops; gives up after `timeout_s` or when NATS is away."""
        with anyio.move_on_after(timeout_s, shield=True):
            try:
                while self._outbox:
                    await self._store_oldest()
            except BusError as error:
                log.warning("events lost at the stop", count=len(self._outbox), error=str(error))

    async def _store_oldest(self) -> None:
        """Store the oldest event; it leaves the outbox only once it is stored (its id makes a repeat harmless)."""
        oldest = self._outbox[0]
        subject = event_subject(self._namespace, oldest.kind.value, oldest.key)
        await self._bus.store(subject, to_json(oldest), message_id=oldest.id)
        if self._outbox and self._outbox[0] is oldest:
            self._outbox.popleft()
