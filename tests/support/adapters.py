"""Small adapters on disk, good ones and every kind of bad one.  No torch: bytes are written as they should lie.

The base is SmolLM2-135M's shape, so that what is good here is good for the demo's base too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorelay.proto.adapters import CONFIG_FILE, EMBEDDINGS_FILE, WEIGHTS_FILE, MaterializeRequest
from lorelay.proto.identity import select
from lorelay.proto.records import ModelFacts

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
DIMENSIONS = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
}
WIDTHS = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}
QV = ("self_attn.q_proj", "self_attn.v_proj")
Config = dict[str, Any]


@dataclass(frozen=True)
class Data:
    """A tensor to write."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Data]


def facts(**changes: Any) -> ModelFacts:
    """Return what an engine would say of SmolLM2-135M."""
    said: dict[str, Any] = {
        "name": BASE,
        "aliases": ("smollm2",),
        "path_fingerprint": "0" * 64,
        "architecture": "LlamaForCausalLM",
        "dimensions": DIMENSIONS,
        "dtype": "bfloat16",
        "max_context_tokens": 2048,
        "routes": ("/v1/chat/completions",),
        "engine": "sim",
        "engine_version": "1",
    }
    return ModelFacts(**{**said, **changes})


def request(source: str, **changes: Any) -> MaterializeRequest:
    """Return a worker's request for the adapter at `source`."""
    asked: dict[str, Any] = {
        "selection": select(BASE, source),
        "facts": facts(),
        "max_rank": 16,
        "max_download_bytes": 1 << 30,
        "timeout_ms": 10_000,
        "request_id": "test",
    }
    return MaterializeRequest(**{**asked, **changes})


def config(**changes: object) -> Config:
    """Return what PEFT would write, with changes."""
    return {
        "auto_mapping": None,
        "base_model_name_or_path": BASE,
        "bias": "none",
        "init_lora_weights": True,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **changes,
    }


def tensor_name(module: str, half: str, layer: int = 0) -> str:
    """Return PEFT's name of one half of a pair; `half` is A or B."""
    return f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"


def bf16(*shape: int, value: float = 0.01) -> Data:
    """Return a BF16 tensor full of `value`."""
    count = 1
    for size in shape:
        count *= size
    return Data("BF16", shape, struct.pack("<f", value)[2:] * count)


def pairs(
    modules: Iterable[str] = QV, *, rank: int = 4, layers: Iterable[int] = (0, 1), value: float = 0.01
) -> Tensors:
    """Return the tensors of an adapter; another `value` makes another content."""
    tensors = {}
    for layer in layers:
        for module in modules:
            width_in, width_out = WIDTHS[module]
            tensors[tensor_name(module, "A", layer)] = bf16(rank, width_in, value=value)
            tensors[tensor_name(module, "B", layer)] = bf16(width_out, rank, value=value)
    return tensors


def safetensors(tensors: Mapping[str, Data], *, header: Callable[[Config], Config] = lambda header: header) -> bytes:
    """Return a safetensors file; `header` may spoil its header."""
    entries: Config = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    return raw_safetensors(json.dumps(header(entries)).encode(), b"".join(t.data for t in tensors.values()))


def raw_safetensors(header: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with this header, whatever it is; `length` is what it claims."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def write_adapter(
    directory: Path, *, settings: Config | bytes | None = None, tensors: Tensors | bytes | None = None
) -> Path:
    """Write an adapter into `directory`, a good one unless told otherwise, and return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = config() if settings is None else settings
    tensors = pairs() if tensors is None else tensors
    (directory / CONFIG_FILE).write_bytes(settings if isinstance(settings, bytes) else json.dumps(settings).encode())
    (directory / WEIGHTS_FILE).write_bytes(tensors if isinstance(tensors, bytes) else safetensors(tensors))
    return directory


@dataclass(frozen=True)
class Bad:
    """A way to be refused."""

    row: str
    """Of docs' field cases."""
    code: str
    """Of the reason that must be among those given."""
    words: tuple[str, ...]
    """What its sentence must hold: the file or tensor, what was found, what is expected."""
    write: Callable[[Path], object]


