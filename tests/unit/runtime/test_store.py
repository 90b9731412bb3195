"""The range of a prefix: exactly the keys that start with it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lorelay.runtime.store import EtcdSettings, EtcdStore, prefix_range

_KEYS = st.binary(min_size=1, max_size=4) | st.lists(st.sampled_from([0, 97, 98, 254, 255]), min_size=1).map(bytes)


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


@given(prefix=_KEYS | st.just(b""), key=_KEYS)
def test_a_key_is_in_the_range_of_a_prefix_if_it_starts_with_it(prefix: bytes, key: bytes) -> None:
    start, end = prefix_range(_text(prefix))
    is_in_range = start <= key and (end == b"\0" or key < end)
    assert is_in_range == key.startswith(prefix)


def test_ranges_of_known_prefixes() -> None:
    assert prefix_range("a/") == (b"a/", b"a0")
    assert prefix_range(_text(b"a\xff")) == (b"a\xff", b"b")
    assert prefix_range("") == (b"\0", b"\0")


@pytest.mark.parametrize("endpoints", [(), ("http://a:1", "https://b:1"), ("a:1",)])
def test_a_store_without_usable_endpoints_is_refused(endpoints: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="http"):
        EtcdStore(EtcdSettings(endpoints=endpoints))
