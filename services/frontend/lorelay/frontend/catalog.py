"""Which models exist now, and what a model id means: an index over the records that discovery shows.

The catalog only reads.  `apply` takes the changes of one watch in order; everything else is a pure look-up over what
they left, so a request sees one consistent fleet.  When etcd is away the last fleet stays in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from lorelay.proto import keys
from lorelay.proto.codec import MalformedMessageError, from_json
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.identity import (
    KEY_PREFIX,
    AdapterSelection,
    check_model_id,
    check_source,
    select,
    split_model_id,
)
from lorelay.proto.records import (
    BUS_PROTOCOL,
    RUNTIME_LORA_PROTOCOL,
    AdapterState,
    Capability,
    InstanceRecord,
    ModelCard,
    ResidencyRecord,
)
from lorelay.runtime.discovery import Change

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(slots=True)
class Worker:
    """What discovery says about one worker; a field is None while its record is not there."""

    instance: InstanceRecord | None = None
    card: ModelCard | None = None
    capability: Capability | None = None
    adapters: dict[str, ResidencyRecord] = field(default_factory=dict)
    """By adapter key."""

    @property
    def serves(self) -> bool:
        """True if it may get requests."""
        return (
            self.card is not None
            and self.instance is not None
            and not self.instance.draining
            and self.instance.protocol == BUS_PROTOCOL
        )

    def takes(self, base: str) -> bool:
        """True if it may get requests for adapters on `base`."""
        capability = self.capability
        return (
            self.serves
            and capability is not None
            and capability.base == base
            and RUNTIME_LORA_PROTOCOL in capability.versions
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What a model id means now: a base, perhaps an adapter, and who can serve it."""

    base: str
    """Canonical name."""
    selection: AdapterSelection | None
    workers: tuple[str, ...]
    """Ids of the workers that may serve it; never empty."""
    holders: frozenset[str] = frozenset()
    """Those of them on which the adapter is resident."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of `/v1/models`."""

    id: str
    parent: str | None
    """The base of a published adapter."""
    root: str
    """The canonical name behind an alias; else the id."""


