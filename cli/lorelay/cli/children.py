"""The processes of a one-machine fleet: started, watched, and stopped together.

Every child has a process group and a log file of its own.  None outlives the fleet: a stop goes to the whole group,
first politely and then not, and a child whose parent was killed is told by the kernel (child.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lorelay.cli import child

TAIL_LINES = 20
STOP_S = 40.0
"""How long a child may take to stop: longer than a service's drain."""
KILL_S = 5.0
STOP_POLL_S = 0.02


@dataclass(eq=False)
class Child:
    """One process."""

    name: str
    command: Sequence[str]
    log: Path
    environ: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it; its output goes into its log file, which is made anew."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-S", child.__file__, str(os.getpid()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environ),
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self.process is None else self.process.poll()

    def tail(self) -> list[str]:
        """Return the last lines of its log."""
        with suppress(OSError), self.log.open(errors="replace") as log:
            return [line.rstrip("\n") for line in deque(log, TAIL_LINES)]
        return []

    def stop(self, wait_s: float, is_hurried: Callable[[], bool]) -> None:
        """Ask it to stop; after `wait_s`, or once `is_hurried`, kill what is left of its process group."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + wait_s
            while self.process.poll() is None and time.monotonic() < deadline and not is_hurried():
                time.sleep(STOP_POLL_S)
        self._signal(signal.SIGKILL)  # also those that the process itself left behind
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None  # noqa: S101 - only called once started
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class ChildDiedError(Exception):
    """A child ended that should run."""

    def __init__(self, dead: Child) -> None:
        super().__init__(f"{dead.name} ended with {describe(dead.exit_code)}; the end of {dead.log}:")
        self.child = dead


class Children:
    """All processes of one fleet, in the order in which they were started."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._is_hurried = False

    def start(self, new: Child) -> Child:
        """Start a child and watch it from now on."""
        new.start()
        self._children.append(new)
        return new

    def check(self) -> None:
        """Return if all of them run.

        Raises:
            ChildDiedError: One does not.
        """
        for each in self._children:
            if each.exit_code is not None:
                raise ChildDiedError(each)

    def stop(self) -> None:
        """Stop them, the last started first, all within about `STOP_S` seconds."""
        deadline = time.monotonic() + STOP_S
        while self._children:
            self._children.pop().stop(max(0.5, deadline - time.monotonic()), lambda: self._is_hurried)

    def hurry(self) -> None:
        """Let a stop that is under way wait for nobody any more."""
        self._is_hurried = True


def describe(exit_code: int | None) -> str:
    """Return how a process ended, for a reader."""
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"