def _set(**changes: object) -> Callable[[Path], object]:
    return lambda directory: write_adapter(directory, settings=config(**changes))


def _without(field: str) -> Callable[[Path], object]:
    return lambda directory: write_adapter(
        directory, settings={name: value for name, value in config().items() if name != field}
    )


def _text(text: bytes) -> Callable[[Path], object]:
    return lambda directory: write_adapter(directory, settings=text)


def _more(**more: Data) -> Callable[[Path], object]:
    return lambda directory: write_adapter(directory, tensors={**pairs(), **more})


def _changed(module: str, half: str, tensor: Data) -> Callable[[Path], object]:
    return lambda directory: write_adapter(directory, tensors={**pairs(), tensor_name(module, half): tensor})


def _renamed(old: str, new: str) -> Callable[[Path], object]:
    return lambda directory: write_adapter(
        directory, tensors={name.replace(old, new): tensor for name, tensor in pairs().items()}
    )


def _bytes(data: bytes) -> Callable[[Path], object]:
    return lambda directory: write_adapter(directory, tensors=data)


def _header(spoil: Callable[[Config], Config]) -> Callable[[Path], object]:
    return lambda directory: write_adapter(directory, tensors=safetensors(pairs(), header=spoil))


def _files(*names: str) -> Callable[[Path], object]:
    """Write files instead of the weights."""

    def write(directory: Path) -> None:
        (write_adapter(directory) / WEIGHTS_FILE).unlink()
        for name in names:
            (directory / name).write_bytes(b"\x80\x04.")

    return write


def _full_model(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model-00001-of-00004.safetensors").write_bytes(b"")


def _linked(how: Callable[[Path, Path], None]) -> Callable[[Path], object]:
    """Put the weights elsewhere, and a link in their place."""

    def write(directory: Path) -> None:
        elsewhere = write_adapter(directory).parent / f"{directory.name}.elsewhere"
        (directory / WEIGHTS_FILE).rename(elsewhere)
        how(directory / WEIGHTS_FILE, elsewhere)

    return write


def _fifo(directory: Path) -> None:
    (write_adapter(directory) / WEIGHTS_FILE).unlink()
    os.mkfifo(directory / WEIGHTS_FILE)


def _shifted(by: int) -> Callable[[Config], Config]:
    """Move all tensors but the first, which leaves a gap (`by` above 0) or an overlap."""

    def spoil(header: Config) -> Config:
        for name in list(header)[2:]:
            header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]
        return header

    return spoil


def _with(name: str, **changes: object) -> Callable[[Config], Config]:
    def spoil(header: Config) -> Config:
        header[name] = {**header[name], **changes}
        return header

    return spoil


_Q = "self_attn.q_proj"
_QA = tensor_name(_Q, "A")
_EMPTY = replace(bf16(), shape=(0,), data=b"")
_NAN, _INFINITE = b"\xc0\x7f", b"\x80\xff"
_ONE = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'

