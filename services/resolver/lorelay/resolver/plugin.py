"""What a resolver plugin is: Dynamo's runtime-LoRA plugin ABI, version 2, so that its plugins run here unchanged.

A plugin turns a source into a local directory.  It runs in the resolver's process, away from engines and prompts, and
is the only code that holds a provider's credentials.  What its exceptions say stays in the log; a client learns the
kind of failure, and the `public` text of our own error classes where there is one.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import anyio.to_thread
import structlog

log = structlog.get_logger()

PROTOCOL_VERSION = 2
VARIABLE = "DYN_LORA_DOWNLOADER_PLUGIN"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class ResolveContext:
    """What a plugin may know of the request.  Must match Dynamo's in names and order."""

    adapter_key: str
    base_model_name: str
    cache_root: Path
    """A directory of this call's own, on the cache's file system; removed after the call's result was copied."""
    deadline_monotonic: float
    """When the call is cancelled, on `time.monotonic()`."""
    max_download_bytes: int
    request_id: str


@dataclass(frozen=True, slots=True)
class ResolvedLoRA:
    """Where a plugin put the adapter.  Must match Dynamo's in names and order."""

    local_path: Path
    """A directory with the adapter's files; other files in it are ignored."""
    source_revision: str
    """What names this content at its provider and never another one (a commit, a digest).  Empty: nothing does."""
    size_bytes: int | None
    metadata: Mapping[str, str] | None = None


class PluginError(Exception):
    """A failure that a plugin knows; any other exception of it is a defect of the plugin.

    Args:
        detail: For the log.
        public: For the client: no path, no secret, no provider's words.  Empty: a fixed sentence.
    """

    def __init__(self, detail: str = "", *, public: str = "") -> None:
        super().__init__(detail)
        self.public = public


class PluginConfigurationError(PluginError):
    """The plugin cannot work as it is configured."""


class AdapterNotFoundError(PluginError):
    """The provider has no such adapter."""


class AdapterForbiddenError(PluginError):
    """The deployment does not allow this source."""


class SourceUnavailableError(PluginError):
    """The provider could not be asked now; later may be better."""


@runtime_checkable
class DownloaderPlugin(Protocol):
    """A resolver plugin."""

    @property
    def protocol_version(self) -> int:
        """2.  A plain attribute will do."""

    @property
    def schemes(self) -> AbstractSet[str]:
        """The schemes of the sources it takes, in lower case; not empty."""

    async def resolve(self, *, source_uri: str, context: ResolveContext) -> ResolvedLoRA | None:
        """Return where the adapter at `source_uri` now is, or None: not mine, ask the next plugin.

        Raises:
            PluginError: One of its subclasses, if it is known why there is no answer.

        Cancellation: must propagate.  What was written under `context.cache_root` is removed by the caller.
        """


