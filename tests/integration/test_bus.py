"""The bus on a real nats-server, through what happens to it."""

from __future__ import annotations

import secrets
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import nats
import pytest

from lorelay.proto.codec import from_json
from lorelay.proto.events import EventKind, LoraEvent
from lorelay.proto.identity import select
from lorelay.proto.subjects import EVENT_STREAM
from lorelay.runtime.bus import (
    Bus,
    BusUnavailableError,
    Message,
    MessageTooLargeError,
    NobodyListensError,
    ReplyTimeoutError,
)
from lorelay.runtime.events import EventLog
from lorelay.runtime.settings import BusSettings
from support.servers import NatsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[Bus]:
    async with Bus(BusSettings(servers=(server.url,), connect_timeout_s=5), "test") as bus:
        yield bus


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    async with connected(nats_server) as bus:
        yield bus


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
def subject() -> str:
    return f"test.{secrets.token_hex(6)}"


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 (a test)
            await anyio.sleep(0.01)


async def test_a_request_gets_its_reply(bus: Bus, subject: str) -> None:
    async def answer(message: Message) -> None:
        await message.reply(message.data[::-1])

    await bus.subscribe(subject, answer)
    assert await bus.request(subject, b"abc", timeout_s=2) == b"cba"


async def test_nobody_there_is_known_at_once_and_silence_after_the_deadline(bus: Bus, subject: str) -> None:
    """F5, F22."""
    started = time.monotonic()
    with pytest.raises(NobodyListensError):
        await bus.request(subject, b"", timeout_s=10)
    assert time.monotonic() - started < 1

    async def silent(message: Message) -> None:
        pass

    await bus.subscribe(subject, silent)
    started = time.monotonic()
    with pytest.raises(ReplyTimeoutError):
        await bus.request(subject, b"", timeout_s=0.2)
    assert time.monotonic() - started < 1


async def test_a_request_that_is_given_up_leaves_nothing_behind(bus: Bus, subject: str) -> None:
    async def silent(message: Message) -> None:
        pass

    await bus.subscribe(subject, silent)
    for _ in range(20):
        with anyio.move_on_after(0.005):
            await bus.request(subject, b"", timeout_s=10)
    await anyio.sleep(0.05)
    assert len(vars(vars(bus)["_client"])["_resp_map"]) == 0


async def test_a_handler_that_raises_does_not_end_its_subscription(bus: Bus, subject: str) -> None:
    async def answer(message: Message) -> None:
        if message.data == b"bad":
            raise ValueError
        await message.reply(b"ok")

    await bus.subscribe(subject, answer)
    await bus.publish(subject, b"bad")
    assert await bus.request(subject, b"good", timeout_s=2) == b"ok"


