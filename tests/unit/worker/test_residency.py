"""The table of adapters: what a request can count on, whatever else happens at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.events import EventKind
from lorelay.proto.identity import AdapterSelection
from lorelay.proto.records import AdapterState
from lorelay.worker.engine.base import EngineDeadError, EngineError
from lorelay.worker.residency import Want
from support.engines import BASE, want, world

if TYPE_CHECKING:
    from support.engines import World

pytestmark = pytest.mark.anyio


async def use(here: World, source: str) -> None:
    async with here.table.hold(want(source)):
        pass


def sources(here: World) -> list[str]:
    return sorted(resident.selection.source for resident in here.table.residents())


async def settle(turns: int = 50) -> None:
    for _ in range(turns):
        await checkpoint()


async def test_fifty_first_requests_are_one_resolve_and_one_load() -> None:
    """D1."""
    async with world() as here:
        here.may_materialize = anyio.Event()
        answered = []

        async def ask() -> None:
            async with here.table.hold(want("a:1")) as resident:
                answered.append(resident.state)

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(ask)
            await settle()
            here.may_materialize.set()
        assert answered == [AdapterState.LOADED] * 50
        assert here.materialized == {"a:1": 1}
        assert here.engine.load_calls == 1
        assert await here.agrees()


async def test_a_resident_adapter_is_not_brought_again() -> None:
    async with world() as here:
        await use(here, "a:1")
        await use(here, "a:1")
        assert here.materialized == {"a:1": 1}
        assert [kind for kind, _ in here.told] == [EventKind.REQUESTED, EventKind.LOADING, EventKind.LOADED]


@pytest.mark.parametrize("others", [0, 3])
async def test_a_first_caller_that_leaves_takes_nobody_along(others: int) -> None:
    """D4: with waiters the work goes on for them; without it stops."""
    async with world() as here:
        here.may_materialize = anyio.Event()
        answered = []

        async def ask() -> None:
            async with here.table.hold(want("a:1")):
                answered.append(True)

        async with anyio.create_task_group() as tasks:
            leader = anyio.CancelScope()

            async def lead() -> None:
                with leader:
                    await ask()

            tasks.start_soon(lead)
            await settle()
            for _ in range(others):
                tasks.start_soon(ask)
            await settle()
            leader.cancel()
            await settle()
            assert here.stopped == ([] if others else ["a:1"])
            here.may_materialize.set()
        assert len(answered) == others
        assert here.materialized == {"a:1": 1}
        assert len(here.table.residents()) == (1 if others else 0)
        assert await here.agrees()


async def test_a_load_that_began_is_finished_though_everybody_left() -> None:
    async with world() as here:
        here.engine.may_load = anyio.Event()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(use, here, "a:1")
                await here.engine.loading.wait()
                scope.cancel()
        here.engine.may_load.set()
        await settle()
        assert sources(here) == ["a:1"]
        assert await here.agrees()


async def test_the_least_recently_used_idle_adapter_is_evicted() -> None:
    async with world(slots=2) as here:
        for source in ("a:1", "b:1", "a:1", "c:1"):
            await use(here, source)
        assert sources(here) == ["a:1", "c:1"]
        assert (EventKind.EVICTED, "b:1") in here.told
        assert await here.agrees()


async def test_use_counts_until_its_end() -> None:
    """A long request that ends now was here later than a short one that began after it."""
    async with world(slots=2) as here:
        async with here.table.hold(want("a:1")):
            await use(here, "b:1")
        await use(here, "c:1")
        assert sources(here) == ["a:1", "c:1"]


async def test_a_held_adapter_is_not_evicted_and_the_request_is_refused_in_time() -> None:
    """D11: as lora_capacity_exceeded, with a time to retry, after the admission timeout."""
    async with world(slots=1) as here, here.table.hold(want("a:1")):
        with pytest.raises(LorelayError) as failure:
            await use(here, "b:1")
        assert failure.value.code is ErrorCode.LORA_CAPACITY_EXCEEDED
        assert failure.value.wire.retry_after_s
        assert sources(here) == ["a:1"]
        assert await here.agrees()


async def test_a_request_waits_for_an_adapter_to_become_idle() -> None:
    async with world(slots=1, admission_timeout_s=5) as here, anyio.create_task_group() as tasks:
        async with here.table.hold(want("a:1")):
            tasks.start_soon(use, here, "b:1")
            await settle()
            assert sources(here) == ["a:1"]
        await settle()
        assert sources(here) == ["b:1"]


async def test_adapters_that_want_one_slot_take_turns_and_each_gets_its_own() -> None:
    """D11: none is evicted between its load and its request's turn, which would go on for ever."""
    async with world(slots=1, admission_timeout_s=5) as here:
        here.may_materialize = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(use, here, f"{'abc'[number % 3]}:1")
            await settle()
            here.may_materialize.set()
        assert here.engine.load_calls == 3
        assert await here.agrees()


