"""Starts and stops vLLM's processes: its environment, its command line, and a start that can be cancelled.

Knows nothing of adapters or requests; `vllm_engine` builds on it.  vLLM is imported inside functions only, after its
environment is set.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

from lorelay.worker.engine.vllm_extension import EXTENSION

if TYPE_CHECKING:
    from argparse import Namespace

    from psutil import Process

SUPPORTED_VLLM: Final = (0, 32)
"""Major and minor version.  What is used of vLLM is not its stable interface, so no other version is tried."""
LEGAL_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Must match `MaxLoRARanks` in vLLM 0.32, config/lora.py."""

_CPU_KV_CACHE_BYTES: Final = 1 << 30
"""KV cache on a CPU when nobody says otherwise; vLLM's own default is a share of all the machine's memory."""
_ENGINE_PROCESS_NAMES: Final = ("EngineCore", "VLLM_DP_Coordinator")
_STOP_POLL_S: Final = 0.1
_STOP_TIMEOUT_S: Final = 15.0
"""How long the engine process may take to shut down before vLLM kills it."""
_LEAVE_TIMEOUT_S: Final = 3.0
"""How long any other may take to follow it."""

_log = logging.getLogger(__name__)


class EngineStartError(Exception):
    """The engine cannot be started here; the text is one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What vLLM is started with."""

    model: str
    """A folder, or a name on a model hub.  With a folder, nothing is asked of a hub."""
    served_names: tuple[str, ...]
    """The names that answer as the base; the canonical one first, then its aliases."""
    dtype: str = "auto"
    """vLLM's `--dtype`.  `auto` is float32 on a CPU: bfloat16 is several times slower without AVX-512-BF16, and with it
    vLLM 0.32 was seen to answer a base's request wrongly (docs/how-to/run-on-cpu.md)."""
    max_model_len: int | None = None
    """Longest context, in tokens; None: the model's own."""
    max_num_seqs: int | None = None
    """Requests that run at once; None: vLLM's choice."""
    max_loras: int = 4
    """Different adapters in one engine step; 0: no LoRA at all."""
    max_cpu_loras: int | None = None
    """Adapters that may be loaded at once; None: `max_loras`."""
    max_lora_rank: int = 16
    """Highest rank that can be loaded; rounded up to one that vLLM takes."""
    enforce_eager: bool = False
    """True: no graphs are captured.  Starts faster, runs slower on a GPU; makes no difference on a CPU."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that vLLM may take, in (0, 1]; None: vLLM's default."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache; None: vLLM's choice on a GPU, 1 GiB on a CPU."""
    log_level: str = "ERROR"
    """Of vLLM's own log lines, which go to the standard error; `VLLM_LOGGING_LEVEL` outranks it."""
    arguments: tuple[str, ...] = ()
    """More of vLLM's command line, as it is; what it says outranks the settings above."""


def legal_rank(rank: int) -> int:
    """Return the least rank that vLLM takes as `max_lora_rank` and that is at least `rank`.

    Raises:
        ValueError: There is none.
    """
    if rank < 1:
        raise ValueError(f"max_lora_rank must be at least 1, not {rank}")
    for legal in LEGAL_RANKS:
        if rank <= legal:
            return legal
    raise ValueError(f"max_lora_rank {rank} is above {LEGAL_RANKS[-1]}, the highest that vLLM takes")


def import_vllm(settings: VllmSettings) -> None:
    """Set vLLM's environment and import what is slow to import."""
    _set_environment(settings)
    try:
        import vllm  # noqa: PLC0415 - an extra, and the environment must be set first
    except ImportError as error:
        raise EngineStartError(
            f"vLLM cannot be imported ({error}): pip install 'lorelay[vllm]', or [cpu] without a GPU"
        ) from error
    supported = ".".join(map(str, SUPPORTED_VLLM))
    if tuple(vllm.__version_tuple__[:2]) != SUPPORTED_VLLM:
        raise EngineStartError(f"vLLM {vllm.__version__} is not supported: install {supported}.x")
    import vllm.entrypoints.launchers.api_server.app_state  # noqa: PLC0415 - as above
    import vllm.entrypoints.launchers.app  # noqa: PLC0415 - as above
    import vllm.v1.engine.async_llm  # noqa: PLC0415 - as above


def _set_environment(settings: VllmSettings) -> None:
    """Tell vLLM and the libraries under it what they only take from the environment.

    They read it on import and in the processes they start, so it is this process' own that must be changed: the one
    place where Lorelay does so.
    """
    environ = os.environ  # noqa: TID251 - see above
    # Without these, a client could load adapters itself, or get the base's words for a name that is not loaded; and
    # requests come in process, where a key would lock out the worker.
    forced = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
        "VLLM_SKIP_MODEL_NAME_VALIDATION": "0",
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_API_KEY": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # A fork of a process with gRPC's threads hangs.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    defaults = {
        "VLLM_LOGGING_LEVEL": settings.log_level,
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TOKENIZERS_PARALLELISM": "false",
        # How long vLLM waits for its workers to leave before it sends SIGTERM.  On a CPU they take 2 to 5 s, and a
        # SIGTERM in the middle of that hangs them, and then the engine core, until both are killed.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "10",
    }
    if Path(settings.model).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environ.update(forced)
    for name, value in defaults.items():
        environ.setdefault(name, value)


