"""JSON Schemas of every message, generated from the structs: `python -m lorelay.proto.schema FOLDER [--check]`.

The schemas are committed in proto/schema, so that a change of a message shows in its diff and a client in another
language can be generated.  `--check` writes nothing and fails if the folder's files are not what would be written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from lorelay.proto import adapters, events, generation, records

MESSAGES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "adapters": (adapters.MaterializeRequest, adapters.MaterializeReply),
    "events": (events.LoraEvent,),
    "generation": (
        generation.GenerateRequest,
        generation.RequestPart,
        generation.Acknowledgement,
        generation.Cancel,
        generation.FrameBatch,
    ),
    "records": (
        records.InstanceRecord,
        records.ModelCard,
        records.Capability,
        records.ResidencyRecord,
        records.ResolverRecord,
    ),
}


def schemas() -> dict[str, bytes]:
    """Return file name -> JSON Schema document, one per module of messages."""
    documents = {}
    for name, structs in MESSAGES.items():
        tops, definitions = msgspec.json.schema_components(structs)
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": f"lorelay.proto.{name}",
            "anyOf": list(tops),
            "$defs": {key.rpartition(".")[2]: value for key, value in definitions.items()},
        }
        text = msgspec.json.encode(document, order="sorted").replace(b"#/$defs/lorelay.proto.", b"#/$defs/")
        documents[f"{name}.json"] = msgspec.json.format(text, indent=2) + b"\n"
    return documents


def main(arguments: list[str]) -> int:
    """Write or check the schemas; return the exit code."""
    folder, is_check = Path(arguments[0]), "--check" in arguments[1:]
    stale = [
        name
        for name, text in schemas().items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != text
    ]
    if is_check:
        for name in stale:
            sys.stderr.write(f"{folder / name} is not what the structs say: run `make schema`\n")
        return bool(stale)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schemas().items():
        (folder / name).write_bytes(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
