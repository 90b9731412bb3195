"""The flow from a source to a snapshot: shared, bounded, cancellable, and clean after every way it can end."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from structlog.testing import capture_logs

from lorelay.proto.adapters import WEIGHTS_FILE, MaterializeReply, MaterializeRequest, Snapshot
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.events import EventKind
from lorelay.proto.identity import AdapterSelection, select
from lorelay.resolver import cache as cache_module, copying, materialization as module
from lorelay.resolver.cache import Cache, CorruptSnapshotError, Reference
from lorelay.resolver.copying import SourceChangedError
from lorelay.resolver.file_plugin import FilePlugin
from lorelay.resolver.materialization import Bounds, Materialization
from lorelay.resolver.plugin import (
    AdapterForbiddenError,
    AdapterNotFoundError,
    Chain,
    ResolveContext,
    ResolvedLoRA,
    SourceUnavailableError,
)
from support.adapters import BAD, BASE, config, facts, pairs, request, write_adapter

pytestmark = pytest.mark.anyio

SOURCE = "test://team/a"


class Plugin:
    """Answers from a folder; waits, fails or downloads as it is told."""

    protocol_version = 2
    schemes = frozenset({"test"})

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.revision = ""
        self.error: BaseException | None = None
        self.go = anyio.Event()
        self.go.set()
        self.asked = 0
        self.cancelled = 0
        self.contexts = list[ResolveContext]()
        self.downloads = False

    async def resolve(self, *, source_uri: str, context: ResolveContext) -> ResolvedLoRA | None:
        """Answer."""
        assert source_uri.startswith("test:")
        self.asked += 1
        self.contexts.append(context)
        path = self.folder
        if self.downloads:
            path = context.cache_root / "downloaded"
            await anyio.to_thread.run_sync(shutil.copytree, self.folder, path)
        try:
            await self.go.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return ResolvedLoRA(path, self.revision, None)


@dataclass
class Event:
    """What was emitted."""

    kind: EventKind
    fields: dict[str, Any]


class Resolver:
    """All parts, on a cache of its own."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        self.folder = write_adapter(self.base / "source")
        self.plugin = Plugin(self.folder)
        self.events = list[Event]()
        self.now = 0.0
        self.cache = Cache(self.base / "cache", max_bytes=1 << 30, wall=lambda: self.now)
        self.bounds = Bounds(max_pending_keys=4)

    def start(self, tasks: anyio.abc.TaskGroup) -> Materialization:
        """Return a new process's worth of state, over the same cache."""
        return Materialization(
            tasks,
            cache=self.cache,
            chain=Chain([self.plugin, FilePlugin([self.base])]),
            emit=self.emit,
            resolver="1" * 16,
            bounds=self.bounds,
            clock=lambda: self.now,
            wall=lambda: self.now,
        )

    def emit(self, kind: EventKind, selection: AdapterSelection, **fields: Any) -> None:
        """Keep an event."""
        assert selection.base == BASE
        self.events.append(Event(kind, fields))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Materialization]:
        """Run one, and check that it leaves no temporary file."""
        async with anyio.create_task_group() as tasks:
            yield self.start(tasks)
            await wait_until(lambda: not self.temporaries())

    def kinds(self) -> list[str]:
        """Return the kinds of all events so far."""
        return [event.kind.value for event in self.events]

    def temporaries(self) -> list[Path]:
        """Return what is in the cache's `tmp`."""
        return list((self.cache.root / "tmp").iterdir())

    def snapshots(self) -> list[str]:
        """Return the names of all snapshots."""
        return sorted(path.name for path in (self.cache.root / "snapshots").iterdir())


@pytest.fixture
def resolver(tmp_path: Path) -> Resolver:
    return Resolver(tmp_path)


async def refusal(materialization: Materialization, asked: MaterializeRequest) -> LorelayError:
    with pytest.raises(LorelayError) as caught:
        await materialization.materialize(asked)
    return caught.value


