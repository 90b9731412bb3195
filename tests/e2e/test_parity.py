"""An adapter served over HTTP says, token for token, what PEFT says with the same files on the same base.

Needs a fleet that runs vLLM in float32, its default on a CPU: in bfloat16 the two round differently.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from support.stack import call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.stack import Stack

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # torch's and PEFT's
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed"),
]

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
SOURCES = {name: f"wandb-artifact:///demo/tones/{name}:v1" for name in ("pirate", "robot")}
CHATS = ("What is the capital of Japan?", "How do magnets work?", "Tell me about cats.")
PLAIN = ("The capital of Spain is", "Q: What is rain?\nA:")
TOKENS = 20


class Reference:
    """PEFT with one adapter on the base, in float32."""

    def __init__(self, model: Path, adapter: Path | None) -> None:
        import torch  # noqa: PLC0415 - heavy, and only with the CPU extra
        from peft import PeftModel  # noqa: PLC0415 - as torch
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - as torch

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model: Any = base if adapter is None else PeftModel.from_pretrained(base, adapter)
        self.model.eval()

    def greedy_choices(self, prompt_ids: list[int], tokens: list[int]) -> list[int]:
        """Return what greedy decoding chooses after the prompt, and after each beginning of `tokens`.

        If that is `tokens`, greedy decoding from the prompt gives exactly `tokens`: the first choice follows from the
        prompt alone, each later one from the choices before it.  One pass instead of one for each token.
        """
        import torch  # noqa: PLC0415 - as above

        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([prompt_ids + tokens])).logits[0]
        choices: list[int] = logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
        return choices


@pytest.fixture(scope="module", params=[*SOURCES, None], ids=[*SOURCES, "base"])
def served(request: pytest.FixtureRequest, demo_model: Path, demo_adapters: Path) -> Iterator[tuple[str, Reference]]:
    """Return a model id, and what it must say."""
    name = request.param
    if name is None:
        yield BASE, Reference(demo_model, None)
    else:
        yield f"{BASE}|{SOURCES[name]}", Reference(demo_model, demo_adapters / name)


def _answer(stack: Stack, route: str, body: dict[str, object]) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the answer."""
    greedy = {"temperature": 0, "max_tokens": TOKENS, "return_token_ids": True, "ignore_eos": True}
    answer = call(stack.url + route, {**body, **greedy})
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    prompt_ids = choice.get("prompt_token_ids") or answer.json["prompt_token_ids"]
    return prompt_ids, choice["token_ids"]


@pytest.mark.parametrize("question", CHATS)
def test_a_chat_is_what_peft_says(demo_stack: Stack, served: tuple[str, Reference], question: str) -> None:
    model, reference = served
    messages = [{"role": "user", "content": question}]
    prompt_ids, tokens = _answer(demo_stack, "/v1/chat/completions", {"model": model, "messages": messages})
    text = reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt_ids == reference.tokenizer(text).input_ids
    assert len(tokens) == TOKENS
    assert tokens == reference.greedy_choices(prompt_ids, tokens)


@pytest.mark.parametrize("prompt", PLAIN)
def test_a_completion_is_what_peft_says(demo_stack: Stack, served: tuple[str, Reference], prompt: str) -> None:
    model, reference = served
    prompt_ids, tokens = _answer(demo_stack, "/v1/completions", {"model": model, "prompt": prompt})
    assert prompt_ids == reference.tokenizer(prompt).input_ids
    assert len(tokens) == TOKENS
    assert tokens == reference.greedy_choices(prompt_ids, tokens)
