"""Run a service as a process: signals become an orderly stop, failures become one line and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable, Iterator

import anyio
import structlog

from lorelay.runtime.bus import BusError
from lorelay.runtime.settings import SettingsError

log = structlog.get_logger()

EXIT_FAILED = 1
EXIT_USAGE = 2


class StartError(Exception):
    """The service cannot start; `str()` is the one line its operator needs."""


class Stop:
    """The first SIGTERM or SIGINT: cancels a service that is still starting, and tells one that serves."""

    def __init__(self) -> None:
        self._requested = anyio.Event()
        self._is_serving = False
        self._start = anyio.CancelScope()

    async def wait(self) -> None:
        """Return when the process shall stop.  From this call on the service stops by itself and is not cancelled."""
        self._is_serving = True
        await self._requested.wait()

    async def run(self, service: Callable[[Stop], Awaitable[None]]) -> None:
        """Run `service` under the process's signals; a second signal ends the process at once."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            with self._start:
                await service(self)
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("stopping", signal=signal.Signals(number).name)
                break
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        self._requested.set()
        if not self._is_serving:
            self._start.cancel()


def run(service: Callable[[Stop], Awaitable[None]]) -> int:
    """Run `service` on uvloop until it returns, and return the process's exit code."""

    async def main() -> None:
        await Stop().run(service)

    try:
        anyio.run(main, backend_options={"use_uvloop": True})
    except BaseException as error:
        leaves = list(_leaves(error))
        known = [leaf for leaf in leaves if isinstance(leaf, SettingsError | StartError | BusError)]
        if not known or len(known) < len(leaves):
            raise
        for leaf in known:
            sys.stderr.write(f"lorelay: {leaf}\n")
        return EXIT_USAGE if isinstance(known[0], SettingsError) else EXIT_FAILED
    return 0


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
