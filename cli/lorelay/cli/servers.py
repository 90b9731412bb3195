"""The servers of a one-machine fleet: which nats-server and etcd are here, and how each is started.

The PyPI wheels bring nats-server 2.12 or newer and etcd 3.5.1.  An etcd of 3.5.3 or newer on PATH is preferred: the
etcd project warns of inconsistent data in 3.5.0 to 3.5.2.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lorelay.cli.children import Child

ETCD_PREFERRED = (3, 5, 3)


class ServerMissingError(Exception):
    """A server's program is not on this machine; `str()` says how to get it."""


class PortTakenError(Exception):
    """A port that was asked for cannot be had; `str()` says which and why."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server's executable."""

    path: str
    version: str


def find_nats() -> Program:
    """Return the nats-server beside this Python, else the one on PATH.

    Raises:
        ServerMissingError: There is none.
    """
    for path in _candidates("nats-server"):
        version = _version(path, "--version")
        if version:
            return Program(path, ".".join(map(str, version)))
    raise ServerMissingError("no nats-server here: pip install 'lorelay[up]', or put one on PATH")


def find_etcd() -> Program:
    """Return an etcd of `ETCD_PREFERRED` or newer, else whatever etcd there is.

    Raises:
        ServerMissingError: There is none.
    """
    found = [(path, _version(path, "--version")) for path in _candidates("etcd")]
    usable = [(path, version) for path, version in found if version]
    if not usable:
        raise ServerMissingError("no etcd here: pip install 'lorelay[up]', or put one on PATH")
    path, version = next((each for each in usable if each[1] >= ETCD_PREFERRED), usable[0])
    return Program(path, ".".join(map(str, version)))


def nats_child(program: Program, data: Path, port: int, environ: Mapping[str, str]) -> Child:
    """Return the nats-server child: JetStream on, loopback only."""
    command = [program.path, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(data / "nats")]
    return Child("nats-server", command, data / "logs" / "nats-server.log", environ)


def etcd_child(program: Program, data: Path, port: int, peer_port: int, environ: Mapping[str, str]) -> Child:
    """Return the etcd child: one member, loopback only."""
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    command = [
        program.path,
        *("--name", "lorelay", "--data-dir", str(data / "etcd")),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"lorelay={peer}", "--force-new-cluster"),
        *("--log-level", "warn", "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
    ]
    return Child("etcd", command, data / "logs" / "etcd.log", environ)


def is_nats_up(port: int) -> bool:
    """Return whether a NATS server greets on `port`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            return connection.recv(4) == b"INFO"
    except OSError:
        return False


def is_etcd_up(port: int) -> bool:
    """Return whether etcd answers reads and has a leader."""
    try:
        return b'"health":"true"' in _call(port, "/health", None)
    except OSError:
        return False


def forget(port: int, prefix: str) -> None:
    """Delete every key under `prefix`: what an earlier fleet of this data folder left there when it was killed."""
    start = prefix.encode()
    end = start[:-1] + bytes([start[-1] + 1])
    body = {"key": base64.b64encode(start).decode(), "range_end": base64.b64encode(end).decode()}
    _call(port, "/v3/kv/deleterange", msgspec.json.encode(body))


def require_free(host: str, port: int) -> None:
    """Return if `port` can be listened on.

    Raises:
        PortTakenError: It cannot; a fleet that went on would find somebody else's answers there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise PortTakenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _call(port: int, path: str, body: bytes | None) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=2) as response:
        return bytes(response.read())


def _candidates(name: str) -> list[str]:
    """Return the executables called `name`: on PATH in its order, then beside this Python."""
    beside = Path(sys.executable).parent / name
    found = [shutil.which(name, path=folder) for folder in os.get_exec_path()]
    return list(dict.fromkeys([path for path in found if path] + ([str(beside)] if beside.is_file() else [])))


def _version(path: str, flag: str) -> tuple[int, ...]:
    try:
        said = subprocess.run([path, flag], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, match.groups())) if match else ()
