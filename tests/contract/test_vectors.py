"""Golden vectors: what other implementations compute, and bytes that processes of this version have sent.

A vector is never changed; a new version of a message adds one.  A struct that no longer reads its old bytes, or no
longer writes them the same, breaks a fleet in the middle of a roll-out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorelay.proto.codec import from_json, pack, to_json, unpack
from lorelay.proto.identity import adapter_key
from lorelay.proto.rendezvous import score
from lorelay.proto.schema import MESSAGES, schemas

PROTO = Path(__file__).parents[2] / "proto"
STRUCTS = {struct.__name__: struct for structs in MESSAGES.values() for struct in structs}


def vectors(name: str) -> Any:
    """Return the vectors of a file."""
    return json.loads((PROTO / "vectors" / f"{name}.json").read_text())


@pytest.mark.parametrize("vector", vectors("identity"), ids=lambda v: v["source"])
def test_a_key_is_what_dynamos_protocol_computes(vector: dict[str, str]) -> None:
    assert adapter_key(vector["base"], vector["source"]) == vector["key"]


@pytest.mark.parametrize("vector", vectors("rendezvous"), ids=lambda v: v["key"])
def test_a_score_is_what_dynamos_protocol_computes(vector: dict[str, Any]) -> None:
    assert score(vector["key"], vector["worker"], vector["dp_rank"]) == int(vector["score"], 16)


@pytest.mark.parametrize(("name", "encoded"), vectors("messages")["msgpack_hex"].items())
def test_bytes_on_the_hot_path_are_still_read_and_written_the_same(name: str, encoded: str) -> None:
    data = bytes.fromhex(encoded)
    message = unpack(STRUCTS[name], data)
    assert isinstance(message, msgspec.Struct)
    assert pack(message) == data


@pytest.mark.parametrize(("name", "text"), vectors("messages")["json"].items())
def test_json_is_still_read_and_written_the_same(name: str, text: str) -> None:
    message = from_json(STRUCTS[name], text.encode())
    assert isinstance(message, msgspec.Struct)
    assert to_json(message).decode() == text


def test_every_message_has_a_vector() -> None:
    messages = vectors("messages")
    assert {*messages["msgpack_hex"], *messages["json"]} == set(STRUCTS)


@pytest.mark.parametrize(("name", "text"), schemas().items())
def test_the_committed_schemas_are_what_the_structs_say(name: str, text: bytes) -> None:
    assert (PROTO / "schema" / name).read_bytes() == text, "run `make schema`"
