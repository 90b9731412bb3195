"""vLLM as an engine, in this process: its ASGI application, and its adapters.

This module and its neighbours `vllm_*` are the only ones that import vLLM, and only inside
functions, so that a worker without it can say so in one line.  The application is vLLM's own (`build_app`), so its
routes, templates and parsers answer a base and an adapter alike.  Only model requests reach it: vLLM's routes that load
adapters, scale or profile are shut off.

What a reader must not break:

- An adapter's name answers only while the engine holds it: `load` registers the name after the engine's own list has
  the id, `unload` forgets the name first.
- vLLM drops its oldest adapter without a word when it is full, and loads one that is missing again from its path in
  the middle of a step, where a missing file ends the engine.  So `load` refuses when the engine is full, and nobody
  unloads an adapter that a request in flight still uses (the worker's residency sees to that).
- On a CPU vLLM answers requests to the base through an adapter, unless `vllm_cpu_lora` mends it before the first one.
- vLLM's calls hang for ever if its engine process dies under them: every one goes through `_call`, which watches.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.to_thread
import msgspec

from lorelay.proto.records import ModelFacts
from lorelay.worker.engine.base import EngineDeadError, EngineError, EngineLimits
from lorelay.worker.engine.vllm_launch import (
    EngineStartError,
    VllmSettings,
    build_llm,
    import_vllm,
    legal_rank,
    parse_arguments,
    stop_llm,
)

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncIterator, Awaitable

    from psutil import Process

    from lorelay.worker.engine.base import ASGIApp, EngineAdapter, Receive, Scope, Send

__all__ = ["MODEL_ROUTES", "EngineStartError", "VllmEngine", "VllmSettings", "start_vllm"]

Report = Callable[[str], None]
_T = TypeVar("_T")

MODEL_ROUTES: Final = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/detokenize",
        "/generative_scoring",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""POST routes of vLLM 0.32 that are a request to a model, named in the `model` of a JSON body.

A route that is not listed is not served.  vLLM registers most of them only for a model whose tasks need them.
"""

_DIMENSIONS: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_DEATH_POLL_S: Final = 0.25


@contextlib.asynccontextmanager
async def start_vllm(settings: VllmSettings, report: Report) -> AsyncIterator[VllmEngine]:
    """Start vLLM, yield the engine, and stop it.

    The event loop is not blocked meanwhile.  Start one engine at a time in a process.

    Args:
        settings: What to start.
        report: Told each long step before it begins, one line without a newline.

    Raises:
        ValueError: A setting or a vLLM argument is not one.
        EngineStartError: vLLM is not there, is of another version, or did not come up.

    Cancellation: the start is stopped, and the engine's processes are gone when this returns.
    """
    if not settings.served_names:
        raise ValueError("served_names must name the model")
    if settings.max_loras:
        legal_rank(settings.max_lora_rank)
    started = time.monotonic()
    report("importing vLLM")
    await anyio.to_thread.run_sync(import_vllm, settings)
    args = await anyio.to_thread.run_sync(parse_arguments, settings)
    report(f"starting vLLM with {settings.served_names[0]}: weights and KV cache")
    llm, processes = await build_llm(args)
    try:
        report("building vLLM's routes")
        engine = await _assemble(llm, args, processes)
        report(f"vLLM is up after {time.monotonic() - started:.0f} s")
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await stop_llm(llm, processes)


