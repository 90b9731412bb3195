"""Snapshots appear whole or not at all, stay what they are, and make room when nobody holds them."""

from __future__ import annotations

import os
import stat
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from lorelay.proto.adapters import CONFIG_FILE, WEIGHTS_FILE, Snapshot, manifest_digest
from lorelay.resolver import cache as cache_module
from lorelay.resolver.cache import (
    GRACE_S,
    LEFTOVER_S,
    Cache,
    CacheFullError,
    CorruptSnapshotError,
    Reference,
    describe,
)


class Shelf:
    """A cache with a clock that tests turn."""

    def __init__(self, root: Path, max_bytes: int = 10_000) -> None:
        self.root = root
        self.now = 1_000_000.0
        self.held: AbstractSet[str] | None = frozenset()
        self.pruned = list[str]()
        self.cache = Cache(
            root,
            max_bytes=max_bytes,
            in_use=lambda: self.held,
            on_pruned=lambda key, _: self.pruned.append(key),
            wall=lambda: self.now,
        )

    def write(self, content: bytes) -> tuple[Path, Snapshot]:
        """Write a temporary directory and describe it."""
        temporary = self.cache.make_temporary()
        (temporary / CONFIG_FILE).write_bytes(b"{}")
        (temporary / WEIGHTS_FILE).write_bytes(content)
        manifest = describe(temporary)
        return temporary, Snapshot(
            digest=manifest_digest(manifest), manifest=manifest, source_revision="", rank=1, target_modules=()
        )

    def publish(self, content: bytes, key: str = "") -> Snapshot:
        """Publish a snapshot, with a reference if there is a key."""
        temporary, snapshot = self.write(content)
        self.cache.publish(temporary, snapshot)
        self.cache.discard(temporary)
        if key:
            self.cache.refer(key, Reference(base="b", source=key, snapshot=snapshot, resolved_at_s=self.now))
        return snapshot

    def directories(self) -> set[str]:
        """Return the names of all snapshots."""
        return {path.name for path in (self.root / "snapshots").iterdir()}

    def temporaries(self) -> list[Path]:
        """Return what is in progress, or was left."""
        return list((self.root / "tmp").iterdir())


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path.resolve() / "cache")


def test_a_snapshot_can_be_read_by_other_users(shelf: Shelf) -> None:
    """Workers run as somebody else; what is in progress is nobody's business."""
    umask = os.umask(0o077)
    try:
        snapshot = shelf.publish(b"weights")
    finally:
        os.umask(umask)
    path = shelf.cache.path(snapshot)
    assert path == shelf.root / "snapshots" / f"sha256-{snapshot.digest}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o444}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert stat.S_IMODE(shelf.root.stat().st_mode) == 0o755
    assert stat.S_IMODE((shelf.root / "tmp").stat().st_mode) == 0o700
    assert shelf.temporaries() == []


def test_the_same_content_is_stored_once(shelf: Shelf) -> None:
    """Row C11: two sources, one digest, one directory."""
    first, second = shelf.publish(b"same", "k1"), shelf.publish(b"same", "k2")
    assert first == second
    assert shelf.directories() == {first.directory}
    assert shelf.temporaries() == []


def test_a_corrupt_snapshot_is_replaced(shelf: Shelf) -> None:
    """Two resolvers, a bad disk: what lies under a digest has that digest."""
    snapshot = shelf.publish(b"weights")
    weights = shelf.cache.path(snapshot) / WEIGHTS_FILE
    weights.chmod(0o644)
    weights.write_bytes(b"WEIGHTS")
    shelf.publish(b"weights")
    assert weights.read_bytes() == b"weights"
    assert shelf.temporaries() == []


@pytest.mark.parametrize("how", ["content", "size", "missing", "extra", "symlink", "gone"])
def test_what_is_not_whole_is_found_and_taken_away(shelf: Shelf, how: str) -> None:
    """Content is hashed once per process, everything else is looked at each time."""
    snapshot = shelf.publish(b"weights")
    path = shelf.cache.path(snapshot)
    (path / WEIGHTS_FILE).chmod(0o644)
    match how:
        case "content":
            (path / WEIGHTS_FILE).write_bytes(b"WEIGHTS")
        case "size":
            (path / WEIGHTS_FILE).write_bytes(b"weigh")
        case "missing":
            (path / WEIGHTS_FILE).unlink()
        case "extra":
            (path / "more").write_bytes(b"")
        case "symlink":
            (path / WEIGHTS_FILE).rename(shelf.root / "w")
            (path / WEIGHTS_FILE).symlink_to(shelf.root / "w")
        case _:
            shelf.cache.discard(path)
    other_process = Shelf(shelf.root).cache
    with pytest.raises(CorruptSnapshotError):
        other_process.check(snapshot)
    assert shelf.directories() == set()


def test_a_whole_snapshot_passes(shelf: Shelf) -> None:
    """The check that every hit makes."""
    snapshot = shelf.publish(b"weights")
    shelf.cache.check(snapshot)
    Shelf(shelf.root).cache.check(snapshot)


def test_a_manifest_that_is_not_its_digest(shelf: Shelf) -> None:
    """The digest is the identity, not the directory's name."""
    temporary, snapshot = shelf.write(b"weights")
    lie = Snapshot(digest="0" * 64, manifest=snapshot.manifest, source_revision="", rank=1, target_modules=())
    with pytest.raises(CorruptSnapshotError):
        shelf.cache.publish(temporary, lie)
    assert shelf.directories() == set()


