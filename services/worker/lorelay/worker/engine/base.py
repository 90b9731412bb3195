"""The seam to an engine: an ASGI application, and the adapters it holds.

Everything the worker needs of an engine is here, so that the rest of it does not know which one runs.  An
engine serves its HTTP routes through `Engine.app`; a request names an adapter by the name it was loaded under.
Only the worker's residency module calls `load` and `unload`, one at a time; requests and `loaded_ids` may come at any
moment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lorelay.proto.records import ModelFacts

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """An adapter as an engine sees it."""

    name: str
    """What a request's `model` says to be answered through it; for a runtime adapter, its key."""
    engine_id: int
    """A small positive integer, unique within the worker's life."""
    path: Path
    """A verified snapshot's directory.  Its name is content-addressed, so one path never changes content."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine was configured to hold."""

    max_adapters: int
    """Adapters that may be loaded at once (on the host; vLLM's max_cpu_loras).  0: no LoRA."""
    max_adapters_per_batch: int
    """Different adapters in one engine step (vLLM's max_loras)."""
    max_rank: int
    """The highest rank that can be loaded, as effective in the engine."""
    max_concurrent_requests: int
    """Requests that run at once (vLLM's max_num_seqs)."""
    target_modules: tuple[str, ...] = ()
    """Module names that can take an adapter; empty: every module the engine supports."""


class EngineError(Exception):
    """The engine refused or failed an adapter operation; its standing is unharmed.  The text stays in the log."""


class EngineDeadError(Exception):
    """The engine cannot serve any more; the worker must leave."""


class Engine(Protocol):
    """What the worker needs of an engine."""

    @property
    def app(self) -> ASGIApp:
        """The ASGI application that answers every route in `facts.routes`."""

    @property
    def facts(self) -> ModelFacts:
        """What is true of the served model, for the model card."""

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold."""

    async def load(self, adapter: EngineAdapter) -> None:
        """Bring `adapter` into the engine and make its name answer.

        Raises:
            EngineError: The engine does not hold it.
            EngineDeadError: The engine is gone.

        Cancellation: the engine may or may not hold it; ask `loaded_ids`.  (The worker shields this call.)
        """

    async def unload(self, adapter: EngineAdapter) -> None:
        """Take `adapter` out of the engine; its name answers 404 afterwards.  Not there: no error.

        Raises:
            EngineError: The engine still holds it.
            EngineDeadError: The engine is gone.
        """

    async def loaded_ids(self) -> frozenset[int]:
        """Return the engine ids of the adapters the engine itself says it holds."""

    async def check_health(self) -> None:
        """Return if the engine can serve.

        Raises:
            EngineDeadError: It cannot.
        """

    async def aclose(self) -> None:
        """Stop the engine.  Idempotent."""
