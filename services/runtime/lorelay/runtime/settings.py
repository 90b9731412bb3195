"""Read settings out of an environment, all problems at once.

A service's `Settings.from_environ` takes an explicit mapping, reads every variable through one `Environment`, and ends
with `finish()`: the start stops with one line per bad variable, each naming the variable, the value and what is right.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from lorelay.proto.subjects import check_instance, check_namespace

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


class SettingsError(ValueError):
    """Settings that cannot be used; `str()` has a line for each bad variable."""


class Environment:
    """Typed reads of a mapping that collect what is wrong instead of raising at the first."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        """Return the variable without surrounding blanks; unset or empty gives `default`."""
        return self._environ.get(name, "").strip() or default

    def checked(self, name: str, default: str, check: Callable[[str], T]) -> T:
        """Return `check(value)`; a ValueError of it becomes a problem, and `default` is checked instead."""
        value = self.text(name, default)
        try:
            return check(value)
        except ValueError as error:
            self.problem(name, value, str(error))
            return check(default)

    def integer(self, name: str, default: int, *, minimum: int = 0, maximum: int = 1 << 62) -> int:
        """Return a whole number from `minimum` to `maximum`."""

        def check(value: str) -> int:
            number = int(value) if value.lstrip("+-").isdecimal() else None
            if number is None or not minimum <= number <= maximum:
                raise ValueError(f"not a whole number from {minimum} to {maximum}")
            return number

        return self.checked(name, str(default), check)

    def seconds(self, name: str, default: float, *, minimum: float = 0.001, maximum: float = 86_400) -> float:
        """Return a span in seconds."""

        def check(value: str) -> float:
            try:
                number = float(value)
            except ValueError:
                number = float("nan")
            if not minimum <= number <= maximum:
                raise ValueError(f"not a number of seconds from {minimum:g} to {maximum:g}")
            return number

        return self.checked(name, repr(default), check)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a switch: 1/true/yes/on or 0/false/no/off, in any case."""

        def check(value: str) -> bool:
            if value.lower() not in _TRUE | _FALSE:
                raise ValueError("neither true nor false")
            return value.lower() in _TRUE

        return self.checked(name, "true" if default else "false", check)

    def names(self, name: str, default: str = "") -> tuple[str, ...]:
        """Return a comma-separated list without blanks and empty parts."""
        return tuple(part.strip() for part in self.text(name, default).split(",") if part.strip())

    def path(self, name: str, default: str) -> Path:
        """Return a path, `~` expanded."""
        return Path(self.text(name, default)).expanduser()

    def built(self, name: str, build: Callable[[], T], fallback: T) -> T:
        """Return `build()`, which reads variables itself; a ValueError of it becomes a problem."""
        try:
            return build()
        except ValueError as error:
            self.problems += str(error).splitlines() or [f"{name}: {error!r}"]
            return fallback

    def problem(self, name: str, value: str, what: str) -> None:
        """Note that `name` cannot be used."""
        self.problems.append(f"{name}={value!r}: {what}")

    def finish(self) -> None:
        """Raise if anything was wrong.

        Raises:
            SettingsError: With a line for every problem.
        """
        if self.problems:
            raise SettingsError("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class BusSettings:
    """How to reach NATS."""

    servers: tuple[str, ...] = ("nats://127.0.0.1:4222",)
    """NATS_SERVER: one or several URLs, comma-separated."""
    user: str = ""
    """NATS_AUTH_USERNAME."""
    password: str = ""
    """NATS_AUTH_PASSWORD."""
    token: str = ""
    """NATS_AUTH_TOKEN."""
    credentials_file: str = ""
    """NATS_AUTH_CREDENTIALS_FILE: a `.creds` file (JWT and seed)."""
    connect_timeout_s: float = 60.0
    """LORELAY_CONNECT_TIMEOUT_SECONDS: how long a starting process waits for NATS."""

    @classmethod
    def read(cls, env: Environment) -> BusSettings:
        """Read the NATS_* variables."""
        servers = env.names("NATS_SERVER", "nats://127.0.0.1:4222")
        if not servers:
            env.problem("NATS_SERVER", env.text("NATS_SERVER"), "names no server")
        for number, server in enumerate(servers, 1):
            try:
                parts = urlsplit(server if "://" in server else f"nats://{server}")
                is_url = bool(parts.hostname) and parts.port != 0
            except ValueError:
                is_url = False
            if not is_url:  # not repeated: a URL may hold a password
                env.problems.append(f"NATS_SERVER: URL {number} is none; write nats://host:port")
        return cls(
            servers=servers,
            user=env.text("NATS_AUTH_USERNAME"),
            password=env.text("NATS_AUTH_PASSWORD"),
            token=env.text("NATS_AUTH_TOKEN"),
            credentials_file=env.text("NATS_AUTH_CREDENTIALS_FILE"),
            connect_timeout_s=env.seconds("LORELAY_CONNECT_TIMEOUT_SECONDS", 60.0),
        )


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What every service's process has."""

    namespace: str
    """DYN_NAMESPACE: fleets with different namespaces share NATS and etcd without meeting."""
    instance: str
    """LORELAY_INSTANCE_ID: 16 hex digits; random if unset.  A fixed one keeps a worker's adapters its own
    through a restart."""
    lease_ttl_s: int
    """LORELAY_LEASE_TTL_SECONDS: after this long without a sign of life a process counts as gone."""
    drain_s: float
    """LORELAY_DRAIN_SECONDS: how long running requests may go on after SIGTERM."""

    @classmethod
    def read(cls, env: Environment) -> ProcessSettings:
        """Read the variables all services share."""
        return cls(
            namespace=env.checked("DYN_NAMESPACE", "dynamo", check_namespace),
            instance=env.checked("LORELAY_INSTANCE_ID", secrets.token_hex(8), check_instance),
            lease_ttl_s=env.integer("LORELAY_LEASE_TTL_SECONDS", 10, minimum=2, maximum=3600),
            drain_s=env.seconds("LORELAY_DRAIN_SECONDS", 25.0, minimum=0.0),
        )
