"""The content-addressed cache of a cache domain: verified snapshots, and what the sources resolved to.

    <root>/snapshots/sha256-<digest>/    what workers read; appears by one rename, never changes, goes by one rename
    <root>/references/<adapter key>.json  what a source last resolved to, and when
    <root>/tmp/<random>/                  work in progress; private

Several resolvers may share a root, on file systems whose locks do not hold: so there are none.  Temporary names are
random, everything appears and goes by rename, and a digest says what is in a directory.  Two resolvers that make one
snapshot at once both succeed.  Two that fill the cache at once may exceed its limit by what both are writing.

Every method blocks; call them in a thread.  They may be called from several threads at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Set as AbstractSet
from pathlib import Path

import msgspec
import structlog

from lorelay.proto.adapters import SNAPSHOT_FILES, Snapshot, SnapshotFile, manifest_digest
from lorelay.proto.codec import MalformedMessageError, from_json, to_json
from lorelay.resolver.members import DirectoryError, MemberError, Members

log = structlog.get_logger()

LEFTOVER_S = 3600.0
GRACE_S = 5.0
"""A snapshot used this recently is not pruned: whoever asked for it has not said yet that it holds it."""
MAX_REFERENCES = 20_000
"""Spellings of sources are the clients' to invent, so references are bounded; the oldest tenth goes."""
_PREFIX = "sha256-"
_CHUNK_BYTES = 4 << 20


class CacheFullError(Exception):
    """There is no room, and nothing idle is left to prune."""


