"""Bytes of messages: msgpack on the hot path, JSON where a person looks.

Decoding is strict about types and lenient about fields that a newer process added.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes that it cannot read; the last one when they nest too deeply."""

_pack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()


class MalformedMessageError(ValueError):
    """Bytes that are not the message they should be.  Says what was wrong; holds no content."""


def pack(message: msgspec.Struct) -> bytes:
    """Return `message` as msgpack."""
    return _pack.encode(message)


def unpack(kind: type[T], data: bytes) -> T:
    """Return the `kind` that `data` (msgpack) holds.

    Raises:
        MalformedMessageError: It does not.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise MalformedMessageError(f"not a {kind.__name__}: {error}") from error


def to_json(message: msgspec.Struct) -> bytes:
    """Return `message` as JSON."""
    return _json.encode(message)


def from_json(kind: type[T], data: bytes) -> T:
    """Return the `kind` that `data` (JSON) holds.

    Raises:
        MalformedMessageError: It does not.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise MalformedMessageError(f"not a {kind.__name__}: {error}") from error
