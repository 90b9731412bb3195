"""The adapters of one engine: brought on a miss by one flight per key, held by requests, evicted when idle.

The table below is the only owner of the engine's adapters: every load and unload goes through `_engine_lock`, one at a
time, and is shielded, so that a mutation that began is finished and booked even if everybody who wanted it has left.
A request *holds* an adapter from before its engine call until after it; a held adapter never leaves.  What an entry's
state says is what the engine was last known to hold; a lost answer makes it UNCERTAIN, which keeps its slot until the
engine's own list has spoken.

    (absent) -> RESOLVING -> LOADING -> LOADED -> UNLOADING -> (absent)
                    |            |                    |
                    |            +--> UNCERTAIN <-----+
                    +--> (absent)         +--> (absent)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import structlog

from lorelay.proto.adapters import MaterializeReply
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.events import EventKind
from lorelay.proto.identity import AdapterSelection
from lorelay.proto.records import AdapterState
from lorelay.runtime.events import Emit
from lorelay.runtime.singleflight import FlightStoppedError, SingleFlight
from lorelay.worker.engine.base import Engine, EngineAdapter, EngineDeadError, EngineError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Want:
    """Why an adapter is brought."""

    selection: AdapterSelection
    deadline: float
    """On anyio's clock."""
    request_id: str
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Materialized:
    """A snapshot that has been checked and lies at `path`."""

    path: Path
    reply: MaterializeReply


