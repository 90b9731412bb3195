"""`file:///ABSOLUTE/PATH`: adapters in directories of this machine, below roots that the operator allows.

A path is taken byte for byte: nothing is percent-decoded, `?` and `#` are letters like others.  Outside the roots
nothing is looked at, so a client cannot learn what exists there: the path is first contained as text (no `..`), then
followed, then contained again.  What the directory is when its files are opened is checked once more by the opener.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import anyio.to_thread

from lorelay.resolver.plugin import (
    PROTOCOL_VERSION,
    AdapterForbiddenError,
    AdapterNotFoundError,
    PluginConfigurationError,
    ResolveContext,
    ResolvedLoRA,
    SourceUnavailableError,
)

VARIABLE = "LORELAY_FILE_ROOTS"
_PREFIX = "file:///"
_NEVER = (Path("/dev"), Path("/proc"), Path("/sys"))
"""Not even below an allowed root: what is there is no file."""


class FilePlugin:
    """Takes `file` sources below `roots`.

    Raises:
        PluginConfigurationError: A root is no directory, or there is none.
    """

    protocol_version = PROTOCOL_VERSION
    schemes = frozenset({"file"})
    returns_real_paths = True
    """Clients choose the paths: see `lorelay.resolver.plugin`."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = tuple(Path(os.path.normpath(root)) for root in roots)
        if not self._roots:
            raise PluginConfigurationError(f"{VARIABLE} names no directory")
        for root in self._roots:
            if not root.is_absolute() or not root.is_dir():
                raise PluginConfigurationError(f"{VARIABLE}: {str(root)!r} is not an absolute path of a directory")
        self._real_roots = tuple(Path(os.path.realpath(root)) for root in self._roots)

    async def resolve(self, *, source_uri: str, context: ResolveContext) -> ResolvedLoRA | None:
        """Return the directory itself, without a revision: only the content's digest tells versions of it apart.

        Raises:
            AdapterForbiddenError: Not below a root, whether or not something is there.
            AdapterNotFoundError: Below a root, and not there or no directory.
            SourceUnavailableError: Below a root, and the resolver may not read it.
        """
        del context
        scheme, _, _ = source_uri.partition(":")
        if scheme.lower() != "file":
            return None
        return await anyio.to_thread.run_sync(self._find, source_uri)

    def _find(self, source_uri: str) -> ResolvedLoRA:
        if source_uri[: len(_PREFIX)].lower() != _PREFIX:
            raise AdapterForbiddenError(
                source_uri, public="A file source must be file:///ABSOLUTE/PATH, without a host."
            )
        path = Path(source_uri[len(_PREFIX) - 1 :])
        if ".." in path.parts or not self._contains(path, self._roots + self._real_roots):
            raise _forbidden(path)
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:  # what no file system can hold
            raise AdapterNotFoundError(str(error), public="The file source does not exist.") from error
        if not self._contains(real, self._real_roots):
            raise _forbidden(real)
        try:
            mode = real.stat().st_mode
            readable = os.access(real, os.R_OK | os.X_OK)
        except PermissionError as error:
            raise _unreadable(real) from error
        except OSError as error:
            raise AdapterNotFoundError(str(error), public="The file source does not exist.") from error
        if not stat.S_ISDIR(mode):
            raise AdapterNotFoundError(str(real), public="The file source is not a directory.")
        if not readable:
            raise _unreadable(real)
        return ResolvedLoRA(local_path=real, source_revision="", size_bytes=None)

    @staticmethod
    def _contains(path: Path, roots: Iterable[Path]) -> bool:
        return any(path.is_relative_to(root) for root in roots) and not any(path.is_relative_to(p) for p in _NEVER)


def _forbidden(path: Path) -> AdapterForbiddenError:
    return AdapterForbiddenError(str(path), public="The file source is not below a directory this deployment allows.")


def _unreadable(path: Path) -> SourceUnavailableError:
    return SourceUnavailableError(str(path), public="The resolver may not read the file source.")
