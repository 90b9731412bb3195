"""What the path frontend, bus, worker costs per streamed event, on the simulator: `python bench/stream.py --help`.

Starts `lorelay up --engine sim --demo`, opens N streams at once, and prints one JSON line per round: events per second,
time to first event, and each process's CPU per event.  In the same run it calls the simulator in process over ASGI
with the same requests, so that the figures can be read as ratios.  The machine's noise is in every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from lorelay.cli.up import DEMO_ADAPTERS
from lorelay.worker.engine.base import EngineLimits
from lorelay.worker.engine.sim import start_sim
from support.stack import Stack, stack

PROCESSES = ("frontend", "worker", "resolver", "nats", "etcd")


def request(model: str, tokens: int) -> bytes:
    """Return the body of a streamed chat request that runs to its limit."""
    body = {"model": model, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps({**body, "messages": [{"role": "user", "content": "Count."}]}).encode()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that `pid` has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read_stream(url: str, body: bytes) -> tuple[int, float]:
    """Return the events of one stream and the seconds to its first."""
    parts = urlsplit(url)
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    first_s, events, tail = 0.0, 0, b""
    while data := await reader.read(65_536):
        first_s = first_s or time.perf_counter() - started
        tail += data
        events += tail.count(b"data: {")
        tail = tail[-6:]
    writer.close()
    return events, first_s


async def over_http(running: Stack, model: str, streams: int, tokens: int) -> dict[str, object]:
    """Return one round's figures through the whole path."""
    pids = {name: running.child(name if name in ("nats", "etcd") else f"lorelay.cli {name}") for name in PROCESSES}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    started = time.perf_counter()
    body = request(model, tokens)
    results = await asyncio.gather(*(read_stream(running.url, body) for _ in range(streams)))
    wall_s = time.perf_counter() - started
    events = sum(count for count, _ in results)
    firsts = sorted(first_s for _, first_s in results)
    cpu_us = {name: round((cpu_s(pid) - before[name]) / events * 1e6, 1) for name, pid in pids.items()}
    return {
        "streams": streams,
        "events": events,
        "events_per_s": round(events / wall_s),
        "first_event_p50_ms": round(statistics.median(firsts) * 1000, 1),
        "first_event_max_ms": round(firsts[-1] * 1000, 1),
        "cpu_us_per_event": cpu_us,
    }


async def in_process(streams: int, tokens: int) -> float:
    """Return the events per second of the simulator alone, called over ASGI in this process."""
    limits = EngineLimits(max_adapters=1, max_adapters_per_batch=1, max_rank=8, max_concurrent_requests=4096)
    body = request("base", tokens)
    events = 0

    async def one() -> None:
        nonlocal events
        sent = False

        async def receive() -> dict[str, object]:
            nonlocal sent
            if sent:
                await anyio.sleep_forever()
            sent = True
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, object]) -> None:
            nonlocal events
            data = message.get("body", b"")
            assert isinstance(data, bytes)
            events += data.count(b"data: {")

        await engine.app({"type": "http", "path": "/v1/chat/completions"}, receive, send)  # type: ignore[arg-type]

    async with start_sim(DEMO_ADAPTERS.with_name("demo_base"), ("base",), limits) as engine:
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(streams):
                tasks.start_soon(one)
        return events / (time.perf_counter() - started)


async def measure(options: argparse.Namespace, running: Stack) -> None:
    """Print the figures."""
    for streams in options.streams:
        for _ in range(options.rounds):
            alone = await in_process(streams, options.tokens)
            figures = await over_http(running, "smollm2", streams, options.tokens)
            ratio = round(float(str(figures["events_per_s"])) / alone, 3)
            print(json.dumps({**figures, "events_per_s_over_engine_alone": ratio}), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        stack(Path(folder), "--demo", "--engine", "sim", environ={"LORELAY_MAX_NUM_SEQS": "4096"}) as running,
    ):
        asyncio.run(measure(options, running))


if __name__ == "__main__":
    main()