@pytest.mark.parametrize("step", range(12))
def test_a_kill_at_any_point_leaves_no_torn_snapshot(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Row A29: stopped before any of its system calls, publishing leaves a whole snapshot or none."""

    class Killed(BaseException):
        pass

    calls = 0

    def killing(name: str) -> None:
        true = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls > step:
                raise Killed
            return true(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    temporary, snapshot = shelf.write(b"weights")
    for name in ("fsync", "chmod", "rename", "utime"):
        killing(name)
    try:
        shelf.cache.publish(temporary, snapshot)
        survived = True
    except Killed:
        survived = False
    monkeypatch.undo()
    after = Shelf(shelf.root)
    assert survived == (step >= calls)
    if after.directories():
        after.cache.check(snapshot)
    assert after.publish(b"weights") == snapshot
    after.cache.check(snapshot)
    # What the killed process left goes when a later one starts.
    for path in after.temporaries():
        os.utime(path, (0, 0))
    assert Shelf(shelf.root).temporaries() == []


def test_leftovers_go_and_work_of_the_living_stays(shelf: Shelf) -> None:
    """Another resolver may be writing right now."""
    old, young = shelf.cache.make_temporary(), shelf.cache.make_temporary()
    (old / "file").write_bytes(b"x")
    os.utime(old, (shelf.now - LEFTOVER_S - 1,) * 2)
    os.utime(young, (shelf.now - LEFTOVER_S + 1,) * 2)
    assert Shelf(shelf.root).temporaries() == [young]


def test_a_reference_is_found_again(shelf: Shelf) -> None:
    """Across processes; a torn file is no reference."""
    snapshot = shelf.publish(b"weights", "k")
    found = Shelf(shelf.root).cache.look_up("k")
    assert found is not None
    assert found.snapshot == snapshot
    (shelf.root / "references" / "k.json").write_bytes(b'{"base"')
    assert shelf.cache.look_up("k") is None
    assert shelf.cache.look_up("unknown") is None


def test_references_are_bounded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row D3: spellings of sources are the clients' to invent."""
    monkeypatch.setattr(cache_module, "MAX_REFERENCES", 20)
    snapshot = shelf.publish(b"weights")
    for number in range(50):
        reference = Reference(base="b", source=str(number), snapshot=snapshot, resolved_at_s=0)
        shelf.cache.refer(str(number), reference)
        os.utime(shelf.root / "references" / f"{number}.json", (number, number))
    assert len(list((shelf.root / "references").iterdir())) <= 20
    assert shelf.cache.look_up("49") is not None
    assert shelf.cache.look_up("0") is None


def hold(shelf: Shelf, size_bytes: int) -> None:
    shelf.cache.reservation().hold(size_bytes)


def test_the_least_recently_used_idle_snapshot_goes(shelf: Shelf) -> None:
    """Row E16: a limit of 10 kB and adapters of 3 kB."""
    snapshots = []
    for number in range(3):
        snapshots.append(shelf.publish(bytes([number]) * 3000, f"k{number}"))
        shelf.now += 10
    shelf.cache.touch(snapshots[0])
    shelf.now += 10
    hold(shelf, 3000)
    assert shelf.directories() == {snapshots[0].directory, snapshots[2].directory}
    assert shelf.pruned == ["k1"]
    assert shelf.cache.look_up("k1") is None
    assert shelf.temporaries() == []


def test_what_a_worker_holds_is_never_pruned(shelf: Shelf) -> None:
    """Not even when that means a refusal."""
    snapshots = [shelf.publish(bytes([number]) * 3000) for number in range(3)]
    shelf.now += 2 * GRACE_S
    shelf.held = {snapshot.digest for snapshot in snapshots[:2]}
    hold(shelf, 3000)
    assert shelf.directories() == {snapshot.directory for snapshot in snapshots[:2]}
    with pytest.raises(CacheFullError):
        hold(shelf, 3000)
    assert len(shelf.directories()) == 2


def test_nothing_is_pruned_while_nobody_knows_who_holds_what(shelf: Shelf) -> None:
    """Before the first listing of residency, and right after a reply."""
    for number in range(3):
        shelf.publish(bytes([number]) * 3000)
    with pytest.raises(CacheFullError):
        hold(shelf, 3000)
    shelf.now += 2 * GRACE_S
    shelf.held = None
    with pytest.raises(CacheFullError):
        hold(shelf, 3000)
    assert len(shelf.directories()) == 3


def test_what_can_never_fit_prunes_nothing(shelf: Shelf) -> None:
    """A request for more than the cache must not empty it."""
    shelf.publish(b"x" * 3000)
    shelf.now += 2 * GRACE_S
    with pytest.raises(CacheFullError):
        hold(shelf, 10_001)
    assert len(shelf.directories()) == 1


def test_reservations_add_up_and_are_given_back(shelf: Shelf) -> None:
    """Two flights cannot be promised the same room."""
    first, second = shelf.cache.reservation(), shelf.cache.reservation()
    first.hold(6000)
    assert shelf.cache.free_bytes() == 4000
    with pytest.raises(CacheFullError):
        second.hold(6000)
    second.release()
    first.release()
    first.release()
    second.hold(6000)
    assert shelf.cache.free_bytes() == 4000
