"""Settings of the worker, read once from the environment.  docs/reference/settings.md lists them all."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lorelay.proto.errors import LorelayError
from lorelay.proto.identity import check_model_id
from lorelay.proto.subjects import check_namespace
from lorelay.runtime.settings import BusSettings, Environment, ProcessSettings
from lorelay.runtime.store import EtcdSettings
from lorelay.runtime.telemetry import check_exporter

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ENGINES: tuple[Literal["vllm", "sim"], ...] = ("vllm", "sim")
MAX_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Which engine serves which model, and how much it may hold."""

    kind: str
    """LORELAY_ENGINE: `vllm`, or `sim`, the simulator."""
    model: str
    """LORELAY_MODEL: a folder, or for vLLM also a name on the hub.  The simulator needs only a config.json there."""
    names: tuple[str, ...]
    """LORELAY_SERVED_MODEL_NAME: the base's canonical name, then its aliases; default: the model as given."""
    arguments: tuple[str, ...]
    """LORELAY_ENGINE_ARGS: further arguments of `vllm serve`, as a shell would split them."""
    is_lora_enabled: bool
    """DYN_LORA_ENABLED."""
    max_adapters: int
    """LORELAY_MAX_CPU_LORAS: adapters the engine may hold."""
    max_adapters_per_batch: int
    """LORELAY_MAX_LORAS: different adapters in one engine step."""
    max_rank: int
    """LORELAY_MAX_LORA_RANK."""
    max_requests: int
    """LORELAY_MAX_NUM_SEQS: requests the engine runs at once."""
    max_context_tokens: int
    """LORELAY_MAX_MODEL_LEN; 0: what the model allows."""


