"""Names and shapes of an adapter's tensors, matched against the base's modules.

Every tensor must be half of a pair on a module that the base has, with the dimensions that the base has.  A name that
only looks right (one `model.` too many, another tower of a multimodal model) loads in some engines without an error
and answers as the base; so what is not known is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorelay.proto.adapters import WEIGHTS_FILE
from lorelay.proto.records import ModelFacts
from lorelay.resolver.adapter_config import AdapterConfig
from lorelay.resolver.reasons import Findings, show
from lorelay.resolver.safetensors_header import Tensor

DTYPES = ("BF16", "F16", "F32")
_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_MODULE = re.compile(r"model\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<name>[a-z_]+\.[a-z_]+)")

# Tensors that are no A or B, by what their name holds; the first that fits.
_OTHERS = (
    ("lora_magnitude_vector", "unsupported_use_dora", "is a DoRA magnitude vector"),
    ("lora_embedding_", "unsupported_embedding_adapter", "adapts an embedding"),
    ("trainable_tokens", "unsupported_trainable_token_indices", "holds trained token embeddings"),
    ("token_adapter", "unsupported_trainable_token_indices", "holds trained token embeddings"),
    ("modules_to_save", "unsupported_modules_to_save", "is a whole module beside the adapter"),
    (".bias", "unsupported_bias", "is a trained bias"),
    ("lora_", "unknown_tensor", "is neither lora_A.weight nor lora_B.weight of a module"),
    ("", "unsupported_modules_to_save", "is a full tensor beside the adapter"),
)

# Modules of a decoder layer, as (input, output) in words of `_features`.
_ATTENTION = {
    "self_attn.q_proj": ("hidden", "heads"),
    "self_attn.k_proj": ("hidden", "kv_heads"),
    "self_attn.v_proj": ("hidden", "kv_heads"),
    "self_attn.o_proj": ("heads", "hidden"),
}
_MLP = {
    "mlp.gate_proj": ("hidden", "intermediate"),
    "mlp.up_proj": ("hidden", "intermediate"),
    "mlp.down_proj": ("intermediate", "hidden"),
}
_FUSED = {
    "self_attn.qkv_proj": ("hidden", "qkv"),
    "self_attn.o_proj": ("heads", "hidden"),
    "mlp.gate_up_proj": ("hidden", "gate_up"),
    "mlp.down_proj": ("intermediate", "hidden"),
}
_FUSED_ARCHITECTURES = frozenset({"Phi3ForCausalLM"})


@dataclass(slots=True)
class _Pair:
    a: Tensor | None = None
    b: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What an adapter's tensors adapt."""

    rank: int
    """The highest rank; 0 if no pair is well-formed."""
    target_modules: tuple[str, ...]
    """Last names of the adapted modules, sorted."""


def check_tensors(
    tensors: Iterable[Tensor],
    config: AdapterConfig | None,
    facts: ModelFacts,
    served_modules: tuple[str, ...],
    findings: Findings,
) -> Coverage:
    """Check every tensor against the config, the base's facts and the modules the worker adapts (empty: all)."""
    pairs = _pairs(tensors, findings)
    if not pairs and not findings:
        findings.add("no_tensors", f"{WEIGHTS_FILE} has no tensors; expected pairs of lora_A and lora_B.")
    layout = _layout(facts.architecture)
    features = _features(facts.dimensions)
    ranks = {0}
    names = set()
    for path, pair in pairs.items():
        module = _known_module(path, layout, facts, findings)
        if module is not None:
            names.add(module.rpartition(".")[2])
            _check_served(path, module, served_modules, findings)
        if config is not None:
            _check_targeted(path, config, findings)
        if pair.a is None or pair.b is None:
            half, other = ("A", "B") if pair.b is None else ("B", "A")
            findings.add(
                "unpaired_tensor",
                f"{WEIGHTS_FILE}: module {show(path)} has lora_{half} and no lora_{other}; expected both.",
                group=half,
            )
            continue
        rank = _pair_rank(path, pair.a, pair.b, findings)
        if rank is not None:
            ranks.add(rank)
            _check_rank(path, rank, config, findings)
            if module is not None:
                _check_features(pair.a, pair.b, module, tuple(features.get(w) for w in layout[module]), findings)
    return Coverage(rank=max(ranks), target_modules=tuple(sorted(names)))


def _pairs(tensors: Iterable[Tensor], findings: Findings) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = defaultdict(_Pair)
    for tensor in tensors:
        match = _HALF.fullmatch(tensor.name)
        if match is None:
            _refuse_name(tensor, findings)
            continue
        if tensor.dtype not in DTYPES:
            findings.add(
                "unsupported_dtype",
                f"{WEIGHTS_FILE}: tensor {show(tensor.name)} is {tensor.dtype}; expected one of {', '.join(DTYPES)}.",
                group=tensor.dtype,
            )
        pair = pairs[match["module"]]
        if match["half"] == "A":
            pair.a = tensor
        else:
            pair.b = tensor
    return dict(pairs)


def _refuse_name(tensor: Tensor, findings: Findings) -> None:
    if ".lora_" in tensor.name and not tensor.name.startswith("base_model.model."):
        findings.add(
            "unknown_module",
            f"{WEIGHTS_FILE}: tensor {show(tensor.name)} does not begin with base_model.model., as PEFT writes it.",
            group="prefix",
        )
        return
    code, what = next((code, what) for part, code, what in _OTHERS if part in tensor.name)
    findings.add(code, f"{WEIGHTS_FILE}: tensor {show(tensor.name)} {what}, which is not served.", group=what)


