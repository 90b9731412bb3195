"""Random histories of one residency table: whatever happens, the engine holds what the table says."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lorelay.proto.errors import LorelayError
from lorelay.proto.records import AdapterState
from lorelay.worker.engine.base import EngineError
from support.engines import want, world

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from support.engines import World

SOURCES = st.sampled_from(["a:1", "b:1", "c:1", "d:1"])
SLOTS = 2


class Machine(RuleBasedStateMachine):
    """Requests come, hold, go and are cancelled; operators load and unload; the engine fails and loses answers."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.holds: list[tuple[str, anyio.Event, anyio.CancelScope]] = []
        self.held: list[str] = []
        self.here: World
        self.stop = anyio.Event()

    @initialize(eviction=st.sampled_from(["lru", "lru", "pinned"]))
    def start(self, eviction: str) -> None:
        """Run the table in a task of its own."""

        async def start() -> None:
            started = asyncio.Event()

            async def run() -> None:
                async with world(slots=SLOTS, eviction=eviction, admission_timeout_s=0) as self.here:
                    self.tasks = anyio.create_task_group()
                    async with self.tasks:
                        started.set()
                        await self.stop.wait()
                        self.tasks.cancel_scope.cancel()

            self.main = asyncio.get_running_loop().create_task(run())
            await started.wait()

        self.run(start())

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work`, then everything that can go on without a clock."""

        async def go() -> None:
            await work
            for _ in range(60):
                await asyncio.sleep(0)

        self.runner.run(go())

    @rule(source=SOURCES)
    def request(self, source: str) -> None:
        """A request begins; it holds its adapter, if it gets it, until a test lets it go."""
        release, scope = anyio.Event(), anyio.CancelScope()

        async def hold() -> None:
            with scope, suppress(LorelayError):
                async with self.here.table.hold(want(source)):
                    self.held.append(source)
                    try:
                        await release.wait()
                    finally:
                        self.held.remove(source)

        async def begin() -> None:
            self.tasks.start_soon(hold)

        self.holds.append((source, release, scope))
        self.run(begin())

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), cancelled=st.booleans())
    def leave(self, data: st.DataObject, *, cancelled: bool) -> None:
        """A request ends, or its client goes."""
        hold = data.draw(st.sampled_from(self.holds))
        self.holds.remove(hold)

        async def end() -> None:
            if cancelled:
                hold[2].cancel()
            else:
                hold[1].set()

        self.run(end())

    @rule(source=SOURCES, name=st.sampled_from(["x", "y"]))
    def load(self, source: str, name: str) -> None:
        """An operator loads."""

        async def load() -> None:
            with suppress(LorelayError):
                await self.here.table.load(want(source), name)

        async def begin() -> None:
            self.tasks.start_soon(load)

        self.run(begin())

    @rule(source=SOURCES)
    def unload(self, source: str) -> None:
        """An operator unloads."""

        async def unload() -> None:
            for resident in self.here.table.residents():
                if resident.selection.source == source:
                    with suppress(LorelayError):
                        await self.here.table.unload(resident, anyio.current_time())

        async def begin() -> None:
            self.tasks.start_soon(unload)

        self.run(begin())

    @rule(
        which=st.sampled_from(["load_fails", "unload_fails", "list_fails"]), fails=st.booleans(), counts=st.booleans()
    )
    def engine_fails(self, which: str, *, fails: bool, counts: bool) -> None:
        """The engine begins or ceases to fail."""
        setattr(self.here.engine, which, EngineError("on demand") if fails else None)
        self.here.engine.load_counts_though_it_fails = counts

    @rule(gate=st.sampled_from(["may_load", "may_materialize"]), is_open=st.booleans())
    def gate(self, gate: str, *, is_open: bool) -> None:
        """Loading or resolving stalls, or goes on."""
        owner: Any = self.here.engine if gate == "may_load" else self.here

        async def turn() -> None:
            if is_open:
                getattr(owner, gate).set()
            elif getattr(owner, gate).is_set():
                setattr(owner, gate, anyio.Event())

        self.run(turn())

    @invariant()
    def the_table_has_room_for_what_it_holds(self) -> None:
        """Never more than fits."""
        if hasattr(self, "here"):
            assert len(self.here.table.residents()) <= SLOTS
            assert len(self.here.engine.held_names) <= SLOTS

    @invariant()
    def what_is_held_is_in_the_engine(self) -> None:
        """A held adapter answers."""
        if hasattr(self, "here"):
            loaded = {r.selection.source for r in self.here.table.residents() if r.state is AdapterState.LOADED}
            assert set(self.held) <= loaded
            names = {r.selection.key for r in self.here.table.residents() if r.state is AdapterState.LOADED}
            assert names <= self.here.engine.held_names

    def teardown(self) -> None:
        """When all is quiet and the engine answers, table, engine and discovery agree."""
        if not hasattr(self, "here"):
            return
        engine = self.here.engine
        engine.load_fails = engine.unload_fails = engine.list_fails = None

        async def quiet() -> None:
            engine.may_load.set()
            self.here.may_materialize.set()
            for _, release, _ in self.holds:
                release.set()

        async def check() -> None:
            residents = self.here.table.residents()
            assert all(resident.holders == 0 for resident in residents)
            assert {r.state for r in residents} <= {AdapterState.LOADED, AdapterState.UNCERTAIN}
            ids = {r.adapter.engine_id for r in residents}
            certain = {r.adapter.engine_id for r in residents if r.state is AdapterState.LOADED}
            assert certain <= await engine.loaded_ids() <= ids
            assert set(self.here.published) == {r.selection.key for r in residents if r.state is AdapterState.LOADED}
            self.stop.set()
            await self.main

        self.run(quiet())
        self.run(check())
        self.runner.close()


def test_whatever_happens_the_engine_holds_what_the_table_says() -> None:
    """D1, D5, D6, D15, D16."""
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, phases=[Phase.generate]
        ),
    )