class Catalog:
    """The fleet as this frontend sees it."""

    def __init__(self, namespace: str, on_gone: Callable[[str], None]) -> None:
        """Make an empty catalog.

        Args:
            namespace: Whose records these are.
            on_gone: Called with a worker's id when its process has gone: its instance record disappeared, or
                says of a later start.
        """
        self._namespace = namespace
        self._on_gone = on_gone
        self._workers: dict[str, Worker] = {}
        self._bases: dict[str, set[str]] = {}
        """Canonical name -> workers with its card."""
        self._aliases: dict[str, str] = {}
        self._published: dict[str, set[str]] = {}
        """Published name -> workers that hold it."""

    def apply(self, changes: Iterable[Change]) -> None:
        """Take records that appeared, changed or went (value None)."""
        before: dict[str, InstanceRecord | None] = {}
        stale = False
        for change in changes:
            match keys.parse(self._namespace, change.key):
                case ("instances", "worker", worker):
                    before.setdefault(worker, self._worker(worker).instance)
                    self._worker(worker).instance = self._read(InstanceRecord, change)
                case ("models", _, worker):
                    self._worker(worker).card = self._read(ModelCard, change)
                case ("capabilities", worker):
                    self._worker(worker).capability = self._read(Capability, change)
                case ("adapters", worker, _):
                    if not self._apply_residency(worker, change):
                        continue  # not published: no name changed
                case _:
                    continue
            stale = True
        if stale:
            self._reindex()
        for worker, record in before.items():
            now = self._workers.get(worker, Worker()).instance
            if record is not None and (now is None or now.started != record.started):
                self._on_gone(worker)

    def worker(self, worker: str) -> Worker | None:
        """Return what is known of `worker`."""
        return self._workers.get(worker)

    @property
    def routes(self) -> frozenset[str]:
        """Paths that some serving worker answers."""
        return frozenset(
            route
            for worker in self._workers.values()
            if worker.serves and worker.card
            for route in worker.card.facts.routes
        )

    @property
    def bases(self) -> tuple[str, ...]:
        """Canonical names of the bases served now, sorted."""
        return tuple(sorted(self._bases))

    def listed(self) -> list[Listed]:
        """Return the lines of `/v1/models`: bases, their aliases, published adapters; sorted by id."""
        lines = {base: Listed(base, None, base) for base in self._bases}
        for alias, base in self._aliases.items():
            lines.setdefault(alias, Listed(alias, None, base))
        for name, workers in self._published.items():
            record = self._record(name, workers)
            lines.setdefault(name, Listed(name, record.base, name))
        return [lines[name] for name in sorted(lines)]

    def target(self, model: str) -> Target:
        """Return what `model`, as a client sent it, means now (design: an exact known name wins, always).

        Raises:
            LorelayError: `invalid_lora_model_id`, `model_not_found`, `runtime_lora_base_model_required`,
                `runtime_lora_unsupported`, `unsupported_lora_scheme` or `no_worker_available`.
        """
        check_model_id(model)
        if (base := self._base(model)) is not None:
            return Target(base, None, tuple(sorted(self._bases[base])))
        if (workers := self._published.get(model)) is not None:
            return self._published_target(model, workers)
        parts = split_model_id(model)
        if parts is None:
            raise self._not_found(model)
        named, source = parts
        if named is None:
            return self._adapter_target(self._only_base(), source)
        base = self._base(named)
        if base is None:
            raise self._not_found(named)
        return self._adapter_target(base, source)

    def _adapter_target(self, base: str, source: str) -> Target:
        scheme = check_source(source)
        able = {worker for worker in self._bases[base] if self._workers[worker].takes(base)}
        if not able:
            raise LorelayError(
                ErrorCode.RUNTIME_LORA_UNSUPPORTED,
                f"The model {base!r} is served, but no worker of it loads adapters at request time.",
                param="model",
            )
        workers = {w for w in able if scheme in self._schemes(w)}
        if not workers:
            offered = sorted({s for w in able for s in self._schemes(w)})
            raise LorelayError(
                ErrorCode.UNSUPPORTED_LORA_SCHEME,
                f"No worker of {base!r} takes adapters from {scheme}: sources"
                f" (it takes: {', '.join(offered) or 'none now'}).",
                param="model",
            )
        selection = select(base, source)
        holders = frozenset(w for w in workers if self._holds(w, selection.key))
        return Target(base, selection, tuple(sorted(workers)), holders)

    def _published_target(self, name: str, workers: set[str]) -> Target:
        record = self._record(name, workers)
        selection = select(record.base, record.source)
        holders = tuple(sorted(w for w in workers if self._holds(w, selection.key)))
        return Target(record.base, selection, holders, frozenset(holders))

    def _record(self, name: str, workers: set[str]) -> ResidencyRecord:
        """Return the record of the published adapter `name` (of the lowest worker id, should two differ)."""
        return next(r for r in self._workers[min(workers)].adapters.values() if r.name == name)

    def _schemes(self, worker: str) -> tuple[str, ...]:
        capability = self._workers[worker].capability
        return capability.schemes if capability else ()

    def _holds(self, worker: str, key: str) -> bool:
        record = self._workers[worker].adapters.get(key)
        return record is not None and record.state is AdapterState.LOADED

    def _base(self, name: str) -> str | None:
        return name if name in self._bases else self._aliases.get(name)

    def _only_base(self) -> str:
        if len(self._bases) == 1:
            return next(iter(self._bases))
        if not self._bases:
            raise LorelayError(ErrorCode.NO_WORKER_AVAILABLE, "No worker serves any model now; try again.")
        raise LorelayError(
            ErrorCode.RUNTIME_LORA_BASE_MODEL_REQUIRED,
            f"{len(self._bases)} base models are served: name one, as BASE|SOURCE"
            f" ({', '.join(self.bases[:5])}{', …' if len(self._bases) > 5 else ''}).",  # noqa: PLR2004 - a sample
            param="model",
        )

    def _not_found(self, name: str) -> LorelayError:
        if not self._bases:
            return LorelayError(ErrorCode.NO_WORKER_AVAILABLE, "No worker serves any model now; try again.")
        return LorelayError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The model {name!r} does not exist; GET /v1/models lists those that do.",
            param="model",
        )

    def _worker(self, worker: str) -> Worker:
        return self._workers.setdefault(worker, Worker())

    def _apply_residency(self, worker: str, change: Change) -> bool:
        """Take one residency record; return True if a published name came or went."""
        adapters = self._worker(worker).adapters
        # A key is made of the first half of the identity digest that stands in the record's etcd key.
        key = KEY_PREFIX + change.key.rpartition("/")[2][:32]
        old = adapters.pop(key, None)
        record = self._read(ResidencyRecord, change)
        if record is not None:
            adapters[record.key] = record
        return any(r is not None and r.name is not None for r in (old, record))

    def _read(self, kind: type[T], change: Change) -> T | None:
        if change.value is None:
            return None
        try:
            return from_json(kind, change.value)
        except MalformedMessageError as error:
            log.warning("record ignored", key=change.key, error=str(error))
            return None

    def _reindex(self) -> None:
        """Build the name indexes anew: a change of the fleet is rare, a look-up is not."""
        self._workers = {i: w for i, w in self._workers.items() if w.instance or w.card or w.capability or w.adapters}
        bases: dict[str, set[str]] = {}
        aliases: dict[str, str] = {}
        published: dict[str, set[str]] = {}
        for instance, worker in self._workers.items():
            if not worker.serves or worker.card is None:
                continue
            facts = worker.card.facts
            bases.setdefault(facts.name, set()).add(instance)
            for alias in facts.aliases:
                aliases[alias] = min(facts.name, aliases.get(alias, facts.name))  # the same in every frontend
            for record in worker.adapters.values():
                if record.name is not None and record.state is AdapterState.LOADED:
                    published.setdefault(record.name, set()).add(instance)
        self._bases, self._aliases, self._published = bases, aliases, published
