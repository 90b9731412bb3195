"""`lorelay up`: a whole fleet on one machine, from one command, for as long as the command runs."""

from __future__ import annotations

import argparse
import fcntl
import functools
import http.client
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec

from lorelay.cli import demo_model, servers
from lorelay.cli.children import Child, ChildDiedError, Children
from lorelay.proto import keys
from lorelay.proto.subjects import check_namespace

DEMO_ADAPTERS = Path(__file__).with_name("demo_adapters")
DEMO_NAMES = "HuggingFaceTB/SmolLM2-135M-Instruct,smollm2"
DEMO_SOURCES = ("wandb-artifact:///demo/tones/pirate:v1", "wandb-artifact:///demo/tones/robot:v1")
DEMO_PLUGIN = "lorelay.cli.demo_plugin:demo_plugin"
FILE_PLUGIN = "lorelay.resolver.file_plugin:FilePlugin"
SERVER_START_S = 30.0
SERVICE_START_S = 900.0
"""An engine that has to compile or read many gigabytes takes its time."""
POLL_S = 0.05
SAY_AFTER_S = 2.0
"""Waits longer than this say what they wait for, again and again."""


class UpError(Exception):
    """The fleet cannot be started; `str()` is the line for the user."""


class Stopped(Exception):  # noqa: N818 - not an error
    """SIGINT or SIGTERM came."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `lorelay up`."""
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="vLLM, or a simulator without weights"
    )
    parser.add_argument("--model", help="folder of the base model (for vLLM also a hub name); not with --demo")
    parser.add_argument(
        "--served-model-name", metavar="NAME[,ALIAS...]", help="what clients call it (default: as given in --model)"
    )
    parser.add_argument("--workers", type=_positive, default=1, metavar="N", help="how many workers (default: 1)")
    parser.add_argument("--http-host", default="127.0.0.1", metavar="HOST", help="where HTTP is served (127.0.0.1)")
    parser.add_argument("--http-port", type=_port, default=8000, metavar="P", help="0 takes a free one (default: 8000)")
    parser.add_argument(
        "--system-port",
        type=_port,
        default=8081,
        metavar="P",
        help="management of the first worker; others follow (8081)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="where servers, cache and logs keep their data (default: ./.lorelay)"
    )
    parser.add_argument(
        "--adapters",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder that file:// may read; repeatable",
    )
    parser.add_argument("--demo", action="store_true", help="serve the demo's base model and its two adapters")
    parser.add_argument(
        "--engine-args", default="", metavar="ARGS", help="more arguments of `vllm serve`, as one string"
    )


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run a fleet until SIGINT or SIGTERM, or until one of its processes dies; return the exit code."""
    children = Children()
    try:
        with _signals_stop():
            fleet = _Fleet(options, environ, children)
            with fleet.locked():
                try:
                    fleet.start()
                    fleet.watch()
                finally:
                    _say("stopping … (running requests may finish; Ctrl-C again ends them)")
                    with _handlers(lambda _number, _frame: children.hurry()):
                        children.stop()
    except Stopped:
        _say("stopped.")
        return 0
    except ChildDiedError as error:
        _complain(str(error))
        for line in error.child.tail():
            sys.stderr.write(f"    {line}\n")
        return 1
    except (UpError, servers.PortTakenError, servers.ServerMissingError, demo_model.DemoModelError) as error:
        _complain(str(error))
        return 1
    return 0


class _Fleet:
    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str], children: Children) -> None:
        self._options = options
        self._environ = environ
        self._children = children
        self._data: Path = (options.data or Path(".lorelay")).absolute()
        self._http_port = options.http_port or servers.free_port()
        self._system_ports = [
            options.system_port + i if options.system_port else servers.free_port() for i in range(options.workers)
        ]
        self._started = time.monotonic()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the data folder to this fleet."""
        try:
            self._data.mkdir(parents=True, exist_ok=True)
            with (self._data / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield
        except BlockingIOError:
            raise UpError(f"another `lorelay up` uses {self._data}: stop it, or give another --data") from None
        except OSError as error:
            raise UpError(f"cannot write into {self._data}: {error.strerror}; give another --data") from None

    def start(self) -> None:
        """Start everything and return when `/ready` says 200."""
        options = self._options
        for port in (self._http_port, *self._system_ports):
            servers.require_free(options.http_host if port == self._http_port else "127.0.0.1", port)
        model, names = self._model()
        nats_port, etcd_port = servers.free_port(), servers.free_port()
        self._start_servers(nats_port, etcd_port)
        base = {
            **self._environ,
            "PYTHONUNBUFFERED": "1",
            "NATS_SERVER": f"nats://127.0.0.1:{nats_port}",
            "ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd_port}",
            "DYN_LORA_PATH": str(self._data / "cache"),
            "LORELAY_CACHE_DOMAIN": "local",
        }
        base.pop("LORELAY_INSTANCE_ID", None)  # one for several processes would be wrong
        self._service("resolver", {**base, **self._resolver_environ()})
        workers = [
            self._service("worker", {**base, **self._worker_environ(model, names, port)}, f"worker-{number}")
            for number, port in enumerate(self._system_ports)
        ]
        frontend = {**base, "DYN_HTTP_HOST": options.http_host, "DYN_HTTP_PORT": str(self._http_port)}
        self._service("frontend", frontend)
        for worker, port in zip(workers, self._system_ports, strict=True):
            self._await(
                functools.partial(_is_ready, "127.0.0.1", port), SERVICE_START_S, functools.partial(_progress, worker)
            )
        host = "127.0.0.1" if options.http_host in ("0.0.0.0", "::") else options.http_host  # noqa: S104 - a comparison
        self._await(lambda: _is_ready(host, self._http_port), SERVER_START_S, lambda: "the frontend")
        self._introduce(host, names, nats_port, etcd_port)

    def watch(self) -> None:
        """Return never; raise when a signal comes or a child dies."""
        while True:
            self._children.check()
            time.sleep(POLL_S * 4)

    def _model(self) -> tuple[str, str]:
        options = self._options
        if not options.demo:
            if not options.model:
                raise UpError("name the base model's folder with --model DIR, or serve the demo's with --demo")
            return options.model, options.served_model_name or options.model
        if options.model:
            raise UpError("--demo brings its own base model: leave --model out")
        names = options.served_model_name or DEMO_NAMES
        if options.engine == "sim":
            return str(DEMO_ADAPTERS.with_name("demo_base")), names
        folder = self._data / "models" / "SmolLM2-135M-Instruct"
        demo_model.make_demo_model(folder, _say)
        return str(folder), names

    def _start_servers(self, nats_port: int, etcd_port: int) -> None:
        nats, etcd = servers.find_nats(), servers.find_etcd()
        _say(f"nats-server {nats.version} ({nats.path})")
        _say(f"etcd {etcd.version} ({etcd.path})")
        self._children.start(servers.nats_child(nats, self._data, nats_port, self._environ))
        self._children.start(servers.etcd_child(etcd, self._data, etcd_port, servers.free_port(), self._environ))
        self._await(lambda: servers.is_nats_up(nats_port), SERVER_START_S, lambda: "nats-server")
        self._await(lambda: servers.is_etcd_up(etcd_port), SERVER_START_S, lambda: "etcd")
        try:
            namespace = check_namespace(self._environ.get("DYN_NAMESPACE") or "dynamo")
        except ValueError as error:
            raise UpError(f"DYN_NAMESPACE: {error}") from None
        servers.forget(etcd_port, keys.root(namespace))

    def _resolver_environ(self) -> dict[str, str]:
        roots = [str(path.absolute()) for path in self._options.adapters]
        if self._options.demo:
            roots.append(str(DEMO_ADAPTERS))
        own = self._environ.get("LORELAY_FILE_ROOTS", "")
        environ = {"LORELAY_FILE_ROOTS": os.pathsep.join([*roots, *([own] if own else [])])}
        if "DYN_LORA_DOWNLOADER_PLUGIN" not in self._environ:
            plugins = ([DEMO_PLUGIN] if self._options.demo else []) + ([FILE_PLUGIN] if roots or own else [])
            if not plugins:
                raise UpError(
                    "no source of adapters: allow a folder with --adapters DIR (requests then name file:///DIR/NAME),"
                    " or name a plugin in DYN_LORA_DOWNLOADER_PLUGIN"
                )
            environ["DYN_LORA_DOWNLOADER_PLUGIN"] = ",".join(plugins)
        return environ

    def _worker_environ(self, model: str, names: str, port: int) -> dict[str, str]:
        options = self._options
        environ = {
            "LORELAY_ENGINE": options.engine,
            "LORELAY_MODEL": model,
            "LORELAY_SERVED_MODEL_NAME": names,
            "LORELAY_ENGINE_ARGS": options.engine_args,
            "DYN_LORA_ENABLED": "true",
            "DYN_LORA_RUNTIME_LOAD_ENABLED": "true",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "DYN_SYSTEM_PORT": str(port),
        }
        if options.demo:
            environ["LORELAY_MAX_MODEL_LEN"] = self._environ.get("LORELAY_MAX_MODEL_LEN", "1024")
        return environ

    def _service(self, component: str, environ: Mapping[str, str], name: str = "") -> Child:
        name = name or component
        command = [sys.executable, "-m", "lorelay.cli", component]
        with_id = {**environ, "LORELAY_INSTANCE_ID": secrets.token_hex(8)}
        return self._children.start(Child(name, command, self._data / "logs" / f"{name}.log", with_id))

    def _await(self, is_up: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
        """Wait until `is_up`, saying from time to time what for.

        Raises:
            ChildDiedError: A process ended meanwhile.
            UpError: `limit_s` passed.
        """
        start = time.monotonic()
        said_at, said = start, ""
        while not is_up():
            self._children.check()
            now = time.monotonic()
            if now - start > limit_s:
                raise UpError(f"{what()} was not ready after {limit_s:g} s; see {self._data / 'logs'}")
            if now - said_at > (SAY_AFTER_S if what() != said else 5 * SAY_AFTER_S):
                said_at, said = now, what()
                _say(f"waiting for {said} … {now - start:.0f} s")
            time.sleep(POLL_S)

    def _introduce(self, host: str, names: str, nats_port: int, etcd_port: int) -> None:
        url = f"http://{host}:{self._http_port}"
        name = names.rsplit(",", maxsplit=1)[-1].strip()
        took_s = time.monotonic() - self._started
        _say(f"ready after {took_s:.1f} s: {url}")
        _say(f"management of the workers: {', '.join(f'http://127.0.0.1:{port}' for port in self._system_ports)}")
        _say(f"logs: {self._data / 'logs'}   NATS: nats://127.0.0.1:{nats_port}   etcd: http://127.0.0.1:{etcd_port}")
        if self._options.demo:
            models = [name, *(f"{name}|{source}" for source in DEMO_SOURCES)]
        else:
            models = [name, *(f"{name}|file://{path.absolute()}/ADAPTER" for path in self._options.adapters[:1])]
        _say("try, in another terminal:")
        for model in models:
            body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
            text = msgspec.json.encode({**body, "max_tokens": 40, "temperature": 0}).decode()
            print(f"\n  curl -s {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{text}'")
        print(f"\n  nats --server nats://127.0.0.1:{nats_port} sub 'lorelay.*.lora.>'    # events, with the NATS CLI")
        print("\nCtrl-C stops everything.", flush=True)


def _is_ready(host: str, port: int) -> bool:
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(host, port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200  # noqa: PLR2004 - OK
        finally:
            connection.close()
    return False


def _progress(worker: Child) -> str:
    """Return the worker's name with the last step of its engine's start that its log tells."""
    for line in reversed(worker.tail()):
        with suppress(msgspec.DecodeError):
            step = msgspec.json.decode(line, type=dict[str, object]).get("step")
            if step:
                return f"{worker.name} ({step})"
    return worker.name


@contextmanager
def _signals_stop() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Stopped

    with _handlers(stop):
        yield


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _say(text: str) -> None:
    print(f"lorelay: {text}", flush=True)


def _complain(text: str) -> None:
    sys.stderr.write(f"lorelay: {text}\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:  # noqa: PLR2004 - more do not fit on a machine
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 64")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:  # noqa: PLR2004 - the largest port
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)
