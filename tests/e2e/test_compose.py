"""compose.yaml on a real Docker engine: the images are built, the fleet comes up, serves, grows and goes.

The tests share one fleet and run in the order they stand in; the last one ends it.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from lorelay.cli.up import DEMO_ADAPTERS
from lorelay.proto.events import EventKind
from lorelay.proto.identity import adapter_key
from support.docker import require_engine
from support.events import read_events
from support.stack import Answer, call

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PIRATE = "wandb-artifact:///demo/tones/pirate:v1"
SERVICES = ("frontend", "resolver", "worker")
UP_S = 300

_IN_A_SERVICE = """
import errno, json, os
def write(path):
    try:
        with open(path, "w"):
            return "written"
    except OSError as error:
        return errno.errorcode[error.errno]
print(json.dumps({"uid": os.getuid(), "root": write("/opt/x"), "cache": write("/var/lib/lorelay/cache/x")}))
"""
"""What a process in a container may do, as JSON."""


class Project:
    """A compose project of its own: free ports, images with a tag of its own, and a folder of adapters."""

    def __init__(self, adapters: Path) -> None:
        self.name = f"lorelay-test-{secrets.token_hex(4)}"
        self.adapters = adapters
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "DYN_", "LORELAY_"))
        }
        self._environ = {
            **kept,
            "LORELAY_ADAPTERS_DIR": str(adapters),
            "LORELAY_HTTP_PORT": "0",
            "LORELAY_NATS_PORT": "0",
            "LORELAY_VERSION": self.name,
        }

    def image(self, service: str) -> str:
        """Return the name of a service's image."""
        return f"lorelay-{service}:{'sim-' if service == 'worker' else ''}{self.name}"

    def docker(self, *arguments: str, check: bool = True) -> str:
        """Run `docker` and return what it prints; fail with all it said if it fails."""
        done = subprocess.run(["docker", *arguments], cwd=ROOT, env=self._environ, capture_output=True, text=True)  # noqa: PLW1510, S607
        if check and done.returncode:
            pytest.fail(f"docker {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Run `docker compose` on this project."""
        return self.docker("compose", "--env-file", os.devnull, "--project-name", self.name, *arguments, check=check)

    def up(self, *arguments: str) -> None:
        """Start what is not there and wait until all of it is healthy; fail with the logs if it does not get so."""
        try:
            self.compose("up", "--wait", "--wait-timeout", str(UP_S), *arguments)
        except pytest.fail.Exception as failure:
            logs = self.compose("logs", "--no-color", "--tail", "20", check=False)
            pytest.fail(f"{failure}\n{self.compose('ps', '--all', check=False)}\n{logs}")

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """Return what `docker inspect` says of the containers, those that have ended included."""
        ids = self.compose("ps", "--all", "--quiet", *([service] if service else [])).split()
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", *ids)) if ids else []
        return found

    def address(self, service: str, port: int) -> str:
        """Return where a service's port is published."""
        return self.compose("port", service, str(port))

    def chat(self, model: str) -> Answer:
        """Ask `model` something."""
        body = {"model": model, "messages": [{"role": "user", "content": "Where is the treasure?"}]}
        return call(f"http://{self.address('frontend', 8000)}/v1/chat/completions", body)

    def leftovers(self) -> dict[str, str]:
        """Return what the engine still has of this project."""
        label = f"label=com.docker.compose.project={self.name}"
        found = {
            "containers": self.docker("ps", "--all", "--quiet", "--filter", label),
            "networks": self.docker("network", "ls", "--quiet", "--filter", label),
            "volumes": self.docker("volume", "ls", "--quiet", "--filter", label),
        }
        return {kind: ids for kind, ids in found.items() if ids}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Build the images and start the fleet; without an engine fail loudly, or skip if the environment says so."""
    project = Project(tmp_path_factory.mktemp("compose") / "adapters")
    require_engine()
    project.adapters.mkdir(mode=0o755)
    shutil.copytree(DEMO_ADAPTERS / "robot", project.adapters / "robot")
    try:
        project.up("--build")
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "5", check=False)
        project.docker("image", "rm", *map(project.image, SERVICES), check=False)


def test_an_adapter_answers_otherwise_than_its_base_and_both_say_they_are_simulated(fleet: Project) -> None:
    base, adapter = fleet.chat("smollm2"), fleet.chat(f"smollm2|{PIRATE}")
    assert (base.status, adapter.status) == (200, 200), (base.body, adapter.body)
    assert base.text.startswith(f"Simulated {BASE} heard:")
    assert adapter.text.startswith(f"Simulated {BASE} through adapter ")


@pytest.mark.anyio
async def test_the_stream_keeps_what_happened_to_the_adapter(fleet: Project) -> None:
    assert fleet.chat(f"smollm2|{PIRATE}").status == 200
    read = functools.partial(read_events, f"nats://{fleet.address('nats', 4222)}", adapter_key(BASE, PIRATE))
    events = await anyio.to_thread.run_sync(read)  # it runs an event loop of its own
    kinds = [event.kind for event in sorted(events, key=lambda event: event.time)]
    assert EventKind.MATERIALIZED in kinds
    assert EventKind.LOADED in kinds
    assert kinds.index(EventKind.MATERIALIZED) < kinds.index(EventKind.LOADED)
    assert {event.source for event in events} == {PIRATE}


def test_a_folder_of_the_host_is_a_source(fleet: Project) -> None:
    answer = fleet.chat(f"{BASE}|file:///adapters/robot")
    assert answer.status == 200, answer.body
    assert "through adapter" in answer.text
    missing = fleet.chat(f"{BASE}|file:///adapters/none")
    assert (missing.status, missing.code) == (404, "lora_not_found")
    outside = fleet.chat(f"{BASE}|file:///etc")
    assert (outside.status, outside.code) == (403, "lora_source_forbidden")


@pytest.mark.parametrize("service", ["frontend", "resolver"])
def test_the_image_holds_no_torch(fleet: Project, service: str) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'vllm') if u.find_spec(n)])"
    run = ("run", "--rm", "--network", "none", "--entrypoint", "python")
    assert fleet.docker(*run, fleet.image(service), "-c", code) == "[]"


def test_no_service_is_root_or_writes_where_it_must_not(fleet: Project) -> None:
    found = {
        service: json.loads(fleet.compose("exec", "-T", service, "python", "-c", _IN_A_SERVICE)) for service in SERVICES
    }
    assert found == {
        "frontend": {"uid": 10001, "root": "EROFS", "cache": "ENOENT"},
        "resolver": {"uid": 10001, "root": "EROFS", "cache": "written"},
        "worker": {"uid": 10001, "root": "EROFS", "cache": "EROFS"},
    }


def test_every_container_is_confined(fleet: Project) -> None:
    """The one that gives volumes their owner is root, may do nothing else, reaches no network and has ended."""
    for container in fleet.containers():
        host, service = container["HostConfig"], container["Config"]["Labels"]["com.docker.compose.service"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        assert host["Memory"] > 0, service
        if service == "volumes":
            assert (container["State"]["Status"], container["State"]["ExitCode"]) == ("exited", 0)
            assert [name.removeprefix("CAP_") for name in host["CapAdd"]] == ["CHOWN"]  # engines spell it both ways
            assert host["NetworkMode"] == "none"
        else:
            assert container["State"]["Health"]["Status"] == "healthy", service
            assert (container["Config"]["User"], host["CapAdd"]) == ("10001:10001", None), service


def test_workers_scale(fleet: Project) -> None:
    fleet.up("--no-recreate", "--scale", "worker=2")
    assert len(fleet.containers("worker")) == 2
    prefix = "/lorelay/v1/dynamo/capabilities/"
    known = fleet.compose("exec", "-T", "etcd", "etcdctl", "get", "--prefix", "--keys-only", prefix).split()
    assert len(known) == 2
    for source in (PIRATE, "wandb-artifact:///demo/tones/robot:v1", "file:///adapters/robot"):
        assert fleet.chat(f"{BASE}|{source}").status == 200


def test_services_stop_in_order_and_nothing_is_left(fleet: Project) -> None:
    """Runs last: it ends the fleet."""
    ids = [container["Id"] for service in SERVICES for container in fleet.containers(service)]
    fleet.compose("stop", *SERVICES)
    assert set(fleet.docker("wait", *ids).split()) == {"0"}
    fleet.compose("down", "--volumes")
    assert fleet.leftovers() == {}
