"""Registrations and directories on a real etcd, through everything that etcd can do to them."""

from __future__ import annotations

import time
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from lorelay.runtime.discovery import Change, Directory, Registration
from lorelay.runtime.store import EtcdSettings, EtcdStore, LeaseGoneError, StoreUnavailableError
from support.servers import EtcdServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from lorelay.runtime.store import Event

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(etcd_server: EtcdServer) -> AsyncIterator[EtcdStore]:
    async with EtcdStore(EtcdSettings((etcd_server.url,), timeout_s=2)) as store:
        yield store


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """Start an etcd for a test that hurts it."""
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
async def own_store(own_etcd: EtcdServer) -> AsyncIterator[EtcdStore]:
    async with EtcdStore(EtcdSettings((own_etcd.url,), timeout_s=1)) as store:
        yield store


@asynccontextmanager
async def running(part: Registration | Directory) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(part.run)
        yield
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], bool], *, timeout_s: float = 10) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 (a test)
            await anyio.sleep(0.01)


async def contents(store: EtcdStore, prefix: str) -> dict[str, bytes]:
    return {item.key.removeprefix(prefix): item.value for item in (await store.list(prefix)).items}


async def until_contents(store: EtcdStore, prefix: str, expected: dict[str, bytes]) -> None:
    with anyio.fail_after(6):
        while await contents(store, prefix) != expected:  # noqa: ASYNC110 (a test)
            await anyio.sleep(0.02)


