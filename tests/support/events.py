"""Read what the stream LORA_EVENTS keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anyio
import nats
import nats.errors
from nats.js.api import ConsumerConfig, DeliverPolicy

from lorelay.proto.codec import from_json
from lorelay.proto.events import LoraEvent


def read_events(nats_url: str, key: str, *, settle_s: float = 0.5) -> list[LoraEvent]:
    """Return the kept events of the adapter `key`, in order; waits `settle_s` for those still under way."""

    async def read() -> list[LoraEvent]:
        await anyio.sleep(settle_s)
        client = await nats.connect(nats_url)
        try:
            subscription = await client.jetstream().pull_subscribe(
                f"lorelay.*.lora.*.{key}",
                stream="LORA_EVENTS",
                config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL),
            )
            events: list[LoraEvent] = []
            while True:
                try:
                    batch = await subscription.fetch(100, timeout=0.5)
                except nats.errors.TimeoutError:
                    return events
                events += [from_json(LoraEvent, message.data) for message in batch]
        finally:
            await client.close()

    with ThreadPoolExecutor(1) as pool:  # the test's own thread may be running a loop already
        return pool.submit(anyio.run, read).result()
