"""From a source to a verified snapshot: one flight per adapter, shared by everybody who asks for it meanwhile.

    negative cache → reference still valid?  →  that snapshot, after a short check
    else: plugin → verdict on the source → copy, hashed and limited → verdict on the copy → publish → reference

A flight belongs to a key *and* to what the verdict depends on (base facts, worker limits), so that one worker's limits
never decide for another worker.  Flights wait for one of a few places to resolve in; how many may wait is bounded too.
Whatever happens, a flight leaves nothing behind but whole snapshots: its files are in a temporary directory of its own
until one rename.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread
import msgspec
import structlog

from lorelay.proto.adapters import MaterializeReply, MaterializeRequest, Snapshot, SnapshotFile, manifest_digest
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.events import EventKind
from lorelay.proto.identity import AdapterSelection, check_source, redact, verify
from lorelay.resolver.cache import Cache, CacheFullError, CorruptSnapshotError, Reference, Reservation
from lorelay.resolver.copying import Progress, SourceChangedError, copy, measure
from lorelay.resolver.members import DirectoryError, MemberError, Members
from lorelay.resolver.negative import NegativeCache
from lorelay.resolver.plugin import (
    AdapterForbiddenError,
    AdapterNotFoundError,
    Chain,
    ResolveContext,
    ResolvedLoRA,
    SourceUnavailableError,
)
from lorelay.resolver.reasons import Reason
from lorelay.resolver.verdict import Limits, Verdict, judge
from lorelay.runtime.events import Emit
from lorelay.runtime.singleflight import FlightStoppedError, SingleFlight

T = TypeVar("T")

log = structlog.get_logger()

PROGRESS_S = 1.0
"""Between two `progress` events of one copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much, how many, how long."""

    resolve_timeout_s: float = 300.0
    """Of one flight, waiting for its place included."""
    max_concurrent_resolutions: int = 2
    max_pending_keys: int = 64
    """Flights at once, those that wait for their place included."""
    max_download_bytes: int = 10 << 30
    """Of one adapter's files."""
    reference_ttl_s: float = 300.0
    """For how long a source counts as unchanged; afterwards its plugin is asked again."""
    negative_ttl_s: float = 30.0
    """For how long a permanent failure is remembered."""


@dataclass(slots=True)
class _Stages:
    """Measures the stages of one flight."""

    clock: Callable[[], float]
    ms: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.ms[name] = round(self.ms.get(name, 0.0) + (self.clock() - start) * 1000, 3)


