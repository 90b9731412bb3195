"""Copy an adapter's files, and nothing else, out of a directory of a stranger: measured, hashed and limited on the way.

Everything blocks: call it in a thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from lorelay.proto.adapters import SNAPSHOT_FILES, SnapshotFile
from lorelay.resolver.members import Members

_CHUNK_BYTES = 1 << 20


class SourceChangedError(Exception):
    """A file changed while it was copied: what was copied may never have existed."""


class Progress:
    """How far a copy is; written by the copying thread, read by whoever wants to tell."""

    def __init__(self) -> None:
        self.copied_bytes = 0


def measure(members: Members) -> dict[str, int]:
    """Return the size of each of an adapter's files that is there.

    Raises:
        MemberError: One may not be used.
    """
    names = set(members.names())
    sizes = {}
    for name in SNAPSHOT_FILES:
        if name in names:
            with members.open(name) as file:
                sizes[name] = os.fstat(file.fileno()).st_size
    return sizes


def copy(
    members: Members,
    sizes: Mapping[str, int],
    target: Path,
    progress: Progress,
    still_wanted: Callable[[], None],
) -> tuple[SnapshotFile, ...]:
    """Copy the files named in `sizes` into the directory `target` and return their manifest, sorted by name.

    Args:
        members: The source.
        sizes: What `measure` said; not a byte more is written.
        target: An empty private directory.
        progress: Told after each chunk.
        still_wanted: Called before each chunk; raises to stop.

    Raises:
        MemberError: A file may not be used.
        SourceChangedError: A file changed since it was measured, or while it was copied.
    """
    return tuple(_copy(members, name, sizes[name], target, progress, still_wanted) for name in sorted(sizes))


def _copy(  # noqa: PLR0917 - private, one caller
    members: Members, name: str, size: int, target: Path, progress: Progress, still_wanted: Callable[[], None]
) -> SnapshotFile:
    digest, left = hashlib.sha256(), size
    with members.open(name) as source, (target / name).open("xb") as copied:
        before = os.fstat(source.fileno())
        while chunk := source.read(_CHUNK_BYTES):
            still_wanted()
            left -= len(chunk)
            if left < 0:
                break
            digest.update(chunk)
            copied.write(chunk)
            progress.copied_bytes += len(chunk)
        after = os.fstat(source.fileno())
    if left or (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise SourceChangedError(f"{name} changed while it was copied")
    return SnapshotFile(name=name, bytes=size, sha256=digest.hexdigest())
