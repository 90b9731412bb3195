"""Become another program that gets SIGTERM when its parent dies, however that dies.

Run by path, without site-packages: `python -S child.py PARENT_PID PROGRAM ARGUMENT...`.  The kernel keeps the wish
(PR_SET_PDEATHSIG) across exec, so nothing of this stays in the process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # Must match linux/prctl.h


def main() -> None:
    """Set the wish and exec."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the wish was made
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - that is its purpose


if __name__ == "__main__":
    main()
