"""What is served, what is refused, and that a refusal says everything."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from lorelay.proto.adapters import CONFIG_FILE, WEIGHTS_FILE
from lorelay.resolver import values
from lorelay.resolver.members import DirectoryError, Members
from lorelay.resolver.reasons import MAX_REASONS, Findings, show
from lorelay.resolver.safetensors_header import Tensor
from lorelay.resolver.verdict import Limits, Verdict, judge
from support.adapters import (
    BAD,
    DIMENSIONS,
    QV,
    WIDTHS,
    Bad,
    Config,
    Data,
    Tensors,
    bf16,
    config,
    facts,
    pairs,
    tensor_name,
    write_adapter,
)

LIMITS = Limits(max_rank=16)
DEMO_ADAPTERS = Path(__file__).parents[3] / "cli" / "lorelay" / "cli" / "demo_adapters"


def verdict(directory: Path, settings: Config | None = None, tensors: Tensors | None = None) -> Verdict:
    return judge(write_adapter(directory / "adapter", settings=settings, tensors=tensors), facts(), LIMITS)


def codes(found: Verdict) -> set[str]:
    return {reason.code for reason in found.reasons}


@pytest.mark.parametrize("bad", BAD.values(), ids=[f"{bad.row} {name}" for name, bad in BAD.items()])
@pytest.mark.parametrize("is_source", [True, False])
def test_it_is_refused_and_the_reason_says_why(tmp_path: Path, bad: Bad, *, is_source: bool) -> None:
    """Rows A1 A3 A4 A7 A9-A12 A14 A15 A17 A18 A21 A22 A24 A29 B6 H1 H4 H9: as a source and as a snapshot."""
    bad.write(tmp_path / "adapter")
    found = judge(tmp_path / "adapter", facts(), LIMITS, is_source=is_source)
    assert not found.accepted
    sentences = [reason.sentence for reason in found.reasons if reason.code == bad.code]
    assert any(all(word in sentence for word in bad.words) for sentence in sentences), found.reasons
    assert all(str(tmp_path) not in sentence for sentence in sentences)


def test_a_peft_adapter_is_accepted(tmp_path: Path) -> None:
    """What PEFT writes for q and v of SmolLM2 passes, with its rank and modules."""
    assert verdict(tmp_path) == Verdict(
        reasons=(), rank=4, target_modules=("q_proj", "v_proj"), base_verified_by_name=True
    )


@pytest.mark.parametrize("name", ["pirate", "robot"])
def test_the_demos_adapters_are_accepted(name: str) -> None:
    """They were trained by PEFT, not written by our tests."""
    found = judge(DEMO_ADAPTERS / name, facts(), LIMITS, is_source=True)
    assert found.reasons == ()
    assert found.rank == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": None},
        {"use_rslora": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 16.0}},
        {"rank_pattern": None, "modules_to_save": [], "loftq_config": {"loftq_bits": 4}},
        {"target_modules": "all-linear"},
        {"target_modules": "(a+)+$"},
        {"target_modules": ["self_attn.q_proj", "v_proj", "not_there"]},
        {"layers_to_transform": [0, 1, 2], "lora_alpha": 0.5},
        {"a_field_of_2030": 16, "megatron_core": "megatron.core"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
    ],
)
def test_what_changes_nothing_is_no_reason(tmp_path: Path, changes: Config) -> None:
    """Rows A10 A11 A12: neutral values, and fields that only describe training."""
    assert verdict(tmp_path, config(**changes)).reasons == ()


def test_every_module_of_every_layer_has_its_dimensions(tmp_path: Path) -> None:
    """Row A15: all seven projections, in the first and the last layer."""
    found = verdict(tmp_path, config(target_modules="all-linear"), pairs(WIDTHS, layers=(0, 29)))
    assert found.reasons == ()
    assert found.target_modules == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_served_dtypes(tmp_path: Path, dtype: str) -> None:
    """Whatever float type an adapter was saved in."""
    size = 4 if dtype == "F32" else 2
    tensors = {n: Data(dtype, t.shape, b"\x01" * (len(t.data) // 2 * size)) for n, t in pairs().items()}
    assert verdict(tmp_path, tensors=tensors).reasons == ()


def test_rank_limit_is_the_workers(tmp_path: Path) -> None:
    """Row A1: both ranks are named; the same adapter is right for another worker."""
    directory = write_adapter(tmp_path / "a", settings=config(r=64), tensors=pairs(rank=64))
    found = judge(directory, facts(), LIMITS)
    assert [str(reason) for reason in found.reasons] == [
        "rank_too_high: adapter_config.json has r of 64; the worker takes at most 16."
    ]
    assert judge(directory, facts(), Limits(max_rank=64)).accepted


def test_modules_that_the_worker_does_not_adapt(tmp_path: Path) -> None:
    """Row A8: an adapter on down_proj, a worker that adapts q_proj only."""
    directory = write_adapter(
        tmp_path / "a", settings=config(target_modules=["down_proj"]), tensors=pairs(["mlp.down_proj"])
    )
    found = judge(directory, facts(), Limits(max_rank=16, target_modules=("q_proj",)))
    assert codes(found) == {"module_not_served"}
    assert "q_proj" in found.reasons[0].sentence


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    """Config, names, shapes and numbers: one refusal, not four."""
    tensors = {
        **pairs(),
        tensor_name(QV[0], "A"): bf16(4, 100),
        tensor_name(QV[1], "B"): bf16(192, 4, value=float("inf")),
        "base_model.model.lm_head.weight": bf16(2),
    }
    found = verdict(tmp_path, config(use_dora=True, bias="all", r=8), tensors)
    assert codes(found) == {
        "unsupported_use_dora",
        "unsupported_bias",
        "rank_mismatch",
        "base_mismatch",
        "non_finite",
        "unsupported_modules_to_save",
    }


def test_a_hundred_like_it_are_one_reason(tmp_path: Path) -> None:
    """Thirty layers with one fault are told once, with their number."""
    tensors = {name.replace("q_proj", "w_proj"): t for name, t in pairs([QV[0]], layers=range(30)).items()}
    found = verdict(tmp_path, config(target_modules="all-linear"), tensors)
    assert len(found.reasons) == 1
    assert "29 more" in found.reasons[0].sentence


def test_reasons_are_bounded() -> None:
    """A hostile adapter does not make a megabyte of error."""
    findings = Findings()
    for number in range(1000):
        findings.add("code", f"{number}: {show('x' * 10_000)}")
    told = findings.reasons()
    assert len(told) == MAX_REASONS + 1
    assert str(told[-1]) == "more_reasons: 968 more reasons are not listed."
    assert sum(len(str(reason)) for reason in told) < 10_000


@pytest.mark.parametrize("name", [None, "", "/data/Qwen/Qwen2-7B", "./out/ckpt", "C:\\models\\base", "evil/repo", 5])
def test_the_declared_base_proves_nothing(tmp_path: Path, name: object) -> None:
    """Rows B1 B4: null, empty, a path of somebody's laptop: the shape decides."""
    found = verdict(tmp_path, config(base_model_name_or_path=name))
    assert found.accepted
    assert not found.base_verified_by_name


