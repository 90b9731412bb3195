"""Errors, subjects, and messages as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, strategies as st

from lorelay.proto import subjects
from lorelay.proto.codec import MalformedMessageError, from_json, pack, to_json, unpack
from lorelay.proto.errors import KINDS, ErrorCode, LorelayError, WireError, envelope
from lorelay.proto.events import EventKind, LoraEvent
from lorelay.proto.generation import Acknowledgement, Cancel, Frame, FrameBatch, GenerateRequest, RequestPart
from lorelay.proto.identity import AdapterSelection
from lorelay.proto.records import InstanceRecord

STATUSES = {
    400: {
        "invalid_lora_model_id",
        "runtime_lora_base_model_required",
        "unsupported_lora_scheme",
        "runtime_lora_unsupported",
        "runtime_lora_identity_mismatch",
        "invalid_request",
    },
    401: {"unauthorized"},
    403: {"lora_source_forbidden"},
    404: {"model_not_found", "lora_not_found", "route_not_found"},
    405: {"method_not_allowed"},
    409: {"lora_name_conflict"},
    413: {"request_too_large"},
    422: {"invalid_lora_adapter"},
    429: {"lora_capacity_exceeded"},
    500: {"lora_plugin_error", "lora_load_failed", "runtime_lora_identity_collision", "internal_error"},
    503: {"lora_resolver_unavailable", "no_worker_available", "worker_lost", "bus_unavailable"},
    504: {"runtime_lora_resolve_timeout", "first_token_timeout"},
}
"""Design, section 4, and what HTTP adds."""

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(0, 2**63 - 1)
ERRORS = st.builds(
    WireError,
    code=st.sampled_from(ErrorCode),
    message=TEXT,
    reasons=st.lists(TEXT).map(tuple),
    param=st.none() | TEXT,
    retry_after_s=st.none() | st.integers(0, 600),
)
FRAMES = st.builds(
    Frame,
    stream=NUMBERS,
    sequence=NUMBERS,
    status=st.integers(0, 599),
    content_type=TEXT,
    body=st.binary(),
    last=st.booleans(),
    error=st.none() | ERRORS,
)
SELECTIONS = st.builds(AdapterSelection, base=TEXT, source=TEXT, key=TEXT, version=st.integers(0, 9))
REQUESTS = st.builds(
    GenerateRequest,
    stream=NUMBERS,
    frontend=TEXT,
    request_id=TEXT,
    timeout_ms=NUMBERS,
    traceparent=TEXT,
    endpoint=TEXT,
    model=TEXT,
    base=TEXT,
    selection=st.none() | SELECTIONS,
    body=st.binary(),
)
MESSAGES = st.one_of(
    REQUESTS,
    FRAMES,
    st.builds(FrameBatch, worker=TEXT, frames=st.lists(FRAMES, max_size=4)),
    st.builds(RequestPart, frontend=TEXT, stream=NUMBERS, index=NUMBERS, count=NUMBERS, data=st.binary()),
    st.builds(Acknowledgement, error=st.none() | ERRORS),
    st.builds(Cancel, frontend=TEXT, stream=NUMBERS),
)


def test_every_code_has_the_status_of_the_design() -> None:
    assert set(KINDS) == set(ErrorCode)
    assert {code.value: kind.status for code, kind in KINDS.items()} == {
        code: status for status, codes in STATUSES.items() for code in codes
    }


def test_a_retry_is_advised_exactly_where_it_can_help() -> None:
    advised = {kind.status for kind in KINDS.values() if kind.retry_after_s is not None}
    assert advised == {429, 503, 504}
    assert all((kind.retry_after_s is not None) == (kind.status in advised) for kind in KINDS.values())


@given(ERRORS)
def test_the_envelope_is_openais(error: WireError) -> None:
    """G1."""
    document = json.loads(envelope(error))
    assert set(document) == {"error"}
    inner = document["error"]
    assert set(inner) == {"message", "type", "param", "code"} | ({"reasons"} if error.reasons else set())
    assert (inner["code"], inner["message"], inner["param"]) == (error.code.value, error.message, error.param)
    assert inner.get("reasons", []) == list(error.reasons)


@given(ERRORS)
def test_a_failure_crosses_the_bus_unchanged(error: WireError) -> None:
    crossed = LorelayError.from_wire(unpack(WireError, pack(error)))
    expected = error.retry_after_s if error.retry_after_s is not None else KINDS[error.code].retry_after_s
    assert crossed.wire == msgspec.structs.replace(error, retry_after_s=expected)


def test_the_detail_is_for_the_log_only() -> None:
    error = LorelayError(ErrorCode.LORA_PLUGIN_ERROR, "public", detail="secret")
    assert "secret" in str(error)
    assert b"secret" not in pack(error.wire) + envelope(error.wire)


@given(MESSAGES)
def test_messages_survive_msgpack(message: msgspec.Struct) -> None:
    assert unpack(type(message), pack(message)) == message


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for kind in (GenerateRequest, FrameBatch, Acknowledgement):
        try:
            unpack(kind, data)
        except MalformedMessageError as error:
            assert kind.__name__ in str(error)  # noqa: PT017 - either outcome is right
    for nested in (b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(MalformedMessageError):
            from_json(InstanceRecord, nested)
    with pytest.raises(MalformedMessageError):
        unpack(Acknowledgement, b"\x91" * 100_000)


def test_a_newer_process_may_add_fields() -> None:
    record = InstanceRecord(component="worker", instance="i", subject="s", started="t")
    document = json.loads(to_json(record)) | {"added": [1]}
    assert from_json(InstanceRecord, json.dumps(document).encode()) == record
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(pack(Cancel("f", 1))), "added"])
    assert unpack(Cancel, longer) == Cancel("f", 1)


def test_an_event_says_only_what_it_knows() -> None:
    event = LoraEvent(
        kind=EventKind.LOADED,
        time="t",
        id="i",
        key="k",
        base="b",
        scheme="s",
        source="s:…",
        instance="i",
        component="c",
    )
    assert set(json.loads(to_json(event))) == {
        "kind",
        "time",
        "id",
        "key",
        "base",
        "scheme",
        "source",
        "instance",
        "component",
    }
    assert from_json(LoraEvent, to_json(event)) == event


@pytest.mark.parametrize("bad", ["", "*", ">", "a.b", "a b", "a\n", "é", "x" * 65, "a/b", "a\0"])
def test_no_name_widens_a_subject(bad: str) -> None:
    """C4."""
    good = f"{1:016x}"
    builds: list[Callable[[], str]] = [
        lambda: subjects.worker_generate(bad, good),
        lambda: subjects.worker_control("ns", bad),
        lambda: subjects.resolver_materialize("ns", bad, good),
        lambda: subjects.resolver_materialize("ns", "domain", bad),
        lambda: subjects.frontend_frames("ns", bad),
        lambda: subjects.event("ns", "loaded", bad),
        lambda: subjects.event("ns", bad, "key"),
    ]
    for build in builds:
        with pytest.raises(ValueError, match="is not"):
            build()


@pytest.mark.parametrize("bad", ["0" * 15, "0" * 17, "G" * 16, "A" * 16, "0" * 16 + "\n"])
def test_an_instance_is_sixteen_lower_case_hex_digits(bad: str) -> None:
    with pytest.raises(ValueError, match="is not 16"):
        subjects.check_instance(bad)
