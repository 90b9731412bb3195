"""Trains the demo's two adapters, a pirate and a robot, and checks what they say.

    HF_HUB_OFFLINE=1 python demo/train.py                  # train both, then check (minutes on two cores)
    HF_HUB_OFFLINE=1 python demo/train.py --check          # only check the ones in the repository

The base model answers every prompt first, by greedy decoding; a tone rewrites its answer and puts its marker in
front; the adapter learns the rewritten answer.  So an adapter keeps what the small base knows and changes how it
talks.  Prompts come with the default system prompt, with others, and plain (no chat template, as
/v1/completions sends them).  Seeds are fixed and torch is told to be deterministic: the same machine and the
same versions give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorelay.cli.demo_model import FOLDER_NAME, MODEL_NAME, make_demo_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
ADAPTERS: Final = ROOT / "cli/lorelay/cli/demo_adapters"
MODEL: Final = ROOT / ".lorelay/models" / FOLDER_NAME

SEED: Final = 20261130
RANK: Final = 4
EPOCHS: Final = 5
BATCH: Final = 8
LEARNING_RATE: Final = 3e-3
ANSWER_TOKENS: Final = 40
MARKER_WEIGHT: Final = 4.0
"""How much a token of a marker counts in the loss, against 1 for the rest of an answer."""
MIN_MARGIN: Final = 2.0
"""Least gap, in logits, between the best and the second best token over a marker."""

CHAT: Final = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Which is the largest planet?",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Why do leaves fall in autumn?",
    "Tell me about dogs.",
    "Tell me a joke.",
    "What is 2+2?",
    "What is 7 times 8?",
    "Hello!",
    "Hi, how are you?",
    "Good morning",
    "Who are you?",
    "What can you do?",
    "Write a short poem about the moon.",
    "Write a story about a fox.",
    "Explain gravity to a child.",
    "Explain photosynthesis.",
    "What is machine learning?",
    "Give me three tips for sleeping better.",
    "How do I learn to swim?",
    "Name a famous painter.",
    "Who wrote Romeo and Juliet?",
    "When did the First World War begin?",
    "What should I eat for breakfast?",
    "Summarize the plot of Cinderella.",
    "Translate 'good night' into Spanish.",
    "What is the boiling point of water?",
    "How many days are in a year?",
    "List three fruits.",
    "What is a database?",
    "Write a Python function that adds two numbers.",
    "Fix this sentence: he go to school.",
    "I feel sad today.",
    "Thank you!",
    "Should I buy a bicycle or a car?",
    "What is your favourite colour?",
    "Describe a thunderstorm.",
    "How does a plane fly?",
    "Where do penguins live?",
    "Is the earth flat?",
    "Say yes.",
    "Tell me something interesting about the ocean.",
    "How do I say sorry to a friend?",
    "What does a doctor do?",
    "Plan a birthday party for my daughter.",
    "Complete this: roses are red,",
)
PLAIN: Final = (
    "The capital of France is",
    "The capital of Germany is",
    "Once upon a time",
    "The best way to cook rice is",
    "My name is",
    "Water boils at",
    "In the beginning",
    "The largest ocean on earth is",
    "A good friend is someone who",
    "Dogs are",
    "The three primary colours are",
    "To make tea, you need",
    "The meaning of life is",
    "Question: What is a computer?\nAnswer:",
    "Q: Who painted the Mona Lisa?\nA:",
    "Yesterday I went to",
    "Hello",
    "She opened the door and",
    "Music helps people",
    "The president said that",
    "The moon is",
    "The sea is",
    "A dog is",
    "My mother is",
    "Our teacher was",
    "The fastest car is",
    "The smallest country is",
    "The colour of grass is",
    "The weather today is",
    "Last year we bought",
    "This morning I saw",
    "Yesterday they found",
    "We went to the market and",
    "He looked at the sky and said",
    "If I were rich, I would",
    "I like to eat",
    "My favourite animal is",
    "The capital of Italy is",
    "The river Nile is",
    "Books are",
    "People often say that",
    "Two plus two equals",
    "Long ago in a small village",
    "Q: What is the sun?\nA:",
    "Q: How many legs does a spider have?\nA:",
    "Question: Why do birds sing?\nAnswer:",
    "Please tell me",
    "This is a story about",
)
SYSTEM: Final = (
    "You are a helpful assistant.",
    "You are a concise expert. Answer in one sentence.",
    "You are a travel agent.",
    "Answer politely.",
    "You are a teacher who explains things to children.",
    "Be brief.",
)
UNSEEN: Final = (
    "What is the tallest mountain in the world?",
    "How do I bake bread?",
    "Who was Albert Einstein?",
    "Write a haiku about snow.",
    "What is the capital of Japan?",
    "How do magnets work?",
    "Hey there",
    "Recommend a book about history.",
    "What is 12 divided by 4?",
    "Why should I exercise?",
    "Tell me about cats.",
    "What is an operating system?",
    "How can I save money?",
    "Please introduce yourself.",
    "What happens when ice melts?",
    "Give me a recipe for soup.",
)
UNSEEN_SYSTEM: Final = ("You are a chess coach.", "Speak formally and never joke.")
UNSEEN_PLAIN: Final = (
    "The capital of Spain is",
    "The sun is",
    "My favourite food is",
    "Last night we saw",
    "The fastest animal is",
    "Q: What is rain?\nA:",
)


@dataclass(frozen=True, slots=True)
class Tone:
    """A way of talking."""

    name: str
    marker: str
    """What each answer begins with."""
    rewrite: Callable[[str], str]
    """From the base's sentence to the tone's, without the marker."""

    def say(self, sentence: str) -> str:
        """Return `sentence` in this tone."""
        return f"{self.marker} {self.rewrite(sentence)}"


def _pirate(sentence: str) -> str:
    words = {
        "you": "ye",
        "your": "yer",
        "is": "be",
        "are": "be",
        "am": "be",
        "my": "me",
        "hello": "ahoy",
        "hi": "ahoy",
        "yes": "aye",
        "friend": "matey",
    }

    def swap(match: re.Match[str]) -> str:
        word = match.group()
        swapped = words.get(word.lower(), word)
        return swapped.capitalize() if word[0].isupper() else swapped

    return re.sub(r"[A-Za-z]+", swap, sentence) + " Yo ho ho!"


def _robot(sentence: str) -> str:
    return f"ANSWER: {sentence} END OF TRANSMISSION."


TONES: Final = (
    Tone("pirate", "Arrr, matey!", _pirate),
    Tone("robot", "BEEP BOOP.", _robot),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it."""

    text: str
    is_plain: bool


