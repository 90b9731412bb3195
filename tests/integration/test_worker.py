"""A worker and a real resolver as processes: adapters from a source to an answer, and the management API."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import nats
import pytest

from lorelay.proto.codec import from_json
from lorelay.proto.events import LoraEvent
from support.adapters import pairs, write_adapter
from support.fleet import BASE, Fleet
from support.servers import EtcdServer, NatsServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.fleet import Service

CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 100_000}


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def client_of(service: Service) -> httpx.Client:
    return httpx.Client(base_url=service.url, timeout=30)


@pytest.fixture
def fleet(tmp_path: Path, nats_server: NatsServer, etcd_server: EtcdServer) -> Iterator[Fleet]:
    with Fleet(tmp_path, nats_server, etcd_server) as fleet:
        yield fleet


@pytest.fixture
def adapters(tmp_path: Path) -> list[str]:
    """Write three different adapters, and return their sources."""
    sources = []
    for name, value in (("a", 0.01), ("b", 0.02), ("c", 0.03)):
        write_adapter(tmp_path / "adapters" / name, tensors=pairs(value=value))
        sources.append((tmp_path / "adapters" / name).as_uri())
    return sources


def start_resolver(fleet: Fleet, **environ: str) -> Service:
    return fleet.resolver(LORELAY_FILE_ROOTS=str(fleet.directory / "adapters"), **environ)


def test_a_file_adapter_is_resolved_loaded_used_and_told_about(fleet: Fleet, adapters: list[str]) -> None:
    start_resolver(fleet)
    worker, frontend = fleet.worker(), fleet.frontend()
    with client_of(frontend) as client, client_of(worker) as management:
        answers = [client.post(CHAT, json=chat(f"{BASE}|{source}")) for source in adapters[:2]]
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert all("through adapter" in text for text in texts)
        assert len(set(texts)) == 2
        listed = management.get("/v1/loras").json()
        assert listed["count"] == 2
        missing = client.post(CHAT, json=chat(f"{BASE}|{adapters[0]}-missing", stream=True))
        assert error_of(missing) == (404, "lora_not_found")
        (fleet.directory / "adapters" / "a" / "adapter_model.safetensors").write_bytes(b"PK\x03\x04 not weights")
        (fleet.directory / "adapters" / "a").rename(fleet.directory / "adapters" / "bad")
        refused = client.post(CHAT, json=chat(f"{BASE}|{adapters[0]}".replace("/adapters/a", "/adapters/bad")))
        assert error_of(refused) == (422, "invalid_lora_adapter")
        assert refused.json()["error"]["reasons"]
        assert client.post(CHAT, json=chat(BASE)).status_code == 200
    kinds = told(fleet)
    for kind in ("requested", "materialized", "loading", "loaded", "rejected"):
        assert kind in kinds


def told(fleet: Fleet) -> list[str]:
    """Return the kinds of this fleet's events."""

    async def read() -> list[str]:
        client = await nats.connect(fleet.environ()["NATS_SERVER"])
        try:
            sub = await client.jetstream().subscribe(f"lorelay.{fleet.namespace}.lora.>", ordered_consumer=True)
            kinds: list[str] = []
            while True:
                try:
                    message = await sub.next_msg(timeout=1)
                except nats.errors.TimeoutError:
                    return kinds
                event = from_json(LoraEvent, message.data)
                assert message.subject == f"lorelay.{fleet.namespace}.lora.{event.kind}.{event.key}"
                kinds.append(event.kind.value)
        finally:
            await client.close()

    return asyncio.run(read())


