"""What a worker asks of a resolver and what it gets: JSON, so that a person can ask with the NATS CLI too."""

from __future__ import annotations

import hashlib

import msgspec

from lorelay.proto.errors import WireError
from lorelay.proto.identity import AdapterSelection
from lorelay.proto.records import ModelFacts

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
EMBEDDINGS_FILE = "new_embeddings.safetensors"
SNAPSHOT_FILES = (CONFIG_FILE, WEIGHTS_FILE, EMBEDDINGS_FILE)
"""All that a snapshot may hold; the third need not be there."""


class MaterializeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make a verified snapshot of this adapter exist in the cache domain."""

    selection: AdapterSelection
    facts: ModelFacts
    """Of the base it goes on: the verdict is about this base."""
    max_rank: int
    """The worker's highest rank."""
    target_modules: tuple[str, ...] = ()
    """The only modules the worker adapts; empty: all."""
    max_download_bytes: int
    timeout_ms: int
    """Milliseconds left, at the moment of sending."""
    request_id: str
    traceparent: str = ""


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a snapshot's manifest."""

    name: str
    bytes: int
    sha256: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable, verified directory of the cache: `snapshots/sha256-<digest>/`."""

    digest: str
    """SHA-256 (hex) of the manifest: the content's identity."""
    manifest: tuple[SnapshotFile, ...]
    """Sorted by name."""
    source_revision: str
    """What the source's provider calls this immutable version; may be empty."""
    rank: int
    """The highest rank of its tensors."""
    target_modules: tuple[str, ...]
    """Last names of the adapted modules, sorted."""

    @property
    def directory(self) -> str:
        """The directory's name under the cache's `snapshots`."""
        return f"sha256-{self.digest}"

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.manifest)


class MaterializeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The snapshot, or why there is none."""

    snapshot: Snapshot | None = None
    error: WireError | None = None
    from_cache: bool = False
    """True if the source's provider was not asked."""
    resolver: str = ""
    stages_ms: dict[str, float] = {}
    """Milliseconds by stage: resolve, copy, verdict, publish."""


def manifest_digest(manifest: tuple[SnapshotFile, ...]) -> str:
    """Return the SHA-256 (hex) of a manifest's canonical JSON: files by name, fields in the struct's order."""
    ordered = sorted(manifest, key=lambda file: file.name)
    return hashlib.sha256(msgspec.json.encode(ordered)).hexdigest()