def load_plugin(spec: str) -> DownloaderPlugin:
    """Return the plugin that `module:object` names: an instance, a class or a factory, both without arguments.

    Raises:
        PluginConfigurationError: One line that names the variable, the value and what is wrong with it.
    """
    if _SPEC.fullmatch(spec) is None:
        raise _bad(spec, "expected module:object")
    module_name, _, attribute = spec.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise _bad(spec, f"cannot import {module_name}: {_one_line(error)}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise _bad(spec, f"{module_name} has no {attribute}")
        found = getattr(found, name)
    if isinstance(found, type) or not hasattr(found, "resolve"):
        if not callable(found):
            raise _bad(spec, "neither a plugin nor something that makes one")
        try:
            found = found()
        except Exception as error:
            raise _bad(spec, f"making the plugin failed: {_one_line(error)}") from error
    return check_plugin(found, spec)


def check_plugin(plugin: object, spec: str) -> DownloaderPlugin:
    """Return `plugin` if it keeps the ABI.

    Raises:
        PluginConfigurationError: One line that says how it does not.
    """
    if not callable(getattr(plugin, "resolve", None)):
        raise _bad(spec, "the plugin has no method resolve")
    version = getattr(plugin, "protocol_version", None)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise _bad(spec, f"the plugin's protocol_version is {version!r}; expected {PROTOCOL_VERSION}")
    schemes = getattr(plugin, "schemes", None)
    if not isinstance(schemes, AbstractSet) or not schemes:
        raise _bad(spec, f"the plugin's schemes are {schemes!r}; expected a non-empty set of strings")
    for scheme in schemes:
        if not isinstance(scheme, str) or _SCHEME.fullmatch(scheme) is None:
            raise _bad(spec, f"the plugin's scheme {scheme!r} is not a lower-case URI scheme")
    if not isinstance(plugin, DownloaderPlugin):
        raise _bad(spec, "the plugin lacks a part of the ABI")
    return plugin


class Chain:
    """Plugins in the order they are asked.

    Args:
        plugins: Checked plugins.
        allowed_schemes: DYN_LORA_ALLOWED_SCHEMES; empty: whatever the plugins take.

    Raises:
        PluginConfigurationError: No scheme is left.
    """

    def __init__(self, plugins: Sequence[DownloaderPlugin], allowed_schemes: Iterable[str] = ()) -> None:
        self._plugins = tuple(plugins)
        offered = frozenset(scheme for plugin in plugins for scheme in plugin.schemes)
        allowed = frozenset(scheme.lower() for scheme in allowed_schemes)
        self.schemes: frozenset[str] = offered & allowed if allowed else offered
        """What can be resolved."""
        if not plugins:
            raise PluginConfigurationError(f"no source can be resolved: set {VARIABLE} or LORELAY_FILE_ROOTS")
        if not self.schemes:
            raise PluginConfigurationError(
                f"DYN_LORA_ALLOWED_SCHEMES={','.join(sorted(allowed))!r}: none of the plugins' schemes"
                f" ({', '.join(sorted(offered))})"
            )

    @property
    def name(self) -> str:
        """The plugins' class names, for records and logs."""
        return ",".join(type(plugin).__name__ for plugin in self._plugins)

    async def resolve(self, source_uri: str, scheme: str, context: ResolveContext) -> ResolvedLoRA:
        """Return the answer of the first plugin that has one.

        A plugin that breaks does not keep the next one from being asked; its failure stands if nobody else answers.
        A plugin that knows why there is no answer (not found, forbidden, unavailable) ends the search.

        Raises:
            PluginError: A plugin knows why there is no answer, or nobody takes the source (not found).
            Exception: What a broken plugin raised.

        Cancellation: propagates to the plugin that is being asked.
        """
        broken: Exception | None = None
        for plugin in self._plugins:
            if scheme not in plugin.schemes:
                continue
            try:
                resolved = await plugin.resolve(source_uri=source_uri, context=context)
                if resolved is not None:
                    return await anyio.to_thread.run_sync(_checked, plugin, resolved)
            except (AdapterNotFoundError, AdapterForbiddenError, SourceUnavailableError):
                raise
            except Exception as error:  # noqa: BLE001 - strangers' code; kept and raised below
                log.warning("plugin failed", plugin=type(plugin).__name__, key=context.adapter_key, error=repr(error))
                broken = broken or error
        if broken is not None:
            raise broken
        raise AdapterNotFoundError("no plugin takes it", public="No resolver plugin takes this source.")


def _checked(plugin: DownloaderPlugin, resolved: ResolvedLoRA) -> ResolvedLoRA:
    """Return what a plugin said, with a real path.

    Only attributes are asked, so a plugin may return Dynamo's own class.  A plugin whose paths clients choose says
    `returns_real_paths = True`: a symlink that is on such a path by the time it is opened is refused, not followed.
    """
    path = Path(resolved.local_path)
    if not path.is_absolute() or not isinstance(resolved.source_revision, str):
        raise TypeError(f"not an absolute local_path and a source_revision: {resolved!r}")
    if not getattr(plugin, "returns_real_paths", False):
        path = Path(os.path.realpath(path))
    return ResolvedLoRA(path, resolved.source_revision, resolved.size_bytes, resolved.metadata)


def _bad(spec: str, what: str) -> PluginConfigurationError:
    return PluginConfigurationError(f"{VARIABLE}={spec!r}: {what}")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
