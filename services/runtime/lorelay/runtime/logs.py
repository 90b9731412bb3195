"""Logs: JSON lines on standard error, one event name per fact, or coloured text on a terminal.

Standard logging (nats-py, uvicorn, vLLM) goes through the same processors, so that a process writes one kind of line.
"""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("json", "text")


def configure(component: str, instance: str, *, level: str = "info", text: bool = False) -> None:
    """Set up logging for this process.

    Args:
        component: `frontend`, `worker` or `resolver`; stands in every line, as does `instance`.
        instance: The process's instance id.
        level: One of `LEVELS`.
        text: True writes for a reader instead of JSON.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if text else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("nats", "uvicorn.access", "httpx"):
        logging.getLogger(noisy).setLevel("WARNING")
    # Our applications log their own failures; of a client that left in the middle uvicorn would make an error.
    logging.getLogger("uvicorn.error").setLevel("CRITICAL")
    structlog.contextvars.bind_contextvars(component=component, instance=instance)