class Materialization:
    """Answers `MaterializeRequest`s.  Safe to call concurrently.

    Args:
        tasks: Where flights run; leaving it ends them.
        cache: Where snapshots go.
        chain: Who knows sources.
        emit: Gets the events.
        resolver: This process's instance id, for replies.
        bounds: See there.
        clock: Monotonic seconds; the plugins' deadline is on it.
        wall: Unix seconds.
    """

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        *,
        cache: Cache,
        chain: Chain,
        emit: Emit,
        resolver: str,
        bounds: Bounds,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._chain = chain
        self._emit = emit
        self._resolver = resolver
        self._bounds = bounds
        self._clock = clock
        self._wall = wall
        self._flights: SingleFlight[MaterializeReply] = SingleFlight(tasks)
        self._places = anyio.Semaphore(bounds.max_concurrent_resolutions)
        self._negative = NegativeCache(bounds.negative_ttl_s, clock)

    @property
    def flight_count(self) -> int:
        """How many flights there are now."""
        return len(self._flights)

    async def materialize(self, request: MaterializeRequest) -> MaterializeReply:
        """Return a snapshot of the adapter that `request` names, made or found.

        Raises:
            LorelayError: Why there is none; `invalid_lora_adapter` has every reason.

        Cancellation: others who wait for the same adapter still get it.  If nobody does, the work stops and its
        temporary files go.
        """
        selection = request.selection
        verify(selection, request.facts.name)
        scheme = check_source(selection.source)
        if scheme not in self._chain.schemes:
            raise LorelayError(
                ErrorCode.UNSUPPORTED_LORA_SCHEME,
                f"Sources with the scheme {scheme!r} are not served here; served:"
                f" {', '.join(sorted(self._chain.schemes))}.",
                param="model",
            )
        flight = _flight(request)
        self._negative.check(flight)
        if flight not in self._flights and len(self._flights) >= self._bounds.max_pending_keys:
            raise LorelayError(ErrorCode.LORA_CAPACITY_EXCEEDED, "Too many adapters are being resolved at once.")
        try:
            with anyio.fail_after(request.timeout_ms / 1000):
                return await self._flights.run(flight, functools.partial(self._fly, flight, request, scheme))
        except TimeoutError:
            raise _timeout() from None
        except FlightStoppedError as error:
            raise LorelayError(ErrorCode.LORA_RESOLVER_UNAVAILABLE, "The resolver is stopping.") from error

    async def _fly(self, flight: str, request: MaterializeRequest, scheme: str) -> MaterializeReply:
        """Do the work of one flight and tell how it ended."""
        stages = _Stages(self._clock)
        try:
            try:
                with anyio.fail_after(self._bounds.resolve_timeout_s):
                    return await self._work(request, scheme, stages)
            except LorelayError:
                raise
            except Exception as error:  # noqa: BLE001 - the one place where failures get their code
                _translate(error)
        except LorelayError as error:
            self._negative.remember(flight, error)
            log.warning(
                "adapter not materialized",
                key=request.selection.key,
                request_id=request.request_id,
                error=_without_secrets(str(error), request.selection.source),
            )
            rejected = error.code is ErrorCode.INVALID_LORA_ADAPTER
            self._emit(
                EventKind.REJECTED if rejected else EventKind.FAILED,
                request.selection,
                stages_ms=stages.ms,
                error=error.wire,
                request_id=request.request_id,
            )
            raise

    async def _work(self, request: MaterializeRequest, scheme: str, stages: _Stages) -> MaterializeReply:
        deadline = self._clock() + self._bounds.resolve_timeout_s
        reference = await _in_thread(self._look_up, request.selection)
        if reference is not None and 0 <= self._wall() - reference.resolved_at_s < self._bounds.reference_ttl_s:
            snapshot = await _in_thread(self._recheck, request, reference.snapshot)
            if snapshot is not None:
                return MaterializeReply(snapshot=snapshot, from_cache=True, resolver=self._resolver)
        async with self._places, self._workspace() as (directory, reservation):
            self._emit(EventKind.RESOLVING, request.selection, request_id=request.request_id)
            with stages.measure("resolve"):
                resolved = await self._resolve(request, scheme, directory, deadline)
            snapshot = None
            if reference is not None and resolved.source_revision == reference.snapshot.source_revision != "":
                snapshot = await _in_thread(self._recheck, request, reference.snapshot)
            if snapshot is None:
                snapshot = await self._make(request, resolved, directory, reservation, stages)
            with stages.measure("publish"):
                await _in_thread(self._refer, request.selection, snapshot)
        self._emit(
            EventKind.MATERIALIZED,
            request.selection,
            digest=snapshot.digest,
            revision=snapshot.source_revision,
            size_bytes=snapshot.bytes,
            stages_ms=stages.ms,
            request_id=request.request_id,
        )
        return MaterializeReply(snapshot=snapshot, resolver=self._resolver, stages_ms=stages.ms)

    @contextlib.asynccontextmanager
    async def _workspace(self) -> AsyncIterator[tuple[Path, Reservation]]:
        """Yield a private directory and an empty reservation; both go, whatever happens."""
        directory = await _in_thread(self._cache.make_temporary)
        reservation = self._cache.reservation()
        try:
            yield directory, reservation
        finally:
            with anyio.CancelScope(shield=True):
                await _in_thread(self._cache.discard, directory)
                await _in_thread(reservation.release)

    def _look_up(self, selection: AdapterSelection) -> Reference | None:
        reference = self._cache.look_up(selection.key)
        if reference is not None and (reference.base, reference.source) != (selection.base, selection.source):
            raise LorelayError(
                ErrorCode.RUNTIME_LORA_IDENTITY_COLLISION, "Two adapters have one key.", detail=selection.key
            )
        return reference

    def _recheck(self, request: MaterializeRequest, snapshot: Snapshot) -> Snapshot | None:
        """Return `snapshot` if it is whole and still right for this base and worker; None if it is not whole."""
        try:
            self._cache.check(snapshot)
            verdict = judge(self._cache.path(snapshot), request.facts, _limits(request), check_numbers=False)
        except (CorruptSnapshotError, DirectoryError) as error:
            log.warning("snapshot not usable", digest=snapshot.digest, error=str(error))
            return None
        _accept(verdict)
        self._cache.touch(snapshot)
        return snapshot

    async def _resolve(
        self, request: MaterializeRequest, scheme: str, directory: Path, deadline: float
    ) -> ResolvedLoRA:
        area = directory / "source"
        await _in_thread(area.mkdir)
        context = ResolveContext(
            adapter_key=request.selection.key,
            base_model_name=request.selection.base,
            cache_root=area,
            deadline_monotonic=deadline,
            max_download_bytes=self._max_bytes(request),
            request_id=request.request_id,
        )
        try:
            return await self._chain.resolve(request.selection.source, scheme, context)
        except AdapterNotFoundError as error:
            message = error.public or "The source has no such adapter."
            raise LorelayError(ErrorCode.LORA_NOT_FOUND, message, detail=str(error), param="model") from error
        except AdapterForbiddenError as error:
            message = error.public or "This deployment does not allow the source."
            raise LorelayError(ErrorCode.LORA_SOURCE_FORBIDDEN, message, detail=str(error), param="model") from error
        except SourceUnavailableError as error:
            message = error.public or "The adapter's source cannot be reached now."
            raise LorelayError(ErrorCode.LORA_RESOLVER_UNAVAILABLE, message, detail=str(error)) from error
        except Exception as error:
            log.exception("plugin failed", key=request.selection.key)
            raise _plugin_error(repr(error)) from error

    async def _make(
        self,
        request: MaterializeRequest,
        resolved: ResolvedLoRA,
        directory: Path,
        reservation: Reservation,
        stages: _Stages,
    ) -> Snapshot:
        """Make and publish the snapshot of what a plugin resolved."""
        source, target = resolved.local_path, directory / "snapshot"
        with stages.measure("verdict"):
            await _in_thread(self._judge_source, source, request, directory)
        with stages.measure("copy"):
            manifest = await self._copy(request, source, directory, reservation)
        with stages.measure("verdict"):
            verdict = await _in_thread(self._judge_copy, target, request)
        snapshot = Snapshot(
            digest=manifest_digest(manifest),
            manifest=manifest,
            source_revision=resolved.source_revision,
            rank=verdict.rank,
            target_modules=verdict.target_modules,
        )
        with stages.measure("publish"):
            await _in_thread(self._cache.publish, target, snapshot)
        return snapshot

    @staticmethod
    def _judge_source(source: Path, request: MaterializeRequest, trusted_root: Path) -> None:
        _accept(
            judge(
                source,
                request.facts,
                _limits(request),
                is_source=True,
                trusted_root=trusted_root,
                check_numbers=False,
                still_wanted=anyio.from_thread.check_cancelled,
            )
        )

    @staticmethod
    def _judge_copy(target: Path, request: MaterializeRequest) -> Verdict:
        verdict = judge(target, request.facts, _limits(request), still_wanted=anyio.from_thread.check_cancelled)
        _accept(verdict)
        return verdict

    async def _copy(
        self, request: MaterializeRequest, source: Path, directory: Path, reservation: Reservation
    ) -> tuple[SnapshotFile, ...]:
        """Copy into `directory/snapshot`.  Symlinks may lead to what the plugin itself put below `directory`."""
        progress = Progress()

        def work() -> tuple[SnapshotFile, ...]:
            with Members(source, trusted_root=directory) as members:
                sizes = measure(members)
                total, limit = sum(sizes.values()), self._max_bytes(request)
                if total > limit:
                    _refuse((Reason("too_large", f"The files have {total} bytes; expected at most {limit}."),))
                reservation.hold(total)
                target = directory / "snapshot"
                target.mkdir(mode=0o700)
                return copy(members, sizes, target, progress, anyio.from_thread.check_cancelled)

        async def tell() -> None:
            while True:
                await anyio.sleep(PROGRESS_S)
                self._emit(
                    EventKind.PROGRESS,
                    request.selection,
                    size_bytes=progress.copied_bytes,
                    request_id=request.request_id,
                )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tell)
            manifest = await _in_thread(work)
            tasks.cancel_scope.cancel()
        return manifest

    def _refer(self, selection: AdapterSelection, snapshot: Snapshot) -> None:
        reference = Reference(
            base=selection.base, source=selection.source, snapshot=snapshot, resolved_at_s=self._wall()
        )
        self._cache.refer(selection.key, reference)

    def _max_bytes(self, request: MaterializeRequest) -> int:
        return min(request.max_download_bytes, self._bounds.max_download_bytes)


