"""Frames on their way to frontends: what is ready in one turn of the event loop leaves in one message per frontend.

An engine's step wakes all its requests in the same turn, each of them puts its frame here, and one flush sends them:
messages per token fall as concurrency grows, without waiting for anything.
"""

from __future__ import annotations

import math

import anyio
import anyio.lowlevel
import structlog

from lorelay.proto import subjects
from lorelay.proto.codec import pack
from lorelay.proto.errors import ErrorCode, WireError
from lorelay.proto.generation import Frame, FrameBatch
from lorelay.runtime.bus import Bus, BusError

log = structlog.get_logger()

FIELDS_BYTES = 256
"""What a frame may take besides its body."""
RETRY_S = 0.5
"""How often a bus that is away is tried."""
_LOST = WireError(code=ErrorCode.WORKER_LOST, message="A part of the response was lost on the way.")


class Outbox:
    """The frames of one worker."""

    def __init__(self, bus: Bus, namespace: str, worker: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self._worker = worker
        self._ready: dict[str, list[Frame]] = {}
        self._lost: dict[tuple[str, int], Frame] = {}
        """By frontend and stream: what tells a frontend, once the bus is back, that frames of the stream are lost."""
        self._filled = anyio.Event()
        self._flushing = anyio.Lock()
        self.messages = 0
        """Messages sent."""

    @property
    def max_body_bytes(self) -> int:
        """The largest body one frame may carry."""
        return self._bus.max_message_bytes - 2 * FIELDS_BYTES

    def put(self, frontend: str, frame: Frame) -> None:
        """Send `frame` with the next flush.  Never waits."""
        self._ready.setdefault(frontend, []).append(frame)
        self._filled.set()

    async def run(self) -> None:
        """Flush for ever."""
        while True:
            with anyio.move_on_after(RETRY_S if self._lost else math.inf):
                await self._filled.wait()
                await anyio.lowlevel.checkpoint()  # let everybody whom this engine step woke put its frame first
            await self.flush()

    async def flush(self) -> None:
        """Send what is ready.  Frames that the bus does not take are lost; their frontends are told when it is back."""
        async with self._flushing:  # a later batch must not overtake one that is on its way
            await self._flush()

    async def _flush(self) -> None:
        lost, self._lost = self._lost, {}
        for (frontend, _), frame in lost.items():
            self._ready.setdefault(frontend, []).append(frame)
        ready, self._ready = self._ready, {}
        self._filled = anyio.Event()
        for frontend, frames in ready.items():
            subject = subjects.frontend_frames(self._namespace, frontend)
            for batch in self._batches(frames):
                try:
                    await self._bus.publish(subject, pack(FrameBatch(self._worker, batch)))
                    self.messages += 1
                except BusError as error:
                    log.warning("frames lost", frontend=frontend, count=len(batch), error=str(error))
                    for frame in batch:
                        self._lost[frontend, frame.stream] = Frame(
                            stream=frame.stream, sequence=frame.sequence, last=True, error=_LOST
                        )

    def _batches(self, frames: list[Frame]) -> list[list[Frame]]:
        room = self._bus.max_message_bytes - FIELDS_BYTES
        batches: list[list[Frame]] = [[]]
        used = 0
        for frame in frames:
            size = len(frame.body) + FIELDS_BYTES + (len(pack(frame.error)) if frame.error is not None else 0)
            if used + size > room and batches[-1]:
                batches.append([])
                used = 0
            batches[-1].append(frame)
            used += size
        return batches
