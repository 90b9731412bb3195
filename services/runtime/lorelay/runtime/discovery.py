"""Who is there: `Registration` keeps what this process says of itself in etcd, `Directory` follows what others say.

Both live through any loss of etcd, and neither ends its process for it.  A registration makes its lease and keys anew;
a directory keeps its last state and brings it up to date later.
"""

from __future__ import annotations

import random
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, Self

import anyio
import structlog

from lorelay.runtime.store import CompactedError, LeaseGoneError, StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from lorelay.runtime.store import EtcdStore, Listing

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0
_MAX_VALUE_BYTES = 1 << 20  # etcd's default limit of a request is 1.5 MiB
_FAREWELL_S = 2.0
"""How long leaving a registration may take to revoke its lease."""


class _Pauses:
    """Pauses between attempts: doubling, bounded, with jitter so that a fleet does not come back in step."""

    def __init__(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def reset(self) -> None:
        self._next_s = _FIRST_PAUSE_S

    def next(self) -> float:
        pause_s = self._next_s * random.uniform(0.5, 1)  # noqa: S311 (jitter)
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)
        return pause_s


class Registration:
    """Keys that are in etcd as long as this process lives, and no longer than `ttl_s` after.

    `put` and `remove` say what should be there; the caller runs `run` in a task group, which keeps the lease alive and
    makes everything anew when it is gone.  Whatever is written is written under one lock, from the wanted state at that
    moment, so the last `put` or `remove` of a key wins however calls and repairs interleave.

    A write whose outcome is unknown may still take effect later, over a newer one.  It is fenced: a new lease takes the
    old one's place, the old one is revoked, after which etcd refuses what was sent under it, and the key in doubt is
    written again.
    """

    def __init__(self, store: EtcdStore, *, ttl_s: int = 10) -> None:
        """Prepare a registration without keys.

        Args:
            store: An open store; must outlive the registration.
            ttl_s: The lease's time to live, seconds.
        """
        self._store = store
        self._ttl_s = ttl_s
        self._wanted: dict[str, bytes] = {}
        self._published: dict[str, bytes] = {}
        """What is in etcd under `_lease`, as far as it was confirmed."""
        self._lease: int | None = None
        self._fenced: dict[int, str] = {}
        """Leases to revoke, each with the key whose last write under it is in doubt."""
        self._writing: str | None = None
        """The key being written; not None at the start of a repair: its outcome is unknown."""
        self._lock = anyio.Lock()
        self._trouble = anyio.Event()
        self._is_in_step = True
        self._is_closed = False

    @property
    def is_in_step(self) -> bool:
        """Whether etcd had everything at the last attempt."""
        return self._is_in_step

    async def put(self, key: str, value: bytes) -> bool:
        """Publish the key, now and after every loss.

        Returns:
            True: etcd has it.  False: etcd cannot be reached (or `run` is already busy with that), and `run` will
            publish it as soon as it can.

        Raises:
            ValueError: The value is larger than a megabyte, which etcd would refuse again and again.

        Cancellation: the key stays wanted.
        """
        if len(value) > _MAX_VALUE_BYTES:
            raise ValueError(f"{key}: {len(value)} bytes are more than the {_MAX_VALUE_BYTES} that fit in etcd")
        self._wanted[key] = value
        return await self._repair_now()

    async def remove(self, key: str) -> bool:
        """Take the key back; the result and cancellation are as with `put`."""
        self._wanted.pop(key, None)
        return await self._repair_now()

    async def run(self) -> NoReturn:
        """Keep the lease alive and the keys published, for ever.  No failure of etcd ends it.

        Cancellation: the keys stay until `__aexit__`, or until the lease ends.
        """
        pauses = _Pauses()
        while True:
            async with self._lock:
                is_in_step = await self._repair(renew=True)
            if is_in_step:
                pauses.reset()
                self._trouble = anyio.Event()
                with anyio.move_on_after(self._ttl_s / 3):
                    await self._trouble.wait()
            else:
                await anyio.sleep(min(pauses.next(), self._ttl_s / 3))

    async def _repair_now(self) -> bool:
        # While etcd is away only `run` tries, and nobody waits for it.  Nothing is missed: between the last look at
        # `_wanted` and `_is_in_step = True` in `_repair` there is no await.
        if not self._is_in_step:
            return False
        async with self._lock:
            return self._is_in_step and await self._repair(renew=False)

    async def _repair(self, *, renew: bool) -> bool:
        """Bring etcd in step with what is wanted; return whether it is.  The caller holds the lock."""
        if self._is_closed:
            return False
        try:
            if renew and self._lease is not None and not await self._store.keep_alive(self._lease):
                self._lose_lease()
            await self._publish()
        except StoreError as error:
            if self._is_in_step:
                log.warning("registration interrupted", keys=len(self._wanted), error=str(error))
            self._is_in_step = False
            self._trouble.set()
        else:
            if not self._is_in_step:
                log.info("registration restored", keys=len(self._wanted), lease=self._lease)
            self._is_in_step = True
        return self._is_in_step

    async def _publish(self) -> None:
        if self._writing is not None and self._lease is not None:
            self._fenced[self._lease] = self._writing
            self._lease = None
        self._writing = None
        await self._write_differences()
        while self._fenced:
            lease, key = next(iter(self._fenced.items()))
            await self._store.revoke_lease(lease)
            del self._fenced[lease]
            self._published.pop(key, None)  # a late write may have put it under the lease that is now revoked
            await self._write_differences()

    async def _write_differences(self) -> None:
        while True:
            if self._lease is None:
                if not self._wanted:
                    return
                self._lease = await self._store.grant_lease(self._ttl_s)
                self._published.clear()
            key = self._first_difference()
            if key is None:
                return
            self._writing = key
            try:
                await self._write(key, self._lease)
            except LeaseGoneError:
                self._lose_lease()
            except StoreUnavailableError:
                raise
            except StoreError:
                self._writing = None  # refused, so nothing is in doubt
                raise
            self._writing = None

    def _first_difference(self) -> str | None:
        for key in (*self._wanted, *self._published):
            if self._published.get(key) != self._wanted.get(key):
                return key
        return None

    async def _write(self, key: str, lease: int) -> None:
        value = self._wanted.get(key)
        if value is None:
            await self._store.delete(key, lease=lease)  # somebody else's by now: leave it
            del self._published[key]
        else:
            await self._store.put(key, value, lease=lease)
            self._published[key] = value

    def _lose_lease(self) -> None:
        log.warning("lease lost", lease=self._lease, keys=len(self._wanted))
        self._lease = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Revoke the lease, and so remove all keys; if etcd does not answer soon, leave that to the lease's end."""
        with anyio.move_on_after(_FAREWELL_S, shield=True) as scope:
            self._is_closed = True
            async with self._lock:
                for lease in (self._lease, *self._fenced):
                    try:
                        if lease is not None:
                            await self._store.revoke_lease(lease)
                    except StoreError as failure:
                        log.warning("lease not revoked", lease=lease, error=str(failure))
        if scope.cancelled_caught:
            log.warning("lease not revoked", lease=self._lease, error="no answer in time")


