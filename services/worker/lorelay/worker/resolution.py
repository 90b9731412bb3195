"""Ask a resolver of the cache domain for a snapshot, and check what it says before the engine sees it."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import anyio
import structlog

from lorelay.proto import keys
from lorelay.proto.adapters import (
    CONFIG_FILE,
    SNAPSHOT_FILES,
    WEIGHTS_FILE,
    MaterializeReply,
    MaterializeRequest,
    Snapshot,
    manifest_digest,
)
from lorelay.proto.codec import MalformedMessageError, from_json, to_json
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.records import BUS_PROTOCOL, ResolverRecord
from lorelay.proto.rendezvous import ranked
from lorelay.runtime.bus import Bus, BusError, NobodyListensError
from lorelay.runtime.discovery import Change

log = structlog.get_logger()

GRACE_S = 2.0
"""How much longer than the resolver's own deadline its reply is awaited."""


class Resolvers:
    """The live resolvers of one cache domain.  `apply` takes discovery's changes; look-ups never wait."""

    def __init__(self, namespace: str, domain: str) -> None:
        self._namespace = namespace
        self._prefix = keys.resolvers(namespace, domain)
        self._records: dict[str, ResolverRecord] = {}
        self._gone: dict[str, anyio.Event] = {}
        self.changed = anyio.Event()
        """Set, and replaced, at each change."""

    def apply(self, changes: Iterable[Change]) -> None:
        """Take resolver records that appeared, changed or went."""
        for change in changes:
            instance = change.key.removeprefix(self._prefix)
            if change.value is None:
                self._records.pop(instance, None)
                self._gone.pop(instance, anyio.Event()).set()
                continue
            try:
                record = from_json(ResolverRecord, change.value)
            except MalformedMessageError as error:
                log.warning("record ignored", key=change.key, error=str(error))
                continue
            if record.protocol == BUS_PROTOCOL:
                self._records[instance] = record
                self._gone.setdefault(instance, anyio.Event())
        self.changed.set()
        self.changed = anyio.Event()

    @property
    def schemes(self) -> frozenset[str]:
        """Schemes that some resolver takes now."""
        return frozenset(scheme for record in self._records.values() for scheme in record.schemes)

    def for_key(self, key: str, scheme: str) -> list[ResolverRecord]:
        """Return the resolvers that take `scheme`, in the order in which they should be asked for `key`."""
        able = [instance for instance, record in self._records.items() if scheme in record.schemes]
        return [self._records[instance] for instance in ranked(key, able)]

    def gone(self, instance: str) -> anyio.Event:
        """Return the event that is set when the record of `instance` disappears."""
        return self._gone.get(instance) or _already_set()


async def materialize(bus: Bus, resolvers: Resolvers, request: MaterializeRequest) -> MaterializeReply:
    """Have one resolver make the snapshot; if it dies, have the next one do it.

    Raises:
        LorelayError: The resolver's verdict, `lora_resolver_unavailable`, or `runtime_lora_resolve_timeout`.

    Cancellation: the resolver finishes or not as its other callers want; nothing is left here.
    """
    deadline = anyio.current_time() + request.timeout_ms / 1000
    scheme = request.selection.source.partition(":")[0].lower()
    for resolver in resolvers.for_key(request.selection.key, scheme):
        reply = await _ask(bus, resolvers, resolver, request, deadline)
        if reply is None:
            log.warning("resolver lost", resolver=resolver.resolver, adapter_key=request.selection.key)
            continue
        if reply.error is not None:
            raise LorelayError.from_wire(reply.error)
        return reply
    if resolvers.schemes and scheme not in resolvers.schemes:
        taken = ", ".join(sorted(resolvers.schemes))
        raise LorelayError(
            ErrorCode.UNSUPPORTED_LORA_SCHEME, f"No resolver takes {scheme}: sources (they take: {taken})."
        )
    raise LorelayError(
        ErrorCode.LORA_RESOLVER_UNAVAILABLE, f"No resolver for {scheme}: sources is reachable now; try again."
    )


async def _ask(
    bus: Bus, resolvers: Resolvers, resolver: ResolverRecord, request: MaterializeRequest, deadline: float
) -> MaterializeReply | None:
    """Return the reply of `resolver`, or None if it is gone."""
    answers: list[bytes] = []
    failures: list[BusError] = []
    left_s = max(0.0, deadline - anyio.current_time()) + GRACE_S
    with anyio.move_on_after(left_s) as timeout:
        async with anyio.create_task_group() as tasks:

            async def leave_when_gone() -> None:
                await resolvers.gone(resolver.resolver).wait()
                tasks.cancel_scope.cancel()

            async def ask() -> None:
                try:
                    answers.append(await bus.request(resolver.subject, to_json(request), timeout_s=left_s + 1))
                except BusError as error:
                    failures.append(error)
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave_when_gone)
            tasks.start_soon(ask)
    if timeout.cancelled_caught:
        raise LorelayError(
            ErrorCode.RUNTIME_LORA_RESOLVE_TIMEOUT, "The adapter's source did not deliver in time; try again."
        )
    if failures and not isinstance(failures[0], NobodyListensError):
        raise LorelayError(
            ErrorCode.BUS_UNAVAILABLE, "The message bus is not reachable now; try again.", detail=str(failures[0])
        ) from failures[0]
    if not answers:
        return None
    try:
        return from_json(MaterializeReply, answers[0])
    except MalformedMessageError as error:
        raise LorelayError(
            ErrorCode.LORA_PLUGIN_ERROR, "The resolver's answer was not readable.", detail=str(error)
        ) from error


async def check_snapshot(cache: Path, snapshot: Snapshot) -> Path:
    """Return the snapshot's directory after comparing every byte of it with its manifest.

    The worker trusts no process but the file system both see: names, sizes and digests are checked again here, so a
    snapshot that was torn, swapped or lies elsewhere never reaches the engine.

    Raises:
        LorelayError: `lora_load_failed`: it is not what the manifest says.
    """
    return await anyio.to_thread.run_sync(partial(_check_snapshot, cache, snapshot), abandon_on_cancel=True)


def _check_snapshot(cache: Path, snapshot: Snapshot) -> Path:
    path = (cache / "snapshots" / snapshot.directory).resolve()
    names = [file.name for file in snapshot.manifest]
    problem = ""
    if path.parent != (cache / "snapshots").resolve() or snapshot.digest != manifest_digest(snapshot.manifest):
        problem = "the digest is not the manifest's"
    elif not {CONFIG_FILE, WEIGHTS_FILE} <= set(names) <= set(SNAPSHOT_FILES):
        problem = f"the manifest lists {names}"
    else:
        problem = _check_listing(path, names)
        for file in snapshot.manifest:
            problem = problem or _check_file(path / file.name, file.bytes, file.sha256)
    if problem:
        raise LorelayError(
            ErrorCode.LORA_LOAD_FAILED,
            "The adapter's snapshot is not what its resolver said; try again.",
            detail=f"{path}: {problem}",
        )
    return path


def _check_listing(path: Path, names: list[str]) -> str:
    """Say what else lies there: an engine may read files that no manifest lists."""
    try:
        found = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"it cannot be listed: {error.strerror}"
    return "" if found == sorted(names) else f"it holds {found[:8]}, the manifest lists {names}"


def _check_file(path: Path, size: int, sha256: str) -> str:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return f"{path.name} is not a regular file of {size} bytes"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                return f"{path.name} has another digest"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return ""


def _already_set() -> anyio.Event:
    event = anyio.Event()
    event.set()
    return event
