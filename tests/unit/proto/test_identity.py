"""Model ids, sources and keys: the vectors of Dynamo's protocol, the grammar, and the laws behind both."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import assume, given, strategies as st

from lorelay.proto import keys, rendezvous
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.identity import (
    AdapterSelection,
    adapter_key,
    check_model_id,
    check_source,
    identity_digest,
    redact,
    select,
    split_model_id,
    verify,
)

VECTORS = [
    (
        "meta-llama/Llama-3.1-8B-Instruct",
        "wandb-artifact:///team/project/adapter:v7",
        "dyn-lora-c7246b154263a336c006517e4bc6d7c8",
    ),
    ("base", "custom://adapter@sha256:abc", "dyn-lora-e3cfcd02f2e62cb70f45999324e7d4de"),
    ("base", "wandb-artifact:///a|b:v1", "dyn-lora-74bbe88c562d9d177d098e3ba118851a"),
    (
        "Qwen/Qwen3-0.6B",
        "wandb-artifact:///team/project/qwen3-accuracy:v1",
        "dyn-lora-f202aaf30cad5c6f70d5fa735d5bd592",
    ),
]
NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="|", min_codepoint=0x20), min_size=1
).filter(lambda name: "\x7f" not in name)
SECRETS = st.text(string.ascii_letters + string.digits + "+/=%:?#&~", min_size=6, max_size=40)


@pytest.mark.parametrize(("base", "source", "key"), VECTORS)
def test_keys_are_those_of_the_protocol(base: str, source: str, key: str) -> None:
    assert adapter_key(base, source) == key
    assert select(base, source) == AdapterSelection(base=base, source=source, key=key, version=2)
    assert split_model_id(f"{base}|{source}") == (base, source)
    check_source(source)


def test_the_rendezvous_score_is_that_of_the_protocol() -> None:
    assert rendezvous.score("adapter-a", 7, 3) == 0x5EADA6DF812DF3DC


@given(st.permutations([f"{number:016x}" for number in range(6)]))
def test_ranking_does_not_depend_on_the_order(order: list[str]) -> None:
    assert rendezvous.ranked("key", order) == rendezvous.ranked("key", sorted(order))


@given(NAMES, NAMES, NAMES, NAMES)
def test_different_adapters_have_different_keys(base: str, source: str, other_base: str, other: str) -> None:
    """C5: the exact bytes count."""
    assume((base, source) != (other_base, other))
    assert adapter_key(base, source) != adapter_key(other_base, other)


@given(NAMES, NAMES)
def test_where_the_base_ends_is_part_of_the_identity(base: str, source: str) -> None:
    assert adapter_key(base + source[:1], source[1:] + "x") != adapter_key(base, source + "x")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/a/c", "s3://b/a_c"),
        ("s3://b/é", "s3://b/e\u0301"),
        ("s3://b/a%2Fc", "s3://b/a/c"),
        ("S3://b", "s3://b"),
    ],
)
def test_nothing_is_normalised(one: str, other: str) -> None:
    """C5."""
    assert adapter_key("base", one) != adapter_key("base", other)


@given(NAMES, NAMES.filter(lambda rest: "@" not in rest))
def test_an_id_is_split_into_what_it_was_made_of(base: str, rest: str) -> None:
    assume(len(base.encode()) <= 512)
    source = f"s3:{rest}"
    assert split_model_id(f"{base}|{source}") == (base, source)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("base|s3://b/a", ("base", "s3://b/a")),
        ("base|s3://b/a|c", ("base", "s3://b/a|c")),
        ("a:b/c|x:y", ("a:b/c", "x:y")),
        ("s3://b/a", (None, "s3://b/a")),
        ("HF://o/r@v1", (None, "HF://o/r@v1")),
        ("a+b.c-1://x", (None, "a+b.c-1://x")),
        ("gpt-oss:120b", None),
        ("org/name", None),
        ("1s://x", None),
        ("://x", None),
    ],
)
def test_the_grammar(model: str, parts: tuple[str | None, str] | None) -> None:
    """C1, C2."""
    assert split_model_id(model) == parts


@pytest.mark.parametrize(
    "model",
    ["|", "base|", "|s3://b", "base||s3://b", "base|nothing", "base|:x", "base|1:x", "base|s3:", "b" * 513 + "|a:b"],
)
def test_what_breaks_the_grammar_is_refused(model: str) -> None:
    with pytest.raises(LorelayError) as failure:
        split_model_id(model)
    assert failure.value.code is ErrorCode.INVALID_LORA_MODEL_ID
    assert failure.value.wire.param == "model"


def test_limits_are_in_bytes_of_utf8() -> None:
    check_model_id("x" * 4096)
    check_model_id("ü" * 2048)
    split_model_id("ü" * 256 + "|a:b")
    check_source("s3:" + "ü" * 1534 + "x")
    for check, text in (
        (check_model_id, "x" * 4097),
        (check_model_id, "ü" * 2048 + "x"),
        (split_model_id, "ü" * 256 + "x|a:b"),
        (check_source, "s3:" + "ü" * 1535),
    ):
        with pytest.raises(LorelayError):
            check(text)


@pytest.mark.parametrize("bad", [*(chr(code) for code in range(0x20)), "\x7f", "\ud800"])
def test_control_characters_and_lone_surrogates_are_refused(bad: str) -> None:
    for model in (f"a{bad}", f"base|s3://b/{bad}", bad):
        with pytest.raises(LorelayError):
            check_model_id(model)
    with pytest.raises(LorelayError):
        check_source(f"s3://b/{bad}")


def test_an_empty_id_is_refused() -> None:
    with pytest.raises(LorelayError):
        check_model_id("")


@pytest.mark.parametrize("scheme", ["s3", "https", "hf", "custom", "git+https"])
@given(user=st.text(string.ascii_letters + string.digits, min_size=1), secret=SECRETS)
def test_a_password_is_refused_and_never_shown(scheme: str, user: str, secret: str) -> None:
    """Secret keys hold slashes, which end an authority for a parser but not for who wrote it."""
    assume(not re.match(r"\d+([/?#]|$)", secret))  # else it reads as HOST:PORT/PATH
    source = f"{scheme}://{user}:{secret}@bucket/path"
    with pytest.raises(LorelayError) as failure:
        check_source(source)
    assert f"{user}:{secret}" not in str(failure.value)
    assert redact(source) == f"{scheme}://…@bucket/path"


@pytest.mark.parametrize("source", ["https://token@host/x", "hf://hf_token@org/repo", "s3://AKIA@b/a", "s3://:x@b/a"])
def test_a_user_of_a_host_is_refused_and_never_shown(source: str) -> None:
    with pytest.raises(LorelayError):
        check_source(source)
    assert redact(source).partition("://")[2].startswith("…@")


@pytest.mark.parametrize(
    "source",
    [
        "hf://org/repo@v1",
        "oci://localhost:5000/repo@sha256:abc",
        "oci://registry:5000/a/b:tag@sha256:abc",
        "custom://adapter@sha256:abc",
        "wandb-artifact:///team/project/a:v1@x",
        "http://[::1]:8080/a@b",
        "s3://bucket/a:b@c",
        "file:///a/b@c:d",
    ],
)
def test_an_at_that_is_no_user_is_accepted_and_shown(source: str) -> None:
    check_source(source)
    assert redact(source) == source


@pytest.mark.parametrize("source", ["https://h/x?token=SECRET", "https://h/x#SECRET", "s3:x?SECRET", "SECRET", ""])
def test_a_query_and_what_is_no_source_are_not_shown(source: str) -> None:
    assert "SECRET" not in redact(source)


def test_a_selection_that_does_not_recompute_is_refused() -> None:
    good = select("base", "s3://b/a")
    verify(good, "base")
    wrong = [
        (good, "other"),
        (select("other", "s3://b/a"), "base"),
        (AdapterSelection(base="base", source="s3://b/b", key=good.key), "base"),
        (AdapterSelection(base="base", source="s3://b/a", key=good.key.upper()), "base"),
        (AdapterSelection(base="base", source="s3://b/a", key=good.key, version=1), "base"),
    ]
    for selection, base in wrong:
        with pytest.raises(LorelayError) as failure:
            verify(selection, base)
        assert failure.value.code is ErrorCode.RUNTIME_LORA_IDENTITY_MISMATCH


@given(NAMES, NAMES)
def test_no_name_shapes_a_key_of_the_store(base: str, source: str) -> None:
    """C4."""
    worker = f"{1:016x}"
    for key, count in (
        (keys.model("ns", base, worker), 3),
        (keys.adapter("ns", worker, identity_digest(base, source)), 3),
    ):
        assert len(keys.parse("ns", key)) == count
        assert key.isascii()
        assert key.count("/") == 3 + count
    assert keys.parse("other", keys.model("ns", base, worker)) == ()