def test_an_operator_publishes_an_adapter_on_a_worker_without_runtime_loading(
    fleet: Fleet, adapters: list[str]
) -> None:
    """The resolver is followed for the operator's loads, too."""
    start_resolver(fleet)
    worker = fleet.worker(DYN_LORA_RUNTIME_LOAD_ENABLED="false")
    frontend = fleet.frontend()
    with client_of(frontend) as client, client_of(worker) as management:
        time.sleep(0.5)
        body = {"lora_name": "team/tone", "source": {"uri": adapters[0]}}
        loaded = management.post("/v1/loras", json=body)
        assert loaded.status_code == 200, loaded.text
        wait_until(lambda: client.get("/v1/models/team%2Ftone").status_code == 200)
        answer = client.post(CHAT, json=chat("team/tone"))
        assert answer.json()["model"] == "team/tone"
        assert "through adapter" in answer.json()["choices"][0]["message"]["content"]
        assert error_of(client.post(CHAT, json=chat(f"{BASE}|{adapters[1]}"))) == (400, "runtime_lora_unsupported")
        assert management.delete("/v1/loras/team%2Ftone").status_code == 200
        wait_until(lambda: client.get("/v1/models/team%2Ftone").status_code == 404)
        assert error_of(client.post(CHAT, json=chat("team/tone"))) == (404, "model_not_found")
        assert client.post(CHAT, json=chat(BASE)).status_code == 200


