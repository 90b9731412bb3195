"""etcd's settings: what the environment may say, and what it is told when it says something else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lorelay.runtime.store_settings import EtcdSettings, parse_endpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_an_empty_environment_gives_the_local_default() -> None:
    expected = EtcdSettings(endpoints=("http://localhost:2379",))
    assert EtcdSettings.from_environ({}) == expected
    assert EtcdSettings.from_environ({"ETCD_ENDPOINTS": "", "ETCD_AUTH_USERNAME": ""}) == expected


def test_everything_can_be_set(tmp_path: Path) -> None:
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    for file in (ca, cert, key):
        file.touch()
    settings = EtcdSettings.from_environ(
        {
            "ETCD_ENDPOINTS": "https://etcd-0.etcd:2379, https://etcd-1.etcd:2379,",
            "ETCD_AUTH_USERNAME": "worker",
            "ETCD_AUTH_PASSWORD": "secret",
            "ETCD_AUTH_CA": str(ca),
            "ETCD_AUTH_CLIENT_CERT": str(cert),
            "ETCD_AUTH_CLIENT_KEY": str(key),
        }
    )
    assert settings == EtcdSettings(
        endpoints=("https://etcd-0.etcd:2379", "https://etcd-1.etcd:2379"),
        username="worker",
        password="secret",  # noqa: S106
        ca_file=ca,
        cert_file=cert,
        key_file=key,
    )
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"ETCD_ENDPOINTS": "localhost:2379"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "http://localhost:port"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "http://localhost:99999"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "http://[::1"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "http://"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "http://localhost:2379/v3"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "http://me:secret@localhost:2379"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "unix:///run/etcd"}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": " , "}, "ETCD_ENDPOINTS"),
        ({"ETCD_ENDPOINTS": "http://a:1,https://b:1"}, "ETCD_ENDPOINTS"),
        ({"ETCD_AUTH_USERNAME": "worker"}, "ETCD_AUTH_PASSWORD"),
        ({"ETCD_AUTH_PASSWORD": "secret"}, "ETCD_AUTH_USERNAME"),
        ({"ETCD_ENDPOINTS": "https://a", "ETCD_AUTH_CA": "/no/such/file"}, "ETCD_AUTH_CA"),
        ({"ETCD_ENDPOINTS": "https://a", "ETCD_AUTH_CLIENT_CERT": __file__}, "ETCD_AUTH_CLIENT_KEY"),
        ({"ETCD_ENDPOINTS": "http://a", "ETCD_AUTH_CA": __file__}, "ETCD_AUTH_CA"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named) as refusal:
        EtcdSettings.from_environ(environ)
    assert str(refusal.value).startswith(f"{named}: ")
    assert "\n" not in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_all_bad_variables_are_named_at_once() -> None:
    environ = {"ETCD_ENDPOINTS": "nowhere", "ETCD_AUTH_USERNAME": "worker", "ETCD_AUTH_CA": "/no/such/file"}
    with pytest.raises(ValueError, match="ETCD") as refusal:
        EtcdSettings.from_environ(environ)
    names = [line.split(":")[0] for line in str(refusal.value).splitlines()]
    assert names == ["ETCD_ENDPOINTS", "ETCD_AUTH_PASSWORD", "ETCD_AUTH_CA"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:2379", ("dns:///localhost:2379", False)),
        ("https://etcd.example", ("dns:///etcd.example:2379", True)),
        ("http://127.0.0.1:1/", ("dns:///127.0.0.1:1", False)),
        ("http://[::1]:2379", ("dns:///[::1]:2379", False)),
    ],
)
def test_an_endpoint_becomes_a_target_of_grpc(url: str, expected: tuple[str, bool]) -> None:
    assert parse_endpoint(url) == expected
