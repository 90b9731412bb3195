"""A fleet as a user starts it: `lorelay up` in a process of its own, and what it left behind when it was stopped."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MARK = "LORELAY_TEST_RUN"
STOP_S = 60.0


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """What the model said."""
        choice = self.json["choices"][0]
        said: str = choice["text"] if "text" in choice else choice["message"]["content"]
        return said

    @property
    def code(self) -> str:
        """The error's code."""
        code: str = self.json["error"]["code"]
        return code


def call(
    url: str,
    body: object = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Answer:
    """Send a request (POST if there is a body) and return whatever comes back."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return Answer(response.status, dict(response.headers), response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read())


class Stack:
    """A running `lorelay up`."""

    def __init__(self, data: Path, arguments: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self.data = data
        self.adapters = data / "adapters"
        """A folder that file:// sources may name."""
        self.adapters.mkdir(parents=True, exist_ok=True)
        self.mark = secrets.token_hex(8)
        self.started = time.monotonic()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lorelay.cli", "up", "--data", str(data), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, MARK: self.mark, **(environ or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.lines += (line.rstrip("\n") for line in self.process.stdout)

    @property
    def output(self) -> str:
        """What it printed so far."""
        return "\n".join(self.lines)

    def wait_ready(self, timeout_s: float) -> float:
        """Wait for its word that it is ready and return the seconds that took."""
        while "Ctrl-C stops everything" not in self.output:
            took_s = time.monotonic() - self.started
            if self.process.poll() is not None or took_s > timeout_s:
                self.stop()
                raise AssertionError(f"not ready after {took_s:.1f} s:\n{self.output}\n{self.logs()}")
            time.sleep(0.02)
        return time.monotonic() - self.started

    def _said(self, pattern: str) -> str:
        match = re.search(pattern, self.output)
        assert match, f"{pattern!r} is not in:\n{self.output}"
        return match[1]

    @property
    def url(self) -> str:
        """The frontend's."""
        return self._said(r"ready after .* s: (http\S+)")

    @property
    def system_url(self) -> str:
        """The first worker's management listener."""
        return self._said(r"management of the workers: (http[^\s,]+)")

    @property
    def nats_url(self) -> str:
        """The NATS server's."""
        return self._said(r"NATS: (nats://\S+)")

    def log(self, name: str) -> list[dict[str, Any]]:
        """Return the JSON lines of a service's log."""
        lines = (self.data / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def logs(self) -> str:
        """Return the end of every log, for a failure's message."""
        files = sorted((self.data / "logs").glob("*.log"))
        return "\n".join(f"== {f.name}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-25:]) for f in files)

    def chat(self, model: str, text: str, **more: object) -> Answer:
        """Ask `model`; greedy, 40 tokens."""
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0}
        return call(f"{self.url}/v1/chat/completions", {**body, **more})

    def processes(self) -> dict[int, str]:
        """Return pid -> command line of every living process that this fleet started, directly or not."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def child(self, word: str) -> int:
        """Return the pid of the process whose command line holds `word`."""
        pids = [pid for pid, line in self.processes().items() if word in line and " up --data" not in line]
        assert pids, f"no {word!r} in {self.processes()}"
        return min(pids)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._reader.join(5)


@contextmanager
def stack(data: Path, *arguments: str, ready_s: float = 30.0, environ: dict[str, str] | None = None) -> Iterator[Stack]:
    """Run a fleet that is ready; free ports, stopped afterwards, nothing left."""
    ports = ("--http-port", "0", "--system-port", "0")
    running = Stack(data, [*arguments, *ports, "--adapters", str(data / "adapters")], environ)
    try:
        running.wait_ready(ready_s)
        yield running
    finally:
        running.stop()
        assert running.processes() == {}, "processes left behind"
