"""The worker as a process: `lorelay worker` runs `serve`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from socket import socket

import anyio
import anyio.abc
import structlog

from lorelay.proto import keys, subjects
from lorelay.proto.adapters import MaterializeRequest
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.runtime import http, telemetry
from lorelay.runtime.bus import Bus
from lorelay.runtime.discovery import Directory, Registration
from lorelay.runtime.events import EventLog
from lorelay.runtime.process import StartError, Stop
from lorelay.runtime.store import EtcdStore
from lorelay.worker.advertisement import Advertisement
from lorelay.worker.engine.base import Engine, EngineDeadError, EngineLimits
from lorelay.worker.engine.sim import start_sim
from lorelay.worker.engine.vllm_engine import EngineStartError, VllmSettings, start_vllm
from lorelay.worker.generation import Generation
from lorelay.worker.management import Management
from lorelay.worker.outbox import Outbox
from lorelay.worker.residency import Limits, Materialized, Residency, Want
from lorelay.worker.resolution import Resolvers, check_snapshot, materialize
from lorelay.worker.settings import EngineSettings, WorkerSettings

log = structlog.get_logger()

HEALTH_INTERVAL_S = 2.0
FIRST_RESOLVER_S = 5.0
"""How long a starting worker waits for a resolver before it shows its card without runtime adapters."""
WAITING_REQUESTS = 4
"""Requests that may be here, as a multiple of what the engine runs at once."""


async def serve(environ: Mapping[str, str], stop: Stop) -> None:
    """Run a worker until `stop`, or until its engine dies.

    Raises:
        SettingsError: A variable is wrong.
        StartError: The engine did not start, or has died.
        AddressError: The management address cannot be used.
        BusUnavailableError: NATS did not answer within the connect timeout.
    """
    settings = WorkerSettings.from_environ(environ)
    process = settings.process
    telemetry.configure("worker", process.instance, settings.exporter)
    sock = http.bind(settings.system_host, settings.system_port)
    async with (
        Bus(settings.bus, f"lorelay-worker-{process.instance}") as bus,
        EtcdStore(settings.etcd) as store,
        _engine(settings.engine) as engine,
        anyio.create_task_group() as tasks,
    ):
        await _Worker(settings, bus, store, engine, tasks).serve(sock, stop)
        tasks.cancel_scope.cancel()


class _Worker:
    """The parts of one worker, put together; the only place where they meet."""

    def __init__(
        self, settings: WorkerSettings, bus: Bus, store: EtcdStore, engine: Engine, tasks: anyio.abc.TaskGroup
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._engine = engine
        self._tasks = tasks
        process, runtime_lora = settings.process, settings.runtime_lora
        self._registration = Registration(store, ttl_s=process.lease_ttl_s)
        self._events = EventLog(bus, process.namespace, "worker", process.instance)
        self._resolvers = Resolvers(process.namespace, settings.cache_domain)
        resolvers = keys.resolvers(process.namespace, settings.cache_domain)
        self._directory = Directory(store, resolvers, self._resolvers.apply)
        self._advertisement = Advertisement(settings, engine, self._registration)
        self._engine_dead = anyio.Event()
        self._residency = Residency(
            engine,
            Limits(
                max_resident=runtime_lora.max_resident,
                max_pending_keys=runtime_lora.max_pending_keys,
                max_pending_admissions=runtime_lora.max_pending_admissions,
                admission_timeout_s=runtime_lora.admission_timeout_s,
                eviction=runtime_lora.eviction,
            ),
            tasks,
            materialize=self._materialize,
            publish=self._advertisement.publish_adapter,
            emit=self._events.emit,
            on_engine_dead=self._engine_dead.set,
        )
        self._outbox = Outbox(bus, process.namespace, process.instance)
        self._generation = Generation(
            engine,
            self._residency,
            self._outbox,
            tasks,
            is_runtime_lora=lambda: bool(self._advertisement.schemes),
            max_requests=WAITING_REQUESTS * engine.limits.max_concurrent_requests,
        )
        self._is_ready = False
        self._management = Management(
            engine.facts,
            token=settings.system_token,
            load_timeout_s=runtime_lora.resolve_timeout_s,
            is_ready=lambda: self._is_ready,
        )

    async def serve(self, sock: socket, stop: Stop) -> None:
        """Register, serve, drain."""
        settings, process = self._settings, self._settings.process
        tasks = self._tasks
        async with self._registration, http.serving(self._management, sock, grace_s=1.0):
            for job in (self._registration.run, self._events.run, self._outbox.run, self._watch_engine):
                tasks.start_soon(job)
            await self._bus.subscribe(
                subjects.worker_generate(process.namespace, process.instance), self._generation.on_generate
            )
            await self._bus.subscribe(
                subjects.worker_control(process.namespace, process.instance), self._generation.on_control
            )
            if settings.engine.is_lora_enabled:
                tasks.start_soon(self._directory.run)  # an operator's load needs a resolver, too
                if settings.runtime_lora.is_enabled:
                    await self._offer_adapters()
            await self._advertisement.publish()
            if settings.engine.is_lora_enabled:
                self._management.open(self._residency)
            self._is_ready = True
            facts = self._engine.facts
            log.info("serving", model=facts.name, engine=facts.engine, engine_version=facts.engine_version)
            await self._until_stopped(stop)
            self._is_ready = False
            await self._advertisement.withdraw()
            await self._generation.drain(process.drain_s)
            await self._outbox.flush()
            await self._events.flush()
        if self._engine_dead.is_set():
            raise StartError("the engine has died; see the log")

    async def _offer_adapters(self) -> None:
        """Offer what the domain's resolvers take; wait a moment for the first, so that the card does not come first."""
        offered = anyio.Event()

        async def follow() -> None:
            while True:
                changed = self._resolvers.changed
                await self._advertisement.offer(self._resolvers.schemes)
                if self._advertisement.schemes:
                    offered.set()
                await changed.wait()

        self._tasks.start_soon(follow)
        with anyio.move_on_after(FIRST_RESOLVER_S) as wait:
            await offered.wait()
        if wait.cancelled_caught:
            log.warning("no resolver yet", cache_domain=self._settings.cache_domain)

    async def _until_stopped(self, stop: Stop) -> None:
        async with anyio.create_task_group() as tasks:

            async def stop_when_dead() -> None:
                await self._engine_dead.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop_when_dead)
            await stop.wait()
            tasks.cancel_scope.cancel()

    async def _watch_engine(self) -> None:
        while not self._engine_dead.is_set():
            await anyio.sleep(HEALTH_INTERVAL_S)
            try:
                await self._engine.check_health()
            except EngineDeadError as error:
                log.error("engine dead", error=str(error))  # noqa: TRY400 - its traceback says nothing more
                self._engine_dead.set()
        self._generation.fail_all()

    async def _materialize(self, want: Want) -> Materialized:
        runtime_lora, limits = self._settings.runtime_lora, self._engine.limits
        scheme = want.selection.source.partition(":")[0].lower()
        if runtime_lora.allowed_schemes and scheme not in runtime_lora.allowed_schemes:
            raise LorelayError(
                ErrorCode.UNSUPPORTED_LORA_SCHEME, f"This worker's operator does not allow {scheme}: sources."
            )
        left_s = min(runtime_lora.resolve_timeout_s, want.deadline - anyio.current_time())
        request = MaterializeRequest(
            selection=want.selection,
            facts=self._engine.facts,
            max_rank=limits.max_rank,
            target_modules=limits.target_modules,
            max_download_bytes=runtime_lora.max_download_bytes,
            timeout_ms=max(1, round(left_s * 1000)),
            request_id=want.request_id,
            traceparent=want.traceparent,
        )
        reply = await materialize(self._bus, self._resolvers, request)
        assert reply.snapshot is not None  # noqa: S101 - `materialize` raises otherwise
        return Materialized(await check_snapshot(self._settings.cache, reply.snapshot), reply)


