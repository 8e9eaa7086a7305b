from __future__ import annotations

from pathlib import Path

import pytest

from spark_service import env
from spark_service.errors import DataDirError, EnvironmentVariableError, RefusedError
from spark_service.rate_limit import Rate, Rates
from spark_service.settings import Settings, default_data_dir


def test_defaults() -> None:
    settings = Settings.resolve()
    assert (settings.host, settings.port, settings.token) == ("127.0.0.1", 8710, None)
    assert settings.data_dir == default_data_dir()
    assert settings.data_dir.parts[-2:] == ("spark", "service")
    assert settings.database == settings.data_dir / "service.duckdb"
    assert (settings.segment_after_days, settings.segments_dir) == (30, settings.data_dir / "segments")


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARKMOE_SERVICE_PORT", "1234")
    monkeypatch.setenv("SPARKMOE_SERVICE_HOST", "::1")
    monkeypatch.setenv("SPARKMOE_SERVICE_DATA_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", "")
    settings = Settings.resolve()
    assert (settings.host, settings.port, settings.data_dir) == ("::1", 1234, tmp_path / "env")
    assert settings.token is None
    assert Settings.resolve(port=0, data_dir=tmp_path).port == 0
    assert Settings.resolve(port=0, data_dir=tmp_path).data_dir == tmp_path
    assert Settings.resolve(data_dir=tmp_path).segments_dir == tmp_path / "segments"
    monkeypatch.setenv("SPARKMOE_SERVICE_SEGMENTS_DIR", str(tmp_path / "elsewhere"))
    assert Settings.resolve(data_dir=tmp_path).segments_dir == tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPARKMOE_SERVICE_PORT", "65536"),
        ("SPARKMOE_SERVICE_PORT", "-1"),
        ("SPARKMOE_SERVICE_PORT", "eighty"),
        ("SPARKMOE_SERVICE_MAX_BODY_BYTES", "0"),
        ("SPARKMOE_SERVICE_MAX_INFLATED_BYTES", "1e9"),
        ("SPARKMOE_SERVICE_DB_MEMORY", "lots"),
        ("SPARKMOE_SERVICE_DB_THREADS", "0"),
        ("SPARKMOE_SERVICE_READ_RATE", "-1"),
        ("SPARKMOE_SERVICE_UPLOAD_RATE", "1e3"),
        ("SPARKMOE_SERVICE_FAILURE_RATE", "nan"),
        ("SPARKMOE_SERVICE_UPLOAD_BURST", "0"),
        ("SPARKMOE_SERVICE_RETENTION_DAYS", "1.5"),
        ("SPARKMOE_SERVICE_SEGMENT_AFTER_DAYS", "-1"),
    ],
)
def test_unusable_variables_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError) as caught:
        Settings.resolve()
    assert caught.value.message.startswith(f"{name}: found {value!r}, expected ")


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", "two words")
    with pytest.raises(EnvironmentVariableError) as caught:
        Settings.resolve()
    assert "two words" not in caught.value.message


def test_the_table_of_variables() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("SPARKMOE_SERVICE_") for name in names)
    assert all(variable.help for variable in env.VARIABLES)


LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "localhost"]
PUBLIC = ["0.0.0.0", "::", "192.168.1.2", "example.org", ""]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_may_be_open(host: str, tmp_path: Path) -> None:
    Settings.resolve(host=host, data_dir=tmp_path, open_access=True).require_safe_address()


@pytest.mark.parametrize("host", PUBLIC)
@pytest.mark.parametrize("token", ["", "long-random-secret"])
def test_nothing_else_may_be_open(host: str, token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", token)
    with pytest.raises(RefusedError, match="refusing --open"):
        Settings.resolve(host=host, data_dir=tmp_path, open_access=True).require_safe_address()


@pytest.mark.parametrize("host", [*LOOPBACK, *PUBLIC])
def test_everything_else_needs_a_token(host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def settings() -> Settings:
        return Settings.resolve(host=host, data_dir=tmp_path)

    with pytest.raises(RefusedError, match="without a token") as caught:
        settings().require_safe_address()
    assert "spark-service token create" in (caught.value.hint or "")
    assert "--open" in (caught.value.hint or "")
    # With a database it is decided once that is open.
    settings().database.touch()
    settings().require_safe_address()
    with pytest.raises(RefusedError, match="without a token"):
        settings().require_tokens(any_stored=False)
    settings().require_tokens(any_stored=True)
    settings().database.unlink()
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", "long-random-secret")
    settings().require_safe_address()
    settings().require_tokens(any_stored=False)


@pytest.mark.parametrize(("text", "expected"), [("0", 0.0), ("0.5", 0.5), ("1500", 1500.0), ("999999.125", 999999.125)])
def test_rates(text: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("READ", "UPLOAD", "FAILURE"):
        monkeypatch.setenv(f"SPARKMOE_SERVICE_{kind}_RATE", text)
        monkeypatch.setenv(f"SPARKMOE_SERVICE_{kind}_BURST", "7")
    assert Settings.resolve().rates == Rates(Rate(expected, 7), Rate(expected, 7), Rate(expected, 7))


def test_the_rates_documented_are_the_rates_without_settings() -> None:
    assert Settings.resolve().rates == Rates()


def test_the_data_dir_is_made_for_its_owner(tmp_path: Path) -> None:
    settings = Settings.resolve(data_dir=tmp_path / "a" / "b")
    settings.prepare_data_dir()
    assert settings.data_dir.stat().st_mode & 0o777 == 0o700
    assert list(settings.data_dir.iterdir()) == []


def test_a_data_dir_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(DataDirError, match=str(path)):
            Settings.resolve(data_dir=path).prepare_data_dir()

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Not by file modes: the tests may run as root, whom they do not stop.
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(DataDirError, match="Permission denied"):
        Settings.resolve(data_dir=tmp_path).prepare_data_dir()
