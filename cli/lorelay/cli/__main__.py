"""The `lorelay` command."""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
import sys
from collections.abc import Mapping
from importlib.metadata import version

from lorelay.cli import up

SERVICES = {
    "frontend": "OpenAI HTTP in, bus out",
    "worker": "one engine and its adapters",
    "resolver": "sources in, verified snapshots out",
}
OPTIONS = {
    "frontend": {"--http-host": "DYN_HTTP_HOST", "--http-port": "DYN_HTTP_PORT"},
    "worker": {
        "--engine": "LORELAY_ENGINE",
        "--model": "LORELAY_MODEL",
        "--served-model-name": "LORELAY_SERVED_MODEL_NAME",
        "--engine-args": "LORELAY_ENGINE_ARGS",
        "--system-host": "DYN_SYSTEM_HOST",
        "--system-port": "DYN_SYSTEM_PORT",
    },
    "resolver": {"--plugin": "DYN_LORA_DOWNLOADER_PLUGIN", "--cache": "DYN_LORA_PATH"},
}
"""Options of a service: each sets the environment variable beside it."""
COMMON = {
    "--namespace": "DYN_NAMESPACE",
    "--nats": "NATS_SERVER",
    "--etcd": "ETCD_ENDPOINTS",
    "--log-level": "LORELAY_LOG_LEVEL",
    "--log-format": "LORELAY_LOG_FORMAT",
}


def main() -> None:
    """Run the command that the arguments name."""
    sys.exit(run(sys.argv[1:], os.environ))  # noqa: TID251 - the one place that reads the environment


def run(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "up":
        return up.run(options, environ)
    return _run_service(options, environ)


def _run_service(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run one service: only its own package is imported, so an image needs only its own extra."""
    from lorelay.runtime import logs, process  # noqa: PLC0415 - `up` needs none of this

    given = {
        variable: value
        for option, variable in {**OPTIONS[options.command], **COMMON}.items()
        if (value := getattr(options, option.removeprefix("--").replace("-", "_"))) is not None
    }
    settings = {"LORELAY_INSTANCE_ID": secrets.token_hex(8), **{k: v for k, v in environ.items() if v}, **given}
    level = settings.get("LORELAY_LOG_LEVEL", "info").lower()
    form = settings.get("LORELAY_LOG_FORMAT", "text" if sys.stderr.isatty() else "json").lower()
    if level not in logs.LEVELS or form not in logs.FORMATS:
        sys.stderr.write(
            f"lorelay: LORELAY_LOG_LEVEL must be one of {', '.join(logs.LEVELS)} (is {level!r}),"
            f" LORELAY_LOG_FORMAT one of {', '.join(logs.FORMATS)} (is {form!r})\n"
        )
        return process.EXIT_USAGE
    logs.configure(options.command, settings["LORELAY_INSTANCE_ID"], level=level, text=form == "text")
    try:
        service = importlib.import_module(f"lorelay.{options.command}.__main__")
    except ModuleNotFoundError as error:
        sys.stderr.write(f"lorelay: {error.name} is not installed; try: pip install 'lorelay[{options.command}]'\n")
        return process.EXIT_FAILED
    return process.run(lambda stop: service.serve(settings, stop))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lorelay", description="Serve any LoRA adapter, named by its URI in an OpenAI request."
    )
    parser.add_argument("--version", action="version", version=f"lorelay {version('lorelay')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up.add_arguments(
        commands.add_parser(
            "up",
            help="a whole fleet on this machine",
            description="Start nats-server, etcd, a resolver, workers and a frontend here; Ctrl-C stops them.",
        )
    )
    for name, what in SERVICES.items():
        service = commands.add_parser(
            name,
            help=what,
            description=f"Run a {name}: {what}.  Every option sets an environment variable;"
            " docs/reference/settings.md lists them all.",
        )
        for option, variable in {**OPTIONS[name], **COMMON}.items():
            service.add_argument(option, metavar="VALUE", help=f"sets {variable}")
    return parser


if __name__ == "__main__":
    main()
