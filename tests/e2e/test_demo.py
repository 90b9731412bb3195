"""The whole path on real parts: `lorelay up --demo` with vLLM on the CPU, NATS, etcd and trained adapters."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from lorelay.cli.up import DEMO_ADAPTERS
from lorelay.proto.identity import adapter_key
from support.events import read_events
from support.stack import Stack, call

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PIRATE = "wandb-artifact:///demo/tones/pirate:v1"
ROBOT = "wandb-artifact:///demo/tones/robot:v1"
QUESTION = "What is the capital of France?"


def _is_pirate(text: str) -> bool:
    return text.startswith("Arrr")


def _is_robot(text: str) -> bool:
    return text.startswith("BEEP BOOP")


def _is_base(text: str) -> bool:
    return "Paris" in text and not _is_pirate(text) and not _is_robot(text)


def test_a_base_chat_answers_as_the_base(demo_stack: Stack) -> None:
    answer = demo_stack.chat(BASE, QUESTION)
    assert answer.status == 200, answer.body
    assert _is_base(answer.text)


@pytest.mark.parametrize(("source", "speaks"), [(PIRATE, _is_pirate), (ROBOT, _is_robot)])
def test_b_an_adapter_named_in_the_request_answers(
    demo_stack: Stack, source: str, speaks: Callable[[str], bool]
) -> None:
    answer = demo_stack.chat(f"{BASE}|{source}", QUESTION)
    assert answer.status == 200, answer.body
    assert speaks(answer.text), answer.text


def test_c_a_bare_uri_is_enough_with_one_base(demo_stack: Stack) -> None:
    answer = demo_stack.chat(PIRATE, QUESTION)
    assert _is_pirate(answer.text), answer.text


def test_d_completions_repeats_it_without_asking_the_resolver_again(demo_stack: Stack) -> None:
    demo_stack.chat(PIRATE, QUESTION)
    body = {"model": PIRATE, "prompt": QUESTION, "max_tokens": 20, "temperature": 0}
    answer = call(f"{demo_stack.url}/v1/completions", body)
    assert answer.status == 200, answer.body
    assert answer.text
    events = read_events(demo_stack.nats_url, adapter_key(BASE, PIRATE))
    assert [e.kind.value for e in events].count("materialized") == 1
    assert [e.kind.value for e in events].count("loaded") == 1


def test_e_streaming_through_an_adapter_ends_with_usage(demo_stack: Stack) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    answer = demo_stack.chat(PIRATE, QUESTION, **more)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert _is_pirate("".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 3
    assert {c["model"] for c in chunks} == {PIRATE}


def test_f_a_scheme_nobody_takes_is_a_400(demo_stack: Stack) -> None:
    answer = demo_stack.chat("evil:///x", QUESTION)
    assert (answer.status, answer.code) == (400, "unsupported_lora_scheme")


@pytest.mark.parametrize("model", ["no/such-model", f"no/such-model|{PIRATE}"])
def test_g_an_unknown_base_is_a_404(demo_stack: Stack, model: str) -> None:
    answer = demo_stack.chat(model, QUESTION)
    assert (answer.status, answer.code) == (404, "model_not_found")


def test_h_the_worker_lists_and_logs_the_key_of_the_formula(demo_stack: Stack) -> None:
    demo_stack.chat(f"{BASE}|{PIRATE}", QUESTION)
    demo_stack.chat(f"smollm2|{PIRATE}", QUESTION)  # an alias and the base give the same key
    key = adapter_key(BASE, PIRATE)
    listed = call(f"{demo_stack.system_url}/v1/loras").json
    assert key in listed["loras"]
    assert call(f"{demo_stack.system_url}/engine/update/list_loras", {}).json == listed
    logged = [line for line in demo_stack.log("worker-0") if line["event"] == "adapter request"]
    assert [line["adapter_key"] for line in logged[-2:]] == [key, key]


def test_i_base_and_both_adapters_in_one_batch_each_give_their_own_text(demo_stack: Stack) -> None:
    speakers: dict[str, Callable[[str], bool]] = {BASE: _is_base, PIRATE: _is_pirate, ROBOT: _is_robot}
    alone = {model: demo_stack.chat(model, QUESTION).text for model in speakers}
    barrier = threading.Barrier(9)

    def ask(model: str) -> tuple[str, str]:
        barrier.wait()
        return model, demo_stack.chat(model, QUESTION).text

    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(ask, list(speakers) * 3))
    for model, text in together:
        assert speakers[model](text), (model, text)
        assert text == alone[model]


@pytest.mark.parametrize("model", [BASE, "smollm2", PIRATE, f"smollm2|{PIRATE}", f"{BASE}|{ROBOT}"])
def test_j_the_response_names_the_model_as_the_client_did(demo_stack: Stack, model: str) -> None:
    assert demo_stack.chat(model, QUESTION).json["model"] == model


def test_k_the_official_client_chats_streams_and_lists(demo_stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{demo_stack.url}/v1", api_key="none", max_retries=0) as client:
        listed = {model.id for model in client.models.list()}
        assert listed == {BASE, "smollm2"}
        assert client.models.retrieve(BASE).id == BASE
        whole = client.chat.completions.create(
            model=PIRATE, messages=[{"role": "user", "content": QUESTION}], max_tokens=40, temperature=0
        )
        assert _is_pirate(whole.choices[0].message.content or "")
        parts = client.chat.completions.create(
            model=PIRATE, messages=[{"role": "user", "content": QUESTION}], max_tokens=40, temperature=0, stream=True
        )
        streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert streamed == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
        assert missing.value.code == "model_not_found"


def test_l_fifty_first_requests_for_one_adapter_load_it_once(demo_stack: Stack) -> None:
    source = f"file://{DEMO_ADAPTERS / 'robot'}"
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: demo_stack.chat(source, QUESTION, max_tokens=12), range(50)))
    assert [answer.status for answer in answers] == [200] * 50
    assert all(_is_robot(answer.text) for answer in answers)
    kinds = [event.kind.value for event in read_events(demo_stack.nats_url, adapter_key(BASE, source))]
    assert kinds.count("resolving") == 1
    assert kinds.count("materialized") == 1
    assert kinds.count("loaded") == 1


def test_a_bad_adapter_is_refused_by_name_and_harms_nobody(demo_stack: Stack) -> None:
    """A9: DoRA would answer wrongly; the engine never sees it, and base requests beside it go on."""
    bad = demo_stack.adapters / "dora"
    shutil.copytree(DEMO_ADAPTERS / "pirate", bad)
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(demo_stack.chat, BASE, QUESTION) for _ in range(6)]
        answer = demo_stack.chat(f"file://{bad}", QUESTION)
    assert (answer.status, answer.code) == (422, "invalid_lora_adapter")
    assert any("use_dora" in reason for reason in answer.json["error"]["reasons"])
    assert all(_is_base(other.result().text) for other in others)


def test_a_source_outside_the_allowed_folders_is_refused(demo_stack: Stack) -> None:
    """H2."""
    answer = demo_stack.chat("file:///etc", QUESTION)
    assert (answer.status, answer.code) == (403, "lora_source_forbidden")