@dataclass(frozen=True, slots=True)
class RuntimeLoraSettings:
    """Loading adapters that requests name."""

    is_enabled: bool
    """DYN_LORA_RUNTIME_LOAD_ENABLED; needs DYN_LORA_ENABLED."""
    allowed_schemes: frozenset[str]
    """DYN_LORA_ALLOWED_SCHEMES; empty: all that the resolvers take."""
    resolve_timeout_s: float
    """DYN_LORA_RESOLVE_TIMEOUT_SECONDS."""
    max_pending_keys: int
    """DYN_LORA_MAX_PENDING_RUNTIME_KEYS: different adapters being brought at once."""
    max_pending_admissions: int
    """DYN_LORA_MAX_PENDING_ADMISSIONS: requests waiting for an adapter; default: the engine's concurrent requests."""
    admission_timeout_s: float
    """DYN_LORA_PENDING_ADMISSION_TIMEOUT_SECONDS: how long a load may wait for a slot that is in use."""
    max_resident: int
    """DYN_LORA_MAX_RESIDENT_RUNTIME_LORAS; default and bound: the engine's max_adapters."""
    max_download_bytes: int
    """DYN_LORA_MAX_DOWNLOAD_BYTES."""
    eviction: str
    """DYN_LORA_RUNTIME_EVICTION: `lru` or `pinned`."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to know."""

    process: ProcessSettings
    bus: BusSettings
    etcd: EtcdSettings
    engine: EngineSettings
    runtime_lora: RuntimeLoraSettings
    cache: Path
    """DYN_LORA_PATH: the cache of the domain, where snapshots lie."""
    cache_domain: str
    """LORELAY_CACHE_DOMAIN: names the file system that worker and resolvers see alike."""
    system_host: str
    """DYN_SYSTEM_HOST: where the management API is served."""
    system_port: int
    """DYN_SYSTEM_PORT; 0 takes a free one."""
    system_token: str
    """LORELAY_SYSTEM_TOKEN: demanded of every management call (Authorization: Bearer) if set."""
    exporter: str
    """OTEL_TRACES_EXPORTER: none, console or otlp."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> WorkerSettings:
        """Read the settings.

        Raises:
            SettingsError: Naming every variable that cannot be used.
        """
        env = Environment(environ)
        engine = _engine(env)
        settings = cls(
            process=ProcessSettings.read(env),
            bus=BusSettings.read(env),
            etcd=env.built("ETCD_ENDPOINTS", lambda: EtcdSettings.from_environ(environ), EtcdSettings()),
            engine=engine,
            runtime_lora=_runtime_lora(env, engine),
            cache=env.path("DYN_LORA_PATH", "~/.cache/lorelay"),
            cache_domain=env.checked("LORELAY_CACHE_DOMAIN", "local", check_namespace),
            system_host=env.text("DYN_SYSTEM_HOST", "127.0.0.1"),
            system_port=env.integer("DYN_SYSTEM_PORT", 8081, maximum=65_535),
            system_token=env.text("LORELAY_SYSTEM_TOKEN"),
            exporter=env.checked("OTEL_TRACES_EXPORTER", "none", check_exporter),
        )
        if settings.system_host not in LOOPBACK and not settings.system_token:
            env.problem(
                "DYN_SYSTEM_HOST", settings.system_host, "not loopback: set LORELAY_SYSTEM_TOKEN to guard management"
            )
        env.finish()
        return settings


def _engine(env: Environment) -> EngineSettings:
    kind = env.checked("LORELAY_ENGINE", "vllm", _one_of(*ENGINES))
    model = env.text("LORELAY_MODEL")
    if not model:
        env.problem("LORELAY_MODEL", "", "name the model to serve: a folder with its config.json")
    elif kind == "sim" and not (Path(model) / "config.json").is_file():
        env.problem("LORELAY_MODEL", model, "the simulator needs a folder with the model's config.json")
    max_adapters = env.integer("LORELAY_MAX_CPU_LORAS", 16, minimum=1, maximum=MAX_SLOTS)
    per_batch = env.integer("LORELAY_MAX_LORAS", 4, minimum=1, maximum=MAX_SLOTS)
    if per_batch > max_adapters:
        env.problem("LORELAY_MAX_LORAS", str(per_batch), f"more than LORELAY_MAX_CPU_LORAS ({max_adapters})")
    names = env.names("LORELAY_SERVED_MODEL_NAME") or (model,)
    for name in names:
        try:
            check_model_id(name or "-")
        except LorelayError as error:
            env.problem("LORELAY_SERVED_MODEL_NAME", name, error.wire.message)
    return EngineSettings(
        kind=kind,
        model=model,
        names=names,
        arguments=env.checked("LORELAY_ENGINE_ARGS", "", lambda text: tuple(shlex.split(text))),
        is_lora_enabled=env.flag("DYN_LORA_ENABLED", default=False),
        max_adapters=max_adapters,
        max_adapters_per_batch=per_batch,
        max_rank=env.integer("LORELAY_MAX_LORA_RANK", 64, minimum=1, maximum=512),
        max_requests=env.integer("LORELAY_MAX_NUM_SEQS", 64, minimum=1),
        max_context_tokens=env.integer("LORELAY_MAX_MODEL_LEN", 0),
    )


def _runtime_lora(env: Environment, engine: EngineSettings) -> RuntimeLoraSettings:
    is_enabled = env.flag("DYN_LORA_RUNTIME_LOAD_ENABLED", default=False)
    if is_enabled and not engine.is_lora_enabled:
        env.problem("DYN_LORA_RUNTIME_LOAD_ENABLED", "true", "needs DYN_LORA_ENABLED=true")
    return RuntimeLoraSettings(
        is_enabled=is_enabled,
        allowed_schemes=frozenset(s.lower() for s in env.names("DYN_LORA_ALLOWED_SCHEMES")),
        resolve_timeout_s=env.seconds("DYN_LORA_RESOLVE_TIMEOUT_SECONDS", 300.0),
        max_pending_keys=env.integer("DYN_LORA_MAX_PENDING_RUNTIME_KEYS", 64, minimum=1),
        max_pending_admissions=env.integer("DYN_LORA_MAX_PENDING_ADMISSIONS", engine.max_requests, minimum=1),
        admission_timeout_s=env.seconds("DYN_LORA_PENDING_ADMISSION_TIMEOUT_SECONDS", 30.0),
        max_resident=env.integer(
            "DYN_LORA_MAX_RESIDENT_RUNTIME_LORAS", engine.max_adapters, minimum=1, maximum=engine.max_adapters
        ),
        max_download_bytes=env.integer("DYN_LORA_MAX_DOWNLOAD_BYTES", 10 << 30, minimum=1),
        eviction=env.checked("DYN_LORA_RUNTIME_EVICTION", "lru", _one_of("lru", "pinned")),
    )


def _one_of(*choices: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return value

    return check