class Index:
    """A mapping maintained by a directory's changes alone."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.calls: list[list[Change]] = []

    def apply(self, changes: Sequence[Change]) -> None:
        """Take the changes over."""
        self.calls.append(list(changes))
        for change in changes:
            if change.value is None:
                del self.items[change.key]
            else:
                self.items[change.key] = change.value


# Registration


async def test_keys_are_there_until_the_registration_is_left(store: EtcdStore, prefix: str) -> None:
    async with Registration(store, ttl_s=2) as registration, running(registration):
        assert await registration.put(f"{prefix}a", b"1")
        assert await registration.put(f"{prefix}b", b"2")
        assert await registration.put(f"{prefix}a", b"3")
        assert await registration.remove(f"{prefix}b")
        assert await registration.remove(f"{prefix}never-there")
        assert await contents(store, prefix) == {"a": b"3"}
        await anyio.sleep(3.5)  # longer than the lease
        assert await contents(store, prefix) == {"a": b"3"}
        lease = (await store.list(prefix)).items[0].lease
    assert await contents(store, prefix) == {}
    assert await store.keep_alive(lease) == 0


async def test_a_value_too_large_for_etcd_is_refused_at_once(store: EtcdStore, prefix: str) -> None:
    async with Registration(store) as registration:
        with pytest.raises(ValueError, match="bytes"):
            await registration.put(f"{prefix}a", b"x" * (1 << 21))
        assert await registration.put(f"{prefix}b", b"x" * (1 << 20))


async def test_a_lost_lease_is_made_anew_with_all_keys(store: EtcdStore, prefix: str) -> None:
    async with Registration(store, ttl_s=1) as registration, running(registration):
        for name in ("a", "b", "c"):
            await registration.put(f"{prefix}{name}", name.encode())
        (lease,) = {item.lease for item in (await store.list(prefix)).items}
        await store.revoke_lease(lease)
        await until_contents(store, prefix, {"a": b"a", "b": b"b", "c": b"c"})
        await store.revoke_lease((await store.list(prefix)).items[0].lease)
        assert await registration.put(f"{prefix}d", b"d")  # a put notices by itself, and brings all back
        assert sorted(await contents(store, prefix)) == ["a", "b", "c", "d"]


async def test_the_last_word_about_a_key_wins(store: EtcdStore, prefix: str) -> None:
    """Fifty tasks change five keys while the lease is revoked under them."""
    async with Registration(store, ttl_s=1) as registration, running(registration):
        last: dict[str, bytes] = {}

        async def change(task: int) -> None:
            for step in range(10):
                key = f"{prefix}{task % 5}"
                value = f"{task}.{step}".encode()
                if step % 3:
                    last[key] = value
                    await registration.put(key, value)
                else:
                    last.pop(key, None)
                    await registration.remove(key)

        async def revoke() -> None:
            for _ in range(5):
                await anyio.sleep(0.03)
                for lease in {item.lease for item in (await store.list(prefix)).items}:
                    await store.revoke_lease(lease)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(revoke)
            for task in range(50):
                tasks.start_soon(change, task)
        await registration.put(f"{prefix}end", b"")
        expected = {key.removeprefix(prefix): value for key, value in last.items()} | {"end": b""}
        assert await contents(store, prefix) == expected


async def test_what_is_put_while_etcd_is_away_appears_when_it_is_back(
    own_etcd: EtcdServer, own_store: EtcdStore, prefix: str
) -> None:
    """etcd comes back without its data, as from a container without a volume."""
    async with Registration(own_store, ttl_s=2) as registration, running(registration):
        assert await registration.put(f"{prefix}a", b"1")
        assert await registration.put(f"{prefix}b", b"1")
        own_etcd.kill()
        own_etcd.wipe()
        assert not await registration.put(f"{prefix}a", b"2")
        start = time.monotonic()
        assert not await registration.put(f"{prefix}c", b"3")
        assert not await registration.remove(f"{prefix}b")
        assert time.monotonic() - start < 0.2  # the first found out, the others need not wait
        await anyio.to_thread.run_sync(own_etcd.start)
        await until_contents(own_store, prefix, {"a": b"2", "c": b"3"})
        await until(lambda: registration.is_in_step)
        assert await registration.put(f"{prefix}d", b"4")


async def test_a_registration_and_a_directory_outlive_restarts(
    own_etcd: EtcdServer, own_store: EtcdStore, prefix: str
) -> None:
    index = Index()
    directory = Directory(own_store, prefix, index.apply)
    async with Registration(own_store, ttl_s=2) as registration, running(registration), running(directory):
        await registration.put(f"{prefix}a", b"1")
        await until(lambda: dict(directory.items) == {f"{prefix}a": b"1"})
        for step in range(3):
            await anyio.to_thread.run_sync(own_etcd.restart)
            await registration.put(f"{prefix}step", str(step).encode())
            wanted = {f"{prefix}a": b"1", f"{prefix}step": str(step).encode()}
            await until(lambda wanted=wanted: dict(directory.items) == wanted)  # type: ignore[misc]
        assert index.items == directory.items


async def test_a_frozen_etcd_ends_the_lease_and_gets_it_back(
    own_etcd: EtcdServer, own_store: EtcdStore, prefix: str
) -> None:
    """A thawed etcd ends the lease at once; what was sent into the freeze may be applied late, and must not win."""
    async with Registration(own_store, ttl_s=1) as registration, running(registration):
        await registration.put(f"{prefix}a", b"old")
        with own_etcd.frozen():
            assert not await registration.put(f"{prefix}a", b"in doubt")
            await registration.put(f"{prefix}a", b"new")
            await anyio.sleep(1.5)
        await until(lambda: registration.is_in_step)
        await anyio.sleep(1.5)
        assert await contents(own_store, prefix) == {"a": b"new"}


class LateStore(EtcdStore):
    """A store that loses the write of `b"in doubt"`, and carries it out later."""

    def __init__(self, settings: EtcdSettings, *, is_before_revoking: bool) -> None:
        super().__init__(settings)
        self.lost: tuple[str, int | None] | None = None
        self._is_before_revoking = is_before_revoking

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        """Write, unless it is to be lost."""
        if value == b"in doubt":
            self.lost = (key, lease)
            raise StoreUnavailableError("lost")
        return await super().put(key, value, lease=lease)

    async def revoke_lease(self, lease: int) -> bool:
        """Revoke, and before or after that let the lost write arrive."""
        if self._is_before_revoking:
            assert await self.arrive()
            return await super().revoke_lease(lease)
        revoked = await super().revoke_lease(lease)
        assert not await self.arrive()
        return revoked

    async def arrive(self) -> bool:
        """Carry out the lost write; return whether etcd took it."""
        lost, self.lost = self.lost, None
        if lost is None:
            return self._is_before_revoking
        try:
            await super().put(lost[0], b"in doubt", lease=lost[1])
        except LeaseGoneError:
            return False
        return True


@pytest.mark.parametrize("is_before_revoking", [True, False])
async def test_a_write_that_arrives_late_does_not_win(
    etcd_server: EtcdServer, prefix: str, *, is_before_revoking: bool
) -> None:
    settings = EtcdSettings((etcd_server.url,))
    async with LateStore(settings, is_before_revoking=is_before_revoking) as store, Registration(store) as registration:
        assert await registration.put(f"{prefix}a", b"old")
        assert await registration.put(f"{prefix}b", b"other")
        assert not await registration.put(f"{prefix}a", b"in doubt")
        assert not await registration.put(f"{prefix}a", b"new")  # deferred: `run` mends
        async with running(registration):
            await until(lambda: registration.is_in_step)
        assert store.lost is None
        assert await contents(store, prefix) == {"a": b"new", "b": b"other"}


async def test_a_registration_can_be_left_while_etcd_is_dead(
    own_etcd: EtcdServer, own_store: EtcdStore, prefix: str
) -> None:
    async with Registration(own_store, ttl_s=2) as registration:
        async with running(registration):
            await registration.put(f"{prefix}a", b"1")
            own_etcd.kill()
        start = time.monotonic()
    assert time.monotonic() - start < 2.5


# Directory


async def test_a_directory_lists_and_follows(store: EtcdStore, prefix: str) -> None:
    await store.put(f"{prefix}a", b"1")
    index = Index()
    directory = Directory(store, prefix, index.apply)
    assert not directory.ready.is_set()
    async with running(directory):
        await directory.ready.wait()
        assert index.calls == [[Change(f"{prefix}a", b"1")]]
        await store.put(f"{prefix}b", b"2")
        await store.delete(f"{prefix}a")
        await until(lambda: dict(directory.items) == {f"{prefix}b": b"2"})
    assert [change for call in index.calls for change in call] == [
        Change(f"{prefix}a", b"1"),
        Change(f"{prefix}b", b"2"),
        Change(f"{prefix}a", None),
    ]


async def test_an_empty_directory_gets_ready(store: EtcdStore, prefix: str) -> None:
    directory = Directory(store, prefix)
    async with running(directory):
        with anyio.fail_after(5):
            await directory.ready.wait()
        assert dict(directory.items) == {}


class GatedStore(EtcdStore):
    """A store whose watches begin when the test says so, as if the network had been slow."""

    def __init__(self, settings: EtcdSettings) -> None:
        super().__init__(settings)
        self.gate = anyio.Event()

    async def watch(self, prefix: str, start_revision: int = 0) -> AsyncGenerator[tuple[Event, ...], None]:
        """Wait for the gate, then watch."""
        await self.gate.wait()
        async with aclosing(super().watch(prefix, start_revision)) as batches:
            async for batch in batches:
                yield batch


async def test_a_directory_lists_again_after_compaction_and_applies_what_differs(
    own_etcd: EtcdServer, own_store: EtcdStore, prefix: str
) -> None:
    """What it would have watched is compacted away before its watch begins."""
    for name in ("gone", "kept", "changed"):
        await own_store.put(f"{prefix}{name}", b"1")
    index = Index()
    async with GatedStore(EtcdSettings((own_etcd.url,))) as gated:
        directory = Directory(gated, prefix, index.apply)
        async with running(directory):
            await directory.ready.wait()
            await own_store.delete(f"{prefix}gone")
            await own_store.put(f"{prefix}changed", b"2")
            await own_store.put(f"{prefix}new", b"2")
            await own_store.put(f"{prefix}passing", b"2")
            await own_store.delete(f"{prefix}passing")
            await own_store.compact((await own_store.list(prefix)).revision)
            gated.gate.set()
            await until(lambda: len(index.calls) == 2)
            await own_store.put(f"{prefix}later", b"3")
            await until(lambda: len(index.calls) == 3)
            assert index.items == directory.items
    assert index.calls[1] == [
        Change(f"{prefix}gone", None),
        Change(f"{prefix}changed", b"2"),
        Change(f"{prefix}new", b"2"),
    ]
    assert index.calls[2] == [Change(f"{prefix}later", b"3")]


async def test_a_directory_keeps_its_state_while_etcd_is_away_and_sees_a_wiped_one(
    own_etcd: EtcdServer, own_store: EtcdStore, prefix: str
) -> None:
    for index in range(20):
        await own_store.put(f"{prefix}{index}", b"1")
    directory = Directory(own_store, prefix)
    async with running(directory):
        await directory.ready.wait()
        own_etcd.kill()
        own_etcd.wipe()
        await anyio.sleep(1)
        assert len(directory.items) == 20
        await anyio.to_thread.run_sync(own_etcd.start)
        await until(lambda: not directory.items)
        await own_store.put(f"{prefix}a", b"1")
        await until(lambda: dict(directory.items) == {f"{prefix}a": b"1"})


async def test_a_directory_starts_before_etcd(tmp_path: Path, prefix: str) -> None:
    server = EtcdServer(tmp_path / "etcd")
    async with EtcdStore(EtcdSettings((server.url,), timeout_s=0.5)) as store:
        directory = Directory(store, prefix)
        async with running(directory):
            await anyio.sleep(1)
            with server:
                with anyio.fail_after(8):
                    await directory.ready.wait()


async def test_a_listener_that_fails_does_not_stop_the_directory(store: EtcdStore, prefix: str) -> None:
    seen: list[str] = []

    def apply(changes: Sequence[Change]) -> None:
        seen.extend(change.key.removeprefix(prefix) for change in changes)
        raise RuntimeError("a bug")

    directory = Directory(store, prefix, apply)
    async with running(directory):
        await directory.ready.wait()
        await store.put(f"{prefix}a", b"1")
        await until(lambda: seen == ["a"])
        await store.put(f"{prefix}b", b"1")
        await until(lambda: seen == ["a", "b"])
    assert len(directory.items) == 2
