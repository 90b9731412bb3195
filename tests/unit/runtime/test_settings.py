"""Settings: every bad variable is named, all at once, and nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lorelay.frontend.settings import FrontendSettings
from lorelay.runtime.bus import _shown
from lorelay.runtime.settings import BusSettings, Environment, SettingsError
from lorelay.worker.settings import WorkerSettings
from support.fleet import DEMO_BASE

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER = {"LORELAY_ENGINE": "sim", "LORELAY_MODEL": str(DEMO_BASE)}


def problems(environ: Mapping[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as failure:
        WorkerSettings.from_environ(environ)
    return str(failure.value).splitlines()


def test_defaults_are_those_of_the_design() -> None:
    settings = WorkerSettings.from_environ(WORKER)
    lora = settings.runtime_lora
    assert (settings.engine.is_lora_enabled, lora.is_enabled, lora.eviction) == (False, False, "lru")
    assert (lora.resolve_timeout_s, lora.max_pending_keys, lora.admission_timeout_s) == (300, 64, 30)
    assert lora.max_pending_admissions == settings.engine.max_requests
    assert lora.max_resident == settings.engine.max_adapters
    assert lora.max_download_bytes == 10 << 30
    assert (settings.system_host, settings.process.lease_ttl_s) == ("127.0.0.1", 10)
    assert settings.engine.names == (str(DEMO_BASE),)
    frontend = FrontendSettings.from_environ({})
    assert (frontend.host, frontend.port, frontend.process.namespace) == ("127.0.0.1", 8000, "dynamo")


def test_all_problems_are_told_at_once_each_with_its_variable() -> None:
    bad = {
        **WORKER,
        "DYN_NAMESPACE": "a.b",
        "LORELAY_INSTANCE_ID": "7",
        "LORELAY_LEASE_TTL_SECONDS": "1",
        "DYN_SYSTEM_PORT": "65536",
        "DYN_LORA_RESOLVE_TIMEOUT_SECONDS": "nan",
        "DYN_LORA_MAX_PENDING_RUNTIME_KEYS": "1.5",
        "DYN_LORA_ENABLED": "perhaps",
        "DYN_LORA_RUNTIME_LOAD_ENABLED": "true",
        "DYN_LORA_RUNTIME_EVICTION": "fifo",
        "DYN_LORA_MAX_RESIDENT_RUNTIME_LORAS": "17",
        "LORELAY_MAX_LORAS": "17",
        "NATS_SERVER": ",",
        "OTEL_TRACES_EXPORTER": "x",
        "LORELAY_SERVED_MODEL_NAME": "a,b\udcff",
    }
    told = problems(bad)
    assert {line.partition("=")[0] for line in told} == set(bad) - set(WORKER)


@pytest.mark.parametrize("value", ["", " ", "x", "+-1", "1e3", "0x10", "-1", "9" * 5000, "1_000"])
def test_a_number_is_a_number(value: str) -> None:
    env = Environment({"X": value})
    number = env.integer("X", 5)
    if env.problems:
        assert env.problems[0].startswith("X=")
        assert number == 5
    else:
        assert number in (5, 1000)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-1", "1e9", "x", "1s"])
def test_a_span_is_positive_and_finite(value: str) -> None:
    env = Environment({"X": value})
    assert env.seconds("X", 2.0) == 2.0
    assert len(env.problems) == 1


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False), ("", True)]
)
def test_a_switch_has_the_usual_words(value: str, *, expected: bool) -> None:
    env = Environment({"X": value})
    assert env.flag("X", default=True) is expected
    assert env.problems == []


@pytest.mark.parametrize("names", ["", ",", " , "])
def test_a_model_without_a_name_is_served_under_its_own(names: str) -> None:
    settings = WorkerSettings.from_environ({**WORKER, "LORELAY_SERVED_MODEL_NAME": names})
    assert settings.engine.names == (str(DEMO_BASE),)


def test_management_beyond_loopback_needs_a_token() -> None:
    """H3."""
    open_to_all = {**WORKER, "DYN_SYSTEM_HOST": "0.0.0.0"}  # noqa: S104
    assert problems(open_to_all)[0].startswith("DYN_SYSTEM_HOST=")
    guarded = WorkerSettings.from_environ({**open_to_all, "LORELAY_SYSTEM_TOKEN": "t"})
    assert guarded.system_host == "0.0.0.0"  # noqa: S104


def test_a_password_in_a_url_is_not_shown() -> None:
    servers = BusSettings.read(
        Environment({"NATS_SERVER": "nats://me:s3cret@a:4222, me:s3cr@et@b, nats://token@c:1, nats://d:4222, e"})
    ).servers
    shown = _shown(servers)
    assert "s3cr" not in shown
    assert "et@" not in shown
    assert "token" not in shown
    assert [host in shown for host in ("a:4222", "b", "c:1", "nats://d:4222", "e")] == [True] * 5
