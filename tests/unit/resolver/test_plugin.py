"""The plugin ABI: what is accepted at the start, and who is asked in which order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lorelay.resolver.plugin import (
    AdapterForbiddenError,
    AdapterNotFoundError,
    Chain,
    DownloaderPlugin,
    PluginConfigurationError,
    PluginError,
    ResolveContext,
    ResolvedLoRA,
    SourceUnavailableError,
    load_plugin,
)

CONTEXT = ResolveContext(
    adapter_key="dyn-lora-0",
    base_model_name="base",
    cache_root=Path("/tmp"),  # noqa: S108 - never used
    deadline_monotonic=1.0,
    max_download_bytes=1,
    request_id="r",
)


FOUND = ResolvedLoRA(Path("/somewhere"), "rev", None)


class Plugin:
    """Gives one answer, or raises it."""

    protocol_version = 2

    def __init__(self, answer: object = None, schemes: frozenset[str] = frozenset({"s3"})) -> None:
        self.schemes = schemes
        self.answer = answer
        self.asked = list[str]()

    async def resolve(self, *, source_uri: str, context: ResolveContext) -> ResolvedLoRA | None:
        """Answer."""
        assert context is CONTEXT
        self.asked.append(source_uri)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.fixture
def module() -> Iterator[ModuleType]:
    module = ModuleType("a_plugin_module")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    return tmp_path / "link"


@pytest.mark.parametrize("made", [Plugin(), Plugin, lambda: Plugin()], ids=["instance", "class", "factory"])  # noqa: PLW0108
def test_an_instance_a_class_or_a_factory(module: ModuleType, made: object) -> None:
    """As in Dynamo."""
    module.plugin = made  # type: ignore[attr-defined]
    assert isinstance(load_plugin("a_plugin_module:plugin"), Plugin)


def test_a_nested_object(module: ModuleType) -> None:
    """`module:Class.attribute` works too."""
    module.outer = SimpleNamespace(plugin=Plugin)  # type: ignore[attr-defined]
    assert isinstance(load_plugin("a_plugin_module:outer.plugin"), Plugin)


def test_field_names_and_order_are_dynamos() -> None:
    """Plugins build and read these by position and by name."""
    assert list(ResolveContext.__dataclass_fields__) == [
        "adapter_key",
        "base_model_name",
        "cache_root",
        "deadline_monotonic",
        "max_download_bytes",
        "request_id",
    ]
    assert list(ResolvedLoRA.__dataclass_fields__) == ["local_path", "source_revision", "size_bytes", "metadata"]
    assert ResolvedLoRA(Path("/a"), "r", 1).metadata is None


def spoiled(**attributes: object) -> object:
    def make() -> object:
        plugin = Plugin()
        for name, value in attributes.items():
            setattr(plugin, name, value)
        return plugin

    return make


def failing() -> object:
    raise RuntimeError("no\ncredentials")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (spoiled(protocol_version=1), "protocol_version is 1; expected 2"),
        (spoiled(protocol_version="2"), "protocol_version is '2'"),
        (spoiled(protocol_version=True), "protocol_version is True"),
        (spoiled(schemes=frozenset()), "non-empty set"),
        (spoiled(schemes="s3"), "non-empty set"),
        (spoiled(schemes=["s3"]), "non-empty set"),
        (spoiled(schemes={"S3"}), "lower-case"),
        (spoiled(schemes={3}), "lower-case"),
        (spoiled(resolve=None), "no method resolve"),
        (failing, "RuntimeError: no credentials"),
        (7, "neither a plugin"),
    ],
)
def test_what_is_wrong_is_one_line(module: ModuleType, made: object, words: str) -> None:
    """The operator reads the variable, the value and the fault."""
    module.plugin = made  # type: ignore[attr-defined]
    with pytest.raises(PluginConfigurationError) as caught:
        load_plugin("a_plugin_module:plugin")
    text = str(caught.value)
    assert text.startswith("DYN_LORA_DOWNLOADER_PLUGIN='a_plugin_module:plugin': ")
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_colon", "expected module:object"),
        ("a b:c", "expected module:object"),
        (":x", "expected module:object"),
        ("not.there:x", "cannot import not.there"),
        ("json:not_there", "json has no not_there"),
    ],
)
def test_a_name_that_leads_nowhere(spec: str, words: str) -> None:
    """Spelling mistakes are the usual ones."""
    with pytest.raises(PluginConfigurationError, match="DYN_LORA_DOWNLOADER_PLUGIN") as caught:
        load_plugin(spec)
    assert words in str(caught.value)


def chain(*plugins: DownloaderPlugin, allowed: tuple[str, ...] = ()) -> Chain:
    return Chain(plugins, allowed)


def test_schemes_are_those_allowed_and_offered() -> None:
    """DYN_LORA_ALLOWED_SCHEMES narrows, and never widens."""
    plugins = Plugin(schemes=frozenset({"s3", "gs"})), Plugin(schemes=frozenset({"hf"}))
    assert chain(*plugins).schemes == {"s3", "gs", "hf"}
    assert chain(*plugins, allowed=("HF", "s3", "ftp")).schemes == {"s3", "hf"}
    with pytest.raises(PluginConfigurationError, match="DYN_LORA_ALLOWED_SCHEMES"):
        chain(*plugins, allowed=("ftp",))
    with pytest.raises(PluginConfigurationError, match="LORELAY_FILE_ROOTS"):
        chain()


@pytest.mark.anyio
class TestAsking:
    """Row E13: "not mine", "not there" and "broken" are different things."""

    async def ask(self, *plugins: DownloaderPlugin) -> ResolvedLoRA:
        """Ask a chain of `plugins`."""
        return await chain(*plugins).resolve("s3://b/a", "s3", CONTEXT)

    async def test_not_mine_asks_the_next(self) -> None:
        """None is no answer."""
        assert (await self.ask(Plugin(None), Plugin(FOUND))).source_revision == "rev"

    async def test_another_scheme_is_not_asked(self) -> None:
        """A plugin sees only sources it takes."""
        other = Plugin(FOUND, frozenset({"hf"}))
        await self.ask(other, Plugin(FOUND))
        assert other.asked == []

    async def test_nobody_takes_it(self) -> None:
        """Not found, and not a server error."""
        with pytest.raises(AdapterNotFoundError):
            await self.ask(Plugin(None), Plugin(None))

    @pytest.mark.parametrize("error", [AdapterNotFoundError, AdapterForbiddenError, SourceUnavailableError])
    async def test_who_knows_why_ends_the_search(self, error: type[PluginError]) -> None:
        """The next plugin must not be asked for what this one owns."""
        second = Plugin(FOUND)
        with pytest.raises(error):
            await self.ask(Plugin(error("no")), second)
        assert second.asked == []

    @pytest.mark.parametrize("error", [ValueError("bug"), PluginConfigurationError("no token")])
    async def test_a_broken_plugin_does_not_stop_the_next(self, error: Exception) -> None:
        """One plugin's defect is not everybody's."""
        assert (await self.ask(Plugin(error), Plugin(FOUND))).source_revision == "rev"
        with pytest.raises(type(error)):
            await self.ask(Plugin(error), Plugin(None))

    async def test_dynamos_own_result_class_will_do(self) -> None:
        """Attributes are asked, not types."""
        foreign = SimpleNamespace(local_path="/somewhere", source_revision="rev", size_bytes=None, metadata=None)
        assert await self.ask(Plugin(foreign)) == ResolvedLoRA(Path("/somewhere"), "rev", None)

    @pytest.mark.parametrize(
        "answer",
        [
            SimpleNamespace(local_path="a/b", source_revision="rev", size_bytes=None, metadata=None),
            SimpleNamespace(local_path="/a", source_revision=None, size_bytes=None, metadata=None),
            "/a",
        ],
    )
    async def test_an_answer_that_is_none(self, answer: object) -> None:
        """A relative path, a missing revision: the plugin is broken."""
        with pytest.raises((TypeError, AttributeError)):
            await self.ask(Plugin(answer))

    async def test_a_plugins_path_is_followed_once(self, linked: Path) -> None:
        """A plugin may live behind a symlink; what is opened later is the real place."""
        resolved = await self.ask(Plugin(ResolvedLoRA(linked, "rev", None)))
        assert resolved.local_path.name == "real"
