"""The store and the bus against the servers that production runs as containers, not the test wheels' versions."""

from __future__ import annotations

import re
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import LogMessageWaitStrategy

from lorelay.runtime.bus import Bus, Message
from lorelay.runtime.settings import BusSettings
from lorelay.runtime.store import CompactedError, EtcdSettings, EtcdStore
from support.docker import require_engine

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(180)]

COMPOSE = Path(__file__).parents[2] / "compose.yaml"


def image(name: str) -> str:
    """Return the image that compose.yaml runs, so that this tests what is shipped."""
    found = re.search(rf"^ +image: (\S*{name}:\S+)$", COMPOSE.read_text(), re.MULTILINE)
    assert found, f"compose.yaml names no image of {name}"
    return found[1]


@pytest.fixture(autouse=True)
def _engine() -> None:
    require_engine()


async def test_the_shipped_etcd_keeps_leases_watches_and_compactions(prefix: str) -> None:
    etcd = DockerContainer(image("etcd")).with_exposed_ports(2379)
    etcd.with_command(
        "etcd --listen-client-urls http://0.0.0.0:2379 --advertise-client-urls http://0.0.0.0:2379 --log-level info"
    )
    with etcd.waiting_for(LogMessageWaitStrategy("serving client traffic insecurely")):
        url = f"http://{etcd.get_container_host_ip()}:{etcd.get_exposed_port(2379)}"
        async with EtcdStore(EtcdSettings(endpoints=(url,))) as store:
            lease = await store.grant_lease(5)
            revision = await store.put(f"{prefix}a", b"1", lease=lease)
            async with aclosing(store.watch(prefix, revision)) as watch:
                first = await anext(watch)
                assert [(event.key, event.value) for event in first] == [(f"{prefix}a", b"1")]
                await store.revoke_lease(lease)
                gone = await anext(watch)
                assert [(event.key, event.value) for event in gone] == [(f"{prefix}a", None)]
            last = await store.put(f"{prefix}b", b"2")
            await store.compact(last)
            with pytest.raises(CompactedError):
                async with aclosing(store.watch(prefix, revision)) as watch:
                    await anext(watch)


async def test_the_shipped_nats_answers_and_keeps_events() -> None:
    nats = DockerContainer(image("nats")).with_exposed_ports(4222).with_command("-js")
    with nats.waiting_for(LogMessageWaitStrategy("Server is ready")):
        url = f"nats://{nats.get_container_host_ip()}:{nats.get_exposed_port(4222)}"
        async with Bus(BusSettings(servers=(url,)), "test") as bus:

            async def echo(message: Message) -> None:
                await message.reply(message.data.upper())

            await bus.subscribe("test.echo", echo)
            assert await bus.request("test.echo", b"hello", timeout_s=5) == b"HELLO"
            await bus.ensure_stream("TEST", "test.kept.>", keep_s=60, max_bytes=1 << 20)
            await bus.store("test.kept.x", b"1", message_id="one")
            with anyio.fail_after(5):
                await bus.store("test.kept.x", b"1", message_id="one")
