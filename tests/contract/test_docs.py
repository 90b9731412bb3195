"""The reference pages say what the code says: codes, settings, events, reasons, log lines, dependencies, links.

A page that lags behind the code is worse than none, so each list is compared in both directions.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lorelay.proto.errors import KINDS, ErrorCode
from lorelay.proto.events import EventKind
from lorelay.resolver.plugin import check_plugin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
SOURCES = sorted((*(ROOT / "services").rglob("*.py"), *(ROOT / "cli").rglob("*.py"), *(ROOT / "proto").rglob("*.py")))
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"))
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)

_VARIABLE = re.compile(r"\b(?:DYN|ETCD|LORELAY|NATS|OTEL)_[A-Z0-9_]*[A-Z0-9]\b")
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SETTINGS_FILES = {"settings.py", "store_settings.py"}
_CLI = ROOT / "cli" / "lorelay" / "cli" / "__main__.py"
_LOG_METHODS = {"debug", "info", "warning", "error", "exception"}


def _rows(page: str) -> Iterator[list[str]]:
    """Yield the cells of every table row of a page of the reference, header rows excepted."""
    for line in (REFERENCE / page).read_text().splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _first_cells(page: str) -> list[str]:
    """Return every word in backquotes in the first cells of a page's tables."""
    return [word for cells in _rows(page) for word in _CODE.findall(cells[0])]


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _differences(page: Iterable[str], code: Iterable[str]) -> dict[str, list[str]]:
    """Return what only one of the two has, so that a failure says what to write or to take out."""
    listed, named = set(page), set(code)
    found = {"only in the code": sorted(named - listed), "only in the page": sorted(listed - named)}
    return {where: names for where, names in found.items() if names}


def _calls(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (what is called, first argument) of every call whose first argument is a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield ast.unparse(node.func), first.value


def test_every_error_code_has_a_row_and_every_row_a_code() -> None:
    assert not _differences(_first_cells("errors.md"), [code.value for code in ErrorCode])


def test_the_rows_of_errors_say_the_status_type_and_retry_of_the_code() -> None:
    for code, status, kind, retry, *rest in _rows("errors.md"):
        expected = KINDS[ErrorCode(code.strip("`"))]
        after = f"{expected.retry_after_s} s" if expected.retry_after_s else "–"  # noqa: RUF001 - a dash, for readers
        assert [status, kind, retry] == [str(expected.status), f"`{expected.type}`", after], code
        assert len(rest) == 2, code
        assert all(rest), f"{code}: says when, and what to do"


def test_every_setting_has_a_row_and_every_row_a_setting() -> None:
    """Settings are what settings modules name, and what the command's options set."""
    files = [path for path in SOURCES if path.name in _SETTINGS_FILES]
    assert len(files) >= 4
    named = {name for path in (*files, _CLI) for text in _strings(path) for name in _VARIABLE.findall(text)}
    assert not _differences(_first_cells("settings.md"), named)


def test_every_event_kind_has_a_row_and_every_row_a_kind() -> None:
    assert not _differences(_first_cells("events.md"), [kind.value for kind in EventKind])


def test_every_reason_of_a_verdict_has_a_row_and_every_row_a_reason() -> None:
    resolver = [path for path in SOURCES if "resolver" in path.parts]
    told = {word for path in resolver for word in _strings(path)}
    listed = set(_first_cells("verdict.md"))
    named = {
        code
        for path in resolver
        for call, code in _calls(path)
        if call in {"findings.add", "Reason"} and re.fullmatch(r"[a-z_]+", code)
    }
    assert not named - listed
    unknown = {code for code in listed if code not in told and code.removeprefix("unsupported_") not in told}
    assert not unknown


def test_every_log_event_has_a_row_and_every_row_an_event() -> None:
    """Programs match on event names, so a new one is written down, and an old one that is gone is taken out."""
    logged = {
        event
        for path in SOURCES
        for call, event in _calls(path)
        if call.rpartition(".")[0] in {"log", "_log"} and call.rpartition(".")[2] in _LOG_METHODS
        if "%" not in event  # vLLM's side uses the standard library's logging
    }
    assert not _differences(_first_cells("logs.md"), logged)


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    groups = project["dependency-groups"].values()
    wanted = [*project["project"]["dependencies"], *(line for part in (*extras, *groups) for line in part)]
    names = {re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in wanted if isinstance(line, str)}
    adr = (ROOT / "docs" / "adr" / "0002-dependencies.md").read_text()
    assert not {name for name in names if f"`{name}`" not in adr}


def test_every_decision_is_in_the_index_with_its_status() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text()
    for page in sorted(folder.glob("[0-9]*.md")):
        text = page.read_text()
        parts = ("Status: ", "Date: ", "## Context", "## Decision", "## Consequences", "## Alternatives")
        assert [part for part in parts if part not in text] == [], page.name
        assert f"]({page.name})" in index
        assert text.startswith(f"# {page.name[:4]}: ")


def test_the_tests_that_the_failure_model_names_exist() -> None:
    text = (ROOT / "docs" / "explanation" / "failure-model.md").read_text()
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named
    assert not named - defined


def test_the_example_plugin_of_the_how_to_keeps_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "how-to" / "write-a-plugin.md").read_text()
    example = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert example is not None
    monkeypatch.setenv("SHELF_URL", "http://shelf.invalid")
    namespace: dict[str, type] = {}
    exec(example[1], namespace)  # noqa: S102 - our own page
    plugin = check_plugin(namespace["ShelfPlugin"](), "shelf_plugin:ShelfPlugin")
    assert plugin.schemes == {"shelf"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    missing = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_known = target.exists() and (not anchor or anchor in _anchors(target))
        if not is_known:
            missing.append(link)
    assert not missing


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
