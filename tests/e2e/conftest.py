"""The demo on real vLLM: one model and one fleet for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorelay.cli.demo_model import FOLDER_NAME, make_demo_model
from lorelay.cli.up import DEMO_ADAPTERS
from support.stack import Stack, stack

_MODELS = Path(__file__).parents[2] / ".lorelay" / "models"
"""Where `make demo` keeps its model too, so that it is made once per checkout."""


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the folder of the demo's base model, made if it is not there."""
    return make_demo_model(_MODELS / FOLDER_NAME, print)


@pytest.fixture(scope="session")
def demo_adapters() -> Path:
    """Return the folder that holds the demo's adapters, `pirate` and `robot`."""
    return DEMO_ADAPTERS


@pytest.fixture(scope="session")
def demo_stack(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run `lorelay up --demo --engine vllm`."""
    data = tmp_path_factory.mktemp("demo")
    (data / "models").symlink_to(demo_model.parent)
    with stack(data, "--demo", "--engine", "vllm", ready_s=300) as running:
        yield running