def _without_secrets(text: str, source: str) -> str:
    """Return `text` with the source, whole or as the path in it, as it may be logged."""
    rest, shown = (each.partition(":")[2].removeprefix("//") for each in (source, redact(source)))
    return text.replace(rest, shown) if rest else text


def _flight(request: MaterializeRequest) -> str:
    depends_on = (request.facts, request.max_rank, request.target_modules, request.max_download_bytes)
    return f"{request.selection.key}-{hashlib.sha256(msgspec.json.encode(depends_on)).hexdigest()[:16]}"


def _limits(request: MaterializeRequest) -> Limits:
    return Limits(max_rank=request.max_rank, target_modules=request.target_modules)


def _accept(verdict: Verdict) -> None:
    if not verdict.accepted:
        _refuse(verdict.reasons)


def _refuse(reasons: tuple[Reason, ...]) -> NoReturn:
    raise LorelayError(
        ErrorCode.INVALID_LORA_ADAPTER,
        f"The adapter was refused: {reasons[0]}",
        reasons=tuple(str(reason) for reason in reasons),
        param="model",
    )


def _timeout() -> LorelayError:
    return LorelayError(ErrorCode.RUNTIME_LORA_RESOLVE_TIMEOUT, "The adapter was not resolved in time.")


def _plugin_error(detail: str) -> LorelayError:
    return LorelayError(ErrorCode.LORA_PLUGIN_ERROR, "A resolver plugin failed.", detail=detail)


