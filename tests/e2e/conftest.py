"""What the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorelay.cli.demo_model import FOLDER_NAME, DemoModelError, make_demo_model

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the demo's base model, made once per checkout; `make demo` uses the same folder."""
    try:
        return make_demo_model(_ROOT / ".lorelay/models" / FOLDER_NAME, print)
    except DemoModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_adapters() -> Path:
    """Return the folder that holds the demo's adapters, `pirate` and `robot`."""
    return _ROOT / "cli/lorelay/cli/demo_adapters"
