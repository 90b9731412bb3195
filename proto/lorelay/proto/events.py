"""What happens to adapters, told on `lorelay.<ns>.lora.<kind>.<key>` as JSON and kept in the stream LORA_EVENTS."""

from __future__ import annotations

import enum

import msgspec


class EventKind(enum.StrEnum):
    """A step in the life of an adapter."""

    REQUESTED = "requested"
    RESOLVING = "resolving"
    PROGRESS = "progress"
    MATERIALIZED = "materialized"
    REJECTED = "rejected"
    FAILED = "failed"
    LOADING = "loading"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    EVICTED = "evicted"
    UNLOADED = "unloaded"
    PRUNED = "pruned"


class LoraEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step.  Fields that the step does not know are absent."""

    kind: EventKind
    time: str
    """RFC 3339 with milliseconds, UTC."""
    id: str
    """Unique: JetStream drops a repeated one."""
    key: str
    base: str
    scheme: str
    source: str
    """Redacted: no user information, no query."""
    instance: str
    """Who says so."""
    component: str
    """`worker` or `resolver`."""
    digest: str = ""
    """SHA-256 (hex) of the snapshot's manifest."""
    revision: str = ""
    bytes: int | None = None
    stages_ms: dict[str, float] = {}
    """Milliseconds by stage."""
    code: str = ""
    """The error code of a failure."""
    message: str = ""
    """The failure's public message."""
    reasons: tuple[str, ...] = ()
    trace_id: str = ""
    request_id: str = ""
