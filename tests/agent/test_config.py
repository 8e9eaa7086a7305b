from __future__ import annotations

import datetime as dt
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_agent.config import Config, Consent, load_config, save_config
from spark_agent.env import Environment
from spark_agent.errors import ConfigError
from spark_agent.paths import config_path

NOON = dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC)


def test_no_file_is_the_defaults():
    assert load_config(config_path()) == Config()
    assert Config().effective_service_url(Environment()) == "http://127.0.0.1:8710"


def test_environment_before_config_before_default():
    config = Config(service_url="https://a")
    assert config.effective_service_url(Environment()) == "https://a"
    assert config.effective_service_url(Environment(service_url="https://b")) == "https://b"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    consent=st.none() | st.builds(Consent, st.booleans(), st.just(NOON), st.just("https://spark.example")),
    paused=st.booleans(),
    service_url=st.none() | st.just("http://127.0.0.1:8710"),
    token=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    team_key=st.none() | st.binary(min_size=16),
)
def test_what_is_saved_is_loaded(tmp_path: Path, consent, paused, service_url, token, team_key):
    path = tmp_path / "new" / "config.toml"
    config = Config(consent, paused, service_url, token, team_key)
    save_config(path, config)
    assert load_config(path) == config
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["config.toml"]


def test_consent_records_when_and_for_whom(tmp_path: Path):
    path = tmp_path / "config.toml"
    save_config(path, Config().with_consent(True, "https://Spark.example/", at=NOON))
    upload = tomllib.loads(path.read_text("utf-8"))["upload"]
    assert upload == {"consent": True, "consent_at": NOON, "consent_for": "https://spark.example"}
    now = Config().with_consent(False, "https://spark.example").consent
    assert now is not None
    assert now.at.tzinfo is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[upload]\nconsent = yes", "line 2"),
        ('[upload]\nconsent = "yes', "end of document"),
        ('[upload]\nconsent = "yes"', "upload.consent: found 'yes', expected bool"),
        ("[upload]\nconsent = 1", "upload.consent: found 1, expected bool"),
        ("[upload]\nconsent = true", "needs upload.consent_at"),
        ("[upload]\nconsent_at = 2026-11-29T12:00:00", "time zone"),
        ("[upload]\nservice_url = 'nowhere'", "expected http://HOST"),
        ("[upload]\nconsentt = true", "unknown key upload.consentt"),
        ("[uplod]\nconsent = true", "unknown 'uplod'"),
        ("upload = 3", "unknown 'upload'"),
        ("[team]\nkey = 'abcd'", "a value that is not shown"),
        (b"\xff\xfe", "not TOML"),
    ],
)
def test_a_bad_file_is_named_and_never_overwritten(tmp_path: Path, text: str | bytes, expected: str):
    path = tmp_path / "config.toml"
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError):
        save_config(path, Config(paused=True))
    assert path.read_bytes() == content


def test_a_linked_config_stays_a_link(tmp_path: Path):
    real, link = tmp_path / "dotfiles.toml", tmp_path / "config.toml"
    real.write_text("")
    link.symlink_to(real)
    save_config(link, Config(paused=True))
    assert link.is_symlink()
    assert load_config(real).paused


def test_a_folder_or_unwritable_place_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot"):
        save_config(tmp_path / "file" / "config.toml", Config())


def test_secrets_are_not_shown():
    shown = repr(Config(token="spk_1", team_key=b"k" * 16))
    assert "spk_1" not in shown
    assert "kkkk" not in shown
