"""What a model id means, given what discovery has shown so far."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from lorelay.frontend.catalog import Catalog
from lorelay.proto import keys
from lorelay.proto.codec import to_json
from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.identity import adapter_key, identity_digest, select
from lorelay.proto.records import AdapterState, Capability, InstanceRecord, ModelCard, ResidencyRecord
from lorelay.runtime.discovery import Change
from support.engines import facts

if TYPE_CHECKING:
    import msgspec

NS = "test"
ONE, TWO, THREE = (f"{number:016x}" for number in (1, 2, 3))


def put(key: str, record: msgspec.Struct) -> Change:
    return Change(key, to_json(record))


def instance(worker: str = ONE, *, draining: bool = False, protocol: int = 1, started: str = "t0") -> Change:
    record = InstanceRecord(
        component="worker", instance=worker, subject="s", started=started, draining=draining, protocol=protocol
    )
    return put(keys.instance(NS, "worker", worker), record)


def card(worker: str = ONE, name: str = "base", aliases: tuple[str, ...] = ()) -> Change:
    return put(keys.model(NS, name, worker), ModelCard(worker=worker, facts=facts(name, aliases)))


def capability(
    worker: str = ONE, base: str = "base", schemes: tuple[str, ...] = ("s3",), versions: tuple[int, ...] = (2,)
) -> Change:
    record = Capability(
        worker=worker, base=base, schemes=schemes, versions=versions, cache_domain="local", max_rank=64, slots=4
    )
    return put(keys.capability(NS, worker), record)


def adapter(
    worker: str = ONE, source: str = "s3://b/a", name: str | None = None, state: AdapterState = AdapterState.LOADED
) -> Change:
    record = ResidencyRecord(
        worker=worker,
        key=adapter_key("base", source),
        base="base",
        digest="d",
        name=name,
        source=source if name else "",
        state=state,
        bytes=1,
    )
    return put(adapter_at(worker, source), record)


def adapter_at(worker: str, source: str) -> str:
    return keys.adapter(NS, worker, identity_digest("base", source))


def gone(change: Change) -> Change:
    return Change(change.key, None)


def catalog(*changes: Change) -> Catalog:
    made = Catalog(NS, lambda _: None)
    made.apply(changes)
    return made


def code_of(made: Catalog, model: str) -> ErrorCode:
    with pytest.raises(LorelayError) as failure:
        made.target(model)
    return failure.value.code


WORKER = (instance(), card(aliases=("alias",)), capability())


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_records_may_come_in_any_order(order: tuple[int, ...]) -> None:
    records = [*WORKER, adapter(name="tone")]
    made = Catalog(NS, lambda _: None)
    for index in order:
        made.apply([records[index]])
    assert made.target("base").workers == (ONE,)
    assert made.target("alias").base == "base"
    assert made.target("s3://b/a").holders == {ONE}
    assert made.target("tone").selection == select("base", "s3://b/a")
    assert [line.id for line in made.listed()] == ["alias", "base", "tone"]


@pytest.mark.parametrize(
    "missing", [instance(draining=True), instance(protocol=2), Change(keys.instance(NS, "worker", ONE), None)]
)
def test_a_worker_that_drains_or_speaks_another_version_gets_nothing(missing: Change) -> None:
    made = catalog(*WORKER, missing)
    for model in ("base", "alias", "base|s3://b/a"):
        assert code_of(made, model) is ErrorCode.NO_WORKER_AVAILABLE
    assert made.listed() == []
    assert made.routes == frozenset()


def test_a_name_that_differs_by_a_letter_is_not_answered_by_the_base() -> None:
    """C12."""
    made = catalog(*WORKER)
    for model in ("bse", "Base", "base ", "base/", "alias2", "gpt-oss:120b", "nobody|s3://b/a"):
        assert code_of(made, model) is ErrorCode.MODEL_NOT_FOUND


@pytest.mark.parametrize("name", ["gpt-oss:120b", "a|b", "s3://looks/like", "base|s3://x/y", "é ü/%2F?#"])
def test_an_exact_known_name_wins_always(name: str) -> None:
    """C1, C2: whatever it contains, as a base, an alias or a published adapter."""
    as_base = catalog(instance(), card(name=name), capability(base=name))
    assert as_base.target(name).selection is None
    as_alias = catalog(instance(), card(aliases=(name,)), capability())
    assert as_alias.target(name).base == "base"
    assert as_alias.target(name).selection is None
    as_adapter = catalog(*WORKER, adapter(name=name))
    assert as_adapter.target(name).selection == select("base", "s3://b/a")


def test_a_base_wins_over_an_adapter_of_its_name() -> None:
    """C7."""
    for name in ("base", "alias"):
        made = catalog(*WORKER, adapter(name=name))
        assert made.target(name).selection is None
        assert [line.id for line in made.listed()] == ["alias", "base"]


def test_an_alias_and_its_base_give_one_adapter() -> None:
    made = catalog(*WORKER)
    assert made.target("alias|s3://b/a").selection == made.target("base|s3://b/a").selection


def test_an_alias_that_two_bases_claim_means_the_same_in_every_frontend() -> None:
    records = [instance(ONE), card(ONE, "b", ("x",)), instance(TWO), card(TWO, "a", ("x",))]
    assert {catalog(*order).target("x").base for order in itertools.permutations(records)} == {"a"}


def test_a_bare_source_needs_exactly_one_base() -> None:
    """C2."""
    assert code_of(catalog(), "s3://b/a") is ErrorCode.NO_WORKER_AVAILABLE
    made = catalog(*WORKER, instance(TWO), card(TWO), capability(TWO))
    assert made.target("s3://b/a").workers == (ONE, TWO)
    made.apply([instance(THREE), card(THREE, "other")])
    assert code_of(made, "s3://b/a") is ErrorCode.RUNTIME_LORA_BASE_MODEL_REQUIRED
    assert made.target("base|s3://b/a").workers == (ONE, TWO)


def test_the_first_bar_splits_and_no_other() -> None:
    made = catalog(*WORKER)
    selection = made.target("base|s3://b/a|c").selection
    assert selection is not None
    assert selection.source == "s3://b/a|c"
    for model in ("|s3://b/a", "base|", "|", "base||s3://b/a", "s3://b/a|c"):
        assert code_of(made, model) in (ErrorCode.INVALID_LORA_MODEL_ID, ErrorCode.MODEL_NOT_FOUND)


def test_what_no_worker_can_do_is_refused_by_name() -> None:
    assert code_of(catalog(*WORKER), "base|gs://b/a") is ErrorCode.UNSUPPORTED_LORA_SCHEME
    assert code_of(catalog(instance(), card()), "base|s3://b/a") is ErrorCode.RUNTIME_LORA_UNSUPPORTED
    for other in (capability(base="other"), capability(versions=(1, 3))):
        assert code_of(catalog(instance(), card(), other), "base|s3://b/a") is ErrorCode.RUNTIME_LORA_UNSUPPORTED
    assert catalog(*WORKER).target("base|S3://b/a").workers == (ONE,)


def test_an_adapter_is_published_and_taken_back() -> None:
    made = catalog(*WORKER)
    made.apply([adapter(name="tone")])
    assert [(line.id, line.parent) for line in made.listed()][-1] == ("tone", "base")
    made.apply([adapter(name="tone", state=AdapterState.UNLOADING)])
    assert code_of(made, "tone") is ErrorCode.MODEL_NOT_FOUND
    made.apply([adapter(name="tone"), Change(adapter_at(ONE, "s3://b/a"), None)])
    assert code_of(made, "tone") is ErrorCode.MODEL_NOT_FOUND


def test_a_published_adapter_is_served_only_where_it_is() -> None:
    """D14."""
    made = catalog(*WORKER, instance(TWO), card(TWO), capability(TWO), adapter(name="tone"))
    assert made.target("tone").workers == (ONE,)


def test_a_name_that_two_workers_give_to_different_adapters_goes_to_one_of_them() -> None:
    made = catalog(
        *WORKER, instance(TWO), card(TWO), adapter(ONE, "s3://b/a", "tone"), adapter(TWO, "s3://b/other", "tone")
    )
    target = made.target("tone")
    assert target.selection == select("base", "s3://b/a")
    assert target.workers == (ONE,)


def test_runtime_adapters_are_not_listed() -> None:
    assert [line.id for line in catalog(*WORKER, adapter()).listed()] == ["alias", "base"]


def test_one_adapter_going_leaves_its_siblings_and_the_base() -> None:
    """F11."""
    made = catalog(*WORKER, adapter(source="s3://b/a", name="a"), adapter(source="s3://b/b", name="b"))
    made.apply([Change(adapter_at(ONE, "s3://b/a"), None)])
    assert [line.id for line in made.listed()] == ["alias", "b", "base"]
    assert made.target("s3://b/b").holders == {ONE}
    assert made.target("s3://b/a").holders == frozenset()


def test_a_worker_that_is_gone_is_told_once() -> None:
    told: list[str] = []
    made = Catalog(NS, told.append)
    made.apply([*WORKER, instance(TWO)])
    made.apply([gone(instance()), gone(card()), gone(capability())])
    assert told == [ONE]
    made.apply([gone(instance(THREE))])
    assert told == [ONE]
    assert code_of(made, "base") is ErrorCode.NO_WORKER_AVAILABLE


def test_a_worker_whose_lease_was_lost_and_made_anew_is_not_gone() -> None:
    """F1: its process never stopped."""
    told: list[str] = []
    made = Catalog(NS, told.append)
    made.apply(WORKER)
    made.apply([gone(instance()), instance()])
    made.apply([instance(draining=True)])
    assert told == []


def test_a_worker_restarted_under_its_id_is_gone_though_its_record_never_was() -> None:
    told: list[str] = []
    made = Catalog(NS, told.append)
    made.apply([*WORKER])
    made.apply([instance(started="t1")])
    assert told == [ONE]
    assert made.target("base").workers == (ONE,)


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"worker": 1}'])
def test_a_record_that_cannot_be_read_counts_as_absent(value: bytes) -> None:
    made = catalog(*WORKER, instance(TWO), card(TWO), Change(capability(ONE).key, value))
    assert code_of(made, "base|s3://b/a") is ErrorCode.RUNTIME_LORA_UNSUPPORTED
    assert made.target("base").workers == (ONE, TWO)
    made.apply([Change(adapter_at(ONE, "s3://b/a"), value), Change(f"/lorelay/v1/{NS}/what/ever", value)])
    assert made.target("base").workers == (ONE, TWO)


@given(st.permutations([*WORKER, instance(TWO), card(TWO), adapter(name="t"), adapter(TWO, "s3://b/c")]))
def test_a_listing_and_a_watch_in_any_order_show_one_fleet(changes: list[Change]) -> None:
    """F12."""
    at_once, one_by_one = catalog(*changes), catalog()
    for change in changes:
        one_by_one.apply([change])
    for made in (at_once, one_by_one):
        assert [line.id for line in made.listed()] == ["alias", "base", "t"]
        assert made.target("base").workers == (ONE, TWO)


def test_nothing_is_kept_of_workers_that_are_gone() -> None:
    made = catalog()
    for number in range(50):
        worker = f"{number:016x}"
        records = [instance(worker), card(worker), capability(worker), adapter(worker, name="n")]
        made.apply(records)
        made.apply([gone(record) for record in records])
    assert vars(made)["_workers"] == {}
