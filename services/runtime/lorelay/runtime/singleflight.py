"""One computation per key, shared by everybody who asks for it while it runs.

The computation belongs to nobody who waits: it runs in a task group that the flights' owner holds, so one caller's
cancellation, deadline or disconnect is never another caller's failure.  When the last caller leaves, the work is
cancelled, unless it was asked to finish.  Nothing is kept for a key after its flight: results are not cached here.

At most one work per key runs at any moment.  A caller who comes while an abandoned work is still cleaning up waits for
that and then starts anew; it never joins work that is being stopped, and never runs beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import structlog

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class FlightStoppedError(Exception):
    """The owner of the flights stopped while this flight ran: there will be no result."""


class SingleFlight(Generic[T]):
    """Runs at most one work per key and shares its result, or its error, with everybody who waits.

    Args:
        tasks: Where works run.  Leaving or cancelling it ends every flight; who still waits for one gets
            `FlightStoppedError`.
        detach: Default of `run`'s `detach`.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, *, detach: bool = False) -> None:
        self._tasks = tasks
        self._detach = detach
        self._flights: dict[str, _Flight[T]] = {}

    def __len__(self) -> int:
        """Return the number of keys in flight."""
        return len(self._flights)

    def __contains__(self, key: object) -> bool:
        """Return whether `run` would join (or wait out) a flight instead of starting one at once."""
        return key in self._flights

    async def run(self, key: str, work: Callable[[], Awaitable[T]], *, detach: bool | None = None) -> T:
        """Return the result of the flight for `key`; the first caller's `work` is what flies.

        Safe to call concurrently; that is the point.

        Args:
            key: What the work is about.
            work: Called once, without arguments, in the owner's task group, if no flight for `key` can be joined.
            detach: True: the flight runs to its end even if every caller leaves (it stays so if only one of several
                callers asked for it).  None: as the constructor said.

        Raises:
            FlightStoppedError: The owner stopped.
            Exception: Whatever `work` raised; every caller gets the same object.

        Cancellation: leaves the flight to the other callers.  The last one to leave cancels the work, unless it is
        detached or past `commit`; what the work does then is its own affair, and is not waited for here.
        """
        while (flight := self._flights.get(key)) is not None and flight.scope.cancel_called:
            await flight.done.wait()
        if flight is None:
            flight = self._start(key, work)
        flight.is_detached |= self._detach if detach is None else detach
        flight.waiter_count += 1
        try:
            await flight.done.wait()
        finally:
            flight.waiter_count -= 1
            if not (flight.waiter_count or flight.is_detached or flight.done.is_set()):
                flight.scope.cancel()
        return flight.outcome(key)

    async def commit(self, key: str) -> None:
        """Pass the point of no return: called by the work for `key` itself, before what must not be left half done.

        From here on the flight runs to its end even if every caller leaves.  Only the owner can still stop it; the
        work shields what even that must not interrupt.

        Cancellation: if everybody has left already, the work is cancelled here, before anything is begun.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._flights[key].is_detached = True

    def _start(self, key: str, work: Callable[[], Awaitable[T]]) -> _Flight[T]:
        flight = self._flights[key] = _Flight()
        try:
            self._tasks.start_soon(self._fly, key, flight, work, name=f"flight {key}")
        except BaseException:  # the task group is closed: leave no key that nobody will ever serve
            del self._flights[key]
            raise
        return flight

    async def _fly(self, key: str, flight: _Flight[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            with flight.scope:
                flight.results.append(await work())
        except Exception as error:  # noqa: BLE001 - a task's top; the error belongs to the waiters
            flight.error, flight.traceback = error, error.__traceback__
            if not flight.waiter_count:
                _log.exception("flight failed unobserved", key=key)
        finally:
            # Forgotten before anybody wakes: a waiter that asks again at once starts a new flight.
            del self._flights[key]
            flight.done.set()


@dataclass(eq=False, slots=True)
class _Flight(Generic[T]):
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    waiter_count: int = 0
    is_detached: bool = False
    results: list[T] = field(default_factory=list)
    """The result, once there is one; a list because None may be a result."""
    error: Exception | None = None
    traceback: TracebackType | None = None

    def outcome(self, key: str) -> T:
        if self.error is not None:
            # With the traceback it had: each `raise` would add frames to the shared object.
            raise self.error.with_traceback(self.traceback)
        if not self.results:
            raise FlightStoppedError(f"the flight for {key} was stopped")
        return self.results[0]
