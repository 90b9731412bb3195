"""The frontend as a process: `lorelay frontend` runs `serve`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

import anyio
import structlog

from lorelay.frontend.app import App
from lorelay.frontend.catalog import Catalog
from lorelay.frontend.dispatch import Dispatcher
from lorelay.frontend.settings import FrontendSettings
from lorelay.proto import keys
from lorelay.proto.codec import to_json
from lorelay.proto.records import InstanceRecord
from lorelay.runtime import http, telemetry
from lorelay.runtime.bus import Bus
from lorelay.runtime.discovery import Directory, Registration
from lorelay.runtime.process import Stop
from lorelay.runtime.store import EtcdStore

log = structlog.get_logger()


async def serve(environ: Mapping[str, str], stop: Stop) -> None:
    """Run a frontend until `stop`.

    Raises:
        SettingsError: A variable is wrong.
        AddressError: The HTTP address cannot be used.
        BusUnavailableError: NATS did not answer within the connect timeout.
    """
    settings = FrontendSettings.from_environ(environ)
    process = settings.process
    telemetry.configure("frontend", process.instance, settings.exporter)
    sock = http.bind(settings.host, settings.port)
    async with (
        Bus(settings.bus, f"lorelay-frontend-{process.instance}") as bus,
        EtcdStore(settings.etcd) as store,
        anyio.create_task_group() as tasks,
    ):
        dispatcher = Dispatcher(
            bus,
            process.namespace,
            process.instance,
            first_token_timeout_s=settings.first_token_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
        )
        catalog = Catalog(process.namespace, dispatcher.worker_gone)
        directory = Directory(store, keys.root(process.namespace), catalog.apply)
        stopping = False

        def missing() -> list[str]:
            found = {
                "bus": not bus.connected,
                "first listing of the fleet": not directory.ready.is_set(),
                "a worker": not catalog.bases,
                "a running process (stopping)": stopping,
            }
            return [what for what, is_missing in found.items() if is_missing]

        await dispatcher.start()
        tasks.start_soon(directory.run)
        started = dt.datetime.now(dt.UTC)
        app = App(
            catalog,
            dispatcher,
            max_requests=settings.max_requests,
            missing=missing,
            started_unix_s=int(started.timestamp()),
        )
        async with (
            Registration(store, ttl_s=process.lease_ttl_s) as registration,
            http.serving(app, sock, grace_s=1.0),
        ):
            tasks.start_soon(registration.run)
            await registration.put(
                keys.instance(process.namespace, "frontend", process.instance),
                to_json(
                    InstanceRecord(
                        component="frontend",
                        instance=process.instance,
                        subject="",
                        started=started.isoformat(timespec="seconds"),
                    )
                ),
            )
            host, port = sock.getsockname()[:2]
            log.info("listening", url=f"http://{host}:{port}")
            await stop.wait()
            stopping = True
            await dispatcher.drain(process.drain_s)
        tasks.cancel_scope.cancel()