def test_no_declared_base_at_all(tmp_path: Path) -> None:
    """Row B1: the key is absent."""
    settings = config()
    del settings["base_model_name_or_path"]
    assert verdict(tmp_path, settings).accepted


def test_an_alias_is_the_base(tmp_path: Path) -> None:
    """Row B5: any name the worker advertises."""
    assert verdict(tmp_path, config(base_model_name_or_path="smollm2")).base_verified_by_name


def test_no_network_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row B2 (and H11): the declared base is neither fetched nor opened."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("the verdict used the network")

    monkeypatch.setattr(socket, "socket", refuse)
    opened = list[str]()
    true_open = Members.open

    def watch(members: Members, name: str) -> object:
        opened.append(name)
        return true_open(members, name)

    monkeypatch.setattr(Members, "open", watch)
    base = write_adapter(tmp_path / "base")
    found = verdict(tmp_path, config(base_model_name_or_path=str(base), auto_mapping={"auto_map": "x.y"}))
    assert found.accepted
    assert opened == [CONFIG_FILE, WEIGHTS_FILE]


def test_equal_dimensions_of_another_family(tmp_path: Path) -> None:
    """Row B6: an adapter that says what it was trained on is held to it."""
    directory = write_adapter(tmp_path / "a", settings=config(auto_mapping={"base_model_class": "LlamaForCausalLM"}))
    found = judge(directory, facts(architecture="Qwen2ForCausalLM"), LIMITS)
    assert codes(found) == {"base_mismatch"}