async def test_messages_of_a_subject_are_handled_in_order(bus: Bus, subject: str) -> None:
    seen: list[int] = []

    async def handle(message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(int(message.data))

    await bus.subscribe(subject, handle)
    for number in range(500):
        await bus.publish(subject, str(number).encode())
    await until(lambda: len(seen) == 500)
    assert seen == list(range(500))


async def test_a_payload_at_the_limit_passes_and_one_over_it_is_refused_here(bus: Bus, subject: str) -> None:
    """F4: the server would cut the connection."""
    sizes: list[int] = []

    async def handle(message: Message) -> None:
        sizes.append(len(message.data))
        await message.reply(message.data)

    await bus.subscribe(subject, handle)
    limit = bus.max_message_bytes
    assert len(await bus.request(subject, bytes(limit), timeout_s=5)) == limit
    for send in (
        bus.publish(subject, bytes(limit + 1)),
        bus.request(subject, bytes(limit + 1), timeout_s=5),
        bus.store(subject, bytes(limit + 1), message_id="x"),
    ):
        with pytest.raises(MessageTooLargeError):
            await send
    assert bus.connected
    assert sizes == [limit]


async def test_a_server_that_never_answers_stops_the_start_in_time(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    started = time.monotonic()
    with pytest.raises(BusUnavailableError, match="NATS_SERVER"):
        async with Bus(BusSettings(servers=(server.url,), connect_timeout_s=0.5), "test"):
            pass
    assert time.monotonic() - started < 3


async def test_a_start_waits_for_a_server_that_comes_later(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    try:
        async with anyio.create_task_group() as tasks:

            async def late() -> None:
                await anyio.sleep(0.5)
                await anyio.to_thread.run_sync(server.start)

            tasks.start_soon(late)
            async with connected(server) as bus:
                assert bus.connected
    finally:
        server.kill()


async def test_wrong_credentials_are_one_clear_error(tmp_path: Path) -> None:
    with NatsServer(tmp_path, arguments=["--user", "me", "--pass", "secret"]) as server:
        started = time.monotonic()
        with pytest.raises(BusUnavailableError, match="NATS_AUTH") as failure:
            async with Bus(
                BusSettings(servers=(server.url,), user="me", password="wrong", connect_timeout_s=3),  # noqa: S106
                "test",
            ):
                pass
        assert "wrong" not in str(failure.value)
        assert time.monotonic() - started < 1
        async with Bus(BusSettings(servers=(server.url,), user="me", password="secret"), "test") as bus:  # noqa: S106
            assert bus.connected


async def test_a_lost_connection_fails_fast_and_is_made_anew_every_time(own_nats: NatsServer, subject: str) -> None:
    """F7, F8, F10."""
    async with connected(own_nats) as bus:
        lost: list[float] = []
        bus.on_disconnect = lambda: lost.append(time.monotonic())

        async def answer(message: Message) -> None:
            await message.reply(b"ok")

        await bus.subscribe(subject, answer)
        for round_number in range(5):
            assert await bus.request(subject, b"", timeout_s=2) == b"ok"
            own_nats.kill()
            await until(lambda: not bus.connected, 2)
            started = time.monotonic()
            for call in (
                bus.publish(subject, b"x"),
                bus.request(subject, b"x", timeout_s=10),
                bus.store(subject, b"x", message_id="x"),
                bus.ensure_stream("S", subject, keep_s=1, max_bytes=1),
            ):
                with pytest.raises(BusUnavailableError):
                    await call
            assert time.monotonic() - started < 0.5
            assert len(lost) == round_number + 1
            await anyio.to_thread.run_sync(own_nats.start)
            await until(lambda: bus.connected, 5)
        assert await bus.request(subject, b"", timeout_s=2) == b"ok"


async def test_a_server_that_freezes_does_not_hold_up_the_stop(own_nats: NatsServer) -> None:
    async with connected(own_nats) as bus:
        own_nats.freeze()
        await bus.publish("x", b"x")
        started = time.monotonic()
    assert time.monotonic() - started < 4
    own_nats.thaw()


async def test_a_stream_is_made_once_and_left_as_its_operator_made_it(own_nats: NatsServer) -> None:
    async with connected(own_nats) as one, connected(own_nats) as two:
        async with anyio.create_task_group() as tasks:
            for each in (one, two) * 3:
                tasks.start_soon(lambda bus: bus.ensure_stream("S", "s.>", keep_s=60, max_bytes=1 << 20), each)
        await two.ensure_stream("S", "s.>", keep_s=5, max_bytes=1 << 10)
        for _ in range(3):
            await one.store("s.a", b"x", message_id="same")
        with pytest.raises(BusUnavailableError):
            await one.store("elsewhere", b"x", message_id="y", timeout_s=0.5)
        client = await nats.connect(own_nats.url)
        try:
            info = await client.jetstream().stream_info("S")
        finally:
            await client.close()
        assert info.state.messages == 1
        assert (info.config.max_age, info.config.max_bytes) == (60, 1 << 20)


async def test_a_server_without_jetstream_is_a_clear_error(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    command = vars(server)["_command"]
    del command[command.index("--jetstream")]
    with server:
        async with connected(server) as bus:
            with pytest.raises(BusUnavailableError, match="JetStream"):
                await bus.ensure_stream("S", "s.>", keep_s=1, max_bytes=1)


async def test_events_survive_restarts_of_nats_in_order_and_without_repeats(own_nats: NatsServer) -> None:
    total = 300
    async with connected(own_nats) as bus, anyio.create_task_group() as tasks:
        log = EventLog(bus, "test", "worker", f"{1:016x}")
        tasks.start_soon(log.run)
        for number in range(total):
            log.emit(EventKind.LOADED, select("base", "s3://b/a"), revision=str(number))
            await anyio.sleep(0.005)
            if number in (100, 200):
                own_nats.kill()
                await anyio.sleep(0.2)
                await anyio.to_thread.run_sync(own_nats.start)
        await until(lambda: not vars(log)["_outbox"], 15)
        tasks.cancel_scope.cancel()
    client = await nats.connect(own_nats.url)
    try:
        js = client.jetstream()
        stored = (await js.stream_info(EVENT_STREAM)).state.messages
        sub = await js.subscribe("lorelay.*.lora.>", ordered_consumer=True)
        got = [from_json(LoraEvent, (await sub.next_msg(timeout=2)).data).revision for _ in range(stored)]
    finally:
        await client.close()
    assert got == [str(number) for number in range(total)]
