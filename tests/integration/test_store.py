"""The store against a real etcd, and against what happens to a real etcd."""

from __future__ import annotations

import time
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from lorelay.runtime.store import (
    CompactedError,
    EtcdSettings,
    EtcdStore,
    Event,
    LeaseGoneError,
    StoreAuthError,
    StoreError,
    StoreUnavailableError,
)
from support.certificates import make_tls_files
from support.servers import EtcdServer, etcd_cluster, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(etcd_server: EtcdServer) -> AsyncIterator[EtcdStore]:
    async with EtcdStore(EtcdSettings((etcd_server.url,))) as store:
        yield store


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """Start an etcd for a test that hurts it."""
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
async def own_store(own_etcd: EtcdServer) -> AsyncIterator[EtcdStore]:
    async with EtcdStore(EtcdSettings((own_etcd.url,))) as store:
        yield store


class Follower:
    """Collects what a watch yields, as a task of its own."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.delay_s = 0.0

    async def run(self, store: EtcdStore, prefix: str, revision: int) -> None:
        """Follow until cancelled, or until the watch gives up."""
        try:
            async with aclosing(store.watch(prefix, revision)) as batches:
                async for batch in batches:
                    self.events.extend(batch)
                    await anyio.sleep(self.delay_s)
        except (CompactedError, StoreAuthError) as error:
            self.error = error

    async def wait_for(self, count: int, *, timeout_s: float = 20) -> None:
        """Wait for events, or for the end of the watch."""
        with anyio.fail_after(timeout_s):
            while len(self.events) < count and self.error is None:  # noqa: ASYNC110 (a test)
                await anyio.sleep(0.01)


@asynccontextmanager
async def following(store: EtcdStore, prefix: str, revision: int) -> AsyncIterator[Follower]:
    follower = Follower()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follower.run, store, prefix, revision)
        yield follower
        tasks.cancel_scope.cancel()


# Keys


async def test_a_key_is_written_read_and_deleted(store: EtcdStore, prefix: str) -> None:
    assert await store.get(f"{prefix}a") is None
    revision = await store.put(f"{prefix}a", b"1")
    assert await store.put(f"{prefix}a", b"\xff\0") == revision + 1
    found = await store.get(f"{prefix}a")
    assert found is not None
    assert (found.key, found.value, found.version, found.lease) == (f"{prefix}a", b"\xff\0", 2, 0)
    assert (found.create_revision, found.mod_revision) == (revision, revision + 1)
    assert await store.delete(f"{prefix}a")
    assert not await store.delete(f"{prefix}a")
    assert await store.get(f"{prefix}a") is None


async def test_a_foreign_key_that_is_not_text_keeps_its_bytes(store: EtcdStore, prefix: str) -> None:
    key = prefix + b"\xff\xfe".decode("utf-8", "surrogateescape")
    await store.put(key, b"1")
    listing = await store.list(prefix)
    assert [item.key for item in listing.items] == [key]
    assert await store.delete(listing.items[0].key)


async def test_a_prefix_is_listed_and_deleted_without_its_neighbours(store: EtcdStore, prefix: str) -> None:
    for name in ("a/1", "a/2", "a0", "b/1"):
        await store.put(f"{prefix}{name}", name.encode())
    listing = await store.list(f"{prefix}a/")
    assert [item.value for item in listing.items] == [b"a/1", b"a/2"]
    assert listing.revision >= listing.items[-1].mod_revision
    assert await store.delete_prefix(f"{prefix}a/") == 2
    assert [item.value for item in (await store.list(prefix)).items] == [b"a0", b"b/1"]


async def test_a_listing_larger_than_a_message_is_of_one_revision(store: EtcdStore, prefix: str) -> None:
    """40 MiB: larger than gRPC's 4 MiB and than the channel's 16; while it is read, somebody writes."""
    value = b"x" * (1 << 20)
    for index in range(40):
        await store.put(f"{prefix}{index:02}", value)
    stop = anyio.Event()

    async def write() -> None:
        while not stop.is_set():
            await store.put(f"{prefix}39", b"y")
            await store.put(f"{prefix}99", b"z")
            await store.delete(f"{prefix}99")
            await store.put(f"{prefix}39", value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        listing = await store.list(prefix)
        stop.set()
    names = [item.key.removeprefix(prefix) for item in listing.items]
    assert names[:40] == [f"{index:02}" for index in range(40)]
    assert all(item.mod_revision <= listing.revision for item in listing.items)
    # At one revision either "39" has its old value and there is no "99", or it is short and there may be one.
    assert names[40:] in ([], ["99"])
    assert not names[40:] or listing.items[39].value == b"y"
    await store.delete_prefix(prefix)


async def test_thousands_of_keys_are_listed_in_order(store: EtcdStore, prefix: str) -> None:
    names = [f"{prefix}{index:04}" for index in range(2500)]

    async def put(part: list[str]) -> None:
        for name in part:
            await store.put(name, b"")

    async with anyio.create_task_group() as tasks:
        for start in range(50):
            tasks.start_soon(put, names[start::50])
    assert [item.key for item in (await store.list(prefix)).items] == names


async def test_only_one_writer_wins_a_comparison(store: EtcdStore, prefix: str) -> None:
    key = f"{prefix}a"
    first = await store.put_if_absent(key, b"1")
    assert first is not None
    assert await store.put_if_absent(key, b"2") is None
    second = await store.replace_if(key, b"3", first)
    assert second is not None
    assert await store.replace_if(key, b"4", first) is None
    found = await store.get(key)
    assert found is not None
    assert (found.value, found.mod_revision) == (b"3", second)

    winners: list[int] = []

    async def race(index: int) -> None:
        if await store.replace_if(key, str(index).encode(), second) is not None:
            winners.append(index)

    async with anyio.create_task_group() as tasks:
        for index in range(20):
            tasks.start_soon(race, index)
    assert len(winners) == 1


# Leases


async def test_a_lease_keeps_its_keys_and_takes_them_along(store: EtcdStore, prefix: str) -> None:
    lease = await store.grant_lease(30)
    await store.put(f"{prefix}a", b"1", lease=lease)
    found = await store.get(f"{prefix}a")
    assert found is not None
    assert found.lease == lease
    assert await store.keep_alive(lease) == 30
    assert await store.revoke_lease(lease)
    assert await store.get(f"{prefix}a") is None
    assert not await store.revoke_lease(lease)
    assert await store.keep_alive(lease) == 0
    with pytest.raises(LeaseGoneError):
        await store.put(f"{prefix}a", b"1", lease=lease)
    with pytest.raises(LeaseGoneError):
        await store.put_if_absent(f"{prefix}a", b"1", lease=lease)


async def test_a_lease_that_nobody_renews_ends(store: EtcdStore, prefix: str) -> None:
    lease = await store.grant_lease(1)
    await store.put(f"{prefix}a", b"1", lease=lease)
    async with following(store, prefix, 0) as follower:
        await follower.wait_for(1, timeout_s=5)
    assert [(event.key, event.value) for event in follower.events] == [(f"{prefix}a", None)]
    assert await store.keep_alive(lease) == 0


async def test_a_key_is_deleted_only_while_on_its_lease(store: EtcdStore, prefix: str) -> None:
    old, new = await store.grant_lease(30), await store.grant_lease(30)
    await store.put(f"{prefix}a", b"1", lease=new)
    assert not await store.delete(f"{prefix}a", lease=old)
    assert await store.delete(f"{prefix}a", lease=new)
    assert not await store.delete(f"{prefix}a", lease=new)


# Watches


async def test_a_watch_yields_each_change_once_from_its_revision(store: EtcdStore, prefix: str) -> None:
    revision = await store.put(f"{prefix}a", b"1")
    await store.put(f"{prefix}b", b"2")
    async with following(store, prefix, revision) as follower:
        await follower.wait_for(2)
        await store.put(f"{prefix[:-1]}-neighbour", b"no")
        await store.delete(f"{prefix}a")
        await follower.wait_for(3)
    assert [(event.key.removeprefix(prefix), event.value) for event in follower.events] == [
        ("a", b"1"),
        ("b", b"2"),
        ("a", None),
    ]
    assert follower.events[0].mod_revision == revision


async def test_a_revision_larger_than_a_message_arrives_whole(store: EtcdStore, prefix: str) -> None:
    """Deleting by prefix is one revision; with long keys etcd sends it in fragments (of 2 MiB by default)."""
    names = [f"{prefix}{index:04}{'x' * 4096}" for index in range(800)]
    for name in names:
        await store.put(name, b"")
    revision = (await store.list(prefix)).revision
    await store.delete_prefix(prefix)
    async with aclosing(store.watch(prefix, revision + 1)) as batches:
        batch = await anext(batches)
    assert [event.key for event in batch] == names
    assert {event.mod_revision for event in batch} == {revision + 1}


async def test_values_larger_than_a_message_together_are_watched(store: EtcdStore, prefix: str) -> None:
    revision = (await store.list(prefix)).revision
    for index in range(24):
        await store.put(f"{prefix}{index:02}", bytes([index]) * (1 << 20))
    async with following(store, prefix, revision + 1) as follower:
        await follower.wait_for(24)
    assert [event.value and event.value[-1] for event in follower.events] == list(range(24))
    await store.delete_prefix(prefix)


async def test_ending_a_watch_ends_it_in_etcd(store: EtcdStore, etcd_server: EtcdServer, prefix: str) -> None:
    def watchers() -> float:
        return etcd_server.metric("etcd_debugging_mvcc_watcher_total")

    async def wait_until(count: float) -> None:
        with anyio.fail_after(5):
            while watchers() != count:  # noqa: ASYNC110 (a test)
                await anyio.sleep(0.02)

    before = watchers()
    watch = store.watch(prefix, await store.put(f"{prefix}a", b"1"))
    await anext(watch)
    await wait_until(before + 1)
    await watch.aclose()
    await wait_until(before)
    async with following(store, prefix, 0):
        await wait_until(before + 1)
    await wait_until(before)


async def test_compaction_is_surfaced(own_store: EtcdStore, prefix: str) -> None:
    first = await own_store.put(f"{prefix}a", b"1")
    last = await own_store.put(f"{prefix}a", b"2")
    await own_store.compact(last)
    with pytest.raises(CompactedError) as compacted:
        await anext(own_store.watch(prefix, first))
    assert compacted.value.revision == last
    with pytest.raises(CompactedError):
        await own_store.compact(first)
    async with following(own_store, prefix, last) as follower:
        await follower.wait_for(1)
    assert [event.value for event in follower.events] == [b"2"]


async def test_a_watch_loses_and_repeats_nothing_when_etcd_is_killed(
    own_etcd: EtcdServer, own_store: EtcdStore, prefix: str
) -> None:
    """Killed twice while a slow watcher catches up with 6 000 revisions, and once while it is live."""
    revision = (await own_store.list(prefix)).revision

    async def write(count: int) -> None:
        for _ in range(count):
            await own_store.put(f"{prefix}a", b"x" * 100)

    async with anyio.create_task_group() as tasks:
        for _ in range(60):
            tasks.start_soon(write, 100)
    async with following(own_store, prefix, revision + 1) as follower:
        follower.delay_s = 0.05
        for seen in (500, 2500):
            await follower.wait_for(seen)
            assert len(follower.events) < 6000
            await anyio.to_thread.run_sync(own_etcd.restart)
        await follower.wait_for(6000)
        await anyio.to_thread.run_sync(own_etcd.restart)
        await write(10)
        await follower.wait_for(6010)
        await anyio.sleep(0.2)
    revisions = [event.mod_revision for event in follower.events]
    assert revisions == list(range(revision + 1, revision + 6011))


async def test_a_watch_notices_that_etcd_lost_its_data(own_etcd: EtcdServer, own_store: EtcdStore, prefix: str) -> None:
    """Else it would wait in silence for the new store to reach the old one's revision."""
    for _ in range(50):
        revision = await own_store.put(f"{prefix}a", b"1")
    async with following(own_store, prefix, revision) as follower:
        await follower.wait_for(1)
        own_etcd.kill()
        own_etcd.wipe()
        await anyio.to_thread.run_sync(own_etcd.start)
        with anyio.fail_after(10):
            while follower.error is None:  # noqa: ASYNC110 (a test)
                await anyio.sleep(0.02)
    assert isinstance(follower.error, CompactedError)
    assert follower.error.revision < revision