@asynccontextmanager
async def _engine(settings: EngineSettings) -> AsyncIterator[Engine]:
    """Start the engine that the settings name.

    Raises:
        StartError: It did not start; the line says why.
    """
    log.info("engine starting", engine=settings.kind, model=settings.model)
    async with AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(_starting(settings))
        except (EngineStartError, ValueError) as error:
            raise StartError(f"the engine did not start: {error}") from error
        yield engine


def _starting(settings: EngineSettings) -> AbstractAsyncContextManager[Engine]:
    slots = settings.max_adapters if settings.is_lora_enabled else 0
    if settings.kind == "sim":
        limits = EngineLimits(
            max_adapters=slots,
            max_adapters_per_batch=settings.max_adapters_per_batch,
            max_rank=settings.max_rank,
            max_concurrent_requests=settings.max_requests,
        )
        return start_sim(Path(settings.model), settings.names, limits)
    vllm = VllmSettings(
        model=settings.model,
        served_names=settings.names,
        max_model_len=settings.max_context_tokens or None,
        max_num_seqs=settings.max_requests,
        max_loras=settings.max_adapters_per_batch if slots else 0,
        max_cpu_loras=slots or None,
        max_lora_rank=settings.max_rank,
        arguments=settings.arguments,
    )
    return start_vllm(vllm, lambda step: log.info("engine start", step=step))
