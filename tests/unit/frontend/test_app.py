"""The frontend's HTTP, called as a server calls it; only the way to a worker is played."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote, unquote_to_bytes

import anyio
import pytest

from lorelay.frontend.app import App
from lorelay.frontend.catalog import Catalog, Target
from lorelay.frontend.dispatch import Dispatcher, Stream
from lorelay.proto import keys
from lorelay.proto.codec import to_json
from lorelay.proto.errors import KINDS, ErrorCode, LorelayError, WireError
from lorelay.proto.generation import MAX_BODY_BYTES, Frame
from lorelay.proto.identity import adapter_key, identity_digest
from lorelay.proto.records import AdapterState, InstanceRecord, ModelCard, ResidencyRecord
from lorelay.runtime.discovery import Change
from support.engines import facts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

pytestmark = pytest.mark.anyio

WORKER = f"{1:016x}"
NAMES = [
    "org/name",
    "a%2Fb",
    "gpt-oss:120b",
    "a|b",
    "s3://b/a?x=1&y",
    "with space",
    "ünï/çödé",
    "a+b",
    "dots/../x",
    "#",
]


class Answer(NamedTuple):
    """What the application sent."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        """The status and code of an error in OpenAI's envelope."""
        error = self.json["error"]
        assert set(error) - {"reasons"} == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return self.status, error["code"]


class Played:
    """Plays the way to a worker: frames that a test chose."""

    idle_timeout_s = 0.01
    open_streams = 0

    def __init__(self) -> None:
        self.frames = [Frame(stream=1, sequence=0, status=200, content_type="text/plain", body=b"hi", last=True)]
        self.fails: LorelayError | None = None
        self.asked: list[dict[str, Any]] = []
        self.cancelled = False

    @asynccontextmanager
    async def open(self, find: Callable[[], Target], **request: Any) -> AsyncIterator[tuple[Stream, Frame]]:
        """Give the frames."""
        request["target"] = find()
        self.asked.append(request)
        if self.fails is not None:
            raise self.fails
        stream = Stream(1, WORKER)
        for frame in self.frames:
            stream.feed(frame)
        try:
            if not self.frames:
                await anyio.sleep_forever()
            yield stream, Frame(stream=1, sequence=0, status=200, content_type=self.frames[0].content_type)
        except anyio.get_cancelled_exc_class():
            self.cancelled = True
            raise