def wait_until(condition: Any, timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_published_adapter_survives_nothing_but_its_worker(fleet: Fleet, adapters: list[str]) -> None:
    """D13: a restarted frontend lists what is there."""
    start_resolver(fleet)
    worker, frontend = fleet.worker(), fleet.frontend()
    with client_of(worker) as management:
        body = {"lora_name": "tone", "source": {"uri": adapters[0]}}
        assert management.post("/engine/update/load_lora", json=body).status_code == 200
    frontend.restart()
    with client_of(frontend) as client:
        assert [line["id"] for line in client.get("/v1/models").json()["data"]] == [BASE, "tone"]
        assert client.post(CHAT, json=chat("tone")).status_code == 200
        worker.restart()
        frontend.wait_until_usable()
        wait_until(lambda: client.post(CHAT, json=chat(BASE)).status_code == 200)
        assert client.post(CHAT, json=chat(f"{BASE}|{adapters[0]}")).status_code == 200


def test_more_adapters_than_slots_take_turns_and_none_in_use_is_lost(fleet: Fleet, adapters: list[str]) -> None:
    """D11."""
    start_resolver(fleet)
    worker = fleet.worker(
        LORELAY_MAX_CPU_LORAS="2", LORELAY_MAX_LORAS="2", DYN_LORA_PENDING_ADMISSION_TIMEOUT_SECONDS="1"
    )
    frontend = fleet.frontend()
    with client_of(frontend) as client:
        for _ in range(3):
            for source in adapters:
                assert client.post(CHAT, json=chat(f"{BASE}|{source}")).status_code == 200
        with (
            client.stream("POST", CHAT, json=chat(f"{BASE}|{adapters[0]}", stream=True, **ENDLESS)) as one,
            client.stream("POST", CHAT, json=chat(f"{BASE}|{adapters[1]}", stream=True, **ENDLESS)) as two,
        ):
            streams = [response.iter_raw() for response in (one, two)]
            for stream in streams:
                next(stream)
            full = client.post(CHAT, json=chat(f"{BASE}|{adapters[2]}"))
            assert error_of(full) == (429, "lora_capacity_exceeded")
            assert int(full.headers["retry-after"]) > 0
        wait_until(lambda: client.post(CHAT, json=chat(f"{BASE}|{adapters[2]}")).status_code == 200)
    assert worker.logged('"level": "error"') == []


def test_no_resolver_is_a_503_and_a_new_one_ends_it(fleet: Fleet, adapters: list[str]) -> None:
    resolver = start_resolver(fleet, LORELAY_LEASE_TTL_SECONDS="2")
    fleet.worker()
    frontend = fleet.frontend()
    with client_of(frontend) as client:
        resolver.kill()
        started = time.monotonic()
        gone = client.post(CHAT, json=chat(f"{BASE}|{adapters[0]}"))
        assert error_of(gone) == (503, "lora_resolver_unavailable")
        assert time.monotonic() - started < 5
        assert client.post(CHAT, json=chat(BASE)).status_code == 200
        resolver.start()
        wait_until(lambda: client.post(CHAT, json=chat(f"{BASE}|{adapters[0]}")).status_code == 200)


def test_a_resolver_that_dies_during_a_resolution_is_replaced_by_the_next(fleet: Fleet, adapters: list[str]) -> None:
    """F14: frozen, in fact, which no connection tells."""
    resolvers = [start_resolver(fleet, LORELAY_LEASE_TTL_SECONDS="2") for _ in range(2)]
    fleet.worker()
    frontend = fleet.frontend()
    with client_of(frontend) as client:
        for resolver in resolvers:
            resolver.freeze()
            started = time.monotonic()
            answers = [client.post(CHAT, json=chat(f"{BASE}|{source}")).status_code for source in adapters]
            assert answers == [200] * 3
            assert time.monotonic() - started < 12
            resolver.thaw()
            time.sleep(1)


def test_cold_adapters_load_while_etcd_is_away(tmp_path: Path, nats_server: NatsServer, adapters: list[str]) -> None:
    """F1: known routes go on, and what they bring is published when etcd is back."""
    with EtcdServer(tmp_path / "etcd") as etcd, Fleet(tmp_path, nats_server, etcd) as fleet:
        start_resolver(fleet)
        fleet.worker()
        frontend = fleet.frontend()
        with client_of(frontend) as client:
            etcd.kill()
            time.sleep(1)
            started = time.monotonic()
            assert client.post(CHAT, json=chat(f"{BASE}|{adapters[0]}")).status_code == 200
            assert time.monotonic() - started < 5
            etcd.start()
            prefix = f"/lorelay/v1/{fleet.namespace}/adapters/"
            wait_until(lambda: prefix in etcd.control("get", "--prefix", "--keys-only", prefix), 10)


def test_a_dead_worker_is_not_chosen_after_its_lease(fleet: Fleet, adapters: list[str]) -> None:
    """D14, F20: of two workers the one that is dead is never chosen after its lease."""
    start_resolver(fleet)
    workers = [fleet.worker(LORELAY_LEASE_TTL_SECONDS="2") for _ in range(2)]
    frontend = fleet.frontend()
    with client_of(frontend) as client:
        for source in adapters:
            assert client.post(CHAT, json=chat(f"{BASE}|{source}")).status_code == 200
        workers[0].kill()
        time.sleep(4)
        started = time.monotonic()
        for source in adapters:
            assert client.post(CHAT, json=chat(f"{BASE}|{source}")).status_code == 200
        assert time.monotonic() - started < 3


def test_management_asks_for_its_token_and_probes_do_not(fleet: Fleet) -> None:
    """H3."""
    worker = fleet.worker(LORELAY_SYSTEM_TOKEN="secret", DYN_LORA_RUNTIME_LOAD_ENABLED="false")  # noqa: S106
    with client_of(worker) as management:
        assert error_of(management.get("/v1/loras")) == (401, "unauthorized")
        headers = {"authorization": "Bearer secret"}
        assert management.get("/v1/loras", headers=headers).json()["count"] == 0
        assert management.get("/live").status_code == 200
    assert worker.logged("secret") == []


def test_a_bad_setting_stops_the_start_with_one_line(fleet: Fleet) -> None:
    service_environ = fleet.environ(LORELAY_ENGINE="sim", LORELAY_MODEL="/nowhere")
    worker = fleet.worker(DYN_LORA_RUNTIME_LOAD_ENABLED="false")
    done = subprocess.run(
        [*vars(worker)["_command"]],
        env=worker.environ | service_environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("lorelay:")] == [
        "lorelay: LORELAY_MODEL='/nowhere': the simulator needs a folder with the model's config.json"
    ]
    assert "Traceback" not in done.stderr


def test_a_hundred_requests_at_once_for_three_adapters_and_the_base(fleet: Fleet, adapters: list[str]) -> None:
    """D1, D10."""
    start_resolver(fleet)
    worker = fleet.worker(LORELAY_MAX_LORAS="2", DYN_LORA_MAX_PENDING_ADMISSIONS="200")
    frontend = fleet.frontend()
    models = [BASE, *(f"{BASE}|{source}" for source in adapters)]
    failures: list[str] = []

    def ask(number: int) -> None:
        model = models[number % 4]
        with client_of(frontend) as client:
            answer = client.post(CHAT, json=chat(model))
        through = "through adapter" in answer.text
        if answer.status_code != 200 or answer.json()["model"] != model or through != (model != BASE):
            failures.append(answer.text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    loaded = [json.loads(line)["adapter_key"] for line in worker.logged('"adapter loaded"')]
    assert len(loaded) == len(set(loaded)) == 3