BAD: dict[str, Bad] = {
    "rank above the worker's": Bad("A1", "rank_too_high", ("r of 64", "at most 16"), _set(r=64)),
    "rank above the worker's, by tensors": Bad(
        "A1", "rank_mismatch", ("rank 32", "r, 4"), lambda d: write_adapter(d, tensors=pairs(rank=32))
    ),
    "modules_to_save": Bad("A3", "unsupported_modules_to_save", ("lm_head",), _set(modules_to_save=["lm_head"])),
    "full lm_head": Bad(
        "A3", "unsupported_modules_to_save", ("lm_head.weight",), _more(**{"base_model.model.lm_head.weight": bf16(2)})
    ),
    "full embeddings": Bad(
        "A4",
        "unsupported_modules_to_save",
        ("embed_tokens.weight",),
        _more(**{"base_model.model.model.embed_tokens.weight": bf16(2, 2)}),
    ),
    "embedding adapter": Bad(
        "A4",
        "unsupported_embedding_adapter",
        ("lora_embedding_A",),
        _more(**{"base_model.model.model.embed_tokens.lora_embedding_A": bf16(4, 8)}),
    ),
    "new embeddings": Bad(
        "A4",
        "unsupported_new_embeddings",
        (EMBEDDINGS_FILE,),
        lambda d: (write_adapter(d) / EMBEDDINGS_FILE).write_bytes(safetensors({})),
    ),
    "one model. too many": Bad(
        "A7", "unknown_module", ("model.model.layers.0", "expected"), _renamed(".layers.", ".model.layers.")
    ),
    "no prefix": Bad("A7", "unknown_module", ("base_model.model.",), _renamed("base_model.model.", "")),
    "unknown layer": Bad("A7", "unknown_layer", ("layer 41", "0 to 29"), _renamed("layers.1.", "layers.41.")),
    "no tensors": Bad("A7", "no_tensors", (WEIGHTS_FILE,), lambda d: write_adapter(d, tensors={})),
    "half a pair": Bad(
        "A7",
        "unpaired_tensor",
        ("no lora_B",),
        lambda d: write_adapter(d, tensors={n: t for n, t in pairs().items() if n != tensor_name(_Q, "B")}),
    ),
    "beside target_modules": Bad("A7", "module_not_targeted", ("q_proj",), _set(target_modules=["v_proj"])),
    "beside layers_to_transform": Bad("A7", "module_not_targeted", ("layers.1",), _set(layers_to_transform=[0])),
    "DoRA": Bad("A9", "unsupported_use_dora", ("use_dora",), _set(use_dora=True)),
    "DoRA by tensor": Bad(
        "A9",
        "unsupported_use_dora",
        ("lora_magnitude_vector",),
        _more(**{f"base_model.model.model.layers.0.{_Q}.lora_magnitude_vector": bf16(576)}),
    ),
    **{
        init: Bad("A10", "unsupported_init_lora_weights", (init,), _set(init_lora_weights=init))
        for init in ("pissa", "pissa_niter_16", "olora", "loftq", "corda", "something_new")
    },
    "rank_pattern": Bad("A11", "unsupported_rank_pattern", ("q_proj",), _set(rank_pattern={"q_proj": 32})),
    "alpha_pattern": Bad("A11", "unsupported_alpha_pattern", ("q_proj",), _set(alpha_pattern={"q_proj": 32})),
    "bias lora_only": Bad("A12", "unsupported_bias", ("lora_only",), _set(bias="lora_only")),
    "bias all": Bad("A12", "unsupported_bias", ("all",), _set(bias="all")),
    "lora_bias": Bad("A12", "unsupported_lora_bias", ("lora_bias",), _set(lora_bias=True)),
    "bias tensor": Bad(
        "A12",
        "unsupported_bias",
        ("lora_B.bias",),
        _more(**{f"base_model.model.model.layers.0.{_Q}.lora_B.bias": bf16(576)}),
    ),
    "empty tensor": Bad("A14", "tensor_shape", ("[0]", "two dimensions"), _changed(_Q, "A", _EMPTY)),
    "flat tensor": Bad("A14", "tensor_shape", ("[64]", "two dimensions"), _changed(_Q, "A", bf16(64))),
    "empty dimension": Bad("A14", "tensor_shape", ("[0, 576]",), _changed(_Q, "A", Data("BF16", (0, 576), b""))),
    "ranks of a pair differ": Bad("A14", "rank_mismatch", ("[8, 576]", "[576, 4]"), _changed(_Q, "A", bf16(8, 576))),
    "another size's inputs": Bad("A15", "base_mismatch", ("960", "576"), _changed(_Q, "A", bf16(4, 960))),
    "another size's outputs": Bad("A15", "base_mismatch", ("960", "576"), _changed(_Q, "B", bf16(960, 4))),
    "another tower": Bad(
        "A17",
        "unknown_module",
        ("visual.blocks.0",),
        _more(**{f"base_model.model.visual.blocks.0.attn.qkv.lora_{half}.weight": bf16(4, 4) for half in "AB"}),
    ),
    "NaN": Bad(
        "A18", "non_finite", ("NaN", "q_proj.lora_A"), _changed(_Q, "A", replace(bf16(4, 576), data=_NAN * 4 * 576))
    ),
    "infinite": Bad(
        "A18",
        "non_finite",
        ("infinite", "q_proj.lora_B"),
        _changed(_Q, "B", replace(bf16(576, 4), data=bf16(576, 4).data[:-2] + _INFINITE)),
    ),
    "pickle only": Bad("A21", "pickle_not_allowed", ("adapter_model.bin",), _files("adapter_model.bin")),
    "pickle only, .pt": Bad("H4", "pickle_not_allowed", ("adapter_model.pt",), _files("adapter_model.pt")),
    "shards": Bad(
        "A22",
        "sharded_weights",
        ("2 files",),
        _files(
            "adapter_model-00001-of-00002.safetensors",
            "adapter_model-00002-of-00002.safetensors",
            "adapter_model.safetensors.index.json",
        ),
    ),
    "full model": Bad("A24", "not_an_adapter", ("a full model",), _full_model),
    "empty config": Bad("A29", "not_an_adapter", ("peft_type",), _text(b"{}")),
    "cut config": Bad("A29", "config_json", (CONFIG_FILE,), _text(b'{"peft_type": "LORA", "r":')),
    "config is a list": Bad("A29", "config_json", ("expected an object",), _text(b"[1]")),
    "no weights": Bad("A29", "no_weights", (WEIGHTS_FILE,), _files()),
    "prompt tuning": Bad("A29", "peft_type", ("PROMPT_TUNING", "LORA"), _set(peft_type="PROMPT_TUNING")),
    "IA3": Bad("A29", "peft_type", ("IA3", "LORA"), _set(peft_type="IA3")),
    "no peft_type": Bad("A29", "not_an_adapter", ("peft_type",), _without("peft_type")),
    "no r": Bad("A29", "config_field", ("no r",), _without("r")),
    "r is true": Bad("A29", "config_field", ("r is true",), _set(r=True)),
    "r is 0": Bad("A29", "config_field", ("r is 0",), _set(r=0)),
    "alpha is text": Bad("A29", "config_field", ("lora_alpha",), _set(lora_alpha="16")),
    "alpha is endless": Bad(
        "A29", "config_field", ("lora_alpha",), _text(json.dumps(config()).replace("16,", "1e999,", 1).encode())
    ),
    "no target_modules": Bad("A29", "config_field", ("target_modules",), _set(target_modules=None)),
    "target_modules of numbers": Bad("A29", "config_field", ("target_modules",), _set(target_modules=[1])),
    "rslora is text": Bad("A29", "config_field", ("use_rslora",), _set(use_rslora="false")),
    "config with NaN": Bad("A29", "config_json", ("NaN",), _text(b'{"r": NaN}')),
    "config says r twice": Bad("H9", "config_json", ("twice",), _text(b'{"r": 4, "r": 8}')),
    "deep config": Bad("H9", "config_json", ("nested",), _text(b"[" * 100_000)),
    "huge config": Bad("H9", "config_size", ("at most",), _text(b" " * (1 << 21))),
    "config of another encoding": Bad("A29", "config_json", ("UTF-8",), _text("{}".encode("utf-16"))),
    "layer_replication": Bad("A11", "unsupported_layer_replication", ("[[0, 2]]",), _set(layer_replication=[[0, 2]])),
    "aLoRA": Bad("A11", "unsupported_alora_invocation_tokens", ("[1]",), _set(alora_invocation_tokens=[1])),
    "trained tokens": Bad("A4", "unsupported_trainable_token_indices", ("[1]",), _set(trainable_token_indices=[1])),
    "target_parameters": Bad("A11", "unsupported_target_parameters", ("w1",), _set(target_parameters=["w1"])),
    "a switch from the future": Bad("A10", "unsupported_feature", ("use_zlora",), _set(use_zlora=True)),
    "a variant from the future": Bad("A10", "unsupported_feature", ("z_config",), _set(z_config={"a": 1})),
    "another architecture": Bad(
        "B6",
        "base_mismatch",
        ("Qwen2ForCausalLM", "LlamaForCausalLM"),
        _set(auto_mapping={"base_model_class": "Qwen2ForCausalLM"}),
    ),
    "zip as safetensors": Bad("H4", "pickle_not_allowed", ("zip",), _bytes(b"PK\x03\x04" + b"\0" * 60)),
    "pickle as safetensors": Bad("H4", "pickle_not_allowed", ("pickle",), _bytes(b"\x80\x04\x95" + b"\xff" * 60)),
    "LFS pointer": Bad(
        "A29", "git_lfs_pointer", ("Git LFS",), _bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    ),
    "web page": Bad("A29", "not_safetensors", ("HTML",), _bytes(b"<!DOCTYPE html><html></html>")),
    "empty weights": Bad("A29", "not_safetensors", ("0 bytes",), _bytes(b"")),
    "cut weights": Bad("A29", "data_length", ("expected the same",), _bytes(safetensors(pairs())[:-1])),
    "more than the tensors": Bad("H9", "data_length", ("expected the same",), _bytes(safetensors(pairs()) + b"\0")),
    "header of 2^63 bytes": Bad("H9", "header_length", (str(1 << 63),), _bytes(raw_safetensors(b"{}", length=1 << 63))),
    "header of 2^64-1 bytes": Bad(
        "H9", "header_length", ("at most",), _bytes(raw_safetensors(b"{}", length=2**64 - 1))
    ),
    "tensor twice": Bad(
        "H9", "header_json", ("twice",), _bytes(raw_safetensors(_ONE + b"," + _ONE[1:] + b"}", b"1234"))
    ),
    "deep header": Bad("H9", "header_json", ("nested",), _bytes(raw_safetensors(b'{"a":' + b"[" * 150))),
    "text behind the header": Bad("H9", "header_json", (WEIGHTS_FILE,), _bytes(raw_safetensors(b"{} x"))),
    "header is a list": Bad("H9", "not_safetensors", ("no JSON object",), _bytes(raw_safetensors(b"[1]"))),
    "gap": Bad("H9", "tensor_offsets", ("gap",), _header(_shifted(2))),
    "overlap": Bad("H9", "tensor_offsets", ("overlaps",), _header(_shifted(-2))),
    "size differs from shape": Bad("H9", "tensor_size", ("4608 bytes",), _header(_with(_QA, shape=[8, 576]))),
    "shape beyond 64 bits": Bad("H9", "tensor_shape", ("shape",), _header(_with(_QA, shape=[1 << 64, 576]))),
    "product beyond 64 bits": Bad("H9", "tensor_size", ("expected",), _header(_with(_QA, shape=[1 << 62, 1 << 62]))),
    "negative offsets": Bad("H9", "tensor_offsets", ("-1",), _header(_with(_QA, data_offsets=[-1, 4607]))),
    "offsets backwards": Bad("H9", "tensor_offsets", ("[begin, end]",), _header(_with(_QA, data_offsets=[9, 4]))),
    "unknown dtype": Bad("H9", "tensor_dtype", ("Q4_0",), _header(_with(_QA, dtype="Q4_0"))),
    "unserved dtype": Bad(
        "H9", "unsupported_dtype", ("I16", "BF16"), _changed(_Q, "A", replace(bf16(4, 576), dtype="I16"))
    ),
    "extra field": Bad("H9", "header_json", ("exactly",), _header(_with(_QA, strides=[1]))),
    "name that is no name": Bad("H9", "tensor_name", ("printable",), _more(**{"a\nb": bf16(2)})),
    "symlink": Bad("H1", "not_regular_file", ("symbolic link",), _linked(Path.symlink_to)),
    "hard link": Bad("H1", "hard_link", ("2 hard links",), _linked(Path.hardlink_to)),
    "fifo": Bad("H1", "not_regular_file", ("regular file",), _fifo),
}
"""By what is wrong."""