class Here:
    """An application with a base named `base` and published adapters."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.way = Played()
        self.missing: list[str] = []
        self.catalog = Catalog("test", lambda _: None)
        instance = InstanceRecord(component="worker", instance=WORKER, subject="s", started="t")
        card = ModelCard(worker=WORKER, facts=facts(aliases=("alias:1",)))
        changes = [
            Change(keys.instance("test", "worker", WORKER), to_json(instance)),
            Change(keys.model("test", "base", WORKER), to_json(card)),
        ]
        for number, name in enumerate(names):
            source = f"s3://{number}"
            record = ResidencyRecord(
                worker=WORKER,
                key=adapter_key("base", source),
                base="base",
                digest="d",
                name=name,
                source=source,
                state=AdapterState.LOADED,
                bytes=1,
            )
            changes.append(Change(keys.adapter("test", WORKER, identity_digest("base", source)), to_json(record)))
        self.catalog.apply(changes)
        self.app = App(
            self.catalog,
            cast("Dispatcher", self.way),
            max_requests=4,
            missing=lambda: self.missing,
            started_unix_s=1,
        )

    async def call(
        self,
        method: str,
        target: str | bytes,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        leaves: bool = False,
    ) -> Answer:
        """Call the application with the bytes of a request line, as uvicorn does."""
        raw = target if isinstance(target, bytes) else target.encode()
        raw_path, _, query = raw.partition(b"?")
        sent: list[dict[str, Any]] = []
        parts = [body[:10], body[10:]]

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            if not leaves:
                await anyio.sleep_forever()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": unquote_to_bytes(raw_path).decode(errors="replace"),
            "raw_path": raw_path,
            "query_string": query,
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        with anyio.fail_after(5):
            await self.app(scope, receive, send)
        if not sent:
            return Answer(0, {}, b"", complete=False)
        head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        whole = b"".join(message.get("body", b"") for message in sent[1:])
        return Answer(sent[0]["status"], head, whole, complete=len(sent) > 1 and not sent[-1].get("more_body"))

    async def chat(self, body: bytes = b'{"model":"base"}', **more: Any) -> Answer:
        """Post a chat request."""
        return await self.call("POST", "/v1/chat/completions", body, **more)


async def test_a_response_is_forwarded_as_it_comes() -> None:
    here = Here()
    answer = await here.chat(b' {"model" : "base", "x": [1, 2.50] } ')
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, "text/plain", b"hi")
    assert here.way.asked[0]["body"] == b' {"model" : "base", "x": [1, 2.50] } '
    assert here.way.asked[0]["model"] == "base"
    assert answer.complete


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_every_failure_before_the_first_byte_has_its_status_and_envelope(code: ErrorCode) -> None:
    """G1; and whatever the log may say, the client hears nothing of it."""
    here = Here()
    here.way.fails = LorelayError(code, "public", detail="secret", reasons=("one", "two"))
    answer = await here.chat(b'{"model":"base","stream":true}')
    assert answer.error == (KINDS[code].status, code.value)
    assert b"secret" not in answer.body
    assert answer.json["error"]["reasons"] == ["one", "two"]
    retry = KINDS[code].retry_after_s
    assert answer.headers.get("retry-after") == (None if retry is None else str(retry))


async def test_a_failure_after_the_first_byte_of_an_event_stream_is_its_last_event() -> None:
    """G2."""
    here = Here()
    here.way.frames = [
        Frame(stream=1, sequence=0, status=200, content_type="text/event-stream", body=b"data: 1\n\n"),
        Frame(stream=1, sequence=1, last=True, error=WireError(code=ErrorCode.WORKER_LOST, message="gone")),
    ]
    answer = await here.chat()
    assert answer.status == 200
    assert answer.body.startswith(b"data: 1\n\ndata: ")
    assert json.loads(answer.body.split(b"data: ")[2])["error"]["code"] == "worker_lost"
    assert answer.complete
    assert b"[DONE]" not in answer.body


async def test_a_failure_in_the_middle_of_anything_else_is_an_incomplete_response() -> None:
    here = Here()
    here.way.frames = [
        Frame(stream=1, sequence=0, status=200, content_type="application/json", body=b"{"),
        Frame(stream=1, sequence=1, last=True, error=WireError(code=ErrorCode.WORKER_LOST, message="gone")),
    ]
    answer = await here.chat()
    assert (answer.status, answer.body, answer.complete) == (200, b"{", False)


async def test_a_worker_that_goes_silent_in_the_middle_is_an_error() -> None:
    here = Here()
    here.way.frames = [Frame(stream=1, sequence=0, status=200, content_type="text/event-stream", body=b"data: 1\n\n")]
    assert b"worker_lost" in (await here.chat()).body


async def test_a_client_that_leaves_cancels() -> None:
    here = Here()
    here.way.frames = []
    assert (await here.chat(leaves=True)).status == 0
    assert here.way.cancelled


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"x", None),
        (b"{", None),
        (b"[]", None),
        (b'"base"', None),
        (b"null", None),
        (b"{}", "model"),
        (b'{"model":null}', "model"),
        (b'{"model":1}', "model"),
        (b'{"model":["base"]}', "model"),
        (b'{"model":"base"} x', None),
        (b'{"model":"\xff"}', None),
        (b'{"model":"\\ud800"}', None),
        (b'{"model":"base","x":NaN}', None),
        (b'{"model":"base","x":Infinity}', None),
        (b"\xef\xbb\xbf" + b'{"model":"base"}', None),
        (b'{"model":"base","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"model":"base","x":' + b'{"a":' * 100_000, None),
    ],
)
async def test_a_body_that_is_not_a_json_object_with_a_model_is_400(body: bytes, param: str | None) -> None:
    """G17."""
    answer = await Here().chat(body)
    assert answer.error == (400, "invalid_request")
    assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("", (400, "invalid_lora_model_id")),
        ("x" * 4097, (400, "invalid_lora_model_id")),
        ("base|s3://a\\u0000", (400, "invalid_lora_model_id")),
        ("base|s3://key:secret@b/a", (400, "invalid_lora_model_id")),
        ("bas", (404, "model_not_found")),
        ("base|s3://b/a", (400, "runtime_lora_unsupported")),
    ],
)
async def test_a_model_that_means_nothing_is_refused_and_named(model: str, error: tuple[int, str]) -> None:
    answer = await Here().chat(b'{"model":"%s"}' % model.encode())
    assert answer.error == error
    assert answer.json["error"]["param"] == "model"
    assert b"secret" not in answer.body


@pytest.mark.parametrize("headers", [{"content-length": str(MAX_BODY_BYTES + 1)}, {}])
async def test_a_body_that_is_too_large_is_413_with_and_without_an_announcement(headers: dict[str, str]) -> None:
    answer = await Here().chat(bytes(MAX_BODY_BYTES + 1), headers=headers)
    assert answer.error == (413, "request_too_large")


async def test_more_requests_than_fit_are_refused() -> None:
    here = Here()
    here.way.open_streams = 4
    answer = await here.chat()
    assert answer.error == (503, "no_worker_available")
    assert "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "error"),
    [
        ("GET", "/v1/chat/completions", (405, "method_not_allowed")),
        ("POST", "/v1/models", (405, "method_not_allowed")),
        ("DELETE", "/v1/models/base", (405, "method_not_allowed")),
        ("POST", "/live", (405, "method_not_allowed")),
        ("GET", "/", (404, "route_not_found")),
        ("POST", "/v1/embeddings", (404, "route_not_found")),
        ("POST", "/v1/chat/completions/", (404, "route_not_found")),
        ("GET", "/v1/models/", (404, "model_not_found")),
        ("GET", "/v1/models/nobody", (404, "model_not_found")),
    ],
)
async def test_other_methods_and_routes_are_refused(method: str, path: str, error: tuple[int, str]) -> None:
    assert (await Here().call(method, path)).error == error


@pytest.mark.parametrize("name", ["base", "alias:1", *NAMES])
async def test_every_listed_id_is_found_raw_and_encoded(name: str) -> None:
    """C3."""
    here = Here(NAMES)
    listed = {line["id"]: line for line in (await here.call("GET", "/v1/models")).json["data"]}
    assert set(listed) == {"base", "alias:1", *NAMES}
    for written in (name, quote(name, safe=""), quote(name)):
        answer = await here.call("GET", f"/v1/models/{written}")
        assert (answer.status, answer.json) == (200, listed[name]), written


async def test_an_encoded_id_means_what_it_decodes_to_before_what_it_looks_like() -> None:
    here = Here(["a/b", "a%2Fb"])
    assert (await here.call("GET", "/v1/models/a%2Fb")).json["id"] == "a/b"
    assert (await here.call("GET", "/v1/models/a%252Fb")).json["id"] == "a%2Fb"
    assert (await here.call("GET", "/v1/models/base?x=1")).json["id"] == "base"
    assert (await here.call("GET", b"/v1/models/\xff")).error == (404, "model_not_found")


async def test_a_model_line_names_its_base() -> None:
    here = Here(["tone"])
    line = (await here.call("GET", "/v1/models/tone")).json
    assert (line["object"], line["parent"], line["root"]) == ("model", "base", "tone")
    assert (await here.call("GET", "/v1/models/alias:1")).json["root"] == "base"


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_a_request_id_comes_back(given: str) -> None:
    here = Here()
    for answer in (
        await here.chat(headers={"x-request-id": given}),
        await here.chat(b"x", headers={"x-request-id": given}),
        await here.call("GET", "/v1/models", headers={"x-request-id": given}),
    ):
        assert answer.headers["x-request-id"] == given
    assert here.way.asked[0]["request_id"] == given


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "ü"])
async def test_a_request_id_that_is_none_is_replaced(given: str) -> None:
    here = Here()
    answer = await here.chat(headers={"x-request-id": given})
    assert answer.headers["x-request-id"] not in ("", given)


async def test_readiness_says_what_is_missing() -> None:
    here = Here()
    assert (await here.call("GET", "/ready")).status == 200
    here.missing = ["bus"]
    answer = await here.call("GET", "/ready")
    assert (answer.status, answer.json["missing"]) == (503, ["bus"])
    assert (await here.call("GET", "/live")).status == 200
