"""What unit tests of the worker put around the real parts: a simulator that fails on demand, snapshots in memory."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from lorelay.proto.adapters import MaterializeReply, Snapshot
from lorelay.proto.identity import AdapterSelection, select
from lorelay.proto.records import ModelFacts
from lorelay.worker.engine.base import EngineAdapter, EngineDeadError, EngineError, EngineLimits
from lorelay.worker.engine.sim import ROUTES, SimEngine, SimTiming
from lorelay.worker.residency import Limits, Materialized, Residency, Want

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lorelay.proto.errors import WireError
    from lorelay.proto.events import EventKind
    from lorelay.worker.residency import Resident

BASE = "base"
QUICK = SimTiming(step_s=0.0005, step_per_request_s=0, load_s=0)
"""Not zero: a loop that never waits starves cancellation."""


def facts(name: str = BASE, aliases: tuple[str, ...] = ("alias",)) -> ModelFacts:
    """Return what an engine would say of a base."""
    return ModelFacts(
        name=name,
        aliases=aliases,
        path_fingerprint="0" * 64,
        architecture="LlamaForCausalLM",
        dimensions={},
        dtype="none",
        max_context_tokens=2048,
        routes=ROUTES,
        engine="sim",
        engine_version="1",
    )


class Engine(SimEngine):
    """The simulator, whose adapter operations fail or wait when a test says so."""

    def __init__(self, *, max_adapters: int = 4, per_batch: int = 2, max_requests: int = 64) -> None:
        super().__init__(
            facts(),
            EngineLimits(
                max_adapters=max_adapters,
                max_adapters_per_batch=per_batch,
                max_rank=64,
                max_concurrent_requests=max_requests,
            ),
            QUICK,
        )
        self.load_fails: Exception | None = None
        self.load_counts_though_it_fails = False
        self.unload_fails: Exception | None = None
        self.list_fails: Exception | None = None
        self.loading = anyio.Event()
        """Set when a load has begun."""
        self.may_load = anyio.Event()
        self.may_load.set()
        self.load_calls = 0
        self.mutations = 0

    async def load(self, adapter: EngineAdapter) -> None:
        """Load, fail, or both."""
        self.load_calls += 1
        async with self._alone():
            self.loading.set()
            await self.may_load.wait()
            if self.load_fails is None or self.load_counts_though_it_fails:
                self._put(adapter)
            if self.load_fails is not None:
                raise self.load_fails

    async def unload(self, adapter: EngineAdapter) -> None:
        """Unload or fail."""
        async with self._alone():
            await anyio.lowlevel.checkpoint()
            if self.unload_fails is not None:
                raise self.unload_fails
            await super().unload(adapter)

    async def loaded_ids(self) -> frozenset[int]:
        """List or fail."""
        if self.list_fails is not None:
            raise self.list_fails
        return await super().loaded_ids()

    @property
    def held_names(self) -> set[str]:
        """Return the names the engine answers to, the base's apart."""
        return set(self._adapters)

    @property
    def batch(self) -> int:
        """Return how many requests are in the engine."""
        return len(self._running)

    def _put(self, adapter: EngineAdapter) -> None:
        """Hold it as vLLM does: a second load of one name under a new id takes a second slot."""
        if len(self._adapters) >= self.limits.max_adapters:
            raise EngineError("all slots are taken")
        if adapter.name in self._adapters:
            raise AssertionError(f"{adapter.name} was loaded twice")
        self._adapters[adapter.name] = adapter

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Check the seam's promise: one mutation at a time."""
        assert self.mutations == 0, "two mutations at once"
        self.mutations += 1
        try:
            yield
        finally:
            self.mutations -= 1


class World:
    """A residency table on a simulator, with a resolver in memory."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.materialized: Counter[str] = Counter()
        self.stopped: list[str] = []
        """Sources whose materialization was cancelled."""
        self.may_materialize = anyio.Event()
        self.may_materialize.set()
        self.materialize_fails: Exception | None = None
        self.published: dict[str, tuple[str, str | None]] = {}
        """Key -> state and name, as discovery has it."""
        self.told: list[tuple[EventKind, str]] = []
        self.deaths = 0
        self.table: Residency

    async def materialize(self, want: Want) -> Materialized:
        """Give a snapshot when the test allows it."""
        source = want.selection.source
        self.materialized[source] += 1
        try:
            await self.may_materialize.wait()
        except anyio.get_cancelled_exc_class():
            self.stopped.append(source)
            raise
        if self.materialize_fails is not None:
            raise self.materialize_fails
        snapshot = Snapshot(digest=source, manifest=(), source_revision="", rank=8, target_modules=())
        return Materialized(Path("/snapshots") / want.selection.key, MaterializeReply(snapshot=snapshot))

    async def publish(self, resident: Resident | None, selection: AdapterSelection) -> None:
        """Book what discovery would say."""
        if resident is None:
            self.published.pop(selection.key, None)
        else:
            self.published[selection.key] = (resident.state.value, resident.name)

    def emit(
        self,
        kind: EventKind,
        selection: AdapterSelection,
        *,
        digest: str = "",  # noqa: ARG002 - the protocol's
        revision: str = "",  # noqa: ARG002
        size_bytes: int | None = None,  # noqa: ARG002
        stages_ms: dict[str, float] | None = None,  # noqa: ARG002
        error: WireError | None = None,  # noqa: ARG002
        request_id: str = "",  # noqa: ARG002
    ) -> None:
        """Book an event."""
        self.told.append((kind, selection.source))

    def died(self) -> None:
        """Book the engine's death."""
        self.deaths += 1

    async def agrees(self) -> bool:
        """Ask whether table, engine and discovery say the same."""
        residents = self.table.residents()
        ids = {resident.adapter.engine_id for resident in residents}
        return ids == await self.engine.loaded_ids() and set(self.published) == {r.selection.key for r in residents}


@asynccontextmanager
async def world(
    *,
    slots: int = 2,
    eviction: str = "lru",
    admission_timeout_s: float = 0.05,
    max_pending_keys: int = 64,
    max_pending_admissions: int = 256,
) -> AsyncIterator[World]:
    """Run a table on a simulator."""
    limits = Limits(
        max_resident=slots,
        max_pending_keys=max_pending_keys,
        max_pending_admissions=max_pending_admissions,
        admission_timeout_s=admission_timeout_s,
        eviction=eviction,
    )
    made = World(Engine(max_adapters=slots), limits)
    async with anyio.create_task_group() as tasks:
        made.table = Residency(
            made.engine,
            limits,
            tasks,
            materialize=made.materialize,
            publish=made.publish,
            emit=made.emit,
            on_engine_dead=made.died,
        )
        yield made
        tasks.cancel_scope.cancel()


def want(source: str, timeout_s: float = 10, base: str = BASE) -> Want:
    """Return a request's wish for an adapter."""
    return Want(selection=select(base, source), deadline=anyio.current_time() + timeout_s, request_id="r")


__all__ = ["BASE", "Engine", "EngineDeadError", "World", "facts", "want", "world"]
