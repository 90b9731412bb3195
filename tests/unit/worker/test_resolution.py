"""A snapshot is compared with its manifest, byte for byte, before an engine sees it; resolvers come and go."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest

from lorelay.proto import keys
from lorelay.proto.adapters import (
    CONFIG_FILE,
    EMBEDDINGS_FILE,
    WEIGHTS_FILE,
    Snapshot,
    SnapshotFile,
    manifest_digest,
)
from lorelay.proto.codec import to_json
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.records import ResolverRecord
from lorelay.runtime.discovery import Change
from lorelay.worker.resolution import Resolvers, check_snapshot
from support.fleet import write_snapshot

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def refuses(cache: Path, snapshot: Snapshot) -> None:
    with pytest.raises(LorelayError) as failure:
        await check_snapshot(cache, snapshot)
    assert failure.value.code is ErrorCode.LORA_LOAD_FAILED
    assert str(cache) not in failure.value.wire.message


def of(*files: SnapshotFile) -> Snapshot:
    return Snapshot(
        digest=manifest_digest(files), manifest=files, source_revision="", rank=8, target_modules=("q_proj",)
    )


async def test_a_whole_snapshot_is_accepted_wherever_the_cache_lies(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "cache")
    (tmp_path / "link").symlink_to("cache")
    for cache in ("cache", "link"):
        path = await check_snapshot(tmp_path / cache, snapshot)
        assert path == tmp_path / "cache" / "snapshots" / f"sha256-{snapshot.digest}"


async def test_a_torn_or_swapped_snapshot_is_refused(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path)
    weights = tmp_path / "snapshots" / snapshot.directory / WEIGHTS_FILE
    whole = weights.read_bytes()
    for content in (whole[:-1], whole + b"x", b"W" + whole[1:], b""):
        weights.write_bytes(content)
        await refuses(tmp_path, snapshot)
    weights.unlink()
    await refuses(tmp_path, snapshot)
    weights.mkdir()
    await refuses(tmp_path, snapshot)


async def test_a_symbolic_link_is_refused_as_a_file_and_as_the_directory(tmp_path: Path) -> None:
    """H1."""
    snapshot = write_snapshot(tmp_path)
    directory = tmp_path / "snapshots" / snapshot.directory
    moved = tmp_path / "elsewhere"
    shutil.move(directory, moved)
    directory.symlink_to(moved)
    await refuses(tmp_path, snapshot)
    directory.unlink()
    shutil.move(moved, directory)
    (directory / WEIGHTS_FILE).rename(tmp_path / "w")
    (directory / WEIGHTS_FILE).symlink_to(tmp_path / "w")
    await refuses(tmp_path, snapshot)


@pytest.mark.parametrize("name", ["adapter_model.bin", EMBEDDINGS_FILE, "tokenizer.json", ".hidden", "sub/x"])
async def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path, name: str) -> None:
    """H4: an engine may look for more than the manifest says."""
    snapshot = write_snapshot(tmp_path)
    extra = tmp_path / "snapshots" / snapshot.directory / name
    extra.parent.mkdir(exist_ok=True)
    extra.write_bytes(b"x")
    await refuses(tmp_path, snapshot)


async def test_a_manifest_lists_what_a_snapshot_may_hold_and_nothing_else(tmp_path: Path) -> None:
    whole = write_snapshot(tmp_path)
    config, weights = whole.manifest
    outside = SnapshotFile(name="../../x", bytes=0, sha256=hashlib.sha256(b"").hexdigest())
    (tmp_path / "x").touch()
    for snapshot in (of(), of(config), of(weights), of(config, weights, outside), of(config, config, weights)):
        target = tmp_path / "snapshots" / snapshot.directory
        if not target.exists():
            shutil.copytree(tmp_path / "snapshots" / whole.directory, target)
        await refuses(tmp_path, snapshot)


async def test_a_digest_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path)
    other = write_snapshot(tmp_path, weights=b"others")
    await refuses(tmp_path, msgspec.structs.replace(snapshot, digest=other.digest))
    for digest in ("", ".", "../x", "/etc"):
        await refuses(tmp_path, msgspec.structs.replace(snapshot, digest=digest))


def test_the_digest_does_not_depend_on_the_order_of_files() -> None:
    one = SnapshotFile(name=CONFIG_FILE, bytes=1, sha256="a")
    two = SnapshotFile(name=WEIGHTS_FILE, bytes=2, sha256="b")
    assert manifest_digest((one, two)) == manifest_digest((two, one))


async def test_resolvers_come_go_and_are_asked_in_one_order() -> None:
    resolvers = Resolvers("test", "local")
    names = [f"{number:016x}" for number in range(4)]

    def record(name: str, scheme: str = "s3", protocol: int = 1) -> Change:
        value = ResolverRecord(
            resolver=name,
            domain="local",
            subject="s",
            schemes=(scheme,),
            plugin="p",
            free_cache_bytes=1,
            protocol=protocol,
        )
        return Change(keys.resolver("test", "local", name), to_json(value))

    resolvers.apply([record(name) for name in names])
    order = [r.resolver for r in resolvers.for_key("key", "s3")]
    assert sorted(order) == names
    gone = resolvers.gone(order[0])
    resolvers.apply([Change(keys.resolver("test", "local", order[0]), None)])
    assert gone.is_set()
    assert resolvers.gone(order[0]).is_set()
    assert [r.resolver for r in resolvers.for_key("key", "s3")] == order[1:]
    resolvers.apply([record("f" * 16, "hf"), record("e" * 16, "gs", protocol=2), Change(order[1], b"{")])
    assert resolvers.schemes == {"s3", "hf"}
    assert [r.resolver for r in resolvers.for_key("key", "hf")] == ["f" * 16]
