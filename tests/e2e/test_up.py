"""`lorelay up` with the simulator: ready soon, honest about failures, gone without a trace."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorelay.proto.identity import adapter_key
from support.events import read_events
from support.stack import Stack, call, stack

DEMO = ("--demo", "--engine", "sim")
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PIRATE = "wandb-artifact:///demo/tones/pirate:v1"
ROBOT = "wandb-artifact:///demo/tones/robot:v1"

pytestmark = pytest.mark.timeout(120)


def _wait_gone(running: Stack, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while running.processes():
        assert time.monotonic() < deadline, f"left behind: {running.processes()}"
        time.sleep(0.05)


def test_a_simulated_demo_serves_base_and_adapters_and_is_ready_in_seconds(tmp_path: Path) -> None:
    """The first thing a newcomer runs; the goal is 5 s, doubled here for a machine that does something else too."""
    with stack(tmp_path, *DEMO, ready_s=10) as running:
        assert call(f"{running.url}/ready").status == 200
        texts = [running.chat(m, "Hello").text for m in ("smollm2", f"smollm2|{PIRATE}", f"smollm2|{ROBOT}", PIRATE)]
        assert len(set(texts)) == 3
        assert texts[1] == texts[3]
        assert all(text.startswith("Simulated") for text in texts)
        assert "nats-server 2." in running.output
        assert "etcd 3." in running.output
    assert "stopped." in running.output


def test_a_clients_trace_goes_through_frontend_worker_and_resolver(tmp_path: Path) -> None:
    """OpenTelemetry's context: in by HTTP, over NATS, out in the events of both other services."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with stack(tmp_path, *DEMO) as running:
        body = {"model": PIRATE, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": "mine"}
        answer = call(f"{running.url}/v1/chat/completions", body, headers=headers)
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "mine"
        events = read_events(running.nats_url, adapter_key(BASE, PIRATE))
        assert {event.trace_id for event in events} == {trace_id}
        assert {event.request_id for event in events} == {"mine"}
        assert {event.component for event in events} == {"worker", "resolver"}


def test_two_workers_share_the_load_and_one_holds_an_adapter(tmp_path: Path) -> None:
    with stack(tmp_path, *DEMO, "--workers", "2") as running:
        for _ in range(6):
            assert running.chat(f"smollm2|{PIRATE}", "Hello").status == 200
            assert running.chat("smollm2", "Hello").status == 200
        loads = [len([e for e in running.log(f"worker-{n}") if e["event"] == "adapter loaded"]) for n in (0, 1)]
        assert sorted(loads) == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    running = Stack(tmp_path, [*DEMO, "--http-port", "0", "--system-port", "0"])
    running.wait_ready(30)
    assert len(running.processes()) >= 6
    assert running.stop(number) == 0
    assert running.processes() == {}
    assert "Traceback" not in running.output


def test_a_stream_longer_than_the_drain_ends_with_an_error_event(tmp_path: Path) -> None:
    """I2, F15: never cut in silence, never a clean finish, and no traceback in the log."""
    with stack(tmp_path, *DEMO, environ={"LORELAY_DRAIN_SECONDS": "1"}) as running, ThreadPoolExecutor(1) as pool:
        more = {"stream": True, "ignore_eos": True, "max_tokens": 1_000_000}
        answer = pool.submit(running.chat, "smollm2", "Hello", **more)
        time.sleep(1)
        assert running.stop() == 0
        events = answer.result().body.decode().split("\n\n")
        assert '"worker_lost"' in events[-2]
        assert "[DONE]" not in events[-2]
        assert "Traceback" not in running.logs()


def test_a_second_signal_ends_a_stop_that_waits(tmp_path: Path) -> None:
    with stack(tmp_path, *DEMO) as running, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.chat, "smollm2", "x", stream=True, ignore_eos=True, max_tokens=1_000_000)
        time.sleep(1)
        started = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert running.stop(signal.SIGINT) == 0
        assert time.monotonic() - started < 10
        answer.exception(timeout=10)  # it ended, one way or the other


def test_a_signal_during_the_start_stops_everything_too(tmp_path: Path) -> None:
    running = Stack(tmp_path, [*DEMO, "--http-port", "0", "--system-port", "0"])
    while len(running.processes()) < 3:
        time.sleep(0.02)
    assert running.stop() == 0
    assert running.processes() == {}


@pytest.mark.parametrize(
    "victim", ["lorelay.cli worker", "lorelay.cli resolver", "lorelay.cli frontend", "nats", "etcd"]
)
def test_the_death_of_any_child_is_named_with_its_log_and_stops_the_rest(tmp_path: Path, victim: str) -> None:
    running = Stack(tmp_path, [*DEMO, "--http-port", "0", "--system-port", "0"])
    running.wait_ready(30)
    os.kill(running.child(victim), signal.SIGKILL)
    assert running.process.wait(60) == 1
    _wait_gone(running, 1)
    time.sleep(0.1)
    assert "ended with SIGKILL" in running.output
    assert victim.rpartition(" ")[2] in running.output


def test_nothing_outlives_a_killed_up(tmp_path: Path) -> None:
    """SIGKILL cannot be caught: the kernel tells the children."""
    running = Stack(tmp_path, [*DEMO, "--http-port", "0", "--system-port", "0"])
    running.wait_ready(30)
    running.process.kill()
    running.process.wait(10)
    _wait_gone(running)


def test_a_start_after_a_kill_does_not_meet_the_ghosts_of_the_last_one(tmp_path: Path) -> None:
    """The records of killed workers live on in etcd's data until their lease ends; /ready must not count them."""
    first = Stack(tmp_path, [*DEMO, "--http-port", "0", "--system-port", "0"])
    first.wait_ready(30)
    for pid in first.processes():
        os.kill(pid, signal.SIGKILL)
    first.process.wait(10)
    with stack(tmp_path, *DEMO) as second:
        for _ in range(10):
            assert second.chat("smollm2", "Hello").status == 200


def test_a_data_folder_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with stack(tmp_path, *DEMO):
        second = Stack(tmp_path, [*DEMO])
        assert second.process.wait(30) == 1
        time.sleep(0.1)
        assert f"another `lorelay up` uses {tmp_path}" in second.output


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        running = Stack(tmp_path, [*DEMO, "--http-port", str(taken.getsockname()[1]), "--system-port", "0"])
        assert running.process.wait(60) == 1
    time.sleep(0.1)
    assert "cannot listen on 127.0.0.1:" in running.output
    assert "Traceback" not in running.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--model"),
        (("--engine", "sim", "--model", "/nowhere", "--adapters", "."), "config.json"),
        (("--demo", "--model", "x"), "--demo brings its own"),
        (("--demo", "--workers", "0"), "from 1 to 64"),
        (("--demo", "--http-port", "x"), "not a port"),
        (("--demo", "--engine", "sim", "--data", "/proc/x"), "cannot write into /proc/x"),
    ],
)
def test_wrong_arguments_end_with_a_line_that_says_what_to_do(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    running = Stack(tmp_path, arguments)
    assert running.process.wait(60) != 0
    time.sleep(0.1)
    assert words in running.output
    assert "Traceback" not in running.output
    assert running.processes() == {}
