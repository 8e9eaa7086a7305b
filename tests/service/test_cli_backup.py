from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from spark_service import cli
from spark_service.db.store import Store


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command; give its exit code, stdout and stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spark-service", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        streams = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, streams.out, streams.err

    return call


def test_a_key_that_agents_have_pinned_is_missed(run: Any, data: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "a.tar", tmp_path / "other"
    store = Store.open(data / "service.duckdb", threads=1)
    with store.writing() as cursor:
        cursor.execute(
            "INSERT INTO manifests (fingerprint, workload, phase, vram_bytes, n_ctx, reserve_bytes, revision, sha256, "
            "body_bytes, body_zstd, sequence) VALUES ('f', 'w', 'decode', 1, 1, 0, 'r', 's', 0, ''::BLOB, 0)"
        )
    store.close()
    run("backup", target, "--data-dir", data)
    code, _, err = run("restore", target, "--data-dir", other)
    assert code == 0
    assert err.startswith(f"note: {other} has no signing-key.pem")
    (other / "signing-key.pem").touch(mode=0o600)
    assert run("restore", target, "--data-dir", other, "--force")[::2] == (0, "")


@pytest.fixture
def data(tmp_path: Path, make: Any) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    store = Store.open(folder / "service.duckdb", threads=1)
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape, 2, 1)), "key", "sha")
    store.close()
    return folder


def test_there_and_back(run: Any, data: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "a.tar", tmp_path / "other"
    code, out, err = run("backup", target, "--data-dir", data, "--json")
    made = json.loads(out)
    assert (code, err) == (0, "")
    assert set(made) == {"path", "bytes", "sha256", "schema_version", "rows"}
    assert (made["path"], made["bytes"], made["rows"]["parts"]) == (str(target), target.stat().st_size, 3)
    code, out, err = run("restore", target, "--data-dir", other, "--json")
    restored = json.loads(out)
    assert (code, err) == (0, "")
    assert set(restored) == {"data_dir", "schema_version", "created_at", "rows", "segments"}
    assert restored["rows"] == made["rows"]
    for path in (target, other, other / "service.duckdb"):
        code, out, err = run("verify", path, "--json")
        report = json.loads(out)
        assert (code, err) == (0, "")
        assert set(report) == {"path", "schema_version", "complete", "faults", "checks", "tables"}
        assert report["faults"] == 0
    code, out, _ = run("verify", "--data-dir", other)
    assert code == 0
    assert "counts and content ids" in out


def test_refusals(run: Any, data: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.tar"
    target.write_text("mine")
    code, out, err = run("backup", target, "--data-dir", data)
    assert (code, out) == (3, "")
    assert err.startswith(f"error: refusing to write over {target}")
    assert "--force" in err
    assert target.read_text() == "mine"
    assert run("backup", target, "--data-dir", data, "--force")[0] == 0
    code, out, err = run("restore", target, "--data-dir", data)
    assert (code, out) == (3, "")
    assert "refusing to replace" in err
    assert run("restore", target, "--data-dir", data, "--force")[0] == 0


def test_faults_are_named_and_end_with_1(run: Any, data: Path) -> None:
    with duckdb.connect(str(data / "service.duckdb")) as connection:
        connection.execute("UPDATE parts SET workload = 'other'")
    for options in ([], ["--json"]):
        code, out, err = run("verify", data, *options)
        assert code == 1
        assert f"error: 3 faults in {data}, the first: part " in err
        assert err.count("fault: part ") == 2
        assert "hint: " in err
        assert json.loads(out)["faults"] == 3 if options else "3 faults" in out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["backup"], 2, "target"),
        (["backup", "a.tar", "--service", "http://127.0.0.1:1", "--data-dir", "x"], 2, "two sources"),
        (["backup", "a.tar", "--keep"], 2, "--keep needs --service"),
        (["verify", "a", "--data-dir", "x"], 2, "two databases"),
        (["restore", "nothing.tar"], 1, "No such file"),
        (["verify", "nothing"], 1, "found no file"),
        (["backup", "a.tar"], 1, "found no service.duckdb"),
        (["backup", "a.tar", "--service", "ftp://x"], 1, "expected http://"),
        (["backup", "a.tar", "--service", "http://127.0.0.1:x"], 1, "expected http://"),
        (["backup", "a.tar", "--service", "http://127.0.0.1:1"], 1, "Connection refused"),
    ],
)
def test_wrong_calls(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = run(*args)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert says in err
    assert "\nhint: " in err
    assert not list(tmp_path.glob("*.tar"))