async def test_an_unload_makes_room_for_a_request_that_waits() -> None:
    """The wait for room does not stand in the way of what makes it."""
    async with world(slots=1, admission_timeout_s=5) as here, anyio.create_task_group() as tasks:
        pinned = await here.table.load(want("a:1"), "name")
        tasks.start_soon(use, here, "b:1")
        await settle()
        with anyio.fail_after(1):
            await here.table.unload(pinned, anyio.current_time())
        await settle()
        assert sources(here) == ["b:1"]
        assert await here.agrees()


async def test_pinned_eviction_refuses_at_once_when_full() -> None:
    async with world(slots=1, eviction="pinned", admission_timeout_s=60) as here:
        await use(here, "a:1")
        with anyio.fail_after(1), pytest.raises(LorelayError) as failure:
            await use(here, "b:1")
        assert failure.value.code is ErrorCode.LORA_CAPACITY_EXCEEDED
        assert sources(here) == ["a:1"]


async def test_an_administrative_adapter_is_never_evicted_by_a_request() -> None:
    async with world(slots=1) as here:
        await here.table.load(want("a:1"), "name")
        with pytest.raises(LorelayError) as failure:
            await use(here, "b:1")
        assert failure.value.code is ErrorCode.LORA_CAPACITY_EXCEEDED
        assert sources(here) == ["a:1"]


@pytest.mark.parametrize("error", [EngineError("no"), RuntimeError("a bug in the engine")])
async def test_a_refused_load_is_lora_load_failed_and_its_slot_is_free_again(error: Exception) -> None:
    """D9: everybody who waited gets the same; the next request tries anew."""
    async with world(slots=1) as here:
        here.engine.load_fails = error
        codes = []

        async def ask() -> None:
            try:
                await use(here, "a:1")
            except LorelayError as failure:
                codes.append(failure.code)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
        assert codes == [ErrorCode.LORA_LOAD_FAILED] * 5
        assert here.table.residents() == []
        assert await here.agrees()
        here.engine.load_fails = None
        await use(here, "b:1")
        assert await here.agrees()


async def test_a_load_that_failed_but_is_in_the_engines_list_is_taken_out() -> None:
    """D5: the engine's own list decides."""
    async with world(slots=1) as here:
        here.engine.load_fails = EngineError("lost the answer")
        here.engine.load_counts_though_it_fails = True
        with pytest.raises(LorelayError):
            await use(here, "a:1")
        assert here.engine.held_names == set()
        here.engine.load_fails = None
        await use(here, "b:1")
        assert await here.agrees()


async def test_an_adapter_of_unknown_fate_keeps_its_slot_until_the_list_has_spoken() -> None:
    async with world(slots=1) as here:
        here.engine.load_fails = EngineError("lost the answer")
        here.engine.load_counts_though_it_fails = True
        here.engine.list_fails = EngineError("no list")
        with pytest.raises(LorelayError):
            await use(here, "a:1")
        assert [r.state for r in here.table.residents()] == [AdapterState.UNCERTAIN]
        here.engine.load_fails = None
        with pytest.raises(LorelayError) as failure:
            await use(here, "b:1")
        assert failure.value.code is ErrorCode.LORA_CAPACITY_EXCEEDED
        here.engine.list_fails = None
        await use(here, "b:1")
        assert sources(here) == ["b:1"]
        assert await here.agrees()


async def test_an_adapter_of_unknown_fate_is_settled_before_it_is_loaded_anew() -> None:
    """Else the engine would hold it under two ids, of which the table knows one."""
    async with world(slots=4) as here:
        here.engine.load_fails = EngineError("lost the answer")
        here.engine.load_counts_though_it_fails = True
        here.engine.list_fails = EngineError("no list")
        with pytest.raises(LorelayError):
            await use(here, "a:1")
        here.engine.load_fails = None
        with pytest.raises(LorelayError) as failure:
            await use(here, "a:1")
        assert failure.value.code is ErrorCode.LORA_LOAD_FAILED
        here.engine.list_fails = None
        await use(here, "a:1")
        assert await here.agrees()


async def test_an_adapter_that_the_engine_will_not_let_go_keeps_its_slot() -> None:
    """D5, D16: not routable any more, but not forgotten either."""
    async with world(slots=1) as here:
        await use(here, "a:1")
        here.engine.unload_fails = EngineError("no")
        with pytest.raises(LorelayError):
            await here.table.unload(here.table.residents()[0], anyio.current_time())
        assert [r.state for r in here.table.residents()] == [AdapterState.UNCERTAIN]
        assert here.published == {}
        here.engine.unload_fails = None
        await use(here, "a:1")
        assert await here.agrees()


