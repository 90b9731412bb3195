"""A frontend and its workers as processes, on real NATS and etcd, through what can happen to each of them."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from lorelay.proto.adapters import MaterializeReply, MaterializeRequest
from support.fleet import BASE, Fleet, stub_resolver, write_snapshot
from support.servers import EtcdServer, NatsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from support.fleet import Service

ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 100_000}
BASE_ONLY = {"DYN_LORA_RUNTIME_LOAD_ENABLED": "false"}


def chat(model: str = BASE, content: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def text_of(stream: str) -> str:
    chunks = [json.loads(event) for event in events(stream) if event != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def error_of(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def client_of(service: Service) -> httpx.Client:
    return httpx.Client(base_url=service.url, timeout=30)


@pytest.fixture
def fleet(tmp_path: Path, nats_server: NatsServer, etcd_server: EtcdServer) -> Iterator[Fleet]:
    with Fleet(tmp_path, nats_server, etcd_server) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def base_fleet(
    tmp_path_factory: pytest.TempPathFactory, nats_server: NatsServer, etcd_server: EtcdServer
) -> Iterator[Fleet]:
    """One worker and one frontend that no test hurts."""
    with Fleet(tmp_path_factory.mktemp("fleet"), nats_server, etcd_server) as fleet:
        fleet.worker(**BASE_ONLY, LORELAY_SERVED_MODEL_NAME=f"{BASE},alias:1")
        fleet.frontend()
        yield fleet


@pytest.fixture(scope="module")
def client(base_fleet: Fleet) -> Iterator[httpx.Client]:
    with client_of(base_fleet.services[1]) as client:
        yield client


def test_a_base_answers_whole_and_streamed(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json=chat(content="hello you"))
    assert whole.status_code == 200
    assert whole.json()["model"] == BASE
    assert whole.json()["choices"][0]["message"]["content"] == f"Simulated {BASE} heard: hello you"
    streamed = client.post("/v1/chat/completions", json=chat(content="hello you", stream=True))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert text_of(streamed.text) == f"Simulated {BASE} heard: hello you"
    assert events(streamed.text)[-1] == "[DONE]"


def test_an_alias_is_answered_under_its_own_name(client: httpx.Client) -> None:
    """C1: a known name with a colon is a name."""
    assert client.post("/v1/completions", json={"model": "alias:1", "prompt": "hi"}).json()["model"] == "alias:1"
    for path in ("/v1/models/alias:1", "/v1/models/alias%3A1"):
        assert client.get(path).json()["root"] == BASE


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1_223_632, 20 << 20])
def test_a_prompt_larger_than_a_message_arrives_whole(client: httpx.Client, size: int, *, stream: bool) -> None:
    """F4."""
    prompt = "x" * size
    response = client.post("/v1/chat/completions", json=chat(content=prompt, stream=stream))
    assert response.status_code == 200
    text = text_of(response.text) if stream else response.json()["choices"][0]["message"]["content"]
    assert text == f"Simulated {BASE} heard: {prompt}"


def test_a_large_whole_response_reaches_a_client_that_reads_slowly(client: httpx.Client) -> None:
    """F6: it lies in the frontend meanwhile, which is no reason to break it off."""
    with client.stream("POST", "/v1/chat/completions", json=chat(content="x" * (20 << 20))) as response:
        time.sleep(1)
        size = 0
        for part in response.iter_raw(1 << 20):
            size += len(part)
            time.sleep(0.02)
    assert size == int(response.headers.get("content-length", size)) > 20 << 20


def test_a_body_over_the_limit_is_413(client: httpx.Client) -> None:
    body = json.dumps(chat(content="x" * (32 << 20))).encode()
    assert error_of(client.post("/v1/chat/completions", content=body)) == (413, "request_too_large")

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    try:
        response = client.post("/v1/chat/completions", content=chunks())
    except httpx.TransportError:
        return  # the server need not read to the end what it refused
    assert error_of(response) == (413, "request_too_large")


def test_a_completed_request_is_not_logged_as_a_client_that_left(client: httpx.Client, base_fleet: Fleet) -> None:
    for stream in (False, True):
        headers = {"x-request-id": f"complete-{stream}"}
        assert client.post("/v1/chat/completions", json=chat(stream=stream), headers=headers).status_code == 200
    frontend = base_fleet.services[1]
    assert frontend.logged("client gone", "complete-") == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_engine(base_fleet: Fleet, *, stream: bool) -> None:
    """F23, G21: within a second, streamed or not, before the first byte or after it."""
    worker, frontend = base_fleet.services
    headers = {"x-request-id": f"leaves-{stream}-{time.monotonic()}"}
    with httpx.Client(base_url=frontend.url, timeout=httpx.Timeout(10, read=0.5)) as client:
        if stream:
            with client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True, **ENDLESS), headers=headers
            ) as response:
                next(response.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=chat(**ENDLESS), headers=headers)
        left = time.monotonic()
    worker.wait_for_log("request aborted", headers["x-request-id"], timeout_s=3)
    assert time.monotonic() - left < 1


def test_errors_before_a_worker_have_their_status_and_shape(client: httpx.Client) -> None:
    """G1."""
    post, route = client.post, "/v1/chat/completions"
    assert error_of(post(route, json=chat("nobody"))) == (404, "model_not_found")
    assert error_of(post(route, json=chat("nobody|hf://a/b"))) == (404, "model_not_found")
    assert error_of(post(route, json=chat(f"{BASE}|hf://a/b"))) == (400, "runtime_lora_unsupported")
    assert error_of(post(route, json=chat(f"{BASE}|"))) == (400, "invalid_lora_model_id")
    assert error_of(post(route, json=[])) == (400, "invalid_request")
    assert error_of(post(route, content=b'{"model":"x","a":' + b"[" * 200_000)) == (400, "invalid_request")
    assert error_of(post("/v1/embeddings", json=chat())) == (404, "route_not_found")
    assert error_of(client.get(route)) == (405, "method_not_allowed")
    assert error_of(client.get("/v1/models/no%2Fsuch")) == (404, "model_not_found")


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_requests_survive_the_death_of_one_of_two_workers(fleet: Fleet) -> None:
    """F5: nothing was streamed yet, so each goes to the other worker; no client sees a failure."""
    first, second = fleet.worker(**BASE_ONLY), fleet.worker(**BASE_ONLY)
    frontend = fleet.frontend()
    results: list[tuple[int, str]] = []

    def load() -> None:
        with client_of(frontend) as client:
            while not stop.is_set():
                response = client.post("/v1/chat/completions", json=chat(content="one two three " * 20))
                results.append((response.status_code, response.text[:300]))

    stop = threading.Event()
    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    first.kill()
    time.sleep(13)  # until its lease ends, it is a candidate
    stop.set()
    for thread in threads:
        thread.join()
    assert [text for status, text in results if status != 200] == []
    assert len(results) > 100
    assert second.logged("request failed") == []


def test_a_killed_worker_is_a_503_before_the_first_byte_and_an_error_event_after_it(fleet: Fleet) -> None:
    """G2."""
    worker = fleet.worker(**BASE_ONLY, LORELAY_LEASE_TTL_SECONDS="2")
    frontend = fleet.frontend()
    with client_of(frontend) as client:
        with client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **ENDLESS)) as response:
            assert response.status_code == 200
            parts = response.iter_text()
            text = next(parts)
            worker.kill()
            killed = time.monotonic()
            text += "".join(parts)
        assert time.monotonic() - killed < 6
        last = json.loads(events(text)[-1])
        assert last["error"]["code"] == "worker_lost"
        assert "[DONE]" not in text
        assert '"finish_reason":"' not in text
        assert error_of(client.post("/v1/chat/completions", json=chat())) in [
            (503, "no_worker_available"),
            (503, "worker_lost"),
        ]


def test_a_worker_killed_before_its_first_byte_is_a_503_with_a_time_to_retry(fleet: Fleet) -> None:
    worker = fleet.worker(**BASE_ONLY, LORELAY_LEASE_TTL_SECONDS="2")
    frontend = fleet.frontend()
    killer = threading.Timer(0.5, worker.kill)
    killer.start()
    with client_of(frontend) as client:
        response = client.post("/v1/chat/completions", json=chat(**ENDLESS))
    killer.join()
    assert error_of(response) == (503, "worker_lost")
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_freezes_after_dispatch_does_not_hang_its_clients(fleet: Fleet, *, stream: bool) -> None:
    """F14: its lease ends, so its streams do; after the thaw it serves again."""
    worker = fleet.worker(**BASE_ONLY, LORELAY_LEASE_TTL_SECONDS="2")
    frontend = fleet.frontend()
    freezer = threading.Timer(0.5, worker.freeze)
    freezer.start()
    with client_of(frontend) as client:
        started = time.monotonic()
        response = client.post("/v1/chat/completions", json=chat(stream=stream, **ENDLESS))
        assert time.monotonic() - started < 8
        if stream:
            assert json.loads(events(response.text)[-1])["error"]["code"] == "worker_lost"
        else:
            assert error_of(response) == (503, "worker_lost")
        worker.thaw()
        frontend.wait_until_usable()
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
    worker.wait_for_log("request aborted", timeout_s=5)


def test_a_worker_restarted_under_its_old_id_does_not_leave_streams_of_its_former_life(fleet: Fleet) -> None:
    """The lease of the old process has not ended when the new one registers; its streams are over all the same."""
    worker = fleet.worker(**BASE_ONLY, LORELAY_LEASE_TTL_SECONDS="30")
    frontend = fleet.frontend()
    time.sleep(1)  # `started` has seconds
    with (
        client_of(frontend) as client,
        client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **ENDLESS)) as response,
    ):
        parts = response.iter_text()
        next(parts)
        worker.restart()
        text = "".join(parts)
        assert json.loads(events(text)[-1])["error"]["code"] == "worker_lost"
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200


def test_a_worker_that_is_asked_to_stop_finishes_its_streams(fleet: Fleet) -> None:
    """I2: within the grace a stream ends as if nothing had happened."""
    worker = fleet.worker(**BASE_ONLY)
    frontend = fleet.frontend()
    with client_of(frontend) as client:
        body = chat(stream=True, ignore_eos=True, max_tokens=1500)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            parts = response.iter_text()
            text = next(parts)
            worker.terminate()
            worker.wait_for_log("stopping")
            # What comes between the signal and the drain is still served; soon nothing new is.
            for _ in range(50):
                refused = client.post("/v1/chat/completions", json=chat())
                if refused.status_code != 200:
                    break
            text += "".join(parts)
        assert error_of(refused)[0] == 503
        assert events(text)[-1] == "[DONE]"
        assert worker.wait() == 0
    assert worker.logged('"level": "error"') == []


def test_a_stream_longer_than_the_grace_ends_with_an_error(fleet: Fleet) -> None:
    """F15: never with what looks like a clean end."""
    worker = fleet.worker(**BASE_ONLY, LORELAY_DRAIN_SECONDS="1")
    frontend = fleet.frontend()
    with (
        client_of(frontend) as client,
        client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **ENDLESS)) as response,
    ):
        parts = response.iter_text()
        text = next(parts)
        worker.terminate()
        text += "".join(parts)
    assert json.loads(events(text)[-1])["error"]["code"] == "worker_lost"
    assert "[DONE]" not in text
    assert worker.wait() == 0


def test_a_frontend_that_is_asked_to_stop_finishes_its_streams(fleet: Fleet) -> None:
    fleet.worker(**BASE_ONLY)
    frontend = fleet.frontend()
    with client_of(frontend) as client:
        body = chat(stream=True, ignore_eos=True, max_tokens=400)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            parts = response.iter_text()
            text = next(parts)
            frontend.terminate()
            text += "".join(parts)
    assert events(text)[-1] == "[DONE]"
    assert frontend.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_etcd_away_for_longer_than_the_leases_stops_nobody(tmp_path: Path, nats_server: NatsServer) -> None:
    """F1: base requests go on; afterwards everything is registered anew without a restart."""
    with EtcdServer(tmp_path / "etcd") as etcd, Fleet(tmp_path, nats_server, etcd) as fleet:
        fleet.worker(**BASE_ONLY, LORELAY_LEASE_TTL_SECONDS="5")
        frontend = fleet.frontend()
        with client_of(frontend) as client:
            etcd.kill()
            for _ in range(30):
                assert client.post("/v1/chat/completions", json=chat()).status_code == 200
                time.sleep(0.5)
            etcd.start()
            for _ in range(24):
                assert client.post("/v1/chat/completions", json=chat()).status_code == 200
                time.sleep(0.25)
        deadline = time.monotonic() + 10
        while "/models/" not in etcd.control("get", "--prefix", "--keys-only", f"/lorelay/v1/{fleet.namespace}/"):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_nats_away_is_a_fast_503_and_then_over(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """F7, F10: five times in a row; readiness says so meanwhile."""
    with NatsServer(tmp_path / "nats") as nats, Fleet(tmp_path, nats, etcd_server) as fleet:
        fleet.worker(**BASE_ONLY)
        frontend = fleet.frontend()
        with client_of(frontend) as client:
            for _ in range(5):
                nats.kill()
                time.sleep(0.3)
                started = time.monotonic()
                assert error_of(client.post("/v1/chat/completions", json=chat())) == (503, "bus_unavailable")
                assert time.monotonic() - started < 1
                assert client.get("/ready").status_code == 503
                nats.start()
                frontend.wait_until_usable()
                deadline = time.monotonic() + 8
                while client.post("/v1/chat/completions", json=chat()).status_code != 200:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)


def test_a_stream_whose_bus_goes_away_ends_with_an_error(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """F8: frames published while NATS was away are gone; the gap is an error, never spliced text."""
    with NatsServer(tmp_path / "nats") as nats, Fleet(tmp_path, nats, etcd_server) as fleet:
        worker = fleet.worker(**BASE_ONLY)
        frontend = fleet.frontend()
        with (
            client_of(frontend) as client,
            client.stream("POST", "/v1/chat/completions", json=chat(stream=True, **ENDLESS)) as response,
        ):
            parts = response.iter_text()
            text = next(parts)
            nats.kill()
            time.sleep(1)
            nats.start()
            text += "".join(parts)
        assert json.loads(events(text)[-1])["error"]["code"] == "bus_unavailable"
        worker.wait_for_log("frames lost")


def test_an_answer_that_is_lost_with_the_bus_is_not_waited_for(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """F8: the answer's only message is published while nobody is connected; its client is told all the same."""
    with NatsServer(tmp_path / "nats") as nats, Fleet(tmp_path, nats, etcd_server) as fleet:
        services = [fleet.worker(**BASE_ONLY), fleet.frontend()]
        cutter = threading.Timer(0.3, nats.kill)
        starter = threading.Timer(2.5, nats.start)
        for timer in (cutter, starter):
            timer.start()
        with client_of(services[1]) as client:
            started = time.monotonic()
            response = client.post("/v1/completions", json={"model": BASE, "prompt": "x " * 400, "max_tokens": 400})
        assert response.status_code == 503
        assert time.monotonic() - started < 6
        starter.join()


