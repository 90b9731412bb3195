"""The engine contract on real vLLM, in process, on the CPU: what the worker relies on, and what vLLM gets wrong."""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from lorelay.worker.engine.base import EngineAdapter, EngineDeadError, EngineError
from lorelay.worker.engine.vllm_engine import EngineStartError, VllmEngine, VllmSettings, start_vllm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALIAS = "smol"
PIRATE = "Arrr, matey!"
ROBOT = "BEEP BOOP."
QUESTION = "What is the capital of France?"


def _settings(model: Path) -> VllmSettings:
    return VllmSettings(
        model=str(model),
        served_names=(BASE, ALIAS),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_loras=2,
        max_cpu_loras=3,
        max_lora_rank=4,
        kv_cache_bytes=256 << 20,
    )


@pytest.fixture(scope="module")
async def running(demo_model: Path, anyio_backend: object) -> AsyncIterator[VllmEngine]:
    """One engine for this module: it takes half a minute to start."""
    del anyio_backend  # asked for, so that this runs in the tests' event loop
    async with start_vllm(_settings(demo_model), print) as engine:
        yield engine


@pytest.fixture
async def engine(running: VllmEngine, demo_adapters: Path) -> AsyncIterator[VllmEngine]:
    """Return the engine, without adapters again after the test."""
    yield running
    for adapter in (_pirate(demo_adapters), _robot(demo_adapters), *_spares(demo_adapters)):
        await running.unload(adapter)


def _pirate(adapters: Path) -> EngineAdapter:
    return EngineAdapter("dyn-lora-pirate", 1, adapters / "pirate")


def _robot(adapters: Path) -> EngineAdapter:
    return EngineAdapter("dyn-lora-robot", 2, adapters / "robot")


def _spares(adapters: Path) -> tuple[EngineAdapter, EngineAdapter]:
    return EngineAdapter("spare", 3, adapters / "robot"), EngineAdapter("one-too-many", 4, adapters / "robot")


@asynccontextmanager
async def _client(engine: VllmEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=120) as client:
        yield client


async def _post(engine: VllmEngine, path: str, body: object) -> httpx.Response:
    async with _client(engine) as client:
        return await client.post(path, json=body)


def _chat_body(model: str, question: str = QUESTION, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24, **more}


async def _chat(engine: VllmEngine, model: str, question: str = QUESTION) -> str:
    response = await _post(engine, "/v1/chat/completions", _chat_body(model, question))
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


async def test_facts_and_limits_are_what_the_engine_really_runs(engine: VllmEngine) -> None:
    assert (engine.facts.name, engine.facts.aliases) == (BASE, (ALIAS,))
    assert (engine.facts.architecture, engine.facts.dtype) == ("LlamaForCausalLM", "float32")
    assert engine.facts.dimensions["hidden_size"] == 576
    assert engine.facts.dimensions["num_key_value_heads"] == 3
    assert engine.facts.max_context_tokens == 512
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= set(
        engine.facts.routes
    )
    assert "/v1/embeddings" not in engine.facts.routes
    assert (engine.limits.max_adapters, engine.limits.max_adapters_per_batch) == (3, 2)
    assert engine.limits.max_rank == 8  # the next one that vLLM takes above 4
    assert engine.limits.max_concurrent_requests == 16
    await engine.check_health()


async def test_the_base_answers_by_each_of_its_names(engine: VllmEngine) -> None:
    assert await _chat(engine, BASE) == await _chat(engine, ALIAS) == "The capital of France is Paris."


async def test_a_loaded_adapter_answers_and_the_base_stays_itself(engine: VllmEngine, demo_adapters: Path) -> None:
    pirate, robot = _pirate(demo_adapters), _robot(demo_adapters)
    await engine.load(pirate)
    await engine.load(robot)
    await engine.load(robot)  # a retry after a lost answer
    assert await engine.loaded_ids() == {1, 2}
    assert (await _chat(engine, pirate.name)).startswith(PIRATE)
    assert (await _chat(engine, robot.name)).startswith(ROBOT)
    assert await _chat(engine, BASE) == "The capital of France is Paris."