def _layout(architecture: str) -> Mapping[str, tuple[str, str]]:
    """Return the modules of a layer that we can check; those of an architecture we do not know are Llama's."""
    if architecture in _FUSED_ARCHITECTURES:
        return _FUSED
    if "Moe" in architecture or "Mixtral" in architecture:
        return _ATTENTION
    return _ATTENTION | _MLP


def _features(dimensions: Mapping[str, int]) -> dict[str, int]:
    """Return what is known of the widths of a layer's modules."""
    known = {name: size for name, size in dimensions.items() if size > 0}
    hidden, heads, kv_heads = (known.get(n) for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = known.get("head_dim") or (hidden // heads if hidden and heads else None)
    intermediate = known.get("intermediate_size")
    features: dict[str, int | None] = {
        "hidden": hidden,
        "intermediate": intermediate,
        "gate_up": intermediate and 2 * intermediate,
        "heads": heads and head_dim and heads * head_dim,
        "kv_heads": kv_heads and head_dim and kv_heads * head_dim,
        "qkv": heads and kv_heads and head_dim and (heads + 2 * kv_heads) * head_dim,
    }
    return {word: width for word, width in features.items() if width}


def _known_module(
    path: str, layout: Mapping[str, tuple[str, str]], facts: ModelFacts, findings: Findings
) -> str | None:
    """Return the module's name within its layer (`self_attn.q_proj`), or None if the base has no such module."""
    match = _MODULE.fullmatch(path)
    if match is None or match["name"] not in layout:
        findings.add(
            "unknown_module",
            f"{WEIGHTS_FILE}: module {show(path)} is not known in the base; expected model.layers.N. and one of"
            f" {', '.join(layout)}.",
            group=re.sub(r"[0-9]+", "N", path),
        )
        return None
    layers = facts.dimensions.get("num_hidden_layers")
    if layers is not None and int(match["layer"]) >= layers:
        findings.add(
            "unknown_layer",
            f"{WEIGHTS_FILE}: module {show(path)} is in layer {match['layer']}; the base has layers 0 to {layers - 1}.",
            group="layer",
        )
        return None
    return match["name"]


def _check_served(path: str, module: str, served_modules: tuple[str, ...], findings: Findings) -> None:
    name = module.rpartition(".")[2]
    if served_modules and name not in served_modules:
        findings.add(
            "module_not_served",
            f"{WEIGHTS_FILE}: module {show(path)} is not adapted by the worker; expected one of"
            f" {', '.join(sorted(served_modules))}.",
            group=name,
        )


def _check_targeted(path: str, config: AdapterConfig, findings: Findings) -> None:
    """Refuse what PEFT would not load from the same files."""
    if config.targets is not None and not any(path == t or path.endswith(f".{t}") for t in config.targets):
        findings.add(
            "module_not_targeted",
            f"{WEIGHTS_FILE}: module {show(path)} is not among the config's target_modules {show(config.targets)}.",
            group="targets",
        )
    match = _MODULE.fullmatch(path)
    if config.layers is not None and match is not None and int(match["layer"]) not in config.layers:
        findings.add(
            "module_not_targeted",
            f"{WEIGHTS_FILE}: module {show(path)} is not among the config's layers_to_transform.",
            group="layers",
        )


def _pair_rank(path: str, a: Tensor, b: Tensor, findings: Findings) -> int | None:
    """Return the rank of a well-formed pair: A is [rank, in], B is [out, rank]."""
    flat = [tensor for tensor in (a, b) if len(tensor.shape) != 2 or 0 in tensor.shape]  # noqa: PLR2004 - matrices
    for tensor in flat:
        findings.add(
            "tensor_shape",
            f"{WEIGHTS_FILE}: tensor {show(tensor.name)} has the shape {show(tensor.shape)}; expected two dimensions"
            " above 0 (adapters exported from sharded training may hold empty tensors).",
            group="flat",
        )
    if flat:
        return None
    if a.shape[0] != b.shape[1]:
        findings.add(
            "rank_mismatch",
            f"{WEIGHTS_FILE}: module {show(path)} has lora_A {show(a.shape)} and lora_B {show(b.shape)}; expected"
            " [rank, in] and [out, rank] of one rank.",
            group="pair",
        )
        return None
    return a.shape[0]


def _check_rank(path: str, rank: int, config: AdapterConfig | None, findings: Findings) -> None:
    if config is not None and config.rank is not None and rank != config.rank:
        findings.add(
            "rank_mismatch",
            f"{WEIGHTS_FILE}: module {show(path)} has tensors of rank {rank}; expected the config's r, {config.rank}.",
            group=f"config {rank}",
        )


def _check_features(a: Tensor, b: Tensor, module: str, widths: tuple[int | None, ...], findings: Findings) -> None:
    for tensor, what, found, expected in ((a, "inputs", a.shape[1], widths[0]), (b, "outputs", b.shape[0], widths[1])):
        if expected is not None and found != expected:
            findings.add(
                "base_mismatch",
                f"{WEIGHTS_FILE}: tensor {show(tensor.name)} has {found} {what}; the base's {module} has {expected}.",
                group=f"{module} {what} {found}",
            )
