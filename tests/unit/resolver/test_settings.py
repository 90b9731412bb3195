"""Settings and the chain they make: everything wrong is said at once, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorelay.resolver.__main__ import FILE_PLUGIN, build_chain
from lorelay.resolver.plugin import PluginConfigurationError
from lorelay.resolver.settings import ResolverSettings
from lorelay.runtime.settings import SettingsError

DEMO_PLUGIN = "lorelay.cli.demo_plugin:demo_plugin"


def test_defaults_are_dynamos() -> None:
    """The DYN_* defaults of the design."""
    settings = ResolverSettings.from_environ({})
    assert settings.resolve_timeout_s == 300
    assert settings.max_concurrent_resolutions == 2
    assert settings.max_pending_keys == 64
    assert settings.max_download_bytes == 10 << 30
    assert settings.max_cache_bytes == 100 << 30
    assert settings.cache_domain == "local"
    assert (settings.plugins, settings.file_roots, settings.allowed_schemes) == ((), (), ())


def test_lists_are_read() -> None:
    """A chain of plugins, several roots, schemes in any case."""
    settings = ResolverSettings.from_environ(
        {
            "DYN_LORA_DOWNLOADER_PLUGIN": "a:b, c:d",
            "LORELAY_FILE_ROOTS": "/a:/b",
            "DYN_LORA_ALLOWED_SCHEMES": "HF,file",
        }
    )
    assert settings.plugins == ("a:b", "c:d")
    assert settings.file_roots == (Path("/a"), Path("/b"))
    assert settings.allowed_schemes == ("hf", "file")


def test_every_bad_variable_is_named() -> None:
    """One start, one message, all faults."""
    bad = {
        "DYN_LORA_MAX_CACHE_BYTES": "ten",
        "DYN_LORA_MAX_DOWNLOAD_BYTES": "-1",
        "DYN_LORA_RESOLVE_TIMEOUT_SECONDS": "nan",
        "DYN_LORA_MAX_CONCURRENT_RESOLUTIONS": "0",
        "DYN_LORA_MAX_PENDING_RUNTIME_KEYS": "0",
        "DYN_LORA_ALLOWED_SCHEMES": "h f",
        "LORELAY_FILE_ROOTS": "relative",
        "LORELAY_CACHE_DOMAIN": "a.b",
        "LORELAY_REFERENCE_TTL_SECONDS": "-1",
    }
    with pytest.raises(SettingsError) as caught:
        ResolverSettings.from_environ(bad)
    lines = str(caught.value).splitlines()
    assert {line.partition("=")[0] for line in lines} == set(bad)
    assert len(lines) == len(bad)


def test_the_file_plugin_needs_roots_only(tmp_path: Path) -> None:
    """Configured roots are enough; naming it decides its place in the chain."""
    environ = {"LORELAY_FILE_ROOTS": str(tmp_path), "DYN_LORA_DOWNLOADER_PLUGIN": DEMO_PLUGIN}
    settings = ResolverSettings.from_environ(environ)
    assert build_chain(settings).name == "DemoPlugin,FilePlugin"
    first = {**environ, "DYN_LORA_DOWNLOADER_PLUGIN": f"{FILE_PLUGIN},{DEMO_PLUGIN}"}
    assert build_chain(ResolverSettings.from_environ(first)).name == "FilePlugin,DemoPlugin"


def test_no_roots_no_file_scheme() -> None:
    """Row H2: `file://` is off until somebody says where it may read."""
    settings = ResolverSettings.from_environ({"DYN_LORA_DOWNLOADER_PLUGIN": DEMO_PLUGIN})
    assert "file" not in build_chain(settings).schemes


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"DYN_LORA_DOWNLOADER_PLUGIN": FILE_PLUGIN},
        {"DYN_LORA_DOWNLOADER_PLUGIN": "not.there:x"},
        {"DYN_LORA_DOWNLOADER_PLUGIN": DEMO_PLUGIN, "DYN_LORA_ALLOWED_SCHEMES": "hf"},
        {"LORELAY_FILE_ROOTS": "/not/there"},
    ],
)
def test_nothing_to_serve_is_no_start(environ: dict[str, str]) -> None:
    """One line that names a variable."""
    with pytest.raises(PluginConfigurationError) as caught:
        build_chain(ResolverSettings.from_environ(environ))
    assert "\n" not in str(caught.value)
    assert "LORA" in str(caught.value) or "LORELAY" in str(caught.value)
