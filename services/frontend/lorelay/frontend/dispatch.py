"""Send a request to a worker and hand its frames to whoever writes the HTTP response.

One subscription per frontend receives the frames of all streams.  A stream ends exactly once: with its last frame, or
with an error of ours when its worker is lost, a frame is missing, a deadline passes, or its client reads too slowly.
Until the first frame the request may be sent once more, to the next worker; afterwards never, because text was sent.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import structlog

from lorelay.frontend.catalog import Target
from lorelay.frontend.routing import pick
from lorelay.proto import subjects
from lorelay.proto.codec import MalformedMessageError, pack, unpack
from lorelay.proto.errors import ErrorCode, LorelayError, WireError
from lorelay.proto.generation import Acknowledgement, Cancel, Frame, FrameBatch, GenerateRequest, RequestPart
from lorelay.runtime.bus import Bus, BusError, Message, NobodyListensError, ReplyTimeoutError
from lorelay.runtime.telemetry import traceparent

log = structlog.get_logger()

ACK_TIMEOUT_S = 5.0
"""A worker acknowledges at once; one that does not within this is taken for lost."""
MAX_ATTEMPTS = 2
FAREWELL_S = 1.0
"""How long the last error of a drained stream may take on its way to its client."""
MAX_BUFFERED_BYTES = 4 << 20
"""What may wait of an event stream for a client that reads slowly; then its stream ends with an error."""
MAX_WHOLE_BYTES = 64 << 20
"""The same for a response in one piece, which is here all at once however fast its client reads."""


class Stream:
    """The frames of one response, in order, from one worker."""

    __slots__ = (
        "_arrived",
        "_buffered_bytes",
        "_ended",
        "_expected",
        "_frames",
        "_max_buffered_bytes",
        "complete",
        "number",
        "worker",
    )

    def __init__(self, number: int, worker: str) -> None:
        self.number = number
        self.worker = worker
        self.complete = False
        """True once the worker's own last frame is here: there is nothing to cancel."""
        self._ended = False
        self._frames: deque[Frame] = deque()
        self._buffered_bytes = 0
        self._max_buffered_bytes = MAX_WHOLE_BYTES
        self._expected = 0
        self._arrived = anyio.Event()

    def feed(self, frame: Frame) -> None:
        """Take a frame that arrived.  Out of sequence or too much unread: the stream fails."""
        if self._ended:
            return
        if frame.sequence != self._expected:
            log.warning("frames lost", worker=self.worker, expected=self._expected, got=frame.sequence)
            self.fail(LorelayError(ErrorCode.WORKER_LOST, "A part of the response was lost on the way.").wire)
            return
        if frame.content_type.startswith("text/event-stream"):
            self._max_buffered_bytes = MAX_BUFFERED_BYTES
        self._expected += 1
        self._buffered_bytes += len(frame.body)
        if self._buffered_bytes > self._max_buffered_bytes and not frame.last:
            self.fail(LorelayError(ErrorCode.INTERNAL_ERROR, "The client reads the response too slowly.").wire)
            return
        self.complete = frame.last
        self._add(frame)

    def fail(self, error: WireError) -> None:
        """End the stream with `error`, unless it has ended."""
        if not self._ended:
            self._add(Frame(stream=self.number, sequence=self._expected, last=True, error=error))

    async def next(self, timeout_s: float) -> Frame:
        """Return the next frame.  Several that wait are joined into one, so a slow client costs fewer writes.

        Raises:
            TimeoutError: None came within `timeout_s`.
        """
        if not self._frames:
            self._arrived = anyio.Event()
            with anyio.fail_after(timeout_s):
                await self._arrived.wait()
        frame = self._frames.popleft()
        if self._frames and frame.error is None:
            bodies, last = [frame.body], frame.last
            while self._frames and self._frames[0].error is None:
                later = self._frames.popleft()
                bodies.append(later.body)
                last = later.last
            frame = Frame(
                stream=frame.stream,
                sequence=frame.sequence,
                status=frame.status,
                content_type=frame.content_type,
                body=b"".join(bodies),
                last=last,
            )
        self._buffered_bytes -= len(frame.body)
        return frame

    def _add(self, frame: Frame) -> None:
        self._ended = frame.last
        self._frames.append(frame)
        self._arrived.set()