@dataclass(eq=False, slots=True)
class Resident:
    """An adapter that the engine holds, or is being made to."""

    selection: AdapterSelection
    adapter: EngineAdapter
    digest: str
    size_bytes: int
    state: AdapterState
    name: str | None = None
    """The published name of an administrative adapter."""
    holders: int = 0
    last_used: int = 0
    """Order of use; the lowest is the least recent."""

    @property
    def pinned(self) -> bool:
        """True if no request may evict it."""
        return self.name is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the table."""

    max_resident: int
    max_pending_keys: int
    max_pending_admissions: int
    admission_timeout_s: float
    eviction: str
    """`lru`, or `pinned`: a full engine refuses."""


@dataclass(slots=True)
class _Counters:
    loads: int = 0
    pending_admissions: int = 0
    clock: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


class Residency:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        tasks: anyio.abc.TaskGroup,
        *,
        materialize: Callable[[Want], Awaitable[Materialized]],
        publish: Callable[[Resident | None, AdapterSelection], Awaitable[None]],
        emit: Emit,
        on_engine_dead: Callable[[], None],
    ) -> None:
        """Make an empty table.

        Args:
            engine: Whose adapters these are.
            limits: Bounds.
            tasks: Where flights run; they end with it.
            materialize: Gives the checked snapshot of an adapter.
            publish: Writes (or, given None, removes) an adapter's record; must be quick and must not raise.
            emit: Tells an event.
            on_engine_dead: Called when the engine says that it cannot serve any more.
        """
        self._engine = engine
        self._limits = limits
        self._materialize = materialize
        self._publish = publish
        self._emit = emit
        self._on_engine_dead = on_engine_dead
        self._flights: SingleFlight[None] = SingleFlight(tasks)
        self._residents: dict[str, Resident] = {}
        self._engine_ids = itertools.count(1)
        self._engine_lock = anyio.Lock()
        self._released = anyio.Event()
        self._waiting: Counter[str] = Counter()
        """Requests in `_admit`, by key."""
        self._counters = _Counters()

    @property
    def loads(self) -> int:
        """Engine loads that succeeded in this worker's life."""
        return self._counters.loads

    def residents(self) -> list[Resident]:
        """Return what the table holds, by key.  Never waits and never asks the engine."""
        return [self._residents[key] for key in sorted(self._residents)]

    @asynccontextmanager
    async def hold(self, want: Want) -> AsyncIterator[Resident]:
        """Keep the adapter in the engine during the block, bringing it first if it is not there.

        Raises:
            LorelayError: It could not be brought; every waiter of the same flight gets the same failure.

        Cancellation: releases; a flight goes on for its other waiters, and past `commit` to its end.
        """
        resident = self._resident(want.selection)
        if resident is None:
            resident = await self._admit(want)
        else:
            resident.holders += 1
        resident.last_used = next(self._counters.clock)
        try:
            yield resident
        finally:
            resident.holders -= 1
            resident.last_used = next(self._counters.clock)
            if not resident.holders:
                self._signal_release()

    async def load(self, want: Want, name: str) -> Resident:
        """Bring an adapter as an operator: published under `name` and never evicted by a request.

        Raises:
            LorelayError: As `hold`, or `lora_name_conflict`: the name means another adapter.
        """
        self._check_name(name, want.selection)
        async with self.hold(want) as resident:
            self._check_name(name, want.selection)  # again: another load may have taken it in the meantime
            if resident.name not in (None, name):
                raise LorelayError(
                    ErrorCode.LORA_NAME_CONFLICT, f"This adapter is published as {resident.name!r} already."
                )
            resident.name = name
            await self._publish(resident, resident.selection)
        return resident

    def _check_name(self, name: str, selection: AdapterSelection) -> None:
        other = self.named(name)
        if other is not None and other.selection != selection:
            raise LorelayError(ErrorCode.LORA_NAME_CONFLICT, f"{name!r} already names another adapter here.")

    def named(self, name: str) -> Resident | None:
        """Return the adapter published under `name`."""
        return next((r for r in self._residents.values() if r.name == name), None)

    def keyed(self, key: str) -> Resident | None:
        """Return the adapter with `key`."""
        return self._residents.get(key)

    async def unload(self, resident: Resident, deadline: float) -> None:
        """Take an adapter out of the engine once no request holds it.

        Raises:
            LorelayError: `lora_name_conflict` if it is still held at `deadline`; `lora_load_failed` if the engine
                would not let it go.
        """
        while True:
            released = self._released
            async with self._engine_lock:
                if self.keyed(resident.selection.key) is not resident:
                    return
                if not resident.holders:
                    if not await self._take_out(resident, EventKind.UNLOADED):
                        raise LorelayError(ErrorCode.LORA_LOAD_FAILED, "The engine did not let the adapter go.")
                    return
            if not await _set_before(released, deadline):
                raise LorelayError(
                    ErrorCode.LORA_NAME_CONFLICT, f"Requests still use this adapter ({resident.holders}); try again."
                )

    def _resident(self, selection: AdapterSelection) -> Resident | None:
        resident = self._residents.get(selection.key)
        if resident is None:
            return None
        if resident.selection != selection:
            raise LorelayError(
                ErrorCode.RUNTIME_LORA_IDENTITY_COLLISION,
                "Another adapter has this adapter's key.",
                detail=selection.key,
            )
        return resident if resident.state is AdapterState.LOADED else None

    async def _admit(self, want: Want) -> Resident:
        """Wait, within the bounds, until the adapter is loaded, and hold it in the same step."""
        if self._counters.pending_admissions >= self._limits.max_pending_admissions:
            raise _saturated(f"{self._counters.pending_admissions} requests wait for adapters here already; try again.")
        self._counters.pending_admissions += 1
        self._waiting[want.selection.key] += 1
        try:
            with anyio.fail_after(max(0.0, want.deadline - anyio.current_time())):
                while True:
                    key = want.selection.key
                    if key not in self._flights and len(self._flights) >= self._limits.max_pending_keys:
                        raise _saturated(f"{len(self._flights)} adapters are being loaded here already; try again.")
                    await self._flights.run(key, lambda: self._bring(want))
                    resident = self._resident(want.selection)
                    if resident is not None:  # else unloaded between the flight's end and our turn
                        resident.holders += 1
                        return resident
        except TimeoutError:
            raise LorelayError(
                ErrorCode.RUNTIME_LORA_RESOLVE_TIMEOUT, "The adapter was not loaded in time; try again."
            ) from None
        except FlightStoppedError:
            raise LorelayError(ErrorCode.WORKER_LOST, "The worker is stopping; try again.") from None
        finally:
            self._counters.pending_admissions -= 1
            self._waiting[want.selection.key] -= 1
            if not self._waiting[want.selection.key]:
                del self._waiting[want.selection.key]
                self._signal_release()

    async def _bring(self, want: Want) -> None:
        """Resolve, make room, load, publish: the work of one flight."""
        selection = want.selection
        self._emit(EventKind.REQUESTED, selection, request_id=want.request_id)
        started = anyio.current_time()
        materialized = await self._materialize(want)
        resolved = anyio.current_time()
        snapshot = materialized.reply.snapshot
        assert snapshot is not None  # noqa: S101 - a reply without an error has one
        async with self._room(want.deadline):
            await self._settle_leftover(selection.key)
            await self._flights.commit(selection.key)
            resident = Resident(
                selection=selection,
                adapter=EngineAdapter(selection.key, next(self._engine_ids), materialized.path),
                digest=snapshot.digest,
                size_bytes=snapshot.bytes,
                state=AdapterState.LOADING,
            )
            self._residents[selection.key] = resident
            self._emit(EventKind.LOADING, selection, digest=snapshot.digest, request_id=want.request_id)
            with anyio.CancelScope(shield=True):
                await self._load(resident)
                await self._publish(resident, selection)
        stages = {
            "materialize": round((resolved - started) * 1000, 3),
            "load": round((anyio.current_time() - resolved) * 1000, 3),
        }
        log.info(
            "adapter loaded",
            adapter_key=selection.key,
            digest=snapshot.digest,
            engine_id=resident.adapter.engine_id,
            bytes=snapshot.bytes,
            stages_ms=stages,
        )
        self._emit(
            EventKind.LOADED,
            selection,
            digest=snapshot.digest,
            size_bytes=snapshot.bytes,
            stages_ms=stages,
            request_id=want.request_id,
        )

    async def _load(self, resident: Resident) -> None:
        """Load into the engine; runs shielded under the lock."""
        try:
            await self._engine.load(resident.adapter)
        except EngineDeadError as error:
            self._remove(resident)
            self._on_engine_dead()
            raise LorelayError(ErrorCode.WORKER_LOST, "The engine has died; try again.", detail=str(error)) from error
        except Exception as error:  # a load that ends in any way but these would keep its slot for ever
            if not isinstance(error, EngineError):
                log.exception("engine load failed unexpectedly", adapter_key=resident.selection.key)
            failure = LorelayError(
                ErrorCode.LORA_LOAD_FAILED, "The engine did not load this adapter.", detail=str(error)
            )
            await self._settle(resident)
            self._emit(EventKind.LOAD_FAILED, resident.selection, digest=resident.digest, error=failure.wire)
            raise failure from error
        resident.state = AdapterState.LOADED
        self._counters.loads += 1

    @asynccontextmanager
    async def _room(self, deadline: float) -> AsyncIterator[None]:
        """Run the block under the lock as soon as one more adapter fits: evict what is idle, or wait until it is.

        The lock is free during the wait, so that an operator's unload, which makes room, is not behind it.
        """
        deadline = min(deadline, anyio.current_time() + self._limits.admission_timeout_s)
        while True:
            released = self._released
            async with self._engine_lock:
                if await self._make_room():
                    yield
                    return
            if self._limits.eviction != "lru" or not await _set_before(released, deadline):
                raise _saturated(f"All {self._limits.max_resident} adapters that fit here are in use; try again.")

    async def _make_room(self) -> bool:
        """Evict idle adapters until one more fits; return whether it does; runs under the lock."""
        if self._is_full:
            for resident in [r for r in self._residents.values() if r.state is AdapterState.UNCERTAIN]:
                await self._settle(resident)
        while self._is_full and self._limits.eviction == "lru":
            idle = [
                r
                for r in self._residents.values()
                if r.state is AdapterState.LOADED and not r.pinned and not self._is_used(r)
            ]
            if not idle:
                break
            await self._take_out(min(idle, key=lambda r: r.last_used), EventKind.EVICTED)
        return not self._is_full

    def _is_used(self, resident: Resident) -> bool:
        """Return whether a request holds it, or waited for it and is about to.

        Without the second, of several adapters that want one slot each would evict the one that was just loaded
        before its requests have their turn, for ever.
        """
        return resident.holders > 0 or resident.selection.key in self._waiting

    @property
    def _is_full(self) -> bool:
        return len(self._residents) >= self._limits.max_resident

    async def _settle_leftover(self, key: str) -> None:
        """Be rid of what an earlier, lost answer of the engine left under `key`; runs under the lock.

        Raises:
            LorelayError: `lora_load_failed`: it cannot be got rid of.
        """
        leftover = self._residents.get(key)
        if leftover is not None:
            await self._settle(leftover)
            if key in self._residents:
                raise LorelayError(ErrorCode.LORA_LOAD_FAILED, "The engine did not let an older load of it go.")

    async def _take_out(self, resident: Resident, kind: EventKind) -> bool:
        """Unload an idle adapter; runs under the lock.  Returns whether the engine let it go."""
        resident.state = AdapterState.UNLOADING
        with anyio.CancelScope(shield=True):
            await self._publish(None, resident.selection)
            try:
                await self._engine.unload(resident.adapter)
            except EngineError as error:
                log.warning("adapter not unloaded", adapter_key=resident.selection.key, error=str(error))
                await self._settle(resident)
                return resident.selection.key not in self._residents
            except EngineDeadError:
                self._on_engine_dead()
                return False
            self._remove(resident)
        log.info("adapter unloaded", adapter_key=resident.selection.key, why=kind.value)
        self._emit(kind, resident.selection, digest=resident.digest)
        return True

    async def _settle(self, resident: Resident) -> None:
        """Get rid of `resident` after a failed mutation, as the engine's own list has it.

        If the engine cannot say, or keeps it, it holds its slot as UNCERTAIN; this is tried again when room is needed.
        """
        resident.state = AdapterState.UNCERTAIN
        with anyio.CancelScope(shield=True):
            try:
                if resident.adapter.engine_id in await self._engine.loaded_ids():
                    await self._engine.unload(resident.adapter)
            except EngineError as error:
                log.warning("adapter's fate unknown", adapter_key=resident.selection.key, error=str(error))
                return
            except EngineDeadError:
                self._on_engine_dead()
                return
        self._remove(resident)

    def _remove(self, resident: Resident) -> None:
        del self._residents[resident.selection.key]
        self._signal_release()

    def _signal_release(self) -> None:
        self._released.set()
        self._released = anyio.Event()


async def _set_before(event: anyio.Event, deadline: float) -> bool:
    """Wait for `event`; return False if the deadline comes first."""
    with anyio.move_on_after(max(0.0, deadline - anyio.current_time())):
        await event.wait()
    return event.is_set()


def _saturated(message: str) -> LorelayError:
    return LorelayError(ErrorCode.LORA_CAPACITY_EXCEEDED, message)
