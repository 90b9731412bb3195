"""The verdict on an adapter: may it be served on this base by this worker, and if not, everything that is wrong.

A pure function of a directory, the base's facts and the worker's limits.  It uses no network and opens nothing but the
files an adapter consists of; what the adapter's config says about its base is compared, never followed.  It is given
twice: on the source before anything is copied, without looking at every number, and on the private copy, complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorelay.proto.adapters import CONFIG_FILE, EMBEDDINGS_FILE, SNAPSHOT_FILES, WEIGHTS_FILE
from lorelay.proto.records import ModelFacts
from lorelay.resolver.adapter_config import MAX_CONFIG_BYTES, AdapterConfig, read_config
from lorelay.resolver.members import MAX_NAMES, MemberError, Members
from lorelay.resolver.modules import DTYPES, Coverage, check_tensors
from lorelay.resolver.reasons import Findings, Reason, show
from lorelay.resolver.safetensors_header import HeaderError, Tensor, read_header
from lorelay.resolver.values import check_values

INDEX_FILE = "adapter_model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the worker can hold."""

    max_rank: int
    target_modules: tuple[str, ...] = ()
    """The only modules it adapts; empty: all."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome.  Accepted if there are no reasons."""

    reasons: tuple[Reason, ...]
    """Everything that is wrong."""
    rank: int = 0
    """The highest rank of its tensors."""
    target_modules: tuple[str, ...] = ()
    """Last names of the adapted modules, sorted."""
    base_verified_by_name: bool = False
    """True: the adapter's config names this base.  False says little: names are paths, mirrors, quantised copies."""

    @property
    def accepted(self) -> bool:
        """True if the adapter may be served."""
        return not self.reasons


def judge(
    directory: Path,
    facts: ModelFacts,
    limits: Limits,
    *,
    is_source: bool = False,
    trusted_root: Path | None = None,
    check_numbers: bool = True,
    still_wanted: Callable[[], None] = lambda: None,
) -> Verdict:
    """Return the verdict on the adapter in `directory`.  Blocks: call it in a thread.

    Args:
        directory: Absolute and real.
        facts: Of the base it would go on.
        limits: Of the worker.
        is_source: True: files that are no part of an adapter are ignored.  False (a snapshot): they are refused.
        trusted_root: See `Members`.
        check_numbers: False leaves out the scan for NaN and infinities, which reads all of the weights.
        still_wanted: Called now and then; raises to stop.

    Raises:
        DirectoryError: `directory` cannot be opened.
        OSError: The file system failed, or a file was cut while it was read.
    """
    findings = Findings()
    coverage = Coverage(rank=0, target_modules=())
    with Members(directory, trusted_root=trusted_root) as members:
        names = members.names()
        _check_names(names, findings, is_source=is_source)
        config = _read_config(members, findings) if CONFIG_FILE in names else None
        if config is not None:
            _check_config(config, facts, limits, findings)
        if WEIGHTS_FILE in names:
            scan = still_wanted if check_numbers else None
            coverage = _check_weights(members, config, facts, limits, findings=findings, still_wanted=scan)
    if config is None or config.rank is None or config.rank <= limits.max_rank:  # else it is said already
        _check_max_rank(WEIGHTS_FILE, "tensors of rank", coverage.rank, limits, findings)
    return Verdict(
        reasons=findings.reasons(),
        rank=coverage.rank,
        target_modules=coverage.target_modules,
        base_verified_by_name=config is not None and config.base_name in {facts.name, *facts.aliases},
    )


def _check_names(names: list[str], findings: Findings, *, is_source: bool) -> None:
    """Check what is there; a source without weights is told what it has instead."""
    if not is_source:
        for name in names:
            if name not in SNAPSHOT_FILES:
                findings.add("unexpected_file", f"{show(name)} is no part of a snapshot.", group="extra")
    if len(names) >= MAX_NAMES:
        findings.add("too_many_files", f"The source has {MAX_NAMES} files or more; expected an adapter's directory.")
    if EMBEDDINGS_FILE in names:
        findings.add("unsupported_new_embeddings", f"{EMBEDDINGS_FILE} holds embeddings of added tokens: not served.")
    if CONFIG_FILE not in names:
        what = "a full model" if "config.json" in names else "no adapter"
        findings.add("not_an_adapter", f"There is no {CONFIG_FILE}: this is {what}.")
    if WEIGHTS_FILE in names:
        return
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    shards = [name for name in names if name.startswith("adapter_model-") and name.endswith(".safetensors")]
    if shards or INDEX_FILE in names:
        findings.add(
            "sharded_weights",
            f"The weights are split into {len(shards)} files beside {INDEX_FILE}; expected one {WEIGHTS_FILE}.",
        )
    elif pickles:
        findings.add(
            "pickle_not_allowed",
            f"The weights are in {show(pickles[0])}, a pickle, which is never opened; expected {WEIGHTS_FILE}.",
        )
    else:
        findings.add("no_weights", f"There is no {WEIGHTS_FILE}.")


def _read_config(members: Members, findings: Findings) -> AdapterConfig | None:
    try:
        with members.open(CONFIG_FILE) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_CONFIG_BYTES:
                findings.add("config_size", f"{CONFIG_FILE} has {size} bytes; expected at most {MAX_CONFIG_BYTES}.")
                return None
            data = file.read(MAX_CONFIG_BYTES)
    except MemberError as error:
        findings.add(error.reason.code, error.reason.sentence)
        return None
    return read_config(data, findings)


def _check_config(config: AdapterConfig, facts: ModelFacts, limits: Limits, findings: Findings) -> None:
    if config.rank is not None:
        _check_max_rank(CONFIG_FILE, "r of", config.rank, limits, findings)
    if config.base_class is not None and facts.architecture and config.base_class != facts.architecture:
        findings.add(
            "base_mismatch",
            f"{CONFIG_FILE}: auto_mapping.base_model_class is {show(config.base_class)}; the base is a"
            f" {facts.architecture}.",
        )


def _check_max_rank(file: str, what: str, rank: int, limits: Limits, findings: Findings) -> None:
    if rank > limits.max_rank:
        findings.add("rank_too_high", f"{file} has {what} {rank}; the worker takes at most {limits.max_rank}.")


def _check_weights(
    members: Members,
    config: AdapterConfig | None,
    facts: ModelFacts,
    limits: Limits,
    *,
    findings: Findings,
    still_wanted: Callable[[], None] | None,
) -> Coverage:
    try:
        with members.open(WEIGHTS_FILE) as file:
            tensors = read_header(file, os.fstat(file.fileno()).st_size, WEIGHTS_FILE)
            coverage = check_tensors(tensors.values(), config, facts, limits.target_modules, findings)
            if still_wanted is not None:
                numbers: list[Tensor] = [tensor for tensor in tensors.values() if tensor.dtype in DTYPES]
                check_values(file, numbers, facts.dtype, findings, still_wanted)
            return coverage
    except MemberError as error:
        findings.add(error.reason.code, error.reason.sentence)
    except HeaderError as error:
        for reason in error.reasons:
            findings.add(reason.code, reason.sentence)
    return Coverage(rank=0, target_modules=())