@pytest.fixture
async def resolved(fleet: Fleet) -> AsyncIterator[list[MaterializeRequest]]:
    """Answer every source with a snapshot of its own; give what was asked."""
    asked: list[MaterializeRequest] = []

    async def answer(request: MaterializeRequest) -> MaterializeReply:
        asked.append(request)
        return MaterializeReply(snapshot=write_snapshot(fleet.cache, weights=request.selection.source.encode()))

    async with stub_resolver(fleet, answer):
        yield asked


@pytest.mark.anyio
async def test_an_adapter_named_by_its_source_answers_whole_and_streamed(
    fleet: Fleet, resolved: list[MaterializeRequest]
) -> None:
    """C2."""
    await anyio.to_thread.run_sync(fleet.worker)
    frontend = await anyio.to_thread.run_sync(fleet.frontend)
    async with httpx.AsyncClient(base_url=frontend.url, timeout=30) as client:
        for model in (f"{BASE}|stub://team/a", "stub://team/a", f"{BASE}|STUB://ünï|x y"):
            whole = await client.post("/v1/chat/completions", json=chat(model))
            assert whole.status_code == 200, whole.text
            assert whole.json()["model"] == model
            assert "through adapter" in whole.json()["choices"][0]["message"]["content"]
            streamed = await client.post("/v1/chat/completions", json=chat(model, stream=True))
            assert text_of(streamed.text) == whole.json()["choices"][0]["message"]["content"]
            assert {json.loads(event)["model"] for event in events(streamed.text)[:-1]} == {model}
        refused = await client.post("/v1/chat/completions", json=chat(f"{BASE}|nope://x", stream=True))
        assert error_of(refused) == (400, "unsupported_lora_scheme")
        assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == [BASE]
    assert len(resolved) == 2


