"""What runs in vLLM's own worker processes: vLLM adds `WorkerExtension` to its worker class there, by name.

Its methods are called over vLLM's `collective_rpc` before the first request.  Nothing here runs in Lorelay's process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Final

from lorelay.worker.engine import vllm_cpu_lora

EXTENSION: Final = "lorelay.worker.engine.vllm_extension.WorkerExtension"
"""For `--worker-extension-cls`."""
_OWNER_POLL_S: Final = 1.0


class WorkerExtension:
    """Methods for vLLM's worker class.  Each returns True, so that the caller sees that it was done everywhere."""

    def mend_cpu_lora(self) -> bool:
        """Keep adapters out of requests to the base; see `vllm_cpu_lora`."""
        vllm_cpu_lora.mend()
        return True

    def leave_with(self, owner: int) -> bool:
        """End vLLM's processes when the process `owner` is gone.

        vLLM stops them when its owner closes it.  When the owner is killed, they would stay for ever, with all their
        memory, and nothing would be left to use or stop them.
        """
        threading.Thread(target=_leave_with, args=(owner,), daemon=True, name="lorelay-owner").start()
        return True


def _leave_with(owner: int) -> None:
    import psutil  # noqa: PLC0415 - comes with vLLM

    engine_core = os.getppid()
    try:
        process = psutil.Process(owner)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_OWNER_POLL_S)
    except psutil.NoSuchProcess:
        pass
    # With one GPU this *is* the engine core's process, and its parent was the owner.
    if engine_core != owner and os.getppid() == engine_core:
        os.kill(engine_core, signal.SIGKILL)
    os._exit(1)
