"""A request's way to a worker and its response's way back: msgpack arrays on core NATS.

Core NATS delivers at most once.  So a request is acknowledged, and the frames of a response carry a sequence number
from 0: a frontend that misses one fails the request and never splices text.  Frames of many requests that are ready in
one engine step travel in one `FrameBatch` per frontend.
"""

from __future__ import annotations

import msgspec

from lorelay.proto.errors import WireError
from lorelay.proto.identity import AdapterSelection

MAX_BODY_BYTES = 32 << 20
"""The largest request body that is accepted."""


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a frontend asks of a worker."""

    stream: int
    """The frontend's number for the response; frames carry it.  Unique within the frontend's life."""
    frontend: str
    """The frontend's instance id: where frames go."""
    request_id: str
    """For logs: `x-request-id`."""
    timeout_ms: int
    """Milliseconds left until the client's deadline for a first frame, at the moment of sending."""
    traceparent: str
    """W3C trace context, or empty."""
    endpoint: str
    """The HTTP path, e.g. `/v1/chat/completions`."""
    model: str
    """The model id as the client sent it: what the response must say."""
    base: str
    """Canonical name of the base; the worker refuses one that it does not serve."""
    selection: AdapterSelection | None
    """The adapter, or None for the base itself."""
    body: bytes
    """The client's body, untouched."""


class RequestPart(msgspec.Struct, frozen=True, array_like=True):
    """A slice of an encoded `GenerateRequest` that is larger than the server's max_payload.

    Parts go out in order on one subject; only the last one asks for the acknowledgement.
    """

    frontend: str
    stream: int
    index: int
    count: int
    data: bytes


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True):
    """A worker's immediate answer: it has the request, or why it does not."""

    error: WireError | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    """The client of `stream` has gone: stop, send nothing more."""

    frontend: str
    stream: int


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of a response."""

    stream: int
    sequence: int
    """0, 1, 2 … within the stream."""
    status: int = 0
    """HTTP status, in the first frame; 0 in later ones."""
    content_type: str = ""
    """In the first frame."""
    body: bytes = b""
    last: bool = False
    error: WireError | None = None
    """The worker failed the request; the last frame.  Before any body it is the whole response."""


class FrameBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one worker has for one frontend after one engine step."""

    worker: str
    frames: list[Frame]