class CorruptSnapshotError(Exception):
    """A snapshot's directory does not hold what its manifest says."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """What a source resolved to."""

    base: str
    source: str
    snapshot: Snapshot
    resolved_at_s: float
    """Unix time."""


class Cache:
    """One resolver's hands on the cache at `root`.

    Args:
        root: Made if it is not there.
        max_bytes: Of all snapshots and of what is being written.
        in_use: Digests that live workers hold, which are never pruned; None: unknown, nothing is pruned.  Called in
            threads.
        on_pruned: Called, in a thread, with each reference whose snapshot was pruned.
        leftover_s: A temporary directory untouched for this long belongs to nobody who lives; longer than any
            resolution takes.
        wall: Unix time in seconds.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        in_use: Callable[[], AbstractSet[str] | None] = frozenset,
        on_pruned: Callable[[str, Reference], None] = lambda _key, _reference: None,
        leftover_s: float = LEFTOVER_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._leftover_s = leftover_s
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._on_pruned = on_pruned
        self._wall = wall
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        self._verified: set[str] = set()
        if not root.exists():
            root.mkdir(parents=True)
            root.chmod(0o755)  # workers read as other users
        self.root = Path(os.path.realpath(root))
        """Real, so that paths below it are."""
        self._snapshots = self.root / "snapshots"
        self._references = self.root / "references"
        self._tmp = self.root / "tmp"
        for directory, mode in ((self._snapshots, 0o755), (self._references, 0o700), (self._tmp, 0o700)):
            directory.mkdir(exist_ok=True)
            with contextlib.suppress(PermissionError):  # another resolver's, with another user
                directory.chmod(mode)
        self._remove_leftovers()

    # Temporary directories

    def make_temporary(self) -> Path:
        """Return a new private directory on the cache's file system."""
        path = self._tmp / secrets.token_hex(16)
        path.mkdir(mode=0o700)
        return path

    def discard(self, temporary: Path) -> None:
        """Remove a temporary directory, whatever is in it.  Gone already: no error."""
        shutil.rmtree(temporary, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        for path in self._tmp.iterdir():
            with contextlib.suppress(OSError):
                if self._wall() - path.stat(follow_symlinks=False).st_mtime > self._leftover_s:
                    log.info("leftover removed", name=path.name)
                    self.discard(path) if path.is_dir() else path.unlink()

    # Snapshots

    def path(self, snapshot: Snapshot) -> Path:
        """Return where `snapshot` is, or would be."""
        return self._snapshots / snapshot.directory

    def publish(self, temporary: Path, snapshot: Snapshot) -> None:
        """Make `temporary`, which holds exactly the snapshot's files, appear as the snapshot.

        Stopped at any point, it leaves the whole snapshot or none.  If the snapshot is there already it is checked
        and kept, or replaced if it is corrupt.

        Raises:
            CorruptSnapshotError: `temporary` does not hold what the manifest says.
        """
        for name in (file.name for file in snapshot.manifest):
            (temporary / name).chmod(0o444)
            _sync(temporary / name)
        temporary.chmod(0o755)
        _sync(temporary)
        check(temporary, snapshot, content=True)
        target = self.path(snapshot)
        try:
            temporary.rename(target)
        except OSError:  # there, and not empty
            try:
                check(target, snapshot, content=True)
            except CorruptSnapshotError as error:
                log.warning("corrupt snapshot replaced", digest=snapshot.digest, error=str(error))
                with contextlib.suppress(FileNotFoundError):  # another resolver saw it too
                    self._take_away(target)
                temporary.rename(target)
        _sync(self._snapshots)
        self._verified.add(snapshot.digest)
        self.touch(snapshot)

    def check(self, snapshot: Snapshot) -> None:
        """Check that `snapshot` is there and whole; its content is hashed the first time in this process's life.

        Raises:
            CorruptSnapshotError: It is not; a corrupt directory is gone afterwards.
        """
        path = self.path(snapshot)
        try:
            check(path, snapshot, content=snapshot.digest not in self._verified)
        except CorruptSnapshotError:
            self._verified.discard(snapshot.digest)
            with contextlib.suppress(OSError):
                self._take_away(path)
            raise
        self._verified.add(snapshot.digest)

    def touch(self, snapshot: Snapshot) -> None:
        """Note that `snapshot` is used now."""
        now = self._wall()
        with contextlib.suppress(OSError):
            os.utime(self.path(snapshot), (now, now))

    def _take_away(self, path: Path) -> None:
        """Remove a snapshot's directory in one step, then its files."""
        grave = self._tmp / secrets.token_hex(16)
        path.rename(grave)
        self.discard(grave)

    # References

    def look_up(self, key: str) -> Reference | None:
        """Return what the source of `key` last resolved to, if it is known."""
        try:
            return from_json(Reference, (self._references / f"{key}.json").read_bytes())
        except (FileNotFoundError, MalformedMessageError):
            return None

    def refer(self, key: str, reference: Reference) -> None:
        """Store what the source of `key` resolved to."""
        temporary = self._tmp / secrets.token_hex(16)
        temporary.write_bytes(to_json(reference))
        _sync(temporary)
        temporary.replace(self._references / f"{key}.json")
        names = os.listdir(self._references)  # noqa: PTH208 - thousands of them
        if len(names) > MAX_REFERENCES:
            paths = sorted((self._references / name for name in names), key=_modified)
            for path in paths[: MAX_REFERENCES // 10]:
                path.unlink(missing_ok=True)

    # Room

    def reservation(self) -> Reservation:
        """Return a reservation that holds nothing yet."""
        return Reservation(self)

    def _reserve(self, size_bytes: int) -> None:
        with self._lock:
            self._make_room(size_bytes)
            self._reserved_bytes += size_bytes

    def _release(self, size_bytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= size_bytes

    def free_bytes(self) -> int:
        """Return how much room is left without pruning."""
        return max(0, self._max_bytes - self._reserved_bytes - sum(size for _, size, _ in self._listing()))

    def _make_room(self, size_bytes: int) -> None:
        listing = sorted(self._listing())
        excess = size_bytes + self._reserved_bytes + sum(size for _, size, _ in listing) - self._max_bytes
        if excess <= 0:
            return
        held = self._in_use()
        idle = [
            (size, digest)
            for used_at, size, digest in listing
            if held is not None and digest not in held and self._wall() - used_at >= GRACE_S
        ]
        if size_bytes > self._max_bytes or sum(size for size, _ in idle) < excess:
            raise CacheFullError(f"{size_bytes} bytes wanted, {excess} too many, {len(idle)} idle snapshots")
        for size, digest in idle:
            if excess <= 0:
                break
            self._prune(digest)
            excess -= size

    def _prune(self, digest: str) -> None:
        # References first: who finds one finds a snapshot, or checks and resolves again.
        for path in self._references.iterdir():
            reference = self.look_up(path.stem)
            if reference is not None and reference.snapshot.digest == digest:
                path.unlink(missing_ok=True)
                self._on_pruned(path.stem, reference)
        self._verified.discard(digest)
        with contextlib.suppress(FileNotFoundError):  # another resolver was faster
            self._take_away(self._snapshots / f"{_PREFIX}{digest}")
        log.info("snapshot pruned", digest=digest)

    def _listing(self) -> Iterator[tuple[float, int, str]]:
        """Yield (last use, bytes, digest) of every snapshot."""
        for path in self._snapshots.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                size = sum(file.stat().st_size for file in path.iterdir())
                yield _modified(path), size, path.name.removeprefix(_PREFIX)


class Reservation:
    """Room in the cache for one resolution.  Released by `release`, whatever happened before."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._held_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Hold room for `size_bytes` more; idle snapshots are pruned for it, least recently used first.

        Raises:
            CacheFullError: There is no room for that.
        """
        self._cache._reserve(size_bytes)  # noqa: SLF001 - two halves of one thing
        self._held_bytes += size_bytes

    def release(self) -> None:
        """Give back what is held.  Idempotent."""
        size_bytes, self._held_bytes = self._held_bytes, 0
        self._cache._release(size_bytes)  # noqa: SLF001


def describe(directory: Path) -> tuple[SnapshotFile, ...]:
    """Return the manifest of the files in `directory`, by reading them.

    Raises:
        CorruptSnapshotError: There is something else in it, or a file that is not regular.
    """
    try:
        with Members(directory) as members:
            names = members.names()
            if not set(names) <= set(SNAPSHOT_FILES):
                raise CorruptSnapshotError(f"{directory.name} holds other files")
            return tuple(_describe(members, name) for name in names)
    except (DirectoryError, MemberError, OSError) as error:
        raise CorruptSnapshotError(str(error)) from error


def check(directory: Path, snapshot: Snapshot, *, content: bool) -> None:
    """Check that `directory` holds exactly what the manifest of `snapshot` says, by size or by `content`.

    Raises:
        CorruptSnapshotError: It does not.
    """
    if manifest_digest(snapshot.manifest) != snapshot.digest:
        raise CorruptSnapshotError(f"{snapshot.digest} is not the digest of its manifest")
    if content:
        if describe(directory) != snapshot.manifest:
            raise CorruptSnapshotError(f"{directory.name} differs from its manifest")
        return
    try:
        with Members(directory) as members:
            names = members.names()
            sizes = {}
            for name in names:
                with members.open(name) as file:
                    sizes[name] = os.fstat(file.fileno()).st_size
    except (DirectoryError, MemberError, OSError) as error:
        raise CorruptSnapshotError(str(error)) from error
    if sizes != {file.name: file.bytes for file in snapshot.manifest}:
        raise CorruptSnapshotError(f"{directory.name} differs from its manifest in size")


def _describe(members: Members, name: str) -> SnapshotFile:
    digest, size = hashlib.sha256(), 0
    with members.open(name) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return SnapshotFile(name=name, bytes=size, sha256=digest.hexdigest())


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
