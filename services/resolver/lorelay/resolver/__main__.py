"""The resolver as a process: `lorelay resolver` runs `serve`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import anyio
import anyio.to_thread
import structlog

from lorelay.proto import keys
from lorelay.resolver.cache import LEFTOVER_S, Cache
from lorelay.resolver.file_plugin import FilePlugin
from lorelay.resolver.materialization import Bounds, Materialization
from lorelay.resolver.plugin import Chain, DownloaderPlugin, PluginConfigurationError, load_plugin
from lorelay.resolver.service import Advertisement, Holdings, Service, tell_pruned
from lorelay.resolver.settings import ResolverSettings
from lorelay.runtime import telemetry
from lorelay.runtime.bus import Bus
from lorelay.runtime.discovery import Directory, Registration
from lorelay.runtime.events import EventLog
from lorelay.runtime.process import StartError, Stop
from lorelay.runtime.store import EtcdStore

log = structlog.get_logger()

FILE_PLUGIN = "lorelay.resolver.file_plugin:FilePlugin"
"""Needs roots, so it is made here and not by `load_plugin`."""
_LAST_REPLIES_S = 2.0
"""For the answers to requests whose flights were stopped at the end of the drain."""


async def serve(environ: Mapping[str, str], stop: Stop) -> None:
    """Run a resolver until `stop`.

    Raises:
        SettingsError: A variable is wrong.
        StartError: A plugin or the cache cannot be used.
        BusUnavailableError: NATS did not answer within the connect timeout.
    """
    settings = ResolverSettings.from_environ(environ)
    process = settings.process
    telemetry.configure("resolver", process.instance, settings.exporter)
    try:
        chain = build_chain(settings)
    except PluginConfigurationError as error:
        raise StartError(str(error)) from error
    async with (
        Bus(settings.bus, f"lorelay-resolver-{process.instance}") as bus,
        EtcdStore(settings.etcd) as store,
        anyio.create_task_group() as tasks,
    ):
        await _serve(settings, chain, bus, store, tasks, stop)
        tasks.cancel_scope.cancel()


async def _serve(  # noqa: PLR0917 - the composition root
    settings: ResolverSettings,
    chain: Chain,
    bus: Bus,
    store: EtcdStore,
    tasks: anyio.abc.TaskGroup,
    stop: Stop,
) -> None:
    process = settings.process
    events = EventLog(bus, process.namespace, "resolver", process.instance)
    holdings = Holdings()
    residency = Directory(store, f"{keys.root(process.namespace)}adapters/", holdings.apply)
    cache = await _open_cache(settings, holdings, events)

    async def know_holdings() -> None:
        await residency.ready.wait()
        holdings.known()

    async with Registration(store, ttl_s=process.lease_ttl_s) as registration:
        for job in (events.run, residency.run, know_holdings, registration.run):
            tasks.start_soon(job)
        async with anyio.create_task_group() as flights:
            materialization = Materialization(
                flights,
                cache=cache,
                chain=chain,
                emit=events.emit,
                resolver=process.instance,
                bounds=Bounds(
                    resolve_timeout_s=settings.resolve_timeout_s,
                    max_concurrent_resolutions=settings.max_concurrent_resolutions,
                    max_pending_keys=settings.max_pending_keys,
                    max_download_bytes=settings.max_download_bytes,
                    reference_ttl_s=settings.reference_ttl_s,
                    negative_ttl_s=settings.negative_ttl_s,
                ),
            )
            service = Service(bus, materialization, tasks, process.instance)
            advertisement = Advertisement(settings, chain, cache, registration)
            await bus.subscribe(advertisement.subject, service.on_message)
            await advertisement.publish()
            tasks.start_soon(advertisement.run)
            log.info("serving", schemes=sorted(chain.schemes), plugin=chain.name, cache=str(cache.root))
            await stop.wait()
            # New requests find nobody listening and go to another resolver at once; the record stays until those
            # that are here are answered, because its disappearance tells their workers to ask elsewhere.
            await advertisement.publish(draining=True)
            await service.drain(process.drain_s)
            flights.cancel_scope.cancel()
        await service.drain(_LAST_REPLIES_S)
    await events.flush()


def build_chain(settings: ResolverSettings) -> Chain:
    """Return the plugins that the settings name; `file://` is the last one, unless it is named elsewhere.

    Raises:
        PluginConfigurationError: One line that says what is wrong.
    """
    specs = list(settings.plugins)
    if settings.file_roots and FILE_PLUGIN not in specs:
        specs.append(FILE_PLUGIN)
    plugins: list[DownloaderPlugin] = [
        FilePlugin(settings.file_roots) if spec == FILE_PLUGIN else load_plugin(spec) for spec in specs
    ]
    return Chain(plugins, settings.allowed_schemes)


async def _open_cache(settings: ResolverSettings, holdings: Holdings, events: EventLog) -> Cache:
    make = functools.partial(
        Cache,
        settings.cache,
        max_bytes=settings.max_cache_bytes,
        in_use=holdings.digests,
        on_pruned=functools.partial(tell_pruned, events),
        leftover_s=max(LEFTOVER_S, 2 * settings.resolve_timeout_s),
    )
    try:
        return await anyio.to_thread.run_sync(make)
    except OSError as error:
        raise StartError(f"DYN_LORA_PATH={str(settings.cache)!r}: {error.strerror or error}") from error