def test_another_size_of_the_same_family(tmp_path: Path) -> None:
    """Rows A15 B6: module names agree and dimensions do not."""
    directory = write_adapter(tmp_path / "a")
    larger = facts(dimensions={**DIMENSIONS, "hidden_size": 960, "num_attention_heads": 15, "num_key_value_heads": 5})
    assert codes(judge(directory, larger, LIMITS)) == {"base_mismatch"}


def test_unknown_dimensions_are_not_guessed(tmp_path: Path) -> None:
    """An engine that says nothing about its base gets what the names allow."""
    assert judge(write_adapter(tmp_path / "a"), facts(dimensions={}, architecture=""), LIMITS).accepted


def test_heads_give_the_head_dim_if_nobody_says_it(tmp_path: Path) -> None:
    """config.json of Llama has no head_dim; Qwen3's is not hidden_size / heads."""
    without = {name: size for name, size in DIMENSIONS.items() if name != "head_dim"}
    directory = write_adapter(tmp_path / "a")
    assert judge(directory, facts(dimensions=without), LIMITS).accepted
    assert codes(judge(directory, facts(dimensions={**DIMENSIONS, "head_dim": 128}), LIMITS)) == {"base_mismatch"}


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_experts_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    """Attention of a mixture model can be checked; its experts cannot, yet."""
    directory = write_adapter(tmp_path / "a", settings=config(target_modules="all-linear"), tensors=pairs(WIDTHS))
    found = judge(directory, facts(architecture=architecture), LIMITS)
    assert codes(found) == {"unknown_module"}
    assert "mlp" in found.reasons[0].sentence
    assert judge(write_adapter(tmp_path / "b"), facts(architecture=architecture), LIMITS).accepted


def test_fused_projections(tmp_path: Path) -> None:
    """Phi-3 has one qkv_proj and one gate_up_proj."""
    tensors = {
        tensor_name("self_attn.qkv_proj", "A"): bf16(4, 576),
        tensor_name("self_attn.qkv_proj", "B"): bf16(576 + 2 * 192, 4),
        tensor_name("mlp.gate_up_proj", "A"): bf16(4, 576),
        tensor_name("mlp.gate_up_proj", "B"): bf16(2 * 1536, 4),
    }
    directory = write_adapter(tmp_path / "a", settings=config(target_modules="all-linear"), tensors=tensors)
    assert judge(directory, facts(architecture="Phi3ForCausalLM"), LIMITS).accepted
    assert codes(judge(directory, facts(), LIMITS)) == {"unknown_module"}


def test_what_lies_beside_an_adapter_is_ignored_in_a_source(tmp_path: Path) -> None:
    """Rows A23 A24: README, optimizer, checkpoints, a whole model: neither read nor fatal."""
    directory = write_adapter(tmp_path / "a")
    for name in ("README.md", ".gitattributes", "training_args.bin", "optimizer.pt", "tokenizer.json", "config.json"):
        (directory / name).write_bytes(b"\x80\x04.")
    (directory / "model-00001-of-00004.safetensors").write_bytes(b"")
    (directory / "checkpoint-500").mkdir()
    assert judge(directory, facts(), LIMITS, is_source=True).accepted
    assert codes(judge(directory, facts(), LIMITS)) == {"unexpected_file"}