async def test_a_dead_engine_is_told_and_its_waiters_fail() -> None:
    async with world() as here:
        here.engine.load_fails = EngineDeadError("gone")
        with pytest.raises(LorelayError) as failure:
            await use(here, "a:1")
        assert failure.value.code is ErrorCode.WORKER_LOST
        assert here.deaths == 1


async def test_an_unload_waits_for_its_holders_and_gives_up_at_its_deadline() -> None:
    """D6."""
    async with world() as here:
        async with here.table.hold(want("a:1")) as resident:
            with pytest.raises(LorelayError) as failure:
                await here.table.unload(resident, anyio.current_time() + 0.02)
            assert failure.value.wire.status == 409
            assert sources(here) == ["a:1"]
        async with anyio.create_task_group() as tasks, here.table.hold(want("a:1")) as resident:
            tasks.start_soon(here.table.unload, resident, anyio.current_time() + 5)
            await settle()
            assert sources(here) == ["a:1"]
        assert here.table.residents() == []
        assert await here.agrees()


async def test_a_name_means_one_adapter_and_an_adapter_has_one_name() -> None:
    async with world(slots=4) as here:
        await here.table.load(want("a:1"), "name")
        await here.table.load(want("a:1"), "name")
        for source, name in (("b:1", "name"), ("a:1", "other")):
            with pytest.raises(LorelayError) as failure:
                await here.table.load(want(source), name)
            assert failure.value.code is ErrorCode.LORA_NAME_CONFLICT
        assert [r.name for r in here.table.residents() if r.name] == ["name"]


async def test_of_two_loads_at_once_one_gets_the_name() -> None:
    async with world(slots=4) as here:
        here.may_materialize = anyio.Event()
        codes = []

        async def load(source: str) -> None:
            try:
                await here.table.load(want(source), "name")
            except LorelayError as failure:
                codes.append(failure.code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load, "a:1")
            tasks.start_soon(load, "b:1")
            await settle()
            here.may_materialize.set()
        assert codes == [ErrorCode.LORA_NAME_CONFLICT]
        assert [r.name for r in here.table.residents() if r.name] == ["name"]


async def test_a_runtime_adapter_that_an_operator_loads_too_is_pinned_from_then_on() -> None:
    """C11: one copy."""
    async with world(slots=1) as here:
        await use(here, "a:1")
        resident = await here.table.load(want("a:1"), "name")
        assert resident.pinned
        assert here.published == {resident.selection.key: ("loaded", "name")}
        assert here.engine.load_calls == 1


async def test_pending_keys_are_bounded() -> None:
    async with world(slots=8, max_pending_keys=2) as here:
        here.may_materialize = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for source in ("a:1", "b:1"):
                tasks.start_soon(use, here, source)
            await settle()
            with pytest.raises(LorelayError) as failure:
                await use(here, "c:1")
            assert failure.value.code is ErrorCode.LORA_CAPACITY_EXCEEDED
            tasks.start_soon(use, here, "a:1")  # joins
            await settle()
            here.may_materialize.set()
        await use(here, "c:1")


async def test_pending_admissions_are_bounded() -> None:
    async with world(max_pending_admissions=3) as here:
        here.may_materialize = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(use, here, "a:1")
            await settle()
            with pytest.raises(LorelayError) as failure:
                await use(here, "a:1")
            assert failure.value.code is ErrorCode.LORA_CAPACITY_EXCEEDED
            here.may_materialize.set()
        await use(here, "b:1")


async def test_nothing_is_kept_of_names_that_failed() -> None:
    """D3."""
    async with world() as here:
        here.materialize_fails = LorelayError(ErrorCode.LORA_NOT_FOUND, "no")
        for number in range(500):
            with pytest.raises(LorelayError) as failure:
                await use(here, f"x:{number}")
            assert failure.value.code is ErrorCode.LORA_NOT_FOUND
        assert here.table.residents() == []
        state = vars(here.table)
        assert len(state["_flights"]) == 0
        assert state["_counters"].pending_admissions == 0


async def test_a_request_whose_deadline_passes_is_told_so() -> None:
    async with world() as here:
        here.may_materialize = anyio.Event()
        with pytest.raises(LorelayError) as failure:
            async with here.table.hold(want("a:1", timeout_s=0.02)):
                pass
        assert failure.value.code is ErrorCode.RUNTIME_LORA_RESOLVE_TIMEOUT
        await settle()
        assert here.stopped == ["a:1"]


async def test_two_adapters_with_one_key_are_not_mixed_up() -> None:
    async with world() as here:
        await use(here, "a:1")
        key = here.table.residents()[0].selection.key
        forged = AdapterSelection(base=BASE, source="b:1", key=key)
        with pytest.raises(LorelayError) as failure:
            async with here.table.hold(Want(forged, anyio.current_time() + 1, "r")):
                pass
        assert failure.value.code is ErrorCode.RUNTIME_LORA_IDENTITY_COLLISION
