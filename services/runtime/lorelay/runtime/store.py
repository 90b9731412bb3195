"""etcd: keys, leases, transactions and watches that outlive their connection.

`store_connection` asks the cluster; here is what the answers mean.  Nothing of gRPC or of etcd's messages leaves this
module, errors included.  Three rules hold for every call:

- It ends within `EtcdSettings.timeout_s`.  Waiting for a connection is part of that, so a call made while etcd restarts
  succeeds once it is back.
- What only reads is repeated inside that time, on another endpoint if there is one; so are `keep_alive` and
  `grant_lease`, whose repetition does no harm.  A write is sent once: after `StoreUnavailableError` it may have been
  applied, or may yet be when a frozen member thaws, and only its caller knows what repeating it would mean.
- Cancelling a call leaves a write in doubt in the same way, and of a read nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio
import structlog

from lorelay.runtime import etcd_pb2 as pb
from lorelay.runtime.store_connection import (
    CompactedError,
    Connection,
    LeaseGoneError,
    Metadata,
    Method,
    ReplyTooLargeError,
    StoreAuthError,
    StoreError,
    StoreUnavailableError,
    Stream,
    is_refusal,
)
from lorelay.runtime.store_settings import EtcdSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

__all__ = [
    "CompactedError",
    "EtcdSettings",
    "EtcdStore",
    "Event",
    "KeyValue",
    "LeaseGoneError",
    "Listing",
    "StoreAuthError",
    "StoreError",
    "StoreUnavailableError",
    "prefix_range",
]

log = structlog.get_logger()

_PAGE_KEYS = 1000
_LISTING_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0
"""Pauses between two attempts to open a watch, doubling, with jitter."""

_RANGE = Method("/etcdserverpb.KV/Range", pb.RangeResponse, is_repeatable=True)
_PUT = Method("/etcdserverpb.KV/Put", pb.PutResponse)
_DELETE = Method("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeResponse)
_TXN = Method("/etcdserverpb.KV/Txn", pb.TxnResponse)
_COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionResponse)
_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse, is_repeatable=True)
_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
# A stream by etcd's definition; with one request and one reply it is the same on the wire as a plain call.
_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse, is_repeatable=True)
_WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchResponse, is_repeatable=True)


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as the store holds it."""

    key: str
    """Bytes that are not UTF-8 (somebody else's) appear as surrogate escapes and go back as they were."""
    value: bytes
    create_revision: int
    mod_revision: int
    """The revision of the last write; what `EtcdStore.replace_if` compares."""
    version: int
    """The number of writes since the key's creation, from 1."""
    lease: int
    """0: none."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one key."""

    key: str
    value: bytes | None
    """None: the key is gone (deleted, or its lease ended)."""
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys below a prefix at one revision, in key order."""

    revision: int
    """Watching from the next one misses nothing."""
    items: tuple[KeyValue, ...]


class EtcdStore:
    """A client of one etcd cluster: an async context manager, for the tasks of one event loop.

    Entering needs no etcd.  Leaving ends what is still in progress, so end watches first.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self._connection = Connection(settings)

    async def __aenter__(self) -> Self:
        """Prepare to connect.

        Raises:
            OSError: A certificate or key file cannot be read.
        """
        await self._connection.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._connection.__aexit__(kind, error, traceback)

    async def get(self, key: str) -> KeyValue | None:
        """Return the key as of now (linearizable), or None."""
        reply = await self._connection.call(_RANGE, pb.RangeRequest(key=_encode(key)))
        return _key_value(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str) -> Listing:
        """Return everything below the prefix at one revision, however large.  Each page has a timeout of its own.

        Raises:
            StoreUnavailableError: etcd does not answer, or compacts faster than the pages can be read.
        """
        for _ in range(_LISTING_ATTEMPTS):
            try:
                return await self._list(prefix)
            except CompactedError:  # between two pages: the revision of the first is gone
                continue
        raise StoreUnavailableError(f"etcd compacts faster than {prefix!r} can be listed")

    async def _list(self, prefix: str) -> Listing:
        key, end = prefix_range(prefix)
        items: list[KeyValue] = []
        revision, limit = 0, _PAGE_KEYS
        while True:
            page = pb.RangeRequest(key=key, range_end=end, limit=limit, revision=revision)
            try:
                reply = await self._connection.call(_RANGE, page)
            except ReplyTooLargeError:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            revision = revision or reply.header.revision
            items.extend(_key_value(kv) for kv in reply.kvs)
            if not reply.more:
                return Listing(revision, tuple(items))
            key = reply.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        """Write the key and return the revision.  Without `lease` it leaves the lease that it was attached to.

        Raises:
            LeaseGoneError: There is no such lease; nothing was written.
        """
        return (await self._connection.call(_PUT, _put(key, value, lease))).header.revision

    async def put_if_absent(self, key: str, value: bytes, *, lease: int | None = None) -> int | None:
        """Write the key if it does not exist; return the revision, or None if it exists."""
        return await self.replace_if(key, value, 0, lease=lease)

    async def replace_if(self, key: str, value: bytes, mod_revision: int, *, lease: int | None = None) -> int | None:
        """Write the key if its last write was at `mod_revision` (0: if it does not exist).

        Returns:
            The new `mod_revision`, or None if the key is in another state.
        """
        condition = pb.Compare(target=pb.Compare.MOD, key=_encode(key), mod_revision=mod_revision)
        operation = pb.RequestOp(request_put=_put(key, value, lease))
        reply = await self._connection.call(_TXN, pb.TxnRequest(compare=[condition], success=[operation]))
        return reply.header.revision if reply.succeeded else None

    async def delete(self, key: str, *, lease: int | None = None) -> bool:
        """Delete the key (given `lease`: only while it is attached to it); return whether it was there."""
        request = pb.DeleteRangeRequest(key=_encode(key))
        if lease is None:
            return (await self._connection.call(_DELETE, request)).deleted > 0
        condition = pb.Compare(target=pb.Compare.LEASE, key=_encode(key), lease=lease)
        operation = pb.RequestOp(request_delete_range=request)
        reply = await self._connection.call(_TXN, pb.TxnRequest(compare=[condition], success=[operation]))
        return reply.succeeded and reply.responses[0].response_delete_range.deleted > 0

    async def delete_prefix(self, prefix: str) -> int:
        """Delete everything below the prefix and return how many keys that were."""
        key, end = prefix_range(prefix)
        return (await self._connection.call(_DELETE, pb.DeleteRangeRequest(key=key, range_end=end))).deleted

    async def compact(self, revision: int) -> None:
        """Forget the history before `revision`.

        Raises:
            CompactedError: It is forgotten already, or `revision` is in the future.
        """
        await self._connection.call(_COMPACT, pb.CompactionRequest(revision=revision))

    async def grant_lease(self, ttl_s: int) -> int:
        """Return a new lease.  If a reply is lost, a second one stays unused until its time is over."""
        return (await self._connection.call(_GRANT, pb.LeaseGrantRequest(TTL=ttl_s))).ID

    async def keep_alive(self, lease: int) -> int:
        """Renew the lease once; return the seconds it now has, 0 if it is gone."""
        return max(0, (await self._connection.call(_KEEP_ALIVE, pb.LeaseKeepAliveRequest(ID=lease))).TTL)

    async def revoke_lease(self, lease: int) -> bool:
        """End the lease and delete its keys; return False if it was gone already."""
        try:
            await self._connection.call(_REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except LeaseGoneError:
            return False
        return True

    async def watch(self, prefix: str, start_revision: int = 0) -> AsyncGenerator[tuple[Event, ...], None]:
        """Yield every change below the prefix from `start_revision` on, once and in order.

        It lives through lost connections, restarts and frozen members and goes on after the last change it yielded;
        while etcd is away it waits.  A batch never splits a revision.  Iterate inside `contextlib.aclosing`, whose
        end also ends the watch in etcd, as does cancellation.

        Args:
            prefix: What to watch; empty for everything.
            start_revision: At most one past a revision seen from this store.  0: from now on, "now" being when etcd
                first answers.

        Raises:
            CompactedError: The changes from the needed revision on cannot be had.
            StoreAuthError: Not allowed, with a new token neither.
        """
        following, cluster = start_revision, 0
        pause_s = _FIRST_PAUSE_S
        while True:
            watching = _Watching(self._connection, prefix)
            try:
                header = await watching.open(following)
                if cluster not in {0, header.cluster_id}:
                    raise CompactedError(header.revision)
                cluster = header.cluster_id
                following = following or header.revision + 1
                pause_s = _FIRST_PAUSE_S
                while True:
                    events = await watching.read()
                    following = events[-1].mod_revision + 1
                    yield events
            except StoreUnavailableError as error:
                log.warning("watch interrupted", prefix=prefix, revision=following, error=str(error))
            finally:
                watching.cancel()
            await anyio.sleep(pause_s * random.uniform(0.5, 1))  # noqa: S311 (jitter)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Watching:
    """One watch on one member."""

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._connection = connection
        self._range = prefix_range(prefix)
        self._stream: Stream[pb.WatchResponse] | None = None

    async def open(self, revision: int) -> pb.ResponseHeader:
        """Begin, and return the header of etcd's confirmation."""
        key, end = self._range
        creation = pb.WatchCreateRequest(key=key, range_end=end, start_revision=revision, fragment=True)

        async def create(endpoint: int, metadata: Metadata, _timeout_s: float) -> pb.ResponseHeader:
            self.cancel()  # an attempt before this one
            self._stream = self._connection.stream(endpoint, _WATCH, metadata)
            await self._stream.write(pb.WatchRequest(create_request=creation))
            return (await self._reply(self._stream)).header

        header = await self._connection.attempt(_WATCH, create)
        if header.revision < revision - 1:
            # A member that lags; or the store has younger data, and the watch would stay silent for long.
            now = await self._connection.call(_RANGE, pb.RangeRequest(key=key, count_only=True))
            if now.header.revision < revision - 1:
                raise CompactedError(now.header.revision)
        return header

    async def read(self) -> tuple[Event, ...]:
        """Return the next changes, with all of the last one's revision."""
        if self._stream is None:
            raise StoreError("the watch is not open")
        events: list[Event] = []
        while True:
            try:
                reply = await self._reply(self._stream)
            except StoreUnavailableError:
                self._connection.shun(self._stream.endpoint)
                raise
            events.extend(_event(event) for event in reply.events)
            if events and not reply.fragment:
                return tuple(events)

    async def _reply(self, stream: Stream[pb.WatchResponse]) -> pb.WatchResponse:
        """Return the next reply; a watch that etcd cancels leaves its stream open, so look at every one."""
        reply = await stream.read()
        if reply.compact_revision:
            raise CompactedError(reply.compact_revision)
        if reply.canceled:
            kind = StoreAuthError if is_refusal(reply.cancel_reason) else StoreUnavailableError
            raise kind(f"etcd cancelled the watch: {reply.cancel_reason}")
        return reply

    def cancel(self) -> None:
        """End the watch, here and in etcd."""
        if self._stream is not None:
            self._stream.cancel()


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Return etcd's `key` and `range_end` for everything that starts with the prefix."""
    key = _encode(prefix)
    kept = key.rstrip(b"\xff")  # nothing comes after 0xff: the range ends after the byte before
    end = kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"  # "\0": at the end of the key space
    return key or b"\0", end


def _encode(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _decode(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _put(key: str, value: bytes, lease: int | None) -> pb.PutRequest:
    return pb.PutRequest(key=_encode(key), value=value, lease=lease or 0)


def _key_value(kv: pb.KeyValue) -> KeyValue:
    return KeyValue(
        key=_decode(kv.key),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        version=kv.version,
        lease=kv.lease,
    )


def _event(event: pb.Event) -> Event:
    value = None if event.type == pb.Event.DELETE else event.kv.value
    return Event(_decode(event.kv.key), value, event.kv.mod_revision)