@pytest.mark.anyio
async def test_adapter_requests_go_where_the_adapter_is(fleet: Fleet, resolved: list[MaterializeRequest]) -> None:
    """F18, D13: and if that worker dies, to another one, which brings it anew."""
    environ = {"LORELAY_LEASE_TTL_SECONDS": "2"}
    workers = [await anyio.to_thread.run_sync(lambda: fleet.worker(**environ)) for _ in range(2)]
    frontend = await anyio.to_thread.run_sync(fleet.frontend)
    async with httpx.AsyncClient(base_url=frontend.url, timeout=30) as client:
        for _ in range(20):
            assert (await client.post("/v1/chat/completions", json=chat("stub://a"))).status_code == 200
        assert len(resolved) == 1
        holder = next(worker for worker in workers if worker.logged("adapter loaded"))
        holder.kill()
        assert (await client.post("/v1/chat/completions", json=chat("stub://a"))).status_code == 200
        assert len(resolved) == 2


@pytest.mark.anyio
async def test_fifty_first_requests_are_one_load(fleet: Fleet, resolved: list[MaterializeRequest]) -> None:
    """D1."""
    worker = await anyio.to_thread.run_sync(fleet.worker)
    frontend = await anyio.to_thread.run_sync(fleet.frontend)
    statuses: list[int] = []
    async with (
        httpx.AsyncClient(base_url=frontend.url, timeout=30) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            statuses.append((await client.post("/v1/chat/completions", json=chat("stub://a"))).status_code)

        for _ in range(50):
            tasks.start_soon(ask)
    assert statuses == [200] * 50
    assert len(resolved) == 1
    assert len(worker.logged("adapter loaded")) == 1