async def test_one_batch_gives_everybody_his_own_model(engine: VllmEngine, demo_adapters: Path) -> None:
    """On a CPU vLLM 0.32 answers the base through the last slot's adapter: vllm-project/vllm#48421."""
    names = [BASE, _pirate(demo_adapters).name, _robot(demo_adapters).name]
    await engine.load(_pirate(demo_adapters))
    await engine.load(_robot(demo_adapters))
    questions = (QUESTION, "Tell me about cats.", "How do magnets work?")
    alone = {(name, question): await _chat(engine, name, question) for name in names for question in questions}
    together: dict[tuple[str, str], str] = {}

    async def ask(name: str, question: str) -> None:
        together[name, question] = await _chat(engine, name, question)

    async with anyio.create_task_group() as tasks:
        for name, question in alone:
            tasks.start_soon(ask, name, question)
    assert together == alone


async def test_other_routes_take_an_adapter_too(engine: VllmEngine, demo_adapters: Path) -> None:
    await engine.load(_robot(demo_adapters))
    name = _robot(demo_adapters).name
    response = await _post(engine, "/v1/responses", {"model": name, "input": QUESTION, "max_output_tokens": 16})
    assert response.status_code == 200, response.text
    assert ROBOT in response.text
    messages = [{"role": "user", "content": QUESTION}]
    response = await _post(engine, "/v1/messages", {"model": name, "messages": messages, "max_tokens": 16})
    assert response.json()["content"][0]["text"].startswith(ROBOT)
    response = await _post(engine, "/tokenize", {"model": name, "prompt": "Hello"})
    assert response.json()["count"] == 1


async def test_a_stream_ends_with_usage(engine: VllmEngine, demo_adapters: Path) -> None:
    await engine.load(_pirate(demo_adapters))
    body = _chat_body(_pirate(demo_adapters).name, stream=True, stream_options={"include_usage": True})
    async with _client(engine) as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        data = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text.startswith(PIRATE)
    assert chunks[-1]["usage"]["completion_tokens"] > 5


async def test_an_unloaded_adapter_is_unknown(engine: VllmEngine, demo_adapters: Path) -> None:
    pirate = _pirate(demo_adapters)
    body = _chat_body(pirate.name)
    assert (await _post(engine, "/v1/chat/completions", body)).status_code == 404
    await engine.load(pirate)
    assert (await _post(engine, "/v1/chat/completions", body)).status_code == 200
    await engine.unload(pirate)
    await engine.unload(pirate)
    assert await engine.loaded_ids() == frozenset()
    response = await _post(engine, "/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")


async def test_a_broken_adapter_is_refused_and_the_engine_lives_on(
    engine: VllmEngine, demo_adapters: Path, tmp_path: Path
) -> None:
    config = (demo_adapters / "pirate/adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(EngineError):
        await engine.load(EngineAdapter("broken", 7, tmp_path))
    with pytest.raises(EngineError):
        await engine.load(EngineAdapter("missing", 8, tmp_path / "nothing"))
    assert await engine.loaded_ids() == frozenset()
    assert (await _post(engine, "/v1/chat/completions", _chat_body("broken"))).status_code == 404
    await engine.check_health()
    assert await _chat(engine, BASE) == "The capital of France is Paris."


async def test_a_full_engine_refuses_and_drops_nobody(engine: VllmEngine, demo_adapters: Path) -> None:
    """Of itself vLLM would drop its oldest adapter and say nothing."""
    spare, one_too_many = _spares(demo_adapters)
    for adapter in (_pirate(demo_adapters), _robot(demo_adapters), spare):
        await engine.load(adapter)
    with pytest.raises(EngineError, match="all it can"):
        await engine.load(one_too_many)
    assert await engine.loaded_ids() == {1, 2, 3}
    assert (await _chat(engine, _pirate(demo_adapters).name)).startswith(PIRATE)


async def test_a_name_means_one_thing(engine: VllmEngine, demo_adapters: Path) -> None:
    with pytest.raises(EngineError, match="name of the base"):
        await engine.load(EngineAdapter(ALIAS, 5, demo_adapters / "pirate"))
    await engine.load(_pirate(demo_adapters))
    with pytest.raises(EngineError, match="another id"):
        await engine.load(EngineAdapter(_pirate(demo_adapters).name, 5, demo_adapters / "robot"))
    assert await engine.loaded_ids() == {1}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/invocations"])
async def test_only_model_requests_reach_vllm(engine: VllmEngine, path: str) -> None:
    body = {"lora_name": "x", "lora_path": "/x"}
    assert (await _post(engine, path, body)).status_code == 404
    async with _client(engine) as client:
        assert (await client.get("/v1/models")).status_code == 404


def _engine_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.name == "EngineCore" and child.pid}