class Dispatcher:
    """All open streams of one frontend."""

    def __init__(
        self, bus: Bus, namespace: str, frontend: str, *, first_token_timeout_s: float, idle_timeout_s: float
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._frontend = frontend
        self._first_token_timeout_s = first_token_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self._streams: dict[int, Stream] = {}
        self._load: Counter[str] = Counter()
        self._next_number = secrets.randbits(40)
        self._rng = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._is_draining = False

    @property
    def open_streams(self) -> int:
        """Streams in flight."""
        return len(self._streams)

    async def start(self) -> None:
        """Subscribe to this frontend's frames."""
        self._bus.on_disconnect = self._bus_gone
        await self._bus.subscribe(subjects.frontend_frames(self._namespace, self._frontend), self._on_frames)

    def worker_gone(self, worker: str) -> None:
        """Fail the open streams of a worker whose record has disappeared."""
        for stream in [s for s in self._streams.values() if s.worker == worker]:
            stream.fail(LorelayError(ErrorCode.WORKER_LOST, "The worker that served this request is gone.").wire)

    def _bus_gone(self) -> None:
        """Fail all open streams: frames may be lost now, and if the last one is, no gap would ever tell."""
        for stream in list(self._streams.values()):
            stream.fail(LorelayError(ErrorCode.BUS_UNAVAILABLE, "The message bus was lost; try again.").wire)

    async def drain(self, grace_s: float) -> None:
        """Refuse what is new, give open streams `grace_s`, then end each with an error and let it be sent."""
        self._is_draining = True
        with anyio.move_on_after(grace_s):
            while self._streams:  # noqa: ASYNC110 - once in a life, and a stream's end need not know of it
                await anyio.sleep(0.05)
        for stream in list(self._streams.values()):
            stream.fail(LorelayError(ErrorCode.WORKER_LOST, "The frontend stopped before the response was whole.").wire)
        with anyio.move_on_after(FAREWELL_S):
            while self._streams:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.05)

    @asynccontextmanager
    async def open(
        self, find: Callable[[], Target], *, model: str, endpoint: str, body: bytes, request_id: str
    ) -> AsyncIterator[tuple[Stream, Frame]]:
        """Send a request and give its stream with the first frame, whose status is the response's.

        Args:
            find: Says what the model means, anew for each attempt.
            model: The model id as the client sent it.
            endpoint: The HTTP path.
            body: The client's bytes.
            request_id: For logs.

        Raises:
            LorelayError: No worker took it, or none gave a first frame in time.

        Cancellation: the worker is told to stop.
        """
        if self._is_draining:
            raise LorelayError(ErrorCode.NO_WORKER_AVAILABLE, "This frontend is stopping; try again.")
        failed: dict[str, LorelayError] = {}
        deadline = anyio.current_time() + self._first_token_timeout_s
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                target = find()
                worker = pick(target, failed, self._load.__getitem__, self._rng)
            except LorelayError:
                if not failed:
                    raise
                worker = None  # with its worker the model went: what happened to this request is still the loss
            if worker is None:
                gone = LorelayError(ErrorCode.WORKER_LOST, "The worker of this request is gone; try again.")
                raise next(iter(failed.values()), gone)
            async with self._stream(worker) as stream:
                try:
                    await self._send(
                        GenerateRequest(
                            stream=stream.number,
                            frontend=self._frontend,
                            request_id=request_id,
                            timeout_ms=max(1, round((deadline - anyio.current_time()) * 1000)),
                            traceparent=traceparent(),
                            endpoint=endpoint,
                            model=model,
                            base=target.base,
                            selection=target.selection,
                            body=body,
                        ),
                        worker,
                    )
                    frame = await self._first(stream, deadline)
                except LorelayError as error:
                    if error.code is not ErrorCode.WORKER_LOST or attempt == MAX_ATTEMPTS:
                        raise
                    log.warning("worker lost before the first byte", worker=worker, request_id=request_id)
                    failed[worker] = error
                    continue
                yield stream, frame
                return

    @asynccontextmanager
    async def _stream(self, worker: str) -> AsyncIterator[Stream]:
        """Receive a new stream's frames during the block; a stream that the worker did not end is cancelled there."""
        self._next_number += 1
        stream = Stream(self._next_number, worker)
        self._streams[stream.number] = stream
        self._load[worker] += 1
        try:
            yield stream
        finally:
            del self._streams[stream.number]
            self._load[worker] -= 1
            if not self._load[worker]:
                del self._load[worker]
            if not stream.complete:
                cancel = pack(Cancel(self._frontend, stream.number))
                with anyio.CancelScope(shield=True), suppress(BusError):
                    await self._bus.publish(subjects.worker_control(self._namespace, worker), cancel)

    async def _first(self, stream: Stream, deadline: float) -> Frame:
        try:
            frame = await stream.next(max(0.0, deadline - anyio.current_time()))
        except TimeoutError:
            raise LorelayError(
                ErrorCode.FIRST_TOKEN_TIMEOUT,
                f"The model gave no answer within {self._first_token_timeout_s:g} s.",
            ) from None
        if frame.error is not None:
            raise LorelayError.from_wire(frame.error)
        return frame

    async def _send(self, request: GenerateRequest, worker: str) -> None:
        """Publish `request` in as many parts as the server's max_payload asks for, and await the acknowledgement."""
        subject = subjects.worker_generate(self._namespace, worker)
        data = pack(request)
        room = self._bus.max_message_bytes
        try:
            if len(data) <= room:
                messages = [data]
            else:
                size = room - 128  # a part's own fields
                count = -(-len(data) // size)
                messages = [
                    pack(RequestPart(self._frontend, request.stream, i, count, data[i * size : (i + 1) * size]))
                    for i in range(count)
                ]
            for message in messages[:-1]:
                await self._bus.publish(subject, message)
            reply = await self._bus.request(subject, messages[-1], timeout_s=ACK_TIMEOUT_S)
            acknowledgement = unpack(Acknowledgement, reply)
        except (NobodyListensError, ReplyTimeoutError) as error:
            raise LorelayError(
                ErrorCode.WORKER_LOST, "The worker of this request does not answer; try again.", detail=str(error)
            ) from error
        except MalformedMessageError as error:
            raise LorelayError(
                ErrorCode.WORKER_LOST, "The worker of this request does not answer; try again.", detail=str(error)
            ) from error
        except BusError as error:
            raise LorelayError(
                ErrorCode.BUS_UNAVAILABLE, "The message bus is not reachable now; try again.", detail=str(error)
            ) from error
        if acknowledgement.error is not None:
            raise LorelayError.from_wire(acknowledgement.error)

    async def _on_frames(self, message: Message) -> None:
        try:
            batch = unpack(FrameBatch, message.data)
        except MalformedMessageError as error:
            log.warning("frames not readable", error=str(error))
            return
        streams = self._streams
        for frame in batch.frames:
            stream = streams.get(frame.stream)
            if stream is not None and stream.worker == batch.worker:
                stream.feed(frame)
