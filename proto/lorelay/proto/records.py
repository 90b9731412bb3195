"""What processes say about themselves in etcd: JSON values under the keys of `lorelay.proto.keys`.

A record's owner writes it on its lease; everybody else only reads.  Absence means "not supported", never "yes".
Fields are added, never renamed; a reader ignores fields it does not know.
"""

from __future__ import annotations

import enum

import msgspec

BUS_PROTOCOL = 1
"""Version of the request and frame structs.  A frontend uses only workers that speak its own."""
RUNTIME_LORA_PROTOCOL = 2
"""Version of Dynamo's runtime-LoRA protocol that this system mirrors.  Matched exactly, not by range."""


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live process: `instances/<component>/<id>`."""

    component: str
    """`frontend`, `worker` or `resolver`."""
    instance: str
    """16 hex digits, chosen by the process or fixed by its operator."""
    subject: str
    """Where it takes requests on the bus; empty for a frontend."""
    transport: str = "nats"
    protocol: int = BUS_PROTOCOL
    started: str
    """RFC 3339, UTC."""
    draining: bool = False
    """True: finishes what it has, must get nothing new."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of the model it serves; an adapter is matched against these, never by network."""

    name: str
    """The base's canonical name."""
    aliases: tuple[str, ...] = ()
    path_fingerprint: str
    """SHA-256 (hex) over the model's config.json, so that two names of one model can be told."""
    architecture: str
    """config.json's first architecture, e.g. `LlamaForCausalLM`; empty if unknown."""
    dimensions: dict[str, int]
    """From config.json, as far as it says: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
    num_key_value_heads, head_dim, vocab_size."""
    dtype: str
    quantization: str | None = None
    max_context_tokens: int
    routes: tuple[str, ...]
    """Paths of the POST routes that the engine answers for this model, e.g. `/v1/chat/completions`."""
    engine: str
    """`vllm` or `sim`."""
    engine_version: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A base served by one worker: `models/<base-hash>/<worker>`."""

    worker: str
    facts: ModelFacts


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can do with adapters at request time: `capabilities/<worker>`.  No record: nothing."""

    worker: str
    base: str
    """Canonical name of the base the adapters would go on."""
    versions: tuple[int, ...] = (RUNTIME_LORA_PROTOCOL,)
    schemes: tuple[str, ...]
    """Source schemes that some resolver of its cache domain takes and its operator allows, sorted."""
    cache_domain: str
    max_rank: int
    target_modules: tuple[str, ...] = ()
    slots: int
    """Adapters that may be resident at once."""


class AdapterState(enum.StrEnum):
    """Where an adapter stands on one worker."""

    RESOLVING = "resolving"
    RESOLVED = "resolved"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    UNCERTAIN = "uncertain"
    """The engine's answer was lost; it holds capacity until the engine's own list says otherwise."""


class ResidencyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter resident on a worker: `adapters/<worker>/<key>`."""

    worker: str
    key: str
    base: str
    digest: str
    """SHA-256 (hex) of the snapshot's manifest."""
    name: str | None = None
    """The published name of an administrative adapter; None for one that a request brought."""
    source: str = ""
    """The source of a published adapter, so that a request for its name can be sent as a selection."""
    state: AdapterState
    pinned: bool = False
    bytes: int


class ResolverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A resolver of a cache domain: `resolvers/<domain>/<id>`."""

    resolver: str
    domain: str
    subject: str
    schemes: tuple[str, ...]
    plugin: str
    plugin_version: str = ""
    free_cache_bytes: int
    protocol: int = BUS_PROTOCOL
