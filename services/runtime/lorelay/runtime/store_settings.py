"""Where etcd is and who we are to it.

The variables are those of etcd's own tools and of Dynamo, so that one environment serves both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_ENDPOINT = "http://localhost:2379"
DEFAULT_PORT = 2379


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach an etcd cluster."""

    endpoints: tuple[str, ...] = (DEFAULT_ENDPOINT,)
    """`http://host:port` or `https://host:port` of the members, all of one scheme.  The first that answers is used."""
    username: str = ""
    """Empty: no authentication."""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    """PEM certificates that vouch for the members; None: the public ones that gRPC brings along."""
    cert_file: Path | None = None
    """PEM certificate (chain) to show to etcd.  Needed, with `key_file`, if etcd has a --trusted-ca-file."""
    key_file: Path | None = None
    timeout_s: float = 5.0
    """What one call may take, connecting and repeating included; seconds, above 0."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read ETCD_ENDPOINTS and ETCD_AUTH_{USERNAME,PASSWORD,CA,CLIENT_CERT,CLIENT_KEY}; empty means unset.

        Raises:
            ValueError: One line per variable that cannot be used: its name and what to do.
        """
        env = {name: value.strip() for name, value in environ.items() if name.startswith("ETCD_")}
        problems: list[str] = []
        urls = (part.strip() for part in (env.get("ETCD_ENDPOINTS") or DEFAULT_ENDPOINT).split(","))
        endpoints = tuple(url for url in urls if url)
        schemes = set()
        for url in endpoints:
            try:
                schemes.add(parse_endpoint(url)[1])
            except ValueError as error:
                problems.append(f"ETCD_ENDPOINTS: {error}")
        if not endpoints:
            problems.append(f"ETCD_ENDPOINTS: name at least one, as in {DEFAULT_ENDPOINT}")
        if len(schemes) > 1:
            problems.append("ETCD_ENDPOINTS: mixes http:// and https://; use one of them for all")
        problems += _pair_problems(env, "ETCD_AUTH_USERNAME", "ETCD_AUTH_PASSWORD")
        problems += _pair_problems(env, "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
        files: list[Path | None] = []
        for name in ("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"):
            file = Path(env[name]).expanduser() if env.get(name) else None
            files.append(file)
            if file and not file.is_file():
                problems.append(f"{name}: {file} is not a file; give the path of a PEM file")
            if file and schemes == {False}:
                problems.append(f"{name}: is set, but ETCD_ENDPOINTS has http://; write https://")
        if problems:
            raise ValueError("\n".join(problems))
        username, password = env.get("ETCD_AUTH_USERNAME", ""), environ.get("ETCD_AUTH_PASSWORD", "")
        ca, cert, key = files
        return cls(endpoints, username, password, ca_file=ca, cert_file=cert, key_file=key)


def _pair_problems(env: Mapping[str, str], first: str, second: str) -> list[str]:
    missing = [name for name in (first, second) if not env.get(name)]
    if len(missing) != 1:
        return []
    return [f"{missing[0]}: set it, or unset {first} and {second}; one is of no use without the other"]


def parse_endpoint(url: str) -> tuple[str, bool]:
    """Return gRPC's target for an endpoint's URL, and whether it wants TLS.

    Raises:
        ValueError: Not `http://host[:port]` or `https://host[:port]`.
    """
    if "@" in url:  # not repeated: what stands before it is a secret
        raise ValueError("an endpoint must not have a user in it; write http://host:port and set ETCD_AUTH_USERNAME")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:  # a port that is none, a bracket too many
        raise ValueError(f"{url!r} is no URL ({error}); write http://host:port") from error
    is_bare = not (parts.path.rstrip("/") or parts.query or parts.fragment)
    if parts.scheme not in {"http", "https"} or not host or not is_bare:
        raise ValueError(f"{url!r} is not an endpoint; write http://host:port or https://host:port")
    host = f"[{host}]" if ":" in host else host
    return f"dns:///{host}:{port}", parts.scheme == "https"
