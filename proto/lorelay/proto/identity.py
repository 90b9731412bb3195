"""Model ids, sources, and the keys derived from them.

A key is a pure function of the bytes a client sent, so every process computes the same one and none has to ask
another.  Nothing here trims, case-folds, percent-decodes or normalises: `%2F` is not `/`, and two spellings of one
adapter are two adapters.  The rules and vectors are Dynamo's runtime-LoRA protocol v2 (docs/reference/protocol.md).
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.records import RUNTIME_LORA_PROTOCOL

MAX_MODEL_ID_BYTES = 4096
MAX_BASE_BYTES = 512
MAX_SOURCE_BYTES = 3072
KEY_PREFIX = "dyn-lora-"

_DOMAIN = b"dynamo-runtime-lora-v1\0"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.+)", re.DOTALL)
_USER = re.compile(r"//([^/?#]*)@")
"""User information in the strict sense: what stands before the last @ of the authority."""
_PASSWORD = re.compile(r"//(?!\[)[^/?#@]*:(?!\d+(?:[/?#]|$)).*@", re.DOTALL)
"""USER:PASSWORD@ with any characters in the password: secret keys hold slashes.  HOST:PORT/…@… is none."""
_NETWORK_SCHEMES = frozenset({"az", "ftp", "gs", "hf", "http", "https", "oci", "s3", "ssh", "wandb-artifact"})


class AdapterSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which adapter on which base: all of it or nothing of it travels in a request."""

    base: str
    """The base's canonical name."""
    source: str
    """Where the adapter comes from, byte for byte as the client wrote it."""
    key: str
    version: int = RUNTIME_LORA_PROTOCOL


def identity_digest(base: str, source: str) -> bytes:
    """Return the 32-byte digest that names the adapter at `source` on `base` (its canonical name)."""
    return hashlib.sha256(_DOMAIN + base.encode() + b"\0" + source.encode()).digest()


def adapter_key(base: str, source: str) -> str:
    """Return the adapter key, `dyn-lora-` and 32 hex digits: safe in a subject, a path and an etcd key."""
    return KEY_PREFIX + identity_digest(base, source)[:16].hex()


def select(base: str, source: str) -> AdapterSelection:
    """Return the selection of the adapter at `source` on the canonical base `base`."""
    return AdapterSelection(base=base, source=source, key=adapter_key(base, source))


def verify(selection: AdapterSelection, base: str) -> None:
    """Check a selection that came over the bus before anything is looked up by it.

    Raises:
        LorelayError: `runtime_lora_identity_mismatch`: not for this base, another protocol, or a key that does
            not recompute.
    """
    if (
        selection.version != RUNTIME_LORA_PROTOCOL
        or selection.base != base
        or selection.key != adapter_key(selection.base, selection.source)
    ):
        raise LorelayError(
            ErrorCode.RUNTIME_LORA_IDENTITY_MISMATCH,
            "The adapter's key does not belong to its base and source.",
            detail=f"key {selection.key} base {selection.base!r} served {base!r} v{selection.version}",
        )


def check_model_id(model: str) -> None:
    """Refuse a model id that is empty, too long, or holds characters no id may hold.

    Raises:
        LorelayError: `invalid_lora_model_id`.
    """
    if not model:
        raise _invalid("The model id is empty: name a model of GET /v1/models or an adapter's URI.")
    if _CONTROL.search(model):
        raise _invalid("The model id holds an ASCII control character.")
    if _bytes(model, "model id") > MAX_MODEL_ID_BYTES:
        raise _invalid(f"The model id is longer than {MAX_MODEL_ID_BYTES} bytes of UTF-8.")


def split_model_id(model: str) -> tuple[str | None, str] | None:
    """Read a model id that is not a known name as `(base, source)`, or `(None, source)` if it is a bare source.

    Returns None if it is neither: just a name that nobody serves.

    Raises:
        LorelayError: `invalid_lora_model_id`: it has a `|` or a scheme, but breaks a rule of the grammar.
    """
    base, bar, source = model.partition("|")
    if not bar:
        base, source = "", model
        if _SCHEME.fullmatch(model) is None or "://" not in model:
            return None
    elif not base or not source:
        raise _invalid("Both sides of the '|' in a model id must be non-empty: BASE|SCHEME:REST.")
    if _bytes(base, "base") > MAX_BASE_BYTES:
        raise _invalid(f"The base in the model id is longer than {MAX_BASE_BYTES} bytes of UTF-8.")
    check_source(source)
    return (base or None), source


def check_source(source: str) -> str:
    """Check a source and return its scheme in lower case.

    Raises:
        LorelayError: `invalid_lora_model_id`: no scheme, too long, forbidden characters, or credentials in it.
    """
    match = _SCHEME.fullmatch(source)
    if match is None:
        raise _invalid("An adapter's source must be SCHEME:REST, such as hf://org/repo or s3://bucket/adapter.")
    if _CONTROL.search(source):
        raise _invalid("The adapter's source holds an ASCII control character.")
    if _bytes(source, "source") > MAX_SOURCE_BYTES:
        raise _invalid(f"The adapter's source is longer than {MAX_SOURCE_BYTES} bytes of UTF-8.")
    scheme = match[1].lower()
    if _user_information(scheme, match[2]) is not None:
        raise _invalid(
            "The adapter's source holds user information (USER@ or USER:PASSWORD@); credentials belong to"
            " the resolver's configuration, never in a model id."
        )
    return scheme


def redact(source: str) -> str:
    """Return `source` fit for logs and events: without user information, query and fragment."""
    match = _SCHEME.fullmatch(source)
    if match is None:
        return "…"
    rest = match[2]
    user = _user_information(match[1].lower(), rest)
    if user is not None:
        rest = "//…@" + rest[user.end() :]
    cut = re.search(r"[?#]", rest)
    return f"{match[1]}:{rest[: cut.start()] + '…' if cut else rest}"


def _user_information(scheme: str, rest: str) -> re.Match[str] | None:
    """Find `//USER@` or `//USER:PASSWORD@`.  A lone `//NAME@` is part of a name where the scheme has no hosts."""
    if (password := _PASSWORD.match(rest)) is not None:
        return password
    user = _USER.match(rest)
    return user if user is not None and (":" in user[1] or scheme in _NETWORK_SCHEMES) else None


def _bytes(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise _invalid(f"The {what} holds a lone surrogate, which is not text.") from error


def _invalid(message: str) -> LorelayError:
    return LorelayError(ErrorCode.INVALID_LORA_MODEL_ID, message, param="model")