def snapshot_of(reply: MaterializeReply) -> Snapshot:
    assert reply.snapshot is not None
    return reply.snapshot


async def test_a_source_becomes_a_snapshot(resolver: Resolver) -> None:
    """Its files, its digest, its stages and its events."""
    resolver.plugin.revision = "v1"
    async with resolver.running() as materialization:
        reply = await materialization.materialize(request(SOURCE))
    snapshot = snapshot_of(reply)
    assert (snapshot.rank, snapshot.target_modules, snapshot.source_revision) == (4, ("q_proj", "v_proj"), "v1")
    assert not reply.from_cache
    assert reply.resolver == "1" * 16
    assert list(reply.stages_ms) == ["resolve", "verdict", "copy", "publish"]
    path = resolver.cache.path(snapshot)
    assert resolver.snapshots() == [path.name]
    assert (path / WEIGHTS_FILE).read_bytes() == (resolver.folder / WEIGHTS_FILE).read_bytes()
    assert resolver.kinds() == ["resolving", "materialized"]
    told = resolver.events[-1].fields
    assert (told["digest"], told["revision"], told["size_bytes"]) == (snapshot.digest, "v1", snapshot.bytes)


async def test_what_a_plugin_may_know(resolver: Resolver) -> None:
    """Row E11: a directory of the call's own, the deadline, the smaller limit."""
    async with resolver.running() as materialization:
        await materialization.materialize(request(SOURCE, max_download_bytes=123_456_789))
    context = resolver.plugin.contexts[0]
    assert context.adapter_key == select(BASE, SOURCE).key
    assert context.base_model_name == BASE
    assert context.cache_root.is_relative_to(resolver.cache.root / "tmp")
    assert context.deadline_monotonic == resolver.bounds.resolve_timeout_s
    assert context.max_download_bytes == 123_456_789
    assert context.request_id == "test"


async def test_only_an_adapters_files_are_taken(resolver: Resolver) -> None:
    """Rows A23 H4: the rest is not copied, and a pickle is nowhere in the cache."""
    for name in ("README.md", "optimizer.pt", "adapter_model.bin", "config.json"):
        (resolver.folder / name).write_bytes(b"\x80\x04.")
    (resolver.folder / "checkpoint-500").mkdir()
    async with resolver.running() as materialization:
        await materialization.materialize(request(SOURCE))
    names = {path.name for path in resolver.cache.root.rglob("*") if path.is_file()}
    assert names == {"adapter_config.json", WEIGHTS_FILE, f"{select(BASE, SOURCE).key}.json"}


async def test_fifty_callers_ask_the_plugin_once(resolver: Resolver) -> None:
    """Row D1: one resolve, one copy, fifty answers."""
    replies = list[MaterializeReply]()
    async with resolver.running() as materialization:

        async def call() -> None:
            replies.append(await materialization.materialize(request(SOURCE)))

        async with anyio.create_task_group() as callers:
            for _ in range(50):
                callers.start_soon(call)
        assert materialization.flight_count == 0
    assert resolver.plugin.asked == 1
    assert len(replies) == 50
    assert len({snapshot_of(reply).digest for reply in replies}) == 1
    assert resolver.kinds() == ["resolving", "materialized"]


async def wait_until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - conditions of files have no events
            await anyio.sleep(0.001)


async def test_the_first_caller_leaves_and_others_get_their_snapshot(resolver: Resolver) -> None:
    """Row D4: leader cancelled, three waiters."""
    resolver.plugin.go = anyio.Event()
    replies = list[MaterializeReply]()
    async with resolver.running() as materialization:
        leader = anyio.CancelScope()

        async def call(scope: anyio.CancelScope) -> None:
            with scope:
                replies.append(await materialization.materialize(request(SOURCE)))

        async with anyio.create_task_group() as callers:
            callers.start_soon(call, leader)
            await wait_until(lambda: resolver.plugin.asked == 1)
            for _ in range(3):
                callers.start_soon(call, anyio.CancelScope())
            await anyio.sleep(0.01)
            leader.cancel()
            await anyio.sleep(0.01)
            resolver.plugin.go.set()
    assert len(replies) == 3
    assert resolver.plugin.asked == 1
    assert resolver.plugin.cancelled == 0