def parse_arguments(settings: VllmSettings) -> Namespace:
    """Return vLLM's parsed command line for `settings`."""
    from vllm.entrypoints.launchers.cli_args import (  # noqa: PLC0415 - only with vLLM
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.logger import configure_logging_from_args  # noqa: PLC0415 - only with vLLM
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415 - only with vLLM

    parser = make_arg_parser(FlexibleArgumentParser())
    words = [*_own_arguments(settings, _cpu_defaults()), *settings.arguments]
    try:
        args: Namespace = parser.parse_args(words)
    except SystemExit as error:  # argparse has said on the standard error what is wrong
        raise ValueError(f"vLLM does not take these arguments: {' '.join(words)}") from error
    taken = [option for option in ("lora_modules", "default_mm_loras", "api_key") if getattr(args, option)]
    if args.worker_extension_cls != EXTENSION:
        taken.append("worker_extension_cls")
    if taken:
        raise ValueError(f"vLLM's --{taken[0].replace('_', '-')} cannot be set: it is the worker's")
    validate_parsed_serve_args(args)
    configure_logging_from_args(args)
    return args


def _cpu_defaults() -> dict[str, str]:
    """Return the arguments that a CPU needs and a GPU does not; empty on a GPU."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - only with vLLM

    if not current_platform.is_cpu():
        return {}
    defaults = {"--dtype": "float32"}
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):  # noqa: TID251 - vLLM's own, and it outranks the argument
        defaults["--kv-cache-memory-bytes"] = str(_CPU_KV_CACHE_BYTES)
    return defaults


def _own_arguments(settings: VllmSettings, cpu_defaults: dict[str, str]) -> list[str]:
    """Return the command line that says what `settings` says."""
    options: dict[str, object] = {
        **cpu_defaults,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
    }
    if settings.dtype != "auto":
        options["--dtype"] = settings.dtype
    if settings.kv_cache_bytes is not None:
        options["--kv-cache-memory-bytes"] = settings.kv_cache_bytes
    if settings.max_loras:
        options["--max-loras"] = settings.max_loras
        options["--max-cpu-loras"] = settings.max_cpu_loras or settings.max_loras
        options["--max-lora-rank"] = legal_rank(settings.max_lora_rank)
    words = ["--model", settings.model, "--served-model-name", *settings.served_names]
    words += ["--enable-lora"] if settings.max_loras else []
    words += ["--enforce-eager"] if settings.enforce_eager else []
    words += ["--no-use-tqdm-on-load", "--worker-extension-cls", EXTENSION]
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)]
    return words


async def build_llm(args: Namespace) -> tuple[Any, set[Process]]:
    """Return a running AsyncLLM and its processes: the engine core, and the workers that it started.

    Its constructor blocks until the engine process is ready, which can take minutes, and takes no interrupt.  So it
    runs in a thread, and a cancelled start stops the engine process under it, which makes the constructor give up.
    """
    others = _engine_processes()
    is_over = anyio.Event()
    made: list[Any] = []
    failures: list[Exception] = []

    async def build_in_thread() -> None:
        with anyio.CancelScope(shield=True):
            try:
                made.append(await anyio.to_thread.run_sync(_construct, args))
            except Exception as error:  # noqa: BLE001 - told below, without an exception group around it
                failures.append(error)
            is_over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(build_in_thread)
        try:
            await is_over.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await _stop_construction(is_over, others)
                for llm in made:  # it was faster than the cancellation
                    await stop_llm(llm, _engine_processes() - others)
            raise
    for error in failures:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineStartError(f"vLLM did not start: {first_line}") from error
    return made[0], _engine_processes() - others


def _construct(args: Namespace) -> Any:  # noqa: ANN401 - vLLM's AsyncLLM
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - only with vLLM
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415 - only with vLLM
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - only with vLLM

    engine_args = AsyncEngineArgs.from_cli_args(args)
    return AsyncLLM.from_engine_args(engine_args, usage_context=UsageContext.OPENAI_API_SERVER)


async def _stop_construction(is_over: anyio.Event, others: set[Process]) -> None:
    """Stop the engine processes, but for `others`, that a constructor has started or will, until it gives up."""
    import psutil  # noqa: PLC0415 - comes with vLLM

    processes: set[Process] = set()
    while not is_over.is_set():
        processes |= _engine_processes() - others
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        with anyio.move_on_after(_STOP_POLL_S):
            await is_over.wait()
    await anyio.to_thread.run_sync(_kill_remaining, processes)


async def stop_llm(llm: Any, processes: set[Process]) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
    """Shut vLLM down, and leave none of its processes behind."""
    await anyio.to_thread.run_sync(lambda: llm.shutdown(timeout=_STOP_TIMEOUT_S))
    # vLLM closes its sockets but forgets what they were made from; ending that waits for any socket still open.
    with anyio.move_on_after(_LEAVE_TIMEOUT_S):
        await anyio.to_thread.run_sync(llm.engine_core.resources.ctx.term, abandon_on_cancel=True)
    await anyio.to_thread.run_sync(_kill_remaining, processes)


def _engine_processes() -> set[Process]:
    """Return vLLM's processes under this one, of every engine."""
    import psutil  # noqa: PLC0415 - comes with vLLM

    found: set[Process] = set()
    for child in multiprocessing.active_children():
        if child.name.startswith(_ENGINE_PROCESS_NAMES):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(child.pid)
                found |= {process, *process.children(recursive=True)}
    return found


def _kill_remaining(processes: set[Process]) -> None:
    """Give `processes` a moment to leave by themselves, then kill them.  Blocks."""
    import psutil  # noqa: PLC0415 - comes with vLLM

    _, remaining = psutil.wait_procs(processes, timeout=_LEAVE_TIMEOUT_S)
    for process in remaining:
        _log.warning("killing process %d that vLLM left behind", process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(remaining, timeout=_LEAVE_TIMEOUT_S)
