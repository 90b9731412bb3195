"""Why an adapter is refused: reasons with a stable code and one sentence, collected so that all are told at once.

A sentence names the file, the field or tensor, what was found and what is expected.  It holds the adapter's own words
only as `show` renders them: ASCII, quoted, cut short.  It never holds a path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

MAX_REASONS = 32
"""More than a person reads, and little enough for any message."""
_MAX_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is wrong with an adapter."""

    code: str
    """Stable, for programs: docs/reference/verdict.md lists them."""
    sentence: str
    """For people."""

    def __str__(self) -> str:
        """Return what goes over the wire."""
        return f"{self.code}: {self.sentence}"


class Findings:
    """Collects reasons; the same thing wrong with many tensors becomes one reason that says how many."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[Reason, int]] = {}

    def __bool__(self) -> bool:
        """Return whether anything was found."""
        return bool(self._found)

    def add(self, code: str, sentence: str, *, group: str | None = None) -> None:
        """Note a reason; those with the same code and `group` are told once, by the first one's sentence."""
        at = (code, sentence if group is None else group)
        reason, count = self._found.get(at, (Reason(code, sentence), 0))
        self._found[at] = (reason, count + 1)

    def reasons(self) -> tuple[Reason, ...]:
        """Return what was found, in order of discovery, at most `MAX_REASONS` and a last one that counts the rest."""
        told = [
            reason if count == 1 else Reason(reason.code, f"{reason.sentence} The same holds for {count - 1} more.")
            for reason, count in self._found.values()
        ]
        if len(told) > MAX_REASONS:
            rest = Reason("more_reasons", f"{len(told) - MAX_REASONS} more reasons are not listed.")
            told = [*told[:MAX_REASONS], rest]
        return tuple(told)


def show(value: object) -> str:
    """Return a JSON value as a sentence may quote it."""
    text = json.dumps(value, ensure_ascii=True, default=repr)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