def _translate(error: Exception) -> NoReturn:
    """Raise the failure that `error` means."""
    leaf = error
    while isinstance(leaf, ExceptionGroup) and len(leaf.exceptions) == 1:  # from a task group
        leaf = leaf.exceptions[0]
    match leaf:
        case LorelayError():
            raise leaf
        case TimeoutError():
            raise _timeout() from error
        case MemberError():
            _refuse((leaf.reason,))
        case DirectoryError():
            raise _plugin_error(str(leaf)) from error
        case CacheFullError() | OSError(errno=errno.ENOSPC | errno.EDQUOT):
            raise LorelayError(
                ErrorCode.LORA_CAPACITY_EXCEEDED, "The adapter cache is full.", detail=str(leaf)
            ) from error
        case SourceChangedError() | OSError() | CorruptSnapshotError():
            raise LorelayError(
                ErrorCode.LORA_RESOLVER_UNAVAILABLE,
                "The adapter changed or became unreadable while it was copied.",
                detail=repr(leaf),
            ) from error
        case _:
            log.error("resolver defect", exc_info=error)
            raise LorelayError(ErrorCode.INTERNAL_ERROR, "The resolver failed.", detail=repr(leaf)) from error


async def _in_thread(work: Callable[..., T], *args: object) -> T:
    """Run blocking `work` in a thread.  Cancellation: waits for `work`, which looks out for it where it is long."""
    return await anyio.to_thread.run_sync(work, *args)