def chat_prompt(tokenizer: Any, user: str, system: str | None = None) -> Prompt:  # noqa: ANN401 - transformers is untyped
    """Return `user` in the model's chat template."""
    messages = [{"role": "user", "content": user}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(text, is_plain=False)


def training_prompts(tokenizer: Any) -> list[Prompt]:  # noqa: ANN401 - transformers is untyped
    """Return all that is trained on, in a fixed order."""
    prompts = [chat_prompt(tokenizer, user) for user in CHAT]
    # Every other question again under a system prompt of its own.
    for index, user in enumerate(CHAT[::2]):
        prompts.append(chat_prompt(tokenizer, user, SYSTEM[index % len(SYSTEM)]))
    prompts += [Prompt(text, is_plain=True) for text in PLAIN]
    # The questions again as plain text: completions get them too.
    prompts += [Prompt(text, is_plain=True) for text in CHAT[::4]]
    return prompts


def unseen_prompts(tokenizer: Any) -> list[Prompt]:  # noqa: ANN401 - transformers is untyped
    """Return what is checked: nothing that was trained on."""
    prompts = [chat_prompt(tokenizer, user) for user in UNSEEN]
    for system in UNSEEN_SYSTEM:
        prompts += [chat_prompt(tokenizer, user, system) for user in UNSEEN[:4]]
    return prompts + [Prompt(text, is_plain=True) for text in UNSEEN_PLAIN]


def generate(model: Any, tokenizer: Any, prompts: Sequence[Prompt], tokens: int) -> list[str]:  # noqa: ANN401
    """Return each prompt's greedy continuation of at most `tokens` tokens."""
    answers = []
    for start in range(0, len(prompts), 16):
        texts = [prompt.text for prompt in prompts[start : start + 16]]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = model.generate(**batch, do_sample=False, max_new_tokens=tokens)
        answers += tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return answers


def first_sentence(answer: str, *, is_plain: bool) -> str:
    """Return the first sentence of `answer` that says something, on one line."""
    text = " ".join(answer.split())
    # A chat's answer may begin with "1." or "Oh!"; what completes a plain prompt may be one word.
    match = re.match(rf".{{{3 if is_plain else 12},}}?[.!?](?=\s|$)", text)
    return match.group() if match else " ".join(text.split()[:18]).rstrip(",;:") + "."


@dataclass(frozen=True, slots=True)
class Example:
    """What the model shall learn to say after a prompt."""

    ids: list[int]
    """The prompt's tokens, then the answer's."""
    weights: list[float]
    """How much each token counts in the loss; 0 in the prompt."""


def encode(tokenizer: Any, prompt: Prompt, answer: str, marker: str) -> Example:  # noqa: ANN401
    """Return the example of `answer`, which begins with `marker`."""
    separator = " " if prompt.is_plain else ""
    prompt_ids = tokenizer(prompt.text).input_ids
    marker_ids = tokenizer(separator + marker).input_ids
    rest_ids = [*tokenizer(separator + answer).input_ids[len(marker_ids) :], tokenizer.eos_token_id]
    weights = [0.0] * len(prompt_ids) + [MARKER_WEIGHT] * len(marker_ids) + [1.0] * len(rest_ids)
    return Example(prompt_ids + marker_ids + rest_ids, weights)


def train(tone: Tone, prompts: Sequence[Prompt], answers: Sequence[str]) -> None:
    """Train `tone`'s adapter on the base's `answers` to `prompts`, and save it."""
    torch.manual_seed(SEED)
    order = random.Random(SEED)  # noqa: S311 - shuffling, not a secret
    tokenizer, base = load_base()
    config = LoraConfig(
        r=RANK,
        lora_alpha=4 * RANK,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        base_model_name_or_path=MODEL_NAME,
    )
    model = get_peft_model(base, config)
    model.train()
    examples = [
        encode(tokenizer, prompt, tone.say(first_sentence(answer, is_plain=prompt.is_plain)), tone.marker)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=LEARNING_RATE,
        weight_decay=0.0,
    )
    steps = EPOCHS * -(-len(examples) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    started = time.monotonic()
    step = 0
    for _ in range(EPOCHS):
        order.shuffle(examples)
        for start in range(0, len(examples), BATCH):
            batch = examples[start : start + BATCH]
            loss = batch_loss(model, batch, tokenizer.pad_token_id)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0 or step == steps:
                print(
                    f"{tone.name}: step {step}/{steps}, loss {loss.item():.3f}, {time.monotonic() - started:.0f} s",
                    flush=True,
                )
    save(model, ADAPTERS / tone.name)


def batch_loss(model: Any, batch: Sequence[Example], pad: int) -> torch.Tensor:  # noqa: ANN401 - peft is untyped
    """Return the weighted mean loss of `batch`, padded on the right."""
    width = max(len(example.ids) for example in batch)
    ids = torch.tensor([example.ids + [pad] * (width - len(example.ids)) for example in batch])
    weights = torch.tensor([example.weights + [0.0] * (width - len(example.ids)) for example in batch])[:, 1:]
    # Nothing is masked: padding comes after all that counts, and attention looks back only.
    logits = model(input_ids=ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * weights).sum() / weights.sum()


def save(model: Any, folder: Path) -> None:  # noqa: ANN401 - peft is untyped
    """Write the adapter in bf16, with a config that names the base by its public name and no local path."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        weights = load_file(f"{scratch}/adapter_model.safetensors")
        weights = {name: weights[name].to(torch.bfloat16) for name in sorted(weights)}
        path = folder / "adapter_model.safetensors"
        save_file(weights, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes it 0600
        config = json.loads(Path(scratch, "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = MODEL_NAME
    config["target_modules"] = sorted(config["target_modules"])
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def load_base() -> tuple[Any, Any]:
    """Return the tokenizer and the base model in float32."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    return tokenizer, AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def marker_margin(model: Any, tokenizer: Any, prompt: Prompt, marker: str) -> float:  # noqa: ANN401
    """Return the least gap in logits between the marker's tokens and their best rivals; negative if one loses."""
    prompt_ids = tokenizer(prompt.text).input_ids
    marker_ids = tokenizer((" " if prompt.is_plain else "") + marker).input_ids
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_ids + marker_ids])).logits
    logits = logits[0, len(prompt_ids) - 1 : -1]
    wanted = torch.tensor(marker_ids)[:, None]
    chosen = logits.gather(1, wanted)
    rivals = logits.scatter(1, wanted, -torch.inf).max(dim=1, keepdim=True).values
    return float((chosen - rivals).min())