# Loss of etcd


async def test_a_call_waits_for_etcd_within_its_time(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd")
    async with EtcdStore(EtcdSettings((server.url,), timeout_s=0.5)) as impatient:
        for call in (impatient.get("a"), impatient.put("a", b""), impatient.list("a"), impatient.keep_alive(1)):
            start = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                await call
            assert 0.4 < time.monotonic() - start < 1.5
    with server:
        server.kill()
        async with EtcdStore(EtcdSettings((server.url,))) as patient, anyio.create_task_group() as tasks:
            tasks.start_soon(patient.put, "a", b"1")
            await anyio.sleep(0.3)
            await anyio.to_thread.run_sync(server.start)
        async with EtcdStore(EtcdSettings((server.url,))) as patient:
            assert await patient.get("a") is not None


async def test_a_frozen_etcd_ends_calls_in_time_and_a_watch_goes_on_after(own_etcd: EtcdServer, prefix: str) -> None:
    async with EtcdStore(EtcdSettings((own_etcd.url,), timeout_s=1)) as store:
        revision = await store.put(f"{prefix}a", b"1")
        async with following(store, prefix, revision) as follower:
            await follower.wait_for(1)
            with own_etcd.frozen():
                start = time.monotonic()
                for call in (store.get("a"), store.keep_alive(1), store.put(f"{prefix}b", b"2")):
                    with pytest.raises(StoreUnavailableError):
                        await call
                assert time.monotonic() - start < 4
            await store.put(f"{prefix}c", b"3")
            with anyio.fail_after(10):
                while follower.events[-1].key != f"{prefix}c":  # noqa: ASYNC110 (a test)
                    await anyio.sleep(0.02)
    revisions = [event.mod_revision for event in follower.events]
    assert revisions == sorted(set(revisions))


async def test_another_endpoint_takes_over_for_a_dead_one_and_names_work(etcd_server: EtcdServer, prefix: str) -> None:
    (dead,) = free_ports(1)
    endpoints = (f"http://localhost:{dead}", f"http://localhost:{etcd_server.port}")
    async with EtcdStore(EtcdSettings(endpoints)) as store:
        start = time.monotonic()
        revision = await store.put(f"{prefix}a", b"1")
        assert time.monotonic() - start < 2
        async with following(store, prefix, revision) as follower:
            await follower.wait_for(1)


async def test_a_cluster_serves_on_while_a_member_is_frozen(tmp_path: Path, prefix: str) -> None:
    """The member that the store is connected to; a watch finds out by pings, after about eight seconds."""
    with etcd_cluster(tmp_path) as members:
        async with EtcdStore(EtcdSettings(tuple(member.url for member in members), timeout_s=3)) as store:
            revision = await store.put(f"{prefix}a", b"0")
            async with following(store, prefix, revision) as follower:
                await follower.wait_for(1)
                (used,) = (each for each in members if each.metric("etcd_debugging_mvcc_watcher_total") == 1)
                with used.frozen():
                    start = time.monotonic()
                    assert await store.get(f"{prefix}a") is not None  # in the time of one call
                    assert time.monotonic() - start < 3
                    with anyio.fail_after(6):
                        while True:
                            try:
                                await store.put(f"{prefix}a", b"1")
                                break
                            except StoreUnavailableError:  # an election, if it was the leader
                                await anyio.sleep(0.05)
                    await follower.wait_for(2, timeout_s=15)


async def test_cancelling_is_prompt_and_stays_within_its_scope(own_etcd: EtcdServer, own_store: EtcdStore) -> None:
    """gRPC replaces a cancellation by one of its own, which a cancel scope would let through."""
    await own_store.put("a", b"1")
    with own_etcd.frozen():
        for call in (own_store.get("a"), own_store.put("a", b"2"), own_store.list("a"), anext(own_store.watch("b"))):
            start = time.monotonic()
            with anyio.move_on_after(0.1) as scope:
                await call
            assert scope.cancelled_caught
            assert time.monotonic() - start < 0.5


async def test_a_call_to_a_store_that_is_closed_under_it_fails(own_etcd: EtcdServer, prefix: str) -> None:
    store = EtcdStore(EtcdSettings((own_etcd.url,)))
    with pytest.raises(StoreError):
        await store.get("a")
    failures: list[str] = []

    async def watch() -> None:
        try:
            await anext(store.watch(prefix))
        except StoreError as error:
            failures.append(str(error))

    async with anyio.create_task_group() as tasks, store:
        await store.put("a", b"1")
        tasks.start_soon(watch)
        await anyio.sleep(0.2)
    assert len(failures) == 1
    assert "closed" in failures[0]


# Who is asking


def enable_auth(server: EtcdServer) -> None:
    for arguments in (
        ("user", "add", "root:rootpw"),
        ("user", "grant-role", "root", "root"),
        ("user", "add", "worker:workerpw"),
        ("role", "add", "worker"),
        ("role", "grant-permission", "worker", "--prefix=true", "readwrite", "/fleet/"),
        ("user", "grant-role", "worker", "worker"),
        ("auth", "enable"),
    ):
        server.control(*arguments)


async def test_a_token_is_renewed_when_it_expires(tmp_path: Path) -> None:
    arguments = ("--auth-token", "simple", "--auth-token-ttl", "1")
    worker = {"username": "worker", "password": "workerpw"}
    with EtcdServer(tmp_path / "etcd", arguments=arguments) as server:
        async with EtcdStore(EtcdSettings((server.url,), **worker)) as store:  # type: ignore[arg-type]
            await store.put("/fleet/a", b"0")  # no authentication yet: a user name does no harm
            await anyio.to_thread.run_sync(enable_auth, server)
            revision = await store.put("/fleet/a", b"1")
            async with following(store, "/fleet/", revision) as follower:
                await follower.wait_for(1)
                await anyio.sleep(2.5)  # simple tokens are swept once a second
                await store.put("/fleet/a", b"2")
                await follower.wait_for(2)  # a running watch needs no new token
            await anyio.sleep(2.5)
            async with following(store, "/fleet/", revision) as follower:  # a new one does
                await follower.wait_for(2)
            assert follower.error is None
            with pytest.raises(StoreAuthError):
                await store.get("/elsewhere")
            with pytest.raises(StoreAuthError):
                await anext(store.watch("/elsewhere"))
        wrong = EtcdSettings((server.url,), username="worker", password="wrong")  # noqa: S106
        for settings in (wrong, EtcdSettings((server.url,))):
            async with EtcdStore(settings) as store:
                with pytest.raises(StoreAuthError):
                    await store.get("/fleet/a")


async def test_tls_with_client_certificates(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path)
    with EtcdServer(tmp_path / "etcd", tls=tls) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        known = EtcdSettings((url,), ca_file=tls.ca, cert_file=tls.client_cert, key_file=tls.client_key)
        async with EtcdStore(known) as store:
            revision = await store.put("a", b"1")
            async with following(store, "a", revision) as follower:
                await follower.wait_for(1)
        for settings in (
            EtcdSettings((url,), ca_file=tls.ca, timeout_s=0.5),
            EtcdSettings((url,), cert_file=tls.client_cert, key_file=tls.client_key, timeout_s=0.5),
        ):
            async with EtcdStore(settings) as store:
                with pytest.raises(StoreUnavailableError):
                    await store.get("a")
        with pytest.raises(FileNotFoundError):
            async with EtcdStore(EtcdSettings((url,), ca_file=tmp_path / "missing.pem")):
                pass
