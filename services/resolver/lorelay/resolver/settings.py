"""Settings of the resolver, read once from the environment.  docs/reference/settings.md lists them all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lorelay.proto.subjects import check_namespace
from lorelay.runtime.settings import BusSettings, Environment, ProcessSettings
from lorelay.runtime.store import EtcdSettings
from lorelay.runtime.telemetry import check_exporter

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


@dataclass(frozen=True, slots=True)
class ResolverSettings:
    """What a resolver needs to know."""

    process: ProcessSettings
    bus: BusSettings
    etcd: EtcdSettings
    cache: Path
    """DYN_LORA_PATH: the cache of the domain, where snapshots lie."""
    cache_domain: str
    """LORELAY_CACHE_DOMAIN: names the file system that workers and resolvers see alike."""
    max_cache_bytes: int
    """DYN_LORA_MAX_CACHE_BYTES: of all snapshots; idle ones are pruned to stay below."""
    plugins: tuple[str, ...]
    """DYN_LORA_DOWNLOADER_PLUGIN: `module:object`, several separated by commas, asked in this order."""
    file_roots: tuple[Path, ...]
    """LORELAY_FILE_ROOTS: folders that `file://` may read, separated by `:`; none: no `file://`."""
    allowed_schemes: tuple[str, ...]
    """DYN_LORA_ALLOWED_SCHEMES: of these only; empty: all that the plugins take."""
    resolve_timeout_s: float
    """DYN_LORA_RESOLVE_TIMEOUT_SECONDS: for one adapter, waiting for its turn included."""
    max_concurrent_resolutions: int
    """DYN_LORA_MAX_CONCURRENT_RESOLUTIONS."""
    max_pending_keys: int
    """DYN_LORA_MAX_PENDING_RUNTIME_KEYS: adapters being resolved or waiting for it; more are refused (429)."""
    max_download_bytes: int
    """DYN_LORA_MAX_DOWNLOAD_BYTES: of one adapter's files."""
    reference_ttl_s: float
    """LORELAY_REFERENCE_TTL_SECONDS: for how long a source counts as unchanged; then its plugin is asked again."""
    negative_ttl_s: float
    """LORELAY_NEGATIVE_TTL_SECONDS: for how long "not found", "forbidden" and a refusal are remembered."""
    exporter: str
    """OTEL_TRACES_EXPORTER: none, console or otlp."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ResolverSettings:
        """Read the settings.

        Raises:
            SettingsError: Naming every variable that cannot be used.
        """
        env = Environment(environ)
        settings = cls(
            process=ProcessSettings.read(env),
            bus=BusSettings.read(env),
            etcd=env.built("ETCD_ENDPOINTS", lambda: EtcdSettings.from_environ(environ), EtcdSettings()),
            cache=env.path("DYN_LORA_PATH", "~/.cache/lorelay"),
            cache_domain=env.checked("LORELAY_CACHE_DOMAIN", "local", check_namespace),
            max_cache_bytes=env.integer("DYN_LORA_MAX_CACHE_BYTES", 100 << 30, minimum=1),
            plugins=env.names("DYN_LORA_DOWNLOADER_PLUGIN"),
            file_roots=_roots(env),
            allowed_schemes=_schemes(env),
            resolve_timeout_s=env.seconds("DYN_LORA_RESOLVE_TIMEOUT_SECONDS", 300.0),
            max_concurrent_resolutions=env.integer("DYN_LORA_MAX_CONCURRENT_RESOLUTIONS", 2, minimum=1, maximum=256),
            max_pending_keys=env.integer("DYN_LORA_MAX_PENDING_RUNTIME_KEYS", 64, minimum=1, maximum=65_536),
            max_download_bytes=env.integer("DYN_LORA_MAX_DOWNLOAD_BYTES", 10 << 30, minimum=1),
            reference_ttl_s=env.seconds("LORELAY_REFERENCE_TTL_SECONDS", 300.0, minimum=0.0),
            negative_ttl_s=env.seconds("LORELAY_NEGATIVE_TTL_SECONDS", 30.0, minimum=0.0),
            exporter=env.checked("OTEL_TRACES_EXPORTER", "none", check_exporter),
        )
        env.finish()
        return settings


def _roots(env: Environment) -> tuple[Path, ...]:
    parts = [part for part in env.text("LORELAY_FILE_ROOTS").split(os.pathsep) if part]
    roots = tuple(Path(part).expanduser() for part in parts)
    for part, root in zip(parts, roots, strict=True):
        if not root.is_absolute():
            env.problem("LORELAY_FILE_ROOTS", part, "not an absolute path")
    return roots


def _schemes(env: Environment) -> tuple[str, ...]:
    schemes = tuple(scheme.lower() for scheme in env.names("DYN_LORA_ALLOWED_SCHEMES"))
    for scheme in schemes:
        if _SCHEME.fullmatch(scheme) is None:
            env.problem("DYN_LORA_ALLOWED_SCHEMES", scheme, "not a scheme such as hf, s3 or file")
    return schemes