class VllmEngine:
    """`Engine` on a running AsyncLLM.  Made by `start_vllm`."""

    def __init__(
        self,
        llm: Any,  # noqa: ANN401 - vLLM's AsyncLLM
        app: Any,  # noqa: ANN401 - FastAPI's
        facts: ModelFacts,
        limits: EngineLimits,
        processes: set[Process],
    ) -> None:
        self._llm = llm
        self._processes = processes
        self._inner: ASGIApp = app
        self._names: dict[str, Any] = app.state.openai_serving_models.lora_requests
        self._facts = facts
        self._limits = limits
        self._routes = frozenset(facts.routes)
        self._is_closed = False

    @property
    def app(self) -> ASGIApp:
        """The ASGI application that answers every route in `facts.routes`, and 404 to all else."""
        return self._serve

    @property
    def facts(self) -> ModelFacts:
        """What is true of the served model."""
        return self._facts

    @property
    def limits(self) -> EngineLimits:
        """What this engine can hold, as vLLM understood its settings."""
        return self._limits

    async def load(self, adapter: EngineAdapter) -> None:
        """Bring `adapter` into the engine and make its name answer.  Loaded already: no error.

        Raises:
            EngineError: The engine does not hold it.
            EngineDeadError: The engine is gone.
        """
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - only with vLLM

        self._check_room_for_name(adapter)
        held = await self.loaded_ids()
        if adapter.engine_id not in held and len(held) >= self._limits.max_adapters:
            raise EngineError(f"the engine holds {len(held)} adapters, which is all it can")
        request = LoRARequest(lora_name=adapter.name, lora_int_id=adapter.engine_id, lora_path=str(adapter.path))
        try:
            is_added = await self._call(lambda: self._llm.add_lora(request))
        except EngineError:
            await self._drop(adapter.engine_id)
            raise
        if not is_added and adapter.engine_id not in await self.loaded_ids():
            raise EngineError(f"vLLM did not take the adapter {adapter.name}")
        self._names[adapter.name] = request

    async def unload(self, adapter: EngineAdapter) -> None:
        """Take `adapter` out of the engine.  Not there: no error.

        No request may be using it: vLLM would load it again from its path.

        Raises:
            EngineError: The engine still holds it.
            EngineDeadError: The engine is gone.
        """
        known = self._names.get(adapter.name)
        if known is not None and known.lora_int_id == adapter.engine_id:
            del self._names[adapter.name]
        await self._drop(adapter.engine_id)

    async def loaded_ids(self) -> frozenset[int]:
        """Return the engine ids of the adapters the engine itself says it holds.

        Raises:
            EngineDeadError: The engine is gone.
        """
        if not self._limits.max_adapters:
            return frozenset()
        return frozenset(await self._call(self._llm.list_loras))

    async def check_health(self) -> None:
        """Return if the engine can serve.

        Raises:
            EngineDeadError: It cannot.
        """
        if self._is_closed or self._llm.errored:
            raise EngineDeadError("vLLM's engine process is gone")

    async def aclose(self) -> None:
        """Stop the engine and its processes.  Idempotent; safe to call concurrently.

        Cancellation: the engine may go on stopping; call again.
        """
        self._is_closed = True
        await stop_llm(self._llm, self._processes)

    def _check_room_for_name(self, adapter: EngineAdapter) -> None:
        """Refuse, before the engine is touched, a name that could not be registered after."""
        if not self._limits.max_adapters:
            raise EngineError("the engine was started without LoRA")
        if adapter.name in (self._facts.name, *self._facts.aliases):
            raise EngineError(f"{adapter.name} is a name of the base")
        known = self._names.get(adapter.name)
        wanted = (adapter.engine_id, str(adapter.path))
        if known is not None and (known.lora_int_id, known.lora_path) != wanted:
            raise EngineError(f"{adapter.name} is loaded with another id or from another path")

    async def _drop(self, engine_id: int) -> None:
        """Remove an adapter from the engine if it is there; the engine's own list has the last word."""
        if engine_id not in await self.loaded_ids():
            return
        await self._call(lambda: self._llm.remove_lora(engine_id))
        if engine_id in await self.loaded_ids():
            raise EngineError(f"vLLM still holds the adapter with id {engine_id}")

    async def _call(self, operation: Callable[[], Awaitable[_T]]) -> _T:
        """Await `operation` on the engine process, and stop waiting when that process dies."""
        await self.check_health()
        results: list[_T] = []
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_on_death, tasks.cancel_scope)
            try:
                results.append(await operation())
            except Exception as error:  # noqa: BLE001 - vLLM raises bare Exception for what the engine refused
                failure = error
            tasks.cancel_scope.cancel()
        if results:
            return results[0]
        await self.check_health()
        raise EngineError(f"vLLM refused: {failure}") from failure

    async def _cancel_on_death(self, scope: anyio.CancelScope) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await anyio.sleep(_DEATH_POLL_S)
        scope.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a model request on to vLLM; answer 404 to anything else."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes:
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"the engine serves HTTP requests, not {scope['type']}")
        error = {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": msgspec.json.encode({"error": error})})


async def _assemble(llm: Any, args: Namespace, processes: set[Process]) -> VllmEngine:  # noqa: ANN401 - AsyncLLM
    """Return the engine around a running AsyncLLM."""
    from vllm.entrypoints.launchers.api_server.app_state import (  # noqa: PLC0415 - only with vLLM
        init_app_state,
    )
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415 - only with vLLM
    from vllm.utils.gc_utils import freeze_gc_heap  # noqa: PLC0415 - only with vLLM

    await _prepare_workers(llm)
    tasks = await llm.get_supported_tasks()
    level = logging.getLogger().level
    app = await anyio.to_thread.run_sync(build_app, args, tasks, llm.model_config)
    logging.getLogger().setLevel(level)  # a package of vLLM's routes sets the root's level when it is imported
    await init_app_state(llm, app.state, args, tasks)
    # vLLM's error handlers tell their server to exit when the engine died; here the worker asks `check_health`.
    app.state.server = SimpleNamespace(should_exit=False)
    facts = await anyio.to_thread.run_sync(_read_facts, llm, args, app)
    await anyio.to_thread.run_sync(freeze_gc_heap)  # as vLLM's own server does, whose lifespan is not run here
    return VllmEngine(llm, app, facts, _read_limits(llm), processes)


async def _prepare_workers(llm: Any) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
    """Do in vLLM's worker processes what must be done before any request."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - only with vLLM

    calls: list[tuple[str, tuple[object, ...]]] = [("leave_with", (os.getpid(),))]
    if current_platform.is_cpu() and llm.vllm_config.lora_config:
        calls.append(("mend_cpu_lora", ()))
    for method, arguments in calls:
        done = await llm.collective_rpc(method, args=arguments)
        if not (done and all(done)):
            raise EngineStartError(f"vLLM's workers did not {method}")


def _read_facts(llm: Any, args: Namespace, app: Any) -> ModelFacts:  # noqa: ANN401 - vLLM's
    import vllm  # noqa: PLC0415 - only with vLLM

    model = llm.model_config
    names = [args.served_model_name] if isinstance(args.served_model_name, str) else args.served_model_name
    text_config = model.hf_text_config
    posted = {route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}
    return ModelFacts(
        name=names[0],
        aliases=tuple(names[1:]),
        path_fingerprint=hashlib.sha256(_read_config(model)).hexdigest(),
        architecture=next(iter(getattr(model.hf_config, "architectures", None) or ()), ""),
        dimensions={name: value for name in _DIMENSIONS if isinstance(value := getattr(text_config, name, None), int)},
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        max_context_tokens=model.max_model_len,
        routes=tuple(sorted(posted & MODEL_ROUTES)),
        engine="vllm",
        engine_version=vllm.__version__,
    )


def _read_config(model: Any) -> bytes:  # noqa: ANN401 - vLLM's ModelConfig
    """Return the bytes of the model's config.json; of the parsed config, if there is no such file."""
    from vllm.transformers_utils.repo_utils import get_hf_file_bytes  # noqa: PLC0415 - only with vLLM

    content: bytes | None = get_hf_file_bytes("config.json", model.model, model.revision)
    return content or str(model.hf_config.to_json_string()).encode()


def _read_limits(llm: Any) -> EngineLimits:  # noqa: ANN401 - vLLM's AsyncLLM
    config = llm.vllm_config
    lora = config.lora_config
    return EngineLimits(
        max_adapters=(lora.max_cpu_loras or lora.max_loras) if lora else 0,
        max_adapters_per_batch=lora.max_loras if lora else 0,
        max_rank=lora.max_lora_rank if lora else 0,
        max_concurrent_requests=config.scheduler_config.max_num_seqs,
        target_modules=tuple(lora.target_modules or ()) if lora else (),
    )
