"""One work per key, whoever comes, fails or leaves."""

from __future__ import annotations

from collections import Counter

import anyio
import anyio.abc
import pytest
from hypothesis import given, strategies as st
from structlog.testing import capture_logs

from lorelay.runtime.singleflight import FlightStoppedError, SingleFlight

pytestmark = pytest.mark.anyio


class Work:
    """Work that waits to be let go, and says what became of it."""

    def __init__(self, result: int | Exception = 1) -> None:
        self.result = result
        self.go = anyio.Event()
        self.calls = 0
        self.running = 0
        self.cancelled = 0
        self.most_running = 0

    async def __call__(self) -> int:
        """Wait, then return or raise."""
        self.calls += 1
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await self.go.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def settle() -> None:
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def test_fifty_callers_share_one_work() -> None:
    """Row D1: one fetch, fifty answers, and nothing left behind."""
    work, results = Work(7), list[int]()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner)

        async def call() -> None:
            results.append(await flights.run("k", work))

        async with anyio.create_task_group() as callers:
            for _ in range(50):
                callers.start_soon(call)
            await settle()
            assert "k" in flights
            assert len(flights) == 1
            work.go.set()
    assert results == [7] * 50
    assert work.calls == 1
    assert len(flights) == 0


async def test_an_error_reaches_every_caller_and_is_not_kept() -> None:
    """The next caller tries again; remembering failures is somebody else's decision."""
    error, work, caught = ValueError("no"), Work(), list[Exception]()
    work.result = error
    work.go.set()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner)

        async def call() -> None:
            try:
                await flights.run("k", work)
            except ValueError as failure:
                caught.append(failure)

        async with anyio.create_task_group() as callers:
            for _ in range(3):
                callers.start_soon(call)
        assert caught == [error] * 3
        work.result = 2
        assert await flights.run("k", work) == 2


async def test_none_is_a_result() -> None:
    """A flight without a value is not a flight without an end."""

    async def nothing() -> None:
        return None

    async with anyio.create_task_group() as owner:
        await SingleFlight[None](owner).run("k", nothing)


async def test_the_leader_leaves_and_others_get_their_result() -> None:
    """Row D4: the first caller's cancellation is nobody else's."""
    work, results = Work(3), list[int]()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner)

        leader = anyio.CancelScope()

        async def call(scope: anyio.CancelScope) -> None:
            with scope:
                results.append(await flights.run("k", work))

        async with anyio.create_task_group() as callers:
            callers.start_soon(call, leader)
            await settle()
            for _ in range(3):
                callers.start_soon(call, anyio.CancelScope())
            await settle()
            leader.cancel()
            await settle()
            assert not work.cancelled
            work.go.set()
    assert results == [3] * 3
    assert work.calls == 1


async def test_the_last_to_leave_stops_the_work() -> None:
    """Row D4: nobody waits, so nothing runs."""
    work = Work()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner)
        async with anyio.create_task_group() as callers:
            for _ in range(2):
                callers.start_soon(flights.run, "k", work)
            await settle()
            callers.cancel_scope.cancel()
        await settle()
        assert work.cancelled == 1
        assert len(flights) == 0


@pytest.mark.parametrize("by_default", [True, False])
async def test_detached_work_finishes_though_everybody_left(*, by_default: bool) -> None:
    """The engine's mutations must not be left half done."""
    work = Work()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner, detach=by_default)
        with anyio.move_on_after(0.001):
            await flights.run("k", work, detach=None if by_default else True)
        await settle()
        assert work.running == 1
        work.go.set()
    assert work.cancelled == 0


async def test_committed_work_finishes_though_everybody_left() -> None:
    """A work may be stopped up to a point and not beyond it."""
    committed, go, done = anyio.Event(), anyio.Event(), list[str]()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[None](owner)

        async def work() -> None:
            await flights.commit("k")
            committed.set()
            await go.wait()
            done.append("done")

        async with anyio.create_task_group() as callers:
            callers.start_soon(flights.run, "k", work)
            await committed.wait()
            callers.cancel_scope.cancel()
        await settle()
        go.set()
    assert done == ["done"]


