from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spark_service import cli
from spark_service.db.migrate import available


def run(*args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["spark-service", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, spark_service.cli\n"
        "heavy = {'ray', 'duckdb', 'fastapi', 'llama_cpp', 'pyarrow', 'numpy', 'uvicorn'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "[]"


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.startswith("spark-service ")


@pytest.mark.parametrize(
    "args",
    [[], ["nothing"], ["run", "--port", "99999"], ["run", "--port", "x"], ["run", "extra"], ["migrate", "--nope"]],
)
def test_wrong_usage(args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args, monkeypatch=monkeypatch) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert "\nhint: " in streams.err


def test_a_public_address_without_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("run", "--host", "0.0.0.0", "--data-dir", str(tmp_path / "a"), monkeypatch=monkeypatch) == 3
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: refusing to listen on 0.0.0.0")
    assert "SPARKMOE_SERVICE_TOKEN" in streams.err
    assert not (tmp_path / "a").exists()


def test_a_data_dir_that_is_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run("run", "--open", "-p", "0", "--data-dir", str(file), monkeypatch=monkeypatch) == 1
    assert capsys.readouterr().err.startswith(f"error: data folder {file}: ")


@pytest.mark.parametrize(
    "command", [["run", "--open", "-p", "0"], ["run", "-p", "0"], ["migrate"], ["token", "list"], ["audit"]]
)
def test_a_foreign_database(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "service.duckdb").write_bytes(b"something else entirely")
    assert run(*command, "--data-dir", str(tmp_path), monkeypatch=monkeypatch) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "error: database" in streams.err
    assert "Traceback" not in streams.err


def test_migrate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data_dir = tmp_path / "data"

    def migrate(*options: str) -> str:
        assert run("migrate", "--data-dir", str(data_dir), *options, monkeypatch=monkeypatch) == 0
        return capsys.readouterr().out

    names = [f"{migration.version:04d}_{migration.name}" for migration in available()]
    assert migrate("--dry-run") == f"would apply: {', '.join(names)}\n"
    assert not data_dir.exists()
    assert json.loads(migrate("--json")) == {
        "data_dir": str(data_dir),
        "schema_version": len(names),
        "pending": [],
        "applied": names,
    }
    assert migrate("--dry-run") == migrate() == f"nothing to do: schema version {len(names)}\n"