async def test_the_last_caller_leaves_during_the_plugins_work(resolver: Resolver) -> None:
    """Rows D4 E8: the plugin is cancelled, what it downloaded is gone, the next request starts anew."""
    resolver.plugin.go = anyio.Event()
    resolver.plugin.downloads = True
    async with resolver.running() as materialization:
        async with anyio.create_task_group() as callers:
            callers.start_soon(materialization.materialize, request(SOURCE))
            await wait_until(lambda: any((path / "source" / "downloaded").exists() for path in resolver.temporaries()))
            await wait_until(lambda: resolver.plugin.asked == 1)
            callers.cancel_scope.cancel()
        await wait_until(lambda: not resolver.temporaries())
        assert resolver.plugin.cancelled == 1
        assert resolver.snapshots() == []
        resolver.plugin.go.set()
        reply = await materialization.materialize(request(SOURCE))
    assert resolver.plugin.asked == 2
    assert resolver.snapshots() == [snapshot_of(reply).directory]


async def test_the_last_caller_leaves_during_the_copy(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row D4: the copying thread notices, and its files go."""
    copied = list[int]()
    true_copy: Callable[..., Any] = copying._copy  # noqa: SLF001 - slowed down

    def slow(*args: Any) -> Any:
        progress, still_wanted = args[4], args[5]

        def check() -> None:
            copied.append(progress.copied_bytes)
            time.sleep(0.005)
            still_wanted()

        return true_copy(*args[:5], check)

    monkeypatch.setattr(copying, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(copying, "_copy", slow)
    async with resolver.running() as materialization:
        async with anyio.create_task_group() as callers:
            callers.start_soon(materialization.materialize, request(SOURCE))
            await wait_until(lambda: len(copied) > 3)
            callers.cancel_scope.cancel()
        await wait_until(lambda: not resolver.temporaries())
    assert resolver.snapshots() == []
    assert len(copied) < 50
    assert resolver.cache.free_bytes() == 1 << 30


async def test_a_repeated_request_does_not_ask_the_plugin(resolver: Resolver) -> None:
    """The resolver's provider is asked once, also by the next process."""
    async with resolver.running() as materialization:
        first = await materialization.materialize(request(SOURCE))
        second = await materialization.materialize(request(SOURCE))
    async with resolver.running() as materialization:
        third = await materialization.materialize(request(SOURCE))
    assert resolver.plugin.asked == 1
    assert [first.from_cache, second.from_cache, third.from_cache] == [False, True, True]
    assert first.snapshot == second.snapshot == third.snapshot


async def test_a_source_is_asked_again_after_a_while(resolver: Resolver) -> None:
    """Row E10: the content changed under its name; the digest tells."""
    async with resolver.running() as materialization:
        old = snapshot_of(await materialization.materialize(request(SOURCE)))
        write_adapter(resolver.folder, tensors=pairs(value=0.5))
        resolver.now += resolver.bounds.reference_ttl_s - 1
        assert snapshot_of(await materialization.materialize(request(SOURCE))) == old
        resolver.now += 2
        new = snapshot_of(await materialization.materialize(request(SOURCE)))
        assert new.digest != old.digest
    assert resolver.plugin.asked == 2
    assert resolver.snapshots() == sorted([old.directory, new.directory])


async def test_an_unchanged_revision_is_not_copied_again(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit or an ETag that is the same names the same content."""
    resolver.plugin.revision = "commit-1"
    async with resolver.running() as materialization:
        first = await materialization.materialize(request(SOURCE))
        resolver.now += resolver.bounds.reference_ttl_s + 1
        monkeypatch.delattr(module, "copy")
        second = await materialization.materialize(request(SOURCE))
        assert not second.from_cache
        third = await materialization.materialize(request(SOURCE))
        assert third.from_cache
    assert first.snapshot == second.snapshot == third.snapshot
    assert resolver.plugin.asked == 2


@pytest.mark.parametrize("spoil", ["remove", "change"])
async def test_a_damaged_snapshot_is_made_again(resolver: Resolver, spoil: str) -> None:
    """Nobody gets a snapshot that is not what its digest says."""
    async with resolver.running() as materialization:
        snapshot = snapshot_of(await materialization.materialize(request(SOURCE)))
    path = resolver.cache.path(snapshot)
    if spoil == "remove":
        shutil.rmtree(path)
    else:
        (path / WEIGHTS_FILE).chmod(0o644)
        (path / WEIGHTS_FILE).write_bytes(b"")
    async with resolver.running() as materialization:
        again = await materialization.materialize(request(SOURCE))
    assert again.snapshot == snapshot
    assert not again.from_cache
    assert (path / WEIGHTS_FILE).stat().st_size > 0


@pytest.mark.parametrize("name", ["rank above the worker's", "modules_to_save", "DoRA by tensor", "NaN", "shards"])
async def test_a_bad_adapter_is_refused_with_its_reasons(tmp_path: Path, name: str) -> None:
    """Row I5: in the error and in the event; nothing stays in the cache."""
    resolver = Resolver(tmp_path)
    shutil.rmtree(resolver.folder)
    BAD[name].write(resolver.folder)
    async with resolver.running() as materialization:
        error = await refusal(materialization, request(SOURCE))
    assert error.code is ErrorCode.INVALID_LORA_ADAPTER
    assert error.wire.status == 422
    assert any(reason.startswith(f"{BAD[name].code}: ") for reason in error.wire.reasons)
    assert error.wire.reasons[0] in error.wire.message
    assert resolver.kinds() == ["resolving", "rejected"]
    assert resolver.events[-1].fields["error"] == error.wire
    assert resolver.snapshots() == []


async def test_a_refusal_by_config_copies_no_weights(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row A1: config first; 100 GB of weights are not read to learn that the rank is too high."""
    write_adapter(resolver.folder, settings=config(r=64), tensors=pairs(rank=64))
    monkeypatch.delattr(module, "copy")
    async with resolver.running() as materialization:
        error = await refusal(materialization, request(SOURCE))
    assert error.wire.reasons == ("rank_too_high: adapter_config.json has r of 64; the worker takes at most 16.",)


async def test_one_workers_limits_do_not_decide_for_another(resolver: Resolver) -> None:
    """Rows A1 A8: refused for one worker, served to the other, remembered apart."""
    write_adapter(resolver.folder, settings=config(r=32), tensors=pairs(rank=32))
    async with resolver.running() as materialization:
        for _ in range(2):
            assert (await refusal(materialization, request(SOURCE))).code is ErrorCode.INVALID_LORA_ADAPTER
            assert snapshot_of(await materialization.materialize(request(SOURCE, max_rank=32))).rank == 32
        limited = request(SOURCE, max_rank=32, target_modules=("o_proj",))
        assert "module_not_served" in (await refusal(materialization, limited)).wire.message


PLUGIN_FAILURES = [
    (AdapterNotFoundError("secret path"), ErrorCode.LORA_NOT_FOUND, True),
    (AdapterForbiddenError("secret path"), ErrorCode.LORA_SOURCE_FORBIDDEN, True),
    (SourceUnavailableError("secret path"), ErrorCode.LORA_RESOLVER_UNAVAILABLE, False),
    (ValueError("secret path"), ErrorCode.LORA_PLUGIN_ERROR, False),
    (TimeoutError("secret path"), ErrorCode.LORA_PLUGIN_ERROR, False),
    (ExceptionGroup("g", [ValueError("secret path")]), ErrorCode.LORA_PLUGIN_ERROR, False),
]


@pytest.mark.parametrize(("error", "code", "is_remembered"), PLUGIN_FAILURES)
async def test_a_plugins_failure_has_a_code_and_keeps_its_text(
    resolver: Resolver, error: Exception, code: ErrorCode, *, is_remembered: bool
) -> None:
    """Rows D20 E13: permanent failures are remembered for a while, others are not; texts stay in the log."""
    resolver.plugin.error = error
    with capture_logs() as logs:
        async with resolver.running() as materialization:
            for _ in range(3):
                failure = await refusal(materialization, request(SOURCE))
                assert failure.code is code
                assert "secret" not in failure.wire.message
            assert resolver.plugin.asked == (1 if is_remembered else 3)
            resolver.now += resolver.bounds.negative_ttl_s + 1
            resolver.plugin.error = None
            assert snapshot_of(await materialization.materialize(request(SOURCE)))
    assert any("secret path" in str(entry) for entry in logs)
    assert resolver.kinds()[:2] == ["resolving", "failed"]


async def test_our_own_errors_may_say_more(resolver: Resolver) -> None:
    """`public` is what a client reads."""
    resolver.plugin.error = AdapterNotFoundError("in the log", public="There is no version 7.")
    async with resolver.running() as materialization:
        assert (await refusal(materialization, request(SOURCE))).wire.message == "There is no version 7."


async def test_a_slow_plugin_ends_at_the_flights_deadline(resolver: Resolver) -> None:
    """Row D19: cancelled, 504, and its files gone."""
    resolver.plugin.go = anyio.Event()
    resolver.bounds = Bounds(resolve_timeout_s=0.02)
    async with resolver.running() as materialization:
        error = await refusal(materialization, request(SOURCE))
    assert error.code is ErrorCode.RUNTIME_LORA_RESOLVE_TIMEOUT
    assert resolver.plugin.cancelled == 1
    assert resolver.kinds() == ["resolving", "failed"]


async def test_a_callers_deadline_is_its_own(resolver: Resolver) -> None:
    """An impatient caller gets 504; a patient one the snapshot."""
    resolver.plugin.go = anyio.Event()
    replies = list[MaterializeReply]()
    async with resolver.running() as materialization:

        async def patient() -> None:
            replies.append(await materialization.materialize(request(SOURCE)))

        async with anyio.create_task_group() as callers:
            callers.start_soon(patient)
            await wait_until(lambda: resolver.plugin.asked == 1)
            error = await refusal(materialization, request(SOURCE, timeout_ms=10))
            assert error.code is ErrorCode.RUNTIME_LORA_RESOLVE_TIMEOUT
            resolver.plugin.go.set()
    assert len(replies) == 1
    assert resolver.plugin.cancelled == 0


async def test_flights_are_bounded(resolver: Resolver) -> None:
    """Row H16: two resolve, two wait, the fifth is refused; who waits for a known one is not."""
    resolver.plugin.go = anyio.Event()
    async with resolver.running() as materialization, anyio.create_task_group() as callers:
        for number in range(4):
            callers.start_soon(materialization.materialize, request(f"{SOURCE}{number}"))
        await wait_until(lambda: materialization.flight_count == 4 and resolver.plugin.asked == 2)
        error = await refusal(materialization, request(f"{SOURCE}5"))
        assert error.code is ErrorCode.LORA_CAPACITY_EXCEEDED
        assert error.wire.retry_after_s
        callers.start_soon(materialization.materialize, request(f"{SOURCE}1"))
        await anyio.sleep(0.01)
        assert resolver.plugin.asked == 2
        resolver.plugin.go.set()
    assert resolver.plugin.asked == 4
    assert len(resolver.snapshots()) == 1


async def test_too_large_is_refused_before_the_copy(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row E16: measured first."""
    monkeypatch.delattr(module, "copy")
    async with resolver.running() as materialization:
        error = await refusal(materialization, request(SOURCE, max_download_bytes=1000))
    assert error.wire.reasons[0].startswith("too_large: ")


async def test_a_full_cache_is_a_capacity_error(resolver: Resolver) -> None:
    """Row E16: 429 while everything is held, an answer once something is idle."""
    resolver.cache = Cache(resolver.base / "small", max_bytes=50_000, wall=lambda: resolver.now)
    async with resolver.running() as materialization:
        first = await materialization.materialize(request(SOURCE))
        write_adapter(resolver.folder, tensors=pairs(value=0.5))
        error = await refusal(materialization, request(f"{SOURCE}2"))
        assert error.code is ErrorCode.LORA_CAPACITY_EXCEEDED
        resolver.now += cache_module.GRACE_S + 1
        second = await materialization.materialize(request(f"{SOURCE}2"))
    assert resolver.snapshots() == [snapshot_of(second).directory]
    assert first.snapshot != second.snapshot


async def test_unknown_schemes_and_wrong_keys(resolver: Resolver) -> None:
    """Decided before any flight, plugin or file."""
    async with resolver.running() as materialization:
        assert (await refusal(materialization, request("s3://b/a"))).code is ErrorCode.UNSUPPORTED_LORA_SCHEME
        forged = AdapterSelection(base=BASE, source=SOURCE, key=select(BASE, "test://other").key)
        error = await refusal(materialization, request(SOURCE, selection=forged))
        assert error.code is ErrorCode.RUNTIME_LORA_IDENTITY_MISMATCH
        error = await refusal(materialization, request(SOURCE, facts=facts(name="another")))
        assert error.code is ErrorCode.RUNTIME_LORA_IDENTITY_MISMATCH
    assert resolver.plugin.asked == 0
    assert resolver.events == []


async def test_two_sources_with_one_key(resolver: Resolver) -> None:
    """What cannot happen by chance is not answered with somebody else's adapter."""
    async with resolver.running() as materialization:
        snapshot = snapshot_of(await materialization.materialize(request(SOURCE)))
        stranger = Reference(base=BASE, source="test://other", snapshot=snapshot, resolved_at_s=0)
        resolver.cache.refer(select(BASE, SOURCE).key, stranger)
        error = await refusal(materialization, request(SOURCE))
        assert error.code is ErrorCode.RUNTIME_LORA_IDENTITY_COLLISION


async def test_file_sources_end_to_end(resolver: Resolver) -> None:
    """Rows E15 H1 H2: found, missing, forbidden, by code."""
    async with resolver.running() as materialization:
        assert snapshot_of(await materialization.materialize(request(f"file://{resolver.folder}")))
        missing = await refusal(materialization, request(f"file://{resolver.base}/missing"))
        outside = await refusal(materialization, request("file:///etc"))
    assert (missing.code, missing.wire.status) == (ErrorCode.LORA_NOT_FOUND, 404)
    assert (outside.code, outside.wire.status) == (ErrorCode.LORA_SOURCE_FORBIDDEN, 403)


async def test_a_folder_swapped_for_a_symlink_is_not_followed(resolver: Resolver) -> None:
    """Row H1: between the plugin's check and our opening."""
    secret = write_adapter(resolver.base / "elsewhere")
    plugin = FilePlugin([resolver.base])
    true_find = plugin._find  # noqa: SLF001 - the moment between check and use

    def swap(source_uri: str) -> ResolvedLoRA:
        found = true_find(source_uri)
        shutil.rmtree(resolver.folder)
        resolver.folder.symlink_to(secret)
        return found

    plugin._find = swap  # type: ignore[method-assign]  # noqa: SLF001
    resolver.plugin = plugin  # type: ignore[assignment]
    async with resolver.running() as materialization:
        error = await refusal(materialization, request(f"file://{resolver.folder}"))
    assert error.code is ErrorCode.LORA_PLUGIN_ERROR
    assert resolver.snapshots() == []


async def test_a_source_that_changes_while_it_is_copied(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of two versions is never served; the caller may try again."""
    true_measure = copying.measure

    def change(members: Any) -> dict[str, int]:
        sizes = true_measure(members)
        write_adapter(resolver.folder, tensors=pairs(layers=range(3)))
        return sizes

    monkeypatch.setattr(module, "measure", change)
    async with resolver.running() as materialization:
        error = await refusal(materialization, request(SOURCE))
        assert error.code is ErrorCode.LORA_RESOLVER_UNAVAILABLE
        monkeypatch.undo()
        assert snapshot_of(await materialization.materialize(request(SOURCE)))


async def test_a_long_copy_tells_its_progress(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches the events sees bytes grow."""
    monkeypatch.setattr(module, "PROGRESS_S", 0.001)
    monkeypatch.setattr(copying, "_CHUNK_BYTES", 4000)
    true_copy: Callable[..., Any] = copying.copy

    def slow(*args: Any) -> Any:
        still_wanted = args[4]

        def check() -> None:
            time.sleep(0.003)
            still_wanted()

        return true_copy(*args[:4], check)

    monkeypatch.setattr(module, "copy", slow)
    async with resolver.running() as materialization:
        await materialization.materialize(request(SOURCE))
    told = [event.fields["size_bytes"] for event in resolver.events if event.kind is EventKind.PROGRESS]
    assert len(told) >= 2
    assert told == sorted(told)
    assert told[-1] > told[0]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), OSError(5, "I/O"), SourceChangedError("x"), CorruptSnapshotError("x")],
)
@pytest.mark.parametrize("step", ["make_temporary", "publish", "refer", "touch"])
async def test_a_failure_between_any_two_steps(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch, error: Exception, step: str
) -> None:
    """Disk full, disk broken: a typed error, nothing torn, and the next request succeeds."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Cache, step, fail)
    async with resolver.running() as materialization:
        failure = await refusal(materialization, request(SOURCE))
        assert failure.wire.status in {429, 503}
        monkeypatch.undo()
        snapshot = snapshot_of(await materialization.materialize(request(SOURCE)))
        resolver.cache.check(snapshot)
    assert resolver.snapshots() == [snapshot.directory]


async def test_a_defect_is_not_a_hang(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody thought of: one fixed sentence, the traceback in the log."""

    def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(Cache, "publish", fail)
    async with resolver.running() as materialization:
        with capture_logs() as logs:
            error = await refusal(materialization, request(SOURCE))
    assert error.wire.message == "The resolver failed."
    assert any(entry["event"] == "resolver defect" for entry in logs)


async def test_the_resolvers_stop_is_an_answer(resolver: Resolver) -> None:
    """Callers outside the stopped group are told, and temporary files go."""
    resolver.plugin.go = anyio.Event()
    failures = list[LorelayError]()
    async with anyio.create_task_group() as callers, anyio.create_task_group() as flights:
        materialization = resolver.start(flights)

        async def call() -> None:
            failures.append(await refusal(materialization, request(SOURCE)))

        callers.start_soon(call)
        await wait_until(lambda: resolver.plugin.asked == 1)
        flights.cancel_scope.cancel()
    assert [failure.code for failure in failures] == [ErrorCode.LORA_RESOLVER_UNAVAILABLE]
    assert resolver.temporaries() == []


async def test_the_negative_cache_is_bounded(resolver: Resolver) -> None:
    """Row H16: a flood of different names costs bounded memory."""
    resolver.plugin.error = AdapterNotFoundError("no")
    async with resolver.running() as materialization:
        for number in range(20):
            await refusal(materialization, request(f"{SOURCE}{number}"))
        negative = materialization._negative  # noqa: SLF001 - its size is the point
        assert len(negative) == 20
        for number in range(3000):
            negative.remember(str(number), LorelayError(ErrorCode.LORA_NOT_FOUND, "no"))
        assert len(negative) == 1024
