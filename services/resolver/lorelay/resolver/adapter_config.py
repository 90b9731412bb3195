"""PEFT's `adapter_config.json`: what we need of it, and every feature in it that we refuse by name.

A feature that changes what the adapter computes is either served exactly or refused here, whatever the engine's version
would do with it: older engines ignore several of these fields and answer wrongly.  Fields that only describe training
are ignored.  A switch that this version does not know (`use_…: true`, `…_config: {…}`) is refused: newer PEFT versions
add variants that way, and an engine that does not know them answers as plain LoRA.

Source: PEFT 0.21, tuners/lora/config.py; vLLM 0.32, lora/peft_helper.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lorelay.proto.adapters import CONFIG_FILE
from lorelay.resolver.reasons import Findings, show
from lorelay.resolver.strict_json import StrictJSONError, loads

T = TypeVar("T")

MAX_CONFIG_BYTES = 1 << 20
_MAX_ALPHA = 1e6
_MAX_TARGETS = 10_000

# These only set A and B before training; the base's weights stay as they are.  Source: vLLM 0.32, as above.
_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})

# Variants of LoRA, refused when the field says anything: (field, what it is).
_VARIANTS = {
    "use_dora": "DoRA, which is not served",
    "use_qalora": "QA-LoRA, which is not served",
    "use_bdlora": "block-diagonal LoRA, which is not served",
    "modules_to_save": "whole modules beside the adapter, which are not served",
    "lora_bias": "trained biases, which are not served",
    "layer_replication": "replicated layers, which are not served",
    "alora_invocation_tokens": "activated LoRA (aLoRA), which is not served",
    "trainable_token_indices": "trained token embeddings, which are not served",
    "target_parameters": "an adapter on parameters instead of modules, which is not served",
    "arrow_config": "Arrow routing between adapters, which is not served",
    "kasa_config": "KaSA, which is not served",
    "monteclora_config": "MonteCLoRA, which is not served",
    "velora_config": "VeLoRA, which is not served",
    "megatron_config": "Megatron's parallel layers, which are not served",
}
# Look like switches, but only say how training began or went.
_TRAINING_ONLY = frozenset({
    "use_rslora", "corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the verdict needs.  A field that was not well-formed is None; the findings say so."""

    rank: int | None
    """`r`."""
    targets: tuple[str, ...] | None
    """`target_modules`, if it is a list; None for an expression such as `all-linear`, which is never evaluated."""
    layers: frozenset[int] | None
    """`layers_to_transform`; None: all."""
    base_name: str | None
    """`base_model_name_or_path`, if it says anything.  Never opened, never fetched."""
    base_class: str | None
    """`auto_mapping.base_model_class`, the class it was trained on, if it says so."""


def read_config(data: bytes, findings: Findings) -> AdapterConfig | None:
    """Return the config that `data` holds, or None if it cannot be read; what is wrong goes to `findings`."""
    try:
        value = loads(data)
    except StrictJSONError as error:
        findings.add("config_json", f"{CONFIG_FILE} is not strict JSON: {error}.")
        return None
    if not isinstance(value, dict):
        findings.add("config_json", f"{CONFIG_FILE} holds {show(value)}; expected an object.")
        return None
    _check_type(value, findings)
    _check_variants(value, findings)
    rank = _field(value, "r", _rank, "a whole number from 1", findings)
    alpha = _field(value, "lora_alpha", _alpha, f"a number above 0, up to {_MAX_ALPHA:g}", findings)
    _check_pattern(value, "rank_pattern", rank, findings)
    _check_pattern(value, "alpha_pattern", alpha, findings)
    target = _field(value, "target_modules", _target, "a list of module names, or a string", findings)
    layers = _field(value, "layers_to_transform", _layers, "layer numbers", findings, optional=True)
    return AdapterConfig(
        rank=rank,
        targets=target if isinstance(target, tuple) else None,
        layers=layers,
        base_name=_base_name(value),
        base_class=_base_class(value),
    )