@dataclass(frozen=True, slots=True)
class Change:
    """A key's new value."""

    key: str
    value: bytes | None
    """None: the key is gone."""


class Directory:
    """What is below a prefix, as of one revision at a time: etcd's current one, or the last that could be seen."""

    def __init__(self, store: EtcdStore, prefix: str, apply: Callable[[Sequence[Change]], None] | None = None) -> None:
        """Prepare an empty directory.

        Args:
            store: An open store; must outlive `run`.
            prefix: Which keys.
            apply: Called after every change of `items`, in order, with what changed, and never while it runs; the
                first call has all there is.  It must not raise: that is a bug, which is logged, after which the
                directory goes on, and what `apply` maintains may be out of step.
        """
        self._store = store
        self._prefix = prefix
        self._apply = apply
        self._items: dict[str, bytes] = {}
        self.items: Mapping[str, bytes] = MappingProxyType(self._items)
        """By full key.  A view: copy it to keep a state across an await."""
        self.ready = anyio.Event()
        """Set once everything there was has been read, and applied."""

    async def run(self) -> NoReturn:
        """Follow the store for ever.  No failure of it ends this, and `items` stays as it was last seen."""
        pauses = _Pauses()
        while True:
            try:
                await self._follow(pauses)
            except CompactedError as error:
                log.info("directory lists again", prefix=self._prefix, error=str(error))
            except StoreError as error:
                log.warning("directory interrupted", prefix=self._prefix, keys=len(self._items), error=str(error))
            await anyio.sleep(pauses.next())

    async def _follow(self, pauses: _Pauses) -> None:
        listing = await self._store.list(self._prefix)
        self._change(_differences(self._items, listing))
        self.ready.set()
        pauses.reset()
        async with aclosing(self._store.watch(self._prefix, listing.revision + 1)) as batches:
            async for events in batches:
                self._change([Change(event.key, event.value) for event in events])

    def _change(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.value is None:
                self._items.pop(change.key, None)
            else:
                self._items[change.key] = change.value
        if self._apply is None or not changes:
            return
        try:
            self._apply(changes)
        except Exception:
            log.exception("directory listener failed", prefix=self._prefix, changes=len(changes))


def _differences(items: Mapping[str, bytes], listing: Listing) -> list[Change]:
    """Return what turns `items` into the listing: first what is gone, then what is new or different."""
    listed = {item.key: item.value for item in listing.items}
    gone = [Change(key, None) for key in items if key not in listed]
    return gone + [Change(key, value) for key, value in listed.items() if items.get(key) != value]
