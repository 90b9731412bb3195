"""Which worker gets a request."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, strategies as st

from lorelay.frontend.catalog import Target
from lorelay.frontend.routing import pick
from lorelay.proto.identity import select
from lorelay.proto.rendezvous import ranked

WORKERS = tuple(f"{number:016x}" for number in range(1, 9))
IDLE = Counter[str]()


def rng() -> random.Random:
    return random.Random(1)  # noqa: S311 - a test's


@given(st.text(min_size=1), st.permutations(WORKERS))
def test_an_adapter_goes_to_one_worker_whatever_the_order(source: str, order: list[str]) -> None:
    selection = select("base", source)
    expected = ranked(selection.key, WORKERS)[0]
    assert pick(Target("base", selection, tuple(order)), (), IDLE.__getitem__, rng()) == expected


@given(st.text(min_size=1), st.sampled_from(WORKERS))
def test_one_worker_leaving_moves_only_its_own_adapters(source: str, left: str) -> None:
    """F20."""
    selection = select("base", source)
    before = pick(Target("base", selection, WORKERS), (), IDLE.__getitem__, rng())
    after = pick(Target("base", selection, WORKERS), {left}, IDLE.__getitem__, rng())
    assert after != left
    assert before in (after, left)


def test_a_holder_is_preferred_to_the_winner() -> None:
    """F18."""
    selection = select("base", "s3://a")
    order = ranked(selection.key, WORKERS)
    target = Target("base", selection, WORKERS, frozenset({order[3], order[5]}))
    assert pick(target, (), IDLE.__getitem__, rng()) == order[3]
    assert pick(target, {order[3]}, IDLE.__getitem__, rng()) == order[5]
    assert pick(target, {order[3], order[5]}, IDLE.__getitem__, rng()) == order[0]


def test_adapters_spread_over_the_workers() -> None:
    places = Counter(
        pick(Target("base", select("base", f"s3://{n}"), WORKERS), (), IDLE.__getitem__, rng()) for n in range(800)
    )
    assert set(places) == set(WORKERS)
    assert max(places.values()) < 2 * min(places.values())


def test_of_two_random_workers_a_base_request_goes_to_the_less_loaded() -> None:
    load = Counter(dict.fromkeys(WORKERS, 5))
    load[WORKERS[0]] = 0
    dice = rng()
    chosen = Counter(pick(Target("base", None, WORKERS), (), load.__getitem__, dice) for _ in range(800))
    assert 150 < chosen[WORKERS[0]] < 250  # it is in a quarter of the pairs
    assert pick(Target("base", None, WORKERS[:2]), (), Counter({WORKERS[1]: 1}).__getitem__, dice) == WORKERS[0]


def test_without_a_candidate_there_is_no_worker() -> None:
    assert pick(Target("base", None, WORKERS), WORKERS, IDLE.__getitem__, rng()) is None
    assert pick(Target("base", None, WORKERS), WORKERS[1:], IDLE.__getitem__, rng()) == WORKERS[0]
