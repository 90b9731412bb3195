"""What all tests share: real servers, one per run; isolation by key prefix; the event loop of the services."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hypothesis
import pytest

from support.servers import EtcdServer, NatsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# A busy machine must not fail a law, and a green run must stay green: no deadline, and the same examples in CI.
hypothesis.settings.register_profile("lorelay", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "lorelay")

_UNIT_TESTS = Path(__file__).parent / "unit"


@pytest.fixture(autouse=True)
def _no_sockets_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test below tests/unit that connects, listens or resolves a name.

    It sees what goes through Python's `socket`; uvloop and gRPC open theirs in C.
    """
    if not request.path.is_relative_to(_UNIT_TESTS):
        return

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("a unit test used a socket; it belongs in tests/integration")

    for name in ("bind", "connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Run coroutines as the services do: asyncio on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session", autouse=True)
async def _one_event_loop(anyio_backend: tuple[str, dict[str, bool]]) -> AsyncIterator[None]:  # noqa: ARG001
    """Hold one event loop for the whole run.

    gRPC has one poller for the process: what completes late, after its loop was closed, would fail in another test's.
    """
    yield  # noqa: PT022 (as a generator it holds the loop)


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for the whole run.  Tests that hurt it start their own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One nats-server for the whole run.  Tests that hurt it start their own."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """Return a key prefix that no other test has."""
    return f"/test/{secrets.token_hex(6)}/"