async def test_a_dead_engine_says_so_and_leaves_nothing(demo_model: Path, demo_adapters: Path) -> None:
    """vLLM's own call to load an adapter waits for ever when the engine process dies under it."""
    before = _engine_pids()
    async with start_vllm(_settings(demo_model), print) as engine:
        (pid,) = _engine_pids() - before
        os.kill(pid, signal.SIGSTOP)  # so that the call is under way
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:

                async def load() -> None:
                    with pytest.raises(EngineDeadError):
                        await engine.load(_pirate(demo_adapters))

                tasks.start_soon(load)
                await anyio.sleep(1)
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with anyio.fail_after(20):
            assert (await _post(engine, "/v1/chat/completions", _chat_body(BASE))).status_code >= 500
    assert _engine_pids() == before


async def test_a_cancelled_start_leaves_no_process(demo_model: Path) -> None:
    before = _engine_pids()
    with anyio.move_on_after(12) as scope:
        async with start_vllm(_settings(demo_model), print):
            pytest.fail("it cannot be that fast")
    assert scope.cancelled_caught
    assert _engine_pids() == before
    gc.collect()  # what vLLM forgets to close complains here, where warnings are ignored


_OWNER = """
import sys, anyio
from lorelay.worker.engine.vllm_engine import VllmSettings, start_vllm

async def main():
    settings = VllmSettings(model=sys.argv[1], served_names=("x",), max_model_len=256, kv_cache_bytes=64 << 20)
    async with start_vllm(settings, lambda line: None):
        print("ready", flush=True)
        await anyio.sleep_forever()

if __name__ == "__main__":
    anyio.run(main)
"""


def test_a_killed_worker_takes_its_engine_along(demo_model: Path, tmp_path: Path) -> None:
    """vLLM's processes would stay for ever, with all their memory: nobody is left to stop them."""
    import psutil  # noqa: PLC0415 - comes with vLLM

    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    with subprocess.Popen([sys.executable, script, demo_model], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        left = psutil.Process(owner.pid).children(recursive=True)
        assert len(left) >= 2
        owner.kill()
    _, alive = psutil.wait_procs(left, timeout=15)
    assert alive == []


async def test_settings_that_cannot_work_stop_the_start(demo_model: Path, tmp_path: Path) -> None:
    def settings(**change: Any) -> VllmSettings:
        return VllmSettings(**{"model": str(demo_model), "served_names": (BASE,), **change})

    for change in (
        {"max_lora_rank": 513},
        {"arguments": ("--no-such-argument",)},
        {"arguments": ("--lora-modules", "x=/x")},
        {"served_names": ()},
    ):
        with pytest.raises(ValueError, match=r"512|no-such|lora-modules|served_names"):
            await start_vllm(settings(**change), print).__aenter__()
    with pytest.raises(EngineStartError, match="did not start"):
        await start_vllm(settings(model=str(tmp_path)), print).__aenter__()
