"""What discovery says about this worker, and when it changes.

The instance and capability records go out before the card, so that whoever sees the card knows the rest.  A resolver
that goes away does not take its schemes back: a cold request is then answered 503 (`lora_resolver_unavailable`), which
is true, and not "unsupported", which is not.
"""

from __future__ import annotations

import datetime as dt

import anyio
import structlog

from lorelay.proto import keys, subjects
from lorelay.proto.codec import to_json
from lorelay.proto.identity import AdapterSelection, identity_digest
from lorelay.proto.records import Capability, InstanceRecord, ModelCard, ResidencyRecord
from lorelay.runtime.discovery import Registration
from lorelay.worker.engine.base import Engine
from lorelay.worker.residency import Resident
from lorelay.worker.settings import WorkerSettings

log = structlog.get_logger()

PUBLISH_S = 0.5
"""How long a load waits for its record to be in etcd."""


class Advertisement:
    """The records of one worker."""

    def __init__(self, settings: WorkerSettings, engine: Engine, registration: Registration) -> None:
        self._settings = settings
        self._engine = engine
        self._registration = registration
        self._namespace = settings.process.namespace
        self._worker = settings.process.instance
        self._started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self._schemes: frozenset[str] = frozenset()

    @property
    def schemes(self) -> frozenset[str]:
        """The schemes advertised now."""
        return self._schemes

    async def publish(self) -> None:
        """Say that this worker serves its base."""
        facts = self._engine.facts
        await self._put_instance(draining=False)
        card = ModelCard(worker=self._worker, facts=facts)
        await self._registration.put(keys.model(self._namespace, facts.name, self._worker), to_json(card))

    async def withdraw(self) -> None:
        """Say that this worker gets nothing new: the first step of a drain."""
        await self._put_instance(draining=True)

    async def offer(self, resolvable: frozenset[str]) -> None:
        """Advertise what can be loaded at request time, given the schemes that live resolvers take."""
        allowed = self._settings.runtime_lora.allowed_schemes
        schemes = self._schemes | (resolvable & allowed if allowed else resolvable)
        if not schemes or schemes == self._schemes:
            return
        self._schemes = schemes
        limits = self._engine.limits
        capability = Capability(
            worker=self._worker,
            base=self._engine.facts.name,
            schemes=tuple(sorted(schemes)),
            cache_domain=self._settings.cache_domain,
            max_rank=limits.max_rank,
            target_modules=limits.target_modules,
            slots=self._settings.runtime_lora.max_resident,
        )
        await self._registration.put(keys.capability(self._namespace, self._worker), to_json(capability))
        log.info("runtime adapters offered", schemes=sorted(schemes))

    async def publish_adapter(self, resident: Resident | None, selection: AdapterSelection) -> None:
        """Write an adapter's residency record, or remove it; if etcd is slow or away, that is done later."""
        key = keys.adapter(self._namespace, self._worker, identity_digest(selection.base, selection.source))
        with anyio.move_on_after(PUBLISH_S):
            await self._publish_adapter(key, resident, selection)

    async def _publish_adapter(self, key: str, resident: Resident | None, selection: AdapterSelection) -> None:
        if resident is None:
            await self._registration.remove(key)
            return
        record = ResidencyRecord(
            worker=self._worker,
            key=selection.key,
            base=selection.base,
            digest=resident.digest,
            name=resident.name,
            source=selection.source if resident.name is not None else "",
            state=resident.state,
            pinned=resident.pinned,
            bytes=resident.size_bytes,
        )
        await self._registration.put(key, to_json(record))

    async def _put_instance(self, *, draining: bool) -> None:
        record = InstanceRecord(
            component="worker",
            instance=self._worker,
            subject=subjects.worker_generate(self._namespace, self._worker),
            started=self._started,
            draining=draining,
        )
        await self._registration.put(keys.instance(self._namespace, "worker", self._worker), to_json(record))
