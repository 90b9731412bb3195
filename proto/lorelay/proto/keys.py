"""Every etcd key, built and parsed in one place.  Names go in as hex digests, so no two of them can share a key."""

from __future__ import annotations

import hashlib

from lorelay.proto.subjects import check_instance, check_namespace


def root(namespace: str) -> str:
    """Prefix of everything a namespace says about itself."""
    return f"/lorelay/v1/{check_namespace(namespace)}/"


def instance(namespace: str, component: str, instance_id: str) -> str:
    """Key of an `InstanceRecord`."""
    return f"{root(namespace)}instances/{check_namespace(component)}/{check_instance(instance_id)}"


def model(namespace: str, base: str, worker: str) -> str:
    """Key of a `ModelCard`; the base stands as the SHA-256 of its canonical name."""
    return f"{root(namespace)}models/{hashlib.sha256(base.encode()).hexdigest()}/{check_instance(worker)}"


def capability(namespace: str, worker: str) -> str:
    """Key of a `Capability`."""
    return f"{root(namespace)}capabilities/{check_instance(worker)}"


def adapter(namespace: str, worker: str, identity_digest: bytes) -> str:
    """Key of a `ResidencyRecord`; the adapter stands as its whole identity digest."""
    return f"{root(namespace)}adapters/{check_instance(worker)}/{identity_digest.hex()}"


def resolver(namespace: str, domain: str, resolver_id: str) -> str:
    """Key of a `ResolverRecord`."""
    return f"{resolvers(namespace, domain)}{check_instance(resolver_id)}"


def resolvers(namespace: str, domain: str) -> str:
    """Prefix of a cache domain's resolvers."""
    return f"{root(namespace)}resolvers/{check_namespace(domain)}/"


def parse(namespace: str, key: str) -> tuple[str, ...]:
    """Return the segments of `key` after the namespace's root, or none if it lies elsewhere."""
    prefix = root(namespace)
    return tuple(key[len(prefix) :].split("/")) if key.startswith(prefix) else ()
