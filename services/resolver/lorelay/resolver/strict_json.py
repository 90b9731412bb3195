"""JSON from strangers: UTF-8, no key twice, no NaN or Infinity, no deep nesting.

The standard parser takes the last of two equal keys, which is how a file says one thing to a checker and another to
an engine; and it answers deep nesting with a RecursionError whose depth depends on the caller's stack.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

MAX_DEPTH = 32

# A string may lack its end: then it reaches to the end of the text, which keeps this linear on every input.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class StrictJSONError(ValueError):
    """Text that is not strict JSON; `str()` says why, without quoting it at length."""


def loads(data: bytes) -> object:
    """Return the value that `data` holds.

    Raises:
        StrictJSONError: It is not strict JSON.
    """
    _check_depth(data)
    try:
        value: object = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except StrictJSONError:
        raise
    except UnicodeDecodeError as error:
        raise StrictJSONError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise StrictJSONError(f"{error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        raise StrictJSONError("a number has too many digits") from error
    return value


def _check_depth(data: bytes) -> None:
    depth = 0
    for match in _TOKEN.finditer(data):
        token = match[0]
        if token in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise StrictJSONError(f"nested deeper than {MAX_DEPTH} levels")
        elif token in b"]}":
            depth -= 1


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise StrictJSONError(f"the key {json.dumps(name[:80])} stands twice in one object")
            seen.add(name)
    return value


def _no_constant(name: str) -> NoReturn:
    raise StrictJSONError(f"{name} is not JSON")
