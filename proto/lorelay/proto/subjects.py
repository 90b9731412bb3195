"""Every NATS subject, built and checked in one place.

A token is refused if NATS would read something into it, so that no name of a client or an operator can widen a subject.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INSTANCE = re.compile(r"[0-9a-f]{16}")

EVENT_STREAM = "LORA_EVENTS"
EVENT_SUBJECTS = "lorelay.*.lora.>"


def check_namespace(namespace: str) -> str:
    """Return `namespace` if it can be a token of a subject.

    Raises:
        ValueError: It has characters other than letters, digits, `_` and `-`, or is empty or over 64 characters.
    """
    if _TOKEN.fullmatch(namespace) is None:
        raise ValueError(f"{namespace!r} is not 1 to 64 letters, digits, '_' or '-'")
    return namespace


def check_instance(instance: str) -> str:
    """Return `instance` if it is an instance id: 16 lower-case hex digits.

    Raises:
        ValueError: It is not.
    """
    if _INSTANCE.fullmatch(instance) is None:
        raise ValueError(f"{instance!r} is not 16 lower-case hex digits")
    return instance


def worker_generate(namespace: str, worker: str) -> str:
    """Subject on which a worker takes requests."""
    return f"lorelay.{check_namespace(namespace)}.worker.{check_instance(worker)}.generate"


def worker_control(namespace: str, worker: str) -> str:
    """Subject on which a worker takes cancels."""
    return f"lorelay.{check_namespace(namespace)}.worker.{check_instance(worker)}.control"


def resolver_materialize(namespace: str, domain: str, resolver: str) -> str:
    """Subject on which one resolver of a cache domain takes sources."""
    return (
        f"lorelay.{check_namespace(namespace)}.resolver.{check_namespace(domain)}"
        f".{check_instance(resolver)}.materialize"
    )


def frontend_frames(namespace: str, frontend: str) -> str:
    """Subject on which a frontend takes frames."""
    return f"lorelay.{check_namespace(namespace)}.frontend.{check_instance(frontend)}.frames"


def event(namespace: str, kind: str, key: str) -> str:
    """Subject of an event about the adapter `key`."""
    return f"lorelay.{check_namespace(namespace)}.lora.{check_namespace(kind)}.{check_namespace(key)}"
