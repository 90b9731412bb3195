"""Two management surfaces, one registry of operations behind them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import anyio
import pytest

from lorelay.proto.errors import ErrorCode, LorelayError
from lorelay.proto.identity import adapter_key
from lorelay.worker import management
from lorelay.worker.management import Management
from support.engines import BASE, World, facts, want, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio

ROUTES = [
    ("GET", "/v1/loras"),
    ("POST", "/v1/loras"),
    ("DELETE", "/v1/loras/x"),
    ("POST", "/engine/update/load_lora"),
    ("POST", "/engine/update/unload_lora"),
    ("POST", "/engine/update/list_loras"),
    ("POST", "/engine/control/anything"),
    ("GET", "/anything"),
]


class Answer(NamedTuple):
    """What was sent."""

    status: int
    json: Any

    @property
    def code(self) -> str:
        """The error's code."""
        assert set(self.json["error"]) - {"reasons"} == {"message", "type", "param", "code"}
        return str(self.json["error"]["code"])


class Here:
    """A management application on a table on a simulator."""

    def __init__(self, around: World, token: str) -> None:
        self.world = around
        self.ready = True
        self.app = Management(facts(), token=token, load_timeout_s=5, is_ready=lambda: self.ready)

    async def call(self, method: str, target: str, body: object = None, token: str | None = None) -> Answer:
        """Call it as uvicorn does."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        raw = target.encode()
        scope = {
            "type": "http",
            "method": method,
            "path": unquote_to_bytes(raw).decode(errors="replace"),
            "raw_path": raw,
            "headers": [] if token is None else [(b"authorization", token.encode())],
        }
        await self.app(scope, receive, send)
        return Answer(sent[0]["status"], json.loads(sent[1]["body"]))


@asynccontextmanager
async def worker(*, token: str = "", is_open: bool = True) -> AsyncIterator[Here]:
    async with world(slots=4) as around:
        here = Here(around, token)
        if is_open:
            here.app.open(around.table)
        yield here


def load(name: str = "tone", uri: str = "s3://b/a") -> dict[str, Any]:
    return {"lora_name": name, "source": {"uri": uri}}


@pytest.mark.parametrize("surface", ["/engine/update/load_lora", "/v1/loras"])
async def test_an_adapter_is_loaded_listed_and_unloaded_on_both_surfaces(surface: str) -> None:
    async with worker() as here:
        loaded = await here.call("POST", surface, load())
        assert (loaded.status, loaded.json["status"], loaded.json["lora_name"]) == (200, "success", "tone")
        assert (await here.call("POST", surface, load())).status == 200
        lists = [await here.call("GET", "/v1/loras"), await here.call("POST", "/engine/update/list_loras", {})]
        for answer in lists:
            assert answer.status == 200
            assert answer.json["loras"] == {"tone": loaded.json["lora_id"]}
            assert answer.json["adapters"][0]["pinned"] is True
        if surface == "/v1/loras":
            gone = await here.call("DELETE", "/v1/loras/tone")
        else:
            gone = await here.call("POST", "/engine/update/unload_lora", {"lora_name": "tone"})
        assert gone.status == 200
        assert (await here.call("GET", "/v1/loras")).json["count"] == 0
        assert await here.world.agrees()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[]", 400),
        (b"null", 400),
        (b'"x"', 400),
        (b"{", 400),
        (b"\xff", 400),
        (b'{"a":' + b"[" * 100_000, 400),
        (b" " * (1 << 20) + b"{}", 413),
        ({}, 400),
        ({"lora_name": "x"}, 400),
        ({"lora_name": 1, "source": {"uri": "s3://b/a"}}, 400),
        ({"lora_name": "", "source": {"uri": "s3://b/a"}}, 400),
        ({"lora_name": "x", "source": "s3://b/a"}, 400),
        ({"lora_name": "x", "source": {"uri": 1}}, 400),
        (load(uri="no scheme"), 400),
        (load(uri="s3://key:secret@b/a"), 400),
        (load(name="x\n"), 400),
        (load(name="x" * 4097), 400),
        (load(name=BASE), 409),
        (load(name="alias"), 409),
        (load(name="BASE"), 409),
    ],
)
async def test_both_surfaces_refuse_alike(body: object, status: int) -> None:
    """C7."""
    async with worker() as here:
        answers = [await here.call("POST", path, body) for path in ("/engine/update/load_lora", "/v1/loras")]
        assert [answer.status for answer in answers] == [status, status]
        assert answers[0].json == answers[1].json
        assert answers[0].code
        assert here.world.materialized == {}


async def test_what_is_not_there_is_404_on_both_surfaces() -> None:
    async with worker() as here:
        answers = [
            await here.call("DELETE", "/v1/loras/nobody"),
            await here.call("POST", "/engine/update/unload_lora", {"lora_name": "nobody"}),
        ]
        assert [(a.status, a.code) for a in answers] == [(404, "lora_not_found")] * 2
        assert (await here.call("POST", "/engine/update/what", {})).code == "route_not_found"


async def test_a_name_that_is_taken_is_409() -> None:
    async with worker() as here:
        await here.call("POST", "/v1/loras", load("tone", "s3://b/a"))
        for body in (load("tone", "s3://b/b"), load("other", "s3://b/a")):
            answer = await here.call("POST", "/v1/loras", body)
            assert (answer.status, answer.code) == (409, "lora_name_conflict")


@pytest.mark.parametrize("name", ["org/name", "a%2Fb", "a|b", "s3://b/a", "with space", "ünï", "a+b", "q?x"])
async def test_a_name_is_found_by_its_encoded_path(name: str) -> None:
    """C3."""
    async with worker() as here:
        assert (await here.call("POST", "/v1/loras", load(name))).status == 200
        assert (await here.call("DELETE", f"/v1/loras/{quote(name, safe='')}")).status == 200
        assert here.world.table.residents() == []


async def test_a_name_is_found_by_the_raw_bytes_of_its_path() -> None:
    async with worker() as here:
        assert (await here.call("POST", "/v1/loras", load("ünï/x:y"))).status == 200
        assert (await here.call("DELETE", "/v1/loras/ünï/x:y")).status == 200


async def test_a_runtime_adapter_is_listed_and_unloaded_by_its_key() -> None:
    async with worker() as here:
        async with here.world.table.hold(want("s3://b/a")):
            pass
        key = adapter_key(BASE, "s3://b/a")
        assert list((await here.call("GET", "/v1/loras")).json["loras"]) == [key]
        assert (await here.call("DELETE", f"/v1/loras/{key}")).status == 200


async def test_an_adapter_in_use_is_409(monkeypatch: pytest.MonkeyPatch) -> None:
    """D6."""
    monkeypatch.setattr(management, "UNLOAD_TIMEOUT_S", 0.01)
    async with worker() as here:
        await here.call("POST", "/v1/loras", load())
        async with here.world.table.hold(want("s3://b/a")):
            assert (await here.call("DELETE", "/v1/loras/tone")).status == 409
        assert (await here.call("DELETE", "/v1/loras/tone")).status == 200


async def test_a_load_that_fails_has_its_reason_and_status() -> None:
    """I5."""
    async with worker() as here:
        here.world.materialize_fails = LorelayError(ErrorCode.INVALID_LORA_ADAPTER, "bad", reasons=("a", "b"))
        for path in ("/engine/update/load_lora", "/v1/loras"):
            answer = await here.call("POST", path, load())
            assert (answer.status, answer.code) == (422, "invalid_lora_adapter")
            assert answer.json["error"]["reasons"] == ["a", "b"]


async def test_a_listing_does_not_wait_for_a_load() -> None:
    """I4."""
    async with worker() as here, anyio.create_task_group() as tasks:
        here.world.engine.may_load = anyio.Event()
        tasks.start_soon(here.call, "POST", "/v1/loras", load())
        await here.world.engine.loading.wait()
        with anyio.fail_after(1):
            listed = await here.call("GET", "/v1/loras")
        assert listed.json["adapters"][0]["state"] == "loading"
        here.world.engine.may_load.set()


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer wrong", "Basic secret", "secret", "bearer secret "])
async def test_every_route_asks_for_the_token(method: str, path: str, token: str | None) -> None:
    """H3: also those that do not exist."""
    async with worker(token="secret") as here:  # noqa: S106
        answer = await here.call(method, path, load(), token=token)
        assert (answer.status, answer.code) == (401, "unauthorized")
        assert here.world.materialized == {}


async def test_the_token_opens_and_probes_need_none() -> None:
    async with worker(token="secret") as here:  # noqa: S106
        assert (await here.call("GET", "/v1/loras", token="Bearer secret")).status == 200  # noqa: S106
        for path in ("/live", "/ready", "/health"):
            assert (await here.call("GET", path)).status == 200
        here.ready = False
        assert [(await here.call("GET", p)).status for p in ("/live", "/ready", "/health")] == [200, 503, 503]


async def test_before_the_engines_records_can_be_published_there_are_no_operations() -> None:
    """D18: a neutral message, the same on both surfaces."""
    async with worker(is_open=False) as here:
        answers = [await here.call(method, path, load()) for method, path in ROUTES[:6]]
        assert {(a.status, a.code, a.json["error"]["message"]) for a in answers} == {
            (404, "route_not_found", "Adapters are not available on this worker.")
        }
