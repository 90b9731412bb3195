"""Highest-random-weight placement, as Dynamo's protocol v2 computes it: the same winner in every process."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from blake3 import blake3


def score(key: str, worker_id: int, dp_rank: int = 0) -> int:
    """Return the u64 score of `worker_id` for the adapter `key`: the highest wins, ties go to the lower id."""
    packed = key.encode() + struct.pack("<QI", worker_id, dp_rank)
    return int.from_bytes(blake3(packed).digest()[:8], "little")


def ranked(key: str, instances: Iterable[str]) -> list[str]:
    """Return the instance ids (16 hex digits) by falling score for `key`."""
    return sorted(instances, key=lambda i: (-score(key, int(i, 16)), i))
