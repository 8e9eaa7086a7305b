from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import spark_agent
from spark_agent.env import VARIABLES, Environment
from spark_agent.errors import ConfigError

KEY = "A" * 43 + "="


def test_the_table_and_the_environment_agree():
    names = [variable.name.removeprefix("SPARKMOE_").lower() for variable in VARIABLES]
    fields = {field.name: field.default for field in dataclasses.fields(Environment)}
    assert names == list(fields)
    assert [variable.default for variable in VARIABLES] == list(fields.values())
    assert Environment.read({}) == Environment()


def test_every_value_is_read():
    found = Environment.read(
        {
            "SPARKMOE_HOST": "0.0.0.0",
            "SPARKMOE_PORT": "0",
            "SPARKMOE_SERVICE_URL": "https://Spark.example:8710/team/",
            "SPARKMOE_SERVICE_TOKEN": "spk_1",
            "SPARKMOE_OFFLINE": "Yes",
            "SPARKMOE_NO_PROGRESS": "off",
            "SPARKMOE_TEAM_KEY": "ab" * 16,
            "SPARKMOE_MODEL": "/models/a.gguf",
            "SPARKMOE_MODELS_DIR": "/models",
            "SPARKMOE_WORKLOAD_RULES": "/etc/rules.toml",
            "DO_NOT_TRACK": "please",
            "NO_COLOR": "0",
            "SPARKMOE_SIGNING_KEY": KEY,
            "SPARKMOE_API_KEY": "key_1",
            "SPARKMOE_API_KEY_FILE": "/run/secrets/key",
            "SPARKMOE_TLS_CERT_FILE": "/etc/tls/cert.pem",
            "SPARKMOE_TLS_KEY_FILE": "/etc/tls/key.pem",
            "SPARKMOE_REPLACEMENT": "watch",
        }
    )
    assert found == Environment(
        "0.0.0.0",
        0,
        "https://spark.example:8710/team",
        "spk_1",
        True,
        False,
        b"\xab" * 16,
        "/models/a.gguf",
        "/models",
        "/etc/rules.toml",
        True,
        True,
        KEY,
        "key_1",
        "/run/secrets/key",
        "/etc/tls/cert.pem",
        "/etc/tls/key.pem",
        "watch",
    )
    assert "spk_1" not in repr(found)
    assert "key_1" not in repr(found)
    assert "xab" not in repr(found)


def test_empty_is_unset():
    assert Environment.read({variable.name: " " for variable in VARIABLES}) == Environment()
    assert not Environment.read({"DO_NOT_TRACK": "0"}).do_not_track


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SPARKMOE_PORT", "http", "expected a port"),
        ("SPARKMOE_PORT", "65536", "expected a port"),
        ("SPARKMOE_PORT", "-1", "expected a port"),
        ("SPARKMOE_PORT", "٣", "expected a port"),
        ("SPARKMOE_SIGNING_KEY", "A" * 43, "expected an Ed25519 public key"),
        ("SPARKMOE_SIGNING_KEY", "A" * 42 + "B=", "expected an Ed25519 public key"),
        ("SPARKMOE_SIGNING_KEY", "ä" * 44, "expected an Ed25519 public key"),
        ("SPARKMOE_OFFLINE", "maybe", "expected 1, true, yes, on"),
        ("SPARKMOE_SERVICE_URL", "spark.example", "expected http://HOST"),
        ("SPARKMOE_SERVICE_URL", "http://", "expected http://HOST"),
        ("SPARKMOE_SERVICE_URL", "ftp://a", "expected http://HOST"),
        ("SPARKMOE_SERVICE_URL", "http://u:p@a", "no user name"),
        ("SPARKMOE_SERVICE_URL", "http://a?b", "no query"),
        ("SPARKMOE_SERVICE_URL", "http://a:99999", "range"),
        ("SPARKMOE_SERVICE_URL", "http://a/ü", "printable ASCII"),
    ],
)
def test_a_bad_value_names_variable_found_and_expected(name: str, value: str, expected: str):
    with pytest.raises(ConfigError, match=re.escape(name)) as caught:
        Environment.read({name: value})
    assert repr(value) in str(caught.value)
    assert expected.lower() in str(caught.value).lower()
    assert name in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPARKMOE_TEAM_KEY", "secret passphrase that is long"),
        ("SPARKMOE_TEAM_KEY", "abcdef"),
        ("SPARKMOE_SERVICE_TOKEN", "two words"),
        ("SPARKMOE_SERVICE_TOKEN", "line\nInjected: yes"),
    ],
)
def test_secrets_are_not_repeated(name: str, value: str):
    with pytest.raises(ConfigError, match=name) as caught:
        Environment.read({name: value})
    assert value not in str(caught.value)
    assert f"{len(value)} characters" in str(caught.value)


def test_no_other_module_reads_our_variables():
    folder = Path(spark_agent.__file__).parent
    readers = [
        path.name
        for path in sorted(folder.rglob("*.py"))
        if re.search(r"(environ\.get\(|getenv\(|environ\[)[\"']SPARKMOE_\w+[\"'][\])](?! =)", path.read_text("utf-8"))
    ]
    assert readers == []