def _check_type(value: dict[str, object], findings: Findings) -> None:
    kind = value.get("peft_type")
    if kind is None:
        findings.add("not_an_adapter", f'{CONFIG_FILE} has no peft_type; expected "LORA".')
    elif kind != "LORA":
        findings.add("peft_type", f'{CONFIG_FILE}: peft_type is {show(kind)}; expected "LORA".')


def _check_variants(value: dict[str, object], findings: Findings) -> None:
    for field, found in value.items():
        where = f"{CONFIG_FILE}: {show(field)[1:-1]} is {show(found)}"
        if field in _VARIANTS:
            if found:
                findings.add(f"unsupported_{field}", f"{where}: {_VARIANTS[field]}.")
        elif field in _TRAINING_ONLY:
            continue
        elif (field.startswith("use_") and found is True) or (field.endswith("_config") and found):
            findings.add("unsupported_feature", f"{where}: a feature that this version does not know.")
    bias = value.get("bias")
    if bias is not None and bias != "none":
        findings.add(
            "unsupported_bias",
            f'{CONFIG_FILE}: bias is {show(bias)}; expected "none": trained biases are not served.',
        )
    rank_stabilized = value.get("use_rslora")
    if not isinstance(rank_stabilized, bool | None):
        findings.add("config_field", f"{CONFIG_FILE}: use_rslora is {show(rank_stabilized)}; expected true or false.")
    init = value.get("init_lora_weights")
    if not (isinstance(init, bool | None) or (isinstance(init, str) and init.lower() in _INITS)):
        findings.add(
            "unsupported_init_lora_weights",
            f"{CONFIG_FILE}: init_lora_weights is {show(init)}: such an adapter belongs on changed base weights, not"
            " on the base; convert it with PEFT's path_initial_model_for_weight_conversion.",
        )


def _check_pattern(value: dict[str, object], field: str, default: float | None, findings: Findings) -> None:
    """Refuse a per-module override, unless it overrides nothing."""
    pattern = value.get(field)
    if not pattern or (isinstance(pattern, dict) and all(each == default for each in pattern.values())):
        return
    findings.add(
        f"unsupported_{field}",
        f"{CONFIG_FILE}: {field} is {show(pattern)}: ranks and scales of single modules are not served; expected none"
        " that differs from r and lora_alpha.",
    )


def _rank(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _alpha(value: object) -> float | None:
    if type(value) not in {int, float}:
        return None
    assert isinstance(value, int | float)  # noqa: S101 - for the type checker
    return value if math.isfinite(value) and 0 < value <= _MAX_ALPHA else None


def _target(value: object) -> str | tuple[str, ...] | None:
    if isinstance(value, str):
        return value or None
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_TARGETS:
        return None
    return tuple(value) if all(isinstance(name, str) and name for name in value) else None


def _layers(value: object) -> frozenset[int] | None:
    numbers: list[object] = value if isinstance(value, list) else [value]
    layers = frozenset(number for number in numbers if isinstance(number, int) and not isinstance(number, bool))
    return layers if len(layers) == len(numbers) else None


def _field(
    value: dict[str, object],
    name: str,
    read: Callable[[object], T | None],
    expected: str,
    findings: Findings,
    *,
    optional: bool = False,
) -> T | None:
    """Return `read` of the field, where None means "not well-formed"; an optional field may be absent or null."""
    if optional and value.get(name) is None:
        return None
    if name not in value:
        findings.add("config_field", f"{CONFIG_FILE} has no {name}; expected {expected}.")
        return None
    found = read(value[name])
    if found is None:
        findings.add("config_field", f"{CONFIG_FILE}: {name} is {show(value[name])}; expected {expected}.")
    return found


def _base_name(value: dict[str, object]) -> str | None:
    name = value.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _base_class(value: dict[str, object]) -> str | None:
    mapping = value.get("auto_mapping")
    name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    return name if isinstance(name, str) and name else None
