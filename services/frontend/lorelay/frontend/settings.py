"""Settings of the frontend, read once from the environment.  docs/reference/settings.md lists them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lorelay.runtime.settings import BusSettings, Environment, ProcessSettings
from lorelay.runtime.store import EtcdSettings
from lorelay.runtime.telemetry import check_exporter


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """What a frontend needs to know."""

    process: ProcessSettings
    bus: BusSettings
    etcd: EtcdSettings
    host: str
    """DYN_HTTP_HOST: where HTTP is served."""
    port: int
    """DYN_HTTP_PORT; 0 takes a free one."""
    first_token_timeout_s: float
    """LORELAY_FIRST_TOKEN_TIMEOUT_SECONDS: from a request's arrival to its first byte, cold load included."""
    idle_timeout_s: float
    """LORELAY_IDLE_TIMEOUT_SECONDS: between two pieces of a response."""
    max_requests: int
    """LORELAY_MAX_REQUESTS: requests in flight; more are answered 503."""
    exporter: str
    """OTEL_TRACES_EXPORTER: none, console or otlp."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> FrontendSettings:
        """Read the settings.

        Raises:
            SettingsError: Naming every variable that cannot be used.
        """
        env = Environment(environ)
        settings = cls(
            process=ProcessSettings.read(env),
            bus=BusSettings.read(env),
            etcd=env.built("ETCD_ENDPOINTS", lambda: EtcdSettings.from_environ(environ), EtcdSettings()),
            host=env.text("DYN_HTTP_HOST", "127.0.0.1"),
            port=env.integer("DYN_HTTP_PORT", 8000, maximum=65_535),
            first_token_timeout_s=env.seconds("LORELAY_FIRST_TOKEN_TIMEOUT_SECONDS", 330.0),
            idle_timeout_s=env.seconds("LORELAY_IDLE_TIMEOUT_SECONDS", 120.0),
            max_requests=env.integer("LORELAY_MAX_REQUESTS", 4096, minimum=1),
            exporter=env.checked("OTEL_TRACES_EXPORTER", "none", check_exporter),
        )
        env.finish()
        return settings