async def test_nothing_is_committed_once_everybody_has_left() -> None:
    """Work whose callers left before the point of no return stops exactly there."""
    begun = list[str]()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[None](owner)

        async def work() -> None:
            with anyio.CancelScope(shield=True):
                await settle()
            await flights.commit("k")
            begun.append("mutation")

        async with anyio.create_task_group() as callers:
            callers.start_soon(flights.run, "k", work)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            callers.cancel_scope.cancel()
    assert begun == []


async def test_a_newcomer_waits_out_work_that_is_being_stopped() -> None:
    """Two works of one key never run side by side, not even while one cleans up."""
    cleaned, order = anyio.Event(), list[str]()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[str](owner)

        async def slow_to_stop() -> str:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await cleaned.wait()
                order.append("cleaned")
            return "never"

        async def next_work() -> str:
            order.append("next")
            return "next"

        async with anyio.create_task_group() as callers:
            callers.start_soon(flights.run, "k", slow_to_stop)
            await settle()
            callers.cancel_scope.cancel()

        async def let_go() -> None:
            await settle()
            assert order == []
            cleaned.set()

        owner.start_soon(let_go)
        assert await flights.run("k", next_work) == "next"
    assert order == ["cleaned", "next"]


async def test_the_owners_stop_is_an_error_and_not_silence() -> None:
    """Who waits in another task group than the owner's must not wait for ever."""
    async with anyio.create_task_group() as outer, anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner)
        caught = list[Exception]()

        async def call() -> None:
            try:
                await flights.run("k", Work())
            except FlightStoppedError as error:
                caught.append(error)

        outer.start_soon(call)
        await settle()
        owner.cancel_scope.cancel()
    assert len(caught) == 1
    assert len(flights) == 0


async def test_a_failure_that_nobody_waits_for_is_logged() -> None:
    """Detached work does not fail in silence, and does not take its owner down."""
    work = Work(ValueError("lost"))
    with capture_logs() as logs:
        async with anyio.create_task_group() as owner:
            flights = SingleFlight[int](owner)
            with anyio.move_on_after(0.001):
                await flights.run("k", work, detach=True)
            work.go.set()
    assert [entry["event"] for entry in logs] == ["flight failed unobserved"]


async def test_a_closed_owner_leaves_no_key() -> None:
    """A flight that cannot start is an error now, not a caller that hangs later."""
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner)
    with pytest.raises(RuntimeError):
        await flights.run("k", Work())
    assert len(flights) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from("ab")),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("finish"), st.sampled_from("ab")),
        st.tuples(st.just("settle"), st.just(0)),
    ),
    max_size=30,
)


@given(steps=STEPS)
async def test_whatever_callers_do(steps: list[tuple[str, str | int]]) -> None:
    """In every interleaving: one work per key at a time, each caller ends once, nothing is kept."""
    works: dict[str, Work] = {}
    ends = Counter[str]()
    scopes = list[anyio.CancelScope]()
    async with anyio.create_task_group() as owner:
        flights = SingleFlight[int](owner)

        async def call(key: str, scope: anyio.CancelScope) -> None:
            with scope:
                assert await flights.run(key, works.setdefault(key, Work())) == 1
                ends["result"] += 1
            ends["left"] += scope.cancelled_caught

        for kind, value in steps:
            if kind == "call":
                scopes.append(anyio.CancelScope())
                owner.start_soon(call, str(value), scopes[-1])
            elif kind == "leave" and scopes:
                scopes[int(value) % len(scopes)].cancel()
            elif kind == "finish":
                works.setdefault(str(value), Work()).go.set()
            else:
                await settle()
        await settle()
        assert sum(work.running for work in works.values()) == len(flights)
        for work in works.values():
            work.go.set()
    assert ends["result"] + ends["left"] == len(scopes)
    assert all(work.most_running <= 1 for work in works.values())
    assert len(flights) == 0