def test_numbers_that_overflow_in_the_engines_type(tmp_path: Path) -> None:
    """Row A18: 1e6 is finite in the file and infinite in float16."""
    directory = write_adapter(tmp_path / "a", tensors=pairs(value=1e6))
    assert judge(directory, facts(), LIMITS).accepted
    found = judge(directory, facts(dtype="torch.float16"), LIMITS)
    assert codes(found) == {"non_finite"}
    assert "float16" in found.reasons[0].sentence


@pytest.mark.parametrize("at", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7F81])
def test_one_bad_number_anywhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, bits: int) -> None:
    """Row A18: in the first, a middle and the last chunk, of either sign, quiet or signalling."""
    monkeypatch.setattr(values, "CHUNK_BYTES", 4)
    numbers = [0x3C00] * 12
    numbers[at] = bits
    findings = Findings()
    path = tmp_path / "w"
    path.write_bytes(struct.pack("<12H", *numbers))
    with path.open("rb", buffering=0) as file:
        tensor = Tensor("t", "BF16", (12,), 0, 24)
        values.check_values(file, [tensor], "bfloat16", findings, lambda: None)
    assert [reason.code for reason in findings.reasons()] == ["non_finite"]


@pytest.mark.parametrize(("dtype", "engine", "kind"), [("F32", "float16", np.float16), ("F16", "float32", np.float32)])
def test_the_limits_are_where_numpy_rounds_to_infinity(
    tmp_path: Path, dtype: str, engine: str, kind: type[np.floating]
) -> None:
    """Numbers around the largest that fit are judged as a conversion would."""
    source = np.float32 if dtype == "F32" else np.float16
    with np.errstate(over="ignore"):
        candidates = np.array([65503, 65504, 65519, 65519.99, 65520, 65521, 1e5], dtype=np.float32).astype(source)
    for number in candidates[np.isfinite(candidates)]:
        findings = Findings()
        path = tmp_path / "w"
        path.write_bytes(np.array([number], dtype=source).tobytes())
        with path.open("rb", buffering=0) as file, np.errstate(over="ignore"):
            tensor = Tensor("t", dtype, (1,), 0, path.stat().st_size)
            values.check_values(file, [tensor], engine, findings, lambda: None)
            assert bool(findings) == bool(np.isinf(kind(number))), number


def test_a_scan_stops_when_nobody_wants_it(tmp_path: Path) -> None:
    """Cancellation reaches the long part."""

    class Stop(Exception):  # noqa: N818 - not an error
        pass

    def stop() -> NoReturn:
        raise Stop

    with pytest.raises(Stop):
        judge(write_adapter(tmp_path / "a"), facts(), LIMITS, still_wanted=stop)


def test_symlinks_may_lead_only_within_a_trusted_root(tmp_path: Path) -> None:
    """Row H1: a hub library's cache is made of symlinks; a client's folder must not be."""
    area, blobs = tmp_path / "area", tmp_path / "area" / "blobs"
    adapter = write_adapter(area / "adapter")
    blobs.mkdir()
    shutil.move(adapter / WEIGHTS_FILE, blobs / "w")
    (adapter / WEIGHTS_FILE).symlink_to("../blobs/w")
    assert judge(adapter, facts(), LIMITS, trusted_root=area).accepted
    assert codes(judge(adapter, facts(), LIMITS)) == {"not_regular_file"}
    assert codes(judge(adapter, facts(), LIMITS, trusted_root=tmp_path / "other")) == {"not_regular_file"}


def test_a_directory_that_became_a_symlink_is_not_followed(tmp_path: Path) -> None:
    """Row H1: what a plugin checked is not what is opened."""
    write_adapter(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(DirectoryError):
        judge(tmp_path / "link", facts(), LIMITS)


def test_hostile_names_are_shown_in_ascii(tmp_path: Path) -> None:
    """A refusal goes into logs and JSON: no control characters, no surrogates."""
    text = json.dumps(config(init_lora_weights="\ud800\u202e\x1b[31m")).encode()
    found = judge(write_adapter(tmp_path / "a", settings=text), facts(), LIMITS)
    assert codes(found) == {"unsupported_init_lora_weights"}
    assert str(found.reasons[0]).isascii()
    assert str(found.reasons[0]).isprintable()
