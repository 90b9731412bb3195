"""Whether there is a Docker engine to test on."""

from __future__ import annotations

import os
import subprocess

import pytest

WITHOUT_DOCKER = "LORELAY_TEST_WITHOUT_DOCKER"
NO_ENGINE = f"""no Docker engine answers `docker info`, so what runs in containers is not tested.
Start one and point DOCKER_HOST to it, or set {WITHOUT_DOCKER}=1 to go without these tests.
docker says: """


def require_engine() -> None:
    """Return if there is an engine; else fail loudly, or skip if the environment says so."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30)  # noqa: PLW1510, S607
        problem = done.stderr if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if not problem:
        return
    if os.environ.get(WITHOUT_DOCKER) == "1":
        pytest.skip(f"no Docker engine, and {WITHOUT_DOCKER}=1")
    pytest.fail(NO_ENGINE + problem)
