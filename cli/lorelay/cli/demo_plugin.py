"""The demo's resolver plugin: two adapters that come with Lorelay, under the names a W&B artifact would have.

    wandb-artifact:///demo/tones/pirate:v1
    wandb-artifact:///demo/tones/robot:v1

It needs no network and no account, and is an example of the plugin protocol: set
`DYN_LORA_DOWNLOADER_PLUGIN=lorelay.cli.demo_plugin:demo_plugin`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from lorelay.resolver.plugin import AdapterNotFoundError, ResolvedLoRA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lorelay.resolver.plugin import ResolveContext

SCHEME: Final = "wandb-artifact"
PIRATE: Final = f"{SCHEME}:///demo/tones/pirate:v1"
ROBOT: Final = f"{SCHEME}:///demo/tones/robot:v1"

_ADAPTERS: Final = Path(__file__).parent / "demo_adapters"


def demo_plugin() -> DemoPlugin:
    """Return the plugin over the adapters that lie beside this module, in a checkout as in an installed wheel."""
    return DemoPlugin({PIRATE: _ADAPTERS / "pirate", ROBOT: _ADAPTERS / "robot"})


class DemoPlugin:
    """Resolves fixed sources to fixed folders."""

    protocol_version: Final = 2
    schemes: Final = frozenset({SCHEME})

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = dict(folders)

    async def resolve(self, *, source_uri: str, context: ResolveContext) -> ResolvedLoRA | None:
        """Return the folder of `source_uri`; None for another scheme.

        Raises:
            AdapterNotFoundError: No adapter has this name.
        """
        del context  # nothing is downloaded: no deadline, no room in the cache
        if not source_uri.lower().startswith(f"{SCHEME}:"):
            return None
        folder = self._folders.get(source_uri)
        if folder is None:
            names = " and ".join(sorted(self._folders))
            raise AdapterNotFoundError(f"not in the demo: {source_uri!r}", public=f"the demo has only {names}")
        return await anyio.to_thread.run_sync(_describe, folder)


def _describe(folder: Path) -> ResolvedLoRA:
    """Return `folder` with a revision that is its content's digest.  Blocks."""
    digest = hashlib.sha256()
    size_bytes = 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        size_bytes += len(content)
        # Lengths, so that no two folders hash the same bytes.
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return ResolvedLoRA(
        local_path=folder,
        source_revision=f"sha256:{digest.hexdigest()}",
        size_bytes=size_bytes,
        metadata={"tone": folder.name, "origin": "demo"},
    )