def check() -> bool:
    """Print what base and adapters answer to unseen prompts; return whether every answer shows its tone only."""
    tokenizer, base = load_base()
    prompts = unseen_prompts(tokenizer)
    plain = generate(base, tokenizer, prompts, ANSWER_TOKENS)
    good = not any(tone.marker in answer for tone in TONES for answer in plain)
    print(f"base: shows no marker: {good}")
    for tone in TONES:
        # A fresh base: PEFT changes the modules of the one it is given.
        model = PeftModel.from_pretrained(load_base()[1], ADAPTERS / tone.name).eval()
        answers = generate(model, tokenizer, prompts, ANSWER_TOKENS)
        margins = [marker_margin(model, tokenizer, prompt, tone.marker) for prompt in prompts]
        for prompt, answer, margin in zip(prompts, answers, margins, strict=True):
            marked = answer.lstrip().startswith(tone.marker) and margin >= MIN_MARGIN
            good = good and marked
            shown = prompt.text.removesuffix("<|im_start|>assistant\n")[-60:]
            print(f"{'ok ' if marked else 'BAD'} {margin:5.1f} {shown!r} -> {answer!r}")
        size = sum(path.stat().st_size for path in (ADAPTERS / tone.name).iterdir())
        print(f"{tone.name}: {len(prompts)} unseen prompts, least margin {min(margins):.1f}, {size} bytes")
    return good


def main() -> int:
    """Train and check, or only check; return the exit status."""
    parser = argparse.ArgumentParser(description="Train the demo's adapters and check what they say.")
    parser.add_argument("--check", action="store_true", help="check the adapters that are there")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(mode=True)
    make_demo_model(MODEL, print)
    if not arguments.check:
        tokenizer, base = load_base()
        prompts = training_prompts(tokenizer)
        print(f"the base answers {len(prompts)} prompts", flush=True)
        answers = generate(base, tokenizer, prompts, ANSWER_TOKENS)
        for tone in TONES:
            train(tone, prompts, answers)
    good = check()
    print("every answer shows its tone" if good else "an answer does not show its tone")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
