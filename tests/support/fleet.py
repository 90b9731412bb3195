"""A fleet of real services as child processes, on given NATS and etcd servers, each test in a namespace of its own.

    with Fleet(tmp_path, nats_server, etcd_server) as fleet:
        worker = fleet.worker(LORELAY_SERVED_MODEL_NAME="demo")
        frontend = fleet.frontend()
        httpx.post(f"{frontend.url}/v1/chat/completions", json={...})

A service is started by `python -m lorelay.cli`, as an operator would, and is waited for until its /ready says yes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio

import lorelay.cli
from lorelay.proto import keys, subjects
from lorelay.proto.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    MaterializeReply,
    MaterializeRequest,
    Snapshot,
    SnapshotFile,
    manifest_digest,
)
from lorelay.proto.codec import from_json, to_json
from lorelay.proto.records import ResolverRecord
from lorelay.runtime.bus import Bus, Message
from lorelay.runtime.discovery import Registration
from lorelay.runtime.settings import BusSettings, Environment
from lorelay.runtime.store import EtcdSettings, EtcdStore
from support.servers import Server, ServerError, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from types import TracebackType

    from support.servers import EtcdServer, NatsServer

DEMO_BASE = Path(str(lorelay.cli.__file__)).parent / "demo_base"
"""A model folder for the simulator."""
BASE = "demo-base"
"""What workers serve unless told otherwise."""
_EXIT_S = 40.0


class Service(Server):
    """One service's process."""

    def __init__(self, kind: str, directory: Path, environ: Mapping[str, str], port: int) -> None:
        """Compose the command line.

        Args:
            kind: `frontend`, `worker` or `resolver`.
            directory: For the log.
            environ: Settings.
            port: Of the HTTP listener that has /ready; 0: it has none, and its log says that it serves.
        """
        super().__init__(directory, [sys.executable, "-m", "lorelay.cli", kind])
        self.kind = kind
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(directory), **environ}
        self.instance = environ["LORELAY_INSTANCE_ID"]
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def launch(self) -> None:
        """Start the process only."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ
            )

    def is_usable(self) -> bool:
        """Ask whether it is ready."""
        if not self.port:
            return '"serving"' in self.log_tail(lines=10_000)
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def terminate(self) -> None:
        """Send SIGTERM and do not wait."""
        self._running().send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the process's end and return its exit code.

        Raises:
            ServerError: It does not end.
        """
        process = self._running()
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{self.kind} does not end; its log ends:\n{self.log_tail()}") from error
        self._process = None
        return code

    def logged(self, *words: str) -> list[str]:
        """Return the lines of the log that hold all the words."""
        return [line for line in self.log_tail(lines=1_000_000).splitlines() if all(word in line for word in words)]

    def wait_for_log(self, *words: str, timeout_s: float = 10) -> str:
        """Return the first line of the log that holds all the words.

        Raises:
            ServerError: None came.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if lines := self.logged(*words):
                return lines[0]
            time.sleep(0.02)
        raise ServerError(f"{self.kind} did not log {words}; its log ends:\n{self.log_tail()}")


class Fleet:
    """Services in one namespace.  A context manager that ends what it started."""

    def __init__(self, directory: Path, nats: NatsServer, etcd: EtcdServer) -> None:
        """Prepare an empty fleet.

        Args:
            directory: For logs and the adapter cache.
            nats: The bus.
            etcd: The store.
        """
        self.directory = directory
        self.namespace = f"test-{secrets.token_hex(6)}"
        self.cache = directory / "cache"
        self._nats = nats
        self._etcd = etcd
        self.services: list[Service] = []

    def frontend(self, **environ: str) -> Service:
        """Start a frontend and wait until it is ready, which needs a worker."""
        (port,) = free_ports(1)
        return self._start("frontend", port, {"DYN_HTTP_PORT": str(port), **environ})

    def worker(self, **environ: str) -> Service:
        """Start a worker with the simulator, adapters on, and wait until it is ready."""
        (port,) = free_ports(1)
        settings = {
            "DYN_SYSTEM_PORT": str(port),
            "LORELAY_ENGINE": "sim",
            "LORELAY_MODEL": str(DEMO_BASE),
            "LORELAY_SERVED_MODEL_NAME": BASE,
            "DYN_LORA_ENABLED": "true",
            "DYN_LORA_RUNTIME_LOAD_ENABLED": "true",
            "DYN_LORA_PATH": str(self.cache),
        }
        return self._start("worker", port, {**settings, **environ})

    def resolver(self, **environ: str) -> Service:
        """Start a resolver and wait until it serves."""
        return self._start("resolver", 0, {"DYN_LORA_PATH": str(self.cache), **environ})

    def environ(self, **environ: str) -> dict[str, str]:
        """Return the settings by which any process joins this fleet."""
        return {
            "NATS_SERVER": self._nats.url,
            "ETCD_ENDPOINTS": self._etcd.url,
            "DYN_NAMESPACE": self.namespace,
            "LORELAY_INSTANCE_ID": secrets.token_hex(8),
            "LORELAY_LOG_FORMAT": "json",
            **environ,
        }

    def _start(self, kind: str, port: int, environ: Mapping[str, str]) -> Service:
        directory = self.directory / f"{kind}-{len(self.services)}"
        service = Service(kind, directory, self.environ(**environ), port)
        self.services.append(service)
        service.start()
        return service

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in reversed(self.services):
            if error is not None:
                sys.stdout.write(f"--- {service.kind} {service.instance}\n{service.log_tail(60)}\n")
            service.kill()


def write_snapshot(cache: Path, weights: bytes = b"weights", config: bytes = b'{"r": 8}') -> Snapshot:
    """Write a snapshot into a cache as a resolver does.  Its files are not a real adapter; the simulator takes them."""
    manifest = tuple(
        SnapshotFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in ((CONFIG_FILE, config), (WEIGHTS_FILE, weights))
    )
    snapshot = Snapshot(
        digest=manifest_digest(manifest), manifest=manifest, source_revision="1", rank=8, target_modules=("q_proj",)
    )
    directory = cache / "snapshots" / snapshot.directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_bytes(config)
    (directory / WEIGHTS_FILE).write_bytes(weights)
    return snapshot


@asynccontextmanager
async def stub_resolver(
    fleet: Fleet, answer: Callable[[MaterializeRequest], Awaitable[MaterializeReply]], scheme: str = "stub"
) -> AsyncIterator[None]:
    """Answer materialize requests in this process, registered as a resolver of `scheme` sources."""
    environment = Environment(fleet.environ())
    instance = secrets.token_hex(8)
    subject = subjects.resolver_materialize(fleet.namespace, "local", instance)
    async with (
        Bus(BusSettings.read(environment), "stub-resolver") as bus,
        EtcdStore(EtcdSettings.from_environ(fleet.environ())) as store,
        Registration(store) as registration,
        anyio.create_task_group() as tasks,
    ):

        async def reply(message: Message) -> None:
            request = from_json(MaterializeRequest, message.data)
            await message.reply(to_json(await answer(request)))

        async def on_message(message: Message) -> None:
            tasks.start_soon(reply, message)

        await bus.subscribe(subject, on_message)
        record = ResolverRecord(
            resolver=instance, domain="local", subject=subject, schemes=(scheme,), plugin="stub", free_cache_bytes=1
        )
        await registration.put(keys.resolver(fleet.namespace, "local", instance), to_json(record))
        yield
        tasks.cancel_scope.cancel()
