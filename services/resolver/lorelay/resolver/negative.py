"""Failures that asking again would only repeat, remembered for a while to spare the provider.

Only permanent ones: the adapter is not there, may not be used, or was refused.  Bounded by count and by time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lorelay.proto.errors import ErrorCode, LorelayError, WireError

PERMANENT = frozenset({ErrorCode.LORA_NOT_FOUND, ErrorCode.LORA_SOURCE_FORBIDDEN, ErrorCode.INVALID_LORA_ADAPTER})


class NegativeCache:
    """Permanent failures by key.

    Args:
        ttl_s: How long one is remembered.
        clock: Monotonic seconds.
        max_entries: When there are more, the oldest is forgotten.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float], *, max_entries: int = 1024) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._max_entries = max_entries
        self._entries: OrderedDict[str, tuple[float, WireError]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._entries)

    def remember(self, key: str, error: LorelayError) -> None:
        """Remember `error`, if it is permanent."""
        if error.code not in PERMANENT:
            return
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._ttl_s, error.wire)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def check(self, key: str) -> None:
        """Return if nothing is remembered for `key`.

        Raises:
            LorelayError: What is.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        until, error = entry
        if self._clock() < until:
            raise LorelayError.from_wire(error)
        del self._entries[key]
