"""Rows E15 H1 H2: local folders, below allowed roots only, and nothing learnt about what is outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lorelay.resolver.file_plugin import FilePlugin
from lorelay.resolver.plugin import (
    AdapterForbiddenError,
    AdapterNotFoundError,
    PluginConfigurationError,
    PluginError,
    ResolveContext,
    ResolvedLoRA,
    SourceUnavailableError,
    check_plugin,
)

pytestmark = pytest.mark.anyio


class Place:
    """A root with an adapter, and things outside of it."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        self.root = self.base / "root"
        self.adapter = self.root / "team" / "a"
        self.adapter.mkdir(parents=True)
        self.secret = self.base / "secret"
        self.secret.mkdir()
        self.plugin = FilePlugin([self.root])

    async def resolve(self, source: str) -> ResolvedLoRA | None:
        """Ask the plugin."""
        context = ResolveContext("k", "base", self.base, 1.0, 1, "r")
        return await self.plugin.resolve(source_uri=source, context=context)

    async def refusal(self, source: str) -> PluginError:
        """Ask the plugin, which must refuse without naming a path."""
        with pytest.raises(PluginError) as caught:
            await self.resolve(source)
        assert str(self.base) not in caught.value.public
        return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_it_keeps_the_abi(place: Place) -> None:
    """It is a plugin like any other."""
    assert check_plugin(place.plugin, "file") is place.plugin


async def test_a_folder_below_a_root(place: Place) -> None:
    """Its revision is empty: only the digest of its content says which version it is."""
    assert await place.resolve(f"file://{place.adapter}") == ResolvedLoRA(place.adapter, "", None)
    assert await place.resolve(f"FILE://{place.adapter}/") == ResolvedLoRA(place.adapter, "", None)
    assert await place.resolve(f"file://{place.root}/./team//a") == ResolvedLoRA(place.adapter, "", None)


async def test_another_scheme_is_not_mine(place: Place) -> None:
    """The chain goes on."""
    assert await place.resolve("s3://b/a") is None


async def test_missing_and_not_a_directory_below_a_root(place: Place) -> None:
    """Row E15: two clear answers."""
    (place.root / "file").write_text("")
    missing = await place.refusal(f"file://{place.root}/nothing")
    a_file = await place.refusal(f"file://{place.root}/file")
    assert isinstance(missing, AdapterNotFoundError)
    assert isinstance(a_file, AdapterNotFoundError)
    assert "does not exist" in missing.public
    assert "not a directory" in a_file.public
    assert isinstance(await place.refusal(f"file://{place.root}/file/below"), AdapterNotFoundError)
    assert isinstance(await place.refusal(f"file://{place.root}/{'x' * 300}"), AdapterNotFoundError)


@pytest.mark.parametrize(
    "source",
    [
        "file:///etc",
        "file:///proc/self",
        "file:////etc",
        "file:///",
        "file://{root}/../secret",
        "file://{root}/team/../../secret",
        "file://{root}/../root/team/a",
        "file://{root}x",
        "file://{base}",
        "file://{base}/secret",
        "file://{base}/missing",
        "file://host{root}/team/a",
        "file://localhost{root}/team/a",
        "file://team/a",
        "file:team/a",
        "file:{root}/team/a",
        "file:///../../etc",
        "file://%2Fetc",
    ],
)
async def test_outside_the_roots(place: Place, source: str) -> None:
    """Rows H1 H2: forbidden, whatever is there."""
    found = await place.refusal(source.format(root=place.root, base=place.base))
    assert isinstance(found, AdapterForbiddenError)


@pytest.mark.parametrize("name", ["a\\..\\b", "%2e%2e", "%2e%2e%2fsecret", "..%2fsecret", "a?b", "a#b", "...", "~"])
async def test_spellings_that_mean_nothing_here(place: Place, name: str) -> None:
    """Row H1: no decoding, no other separator: these are plain names, which may exist."""
    assert isinstance(await place.refusal(f"file://{place.root}/{name}"), AdapterNotFoundError)
    (place.root / name).mkdir()
    assert await place.resolve(f"file://{place.root}/{name}") == ResolvedLoRA(place.root / name, "", None)


async def test_existing_and_missing_outside_look_the_same(place: Place) -> None:
    """A client cannot map the file system."""
    (place.root / "out").symlink_to(place.secret)
    (place.root / "gone").symlink_to(place.base / "missing")
    answers = [
        await place.refusal(source)
        for source in (
            f"file://{place.secret}",
            f"file://{place.base}/missing",
            f"file://{place.root}/out",
            f"file://{place.root}/gone",
            f"file://{place.root}/out/below",
            f"file://{place.root}/../secret",
        )
    ]
    assert {(type(answer), answer.public) for answer in answers} == {
        (AdapterForbiddenError, answers[0].public),
    }


async def test_symlinks_within_the_roots_are_followed(place: Place) -> None:
    """`latest -> a` is how people publish; what is returned is the real folder."""
    (place.root / "latest").symlink_to("team/a")
    assert await place.resolve(f"file://{place.root}/latest") == ResolvedLoRA(place.adapter, "", None)
    (place.root / "loop").symlink_to("loop")
    assert isinstance(await place.refusal(f"file://{place.root}/loop"), AdapterNotFoundError)


async def test_a_root_may_be_a_symlink(place: Place) -> None:
    """Operators mount things; both spellings of the root work."""
    link = place.base / "mounted"
    link.symlink_to(place.root)
    place.plugin = FilePlugin([link])
    for root in (link, place.root):
        assert await place.resolve(f"file://{root}/team/a") == ResolvedLoRA(place.adapter, "", None)


async def test_not_even_a_root_makes_proc_a_folder(place: Place) -> None:
    """Row H2: file:///proc/self under the root `/`."""
    place.plugin = FilePlugin([Path("/")])
    for source in ("file:///proc/self", "file:///sys", "file:///dev/shm"):
        assert isinstance(await place.refusal(source), AdapterForbiddenError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_what_the_resolver_may_not_read(place: Place) -> None:
    """The deployment's fault, and a retry may help once it is mended."""
    place.adapter.chmod(0o000)
    assert isinstance(await place.refusal(f"file://{place.adapter}"), SourceUnavailableError)


@pytest.mark.parametrize("root", ["relative", "/not/there", "/etc/passwd"])
async def test_a_root_that_is_no_folder_stops_the_start(root: str) -> None:
    """One line, at the start, and not at the first request."""
    with pytest.raises(PluginConfigurationError, match="LORELAY_FILE_ROOTS"):
        FilePlugin([Path(root)])
    with pytest.raises(PluginConfigurationError, match="LORELAY_FILE_ROOTS"):
        FilePlugin([])
