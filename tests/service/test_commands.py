"""The administrator's commands on the file of a service that is down."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spark_runtime.placement import Interval
from spark_schemas.drift import DriftList
from spark_service import cli
from spark_service.db.audit import AuditPage
from spark_service.db.drift import save_state
from spark_service.db.store import Store
from spark_service.drift import State
from spark_service.keyring import Keyring
from spark_service.tokens import NewToken, TokenInfo, TokenList


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    def failed(self, code: int, *words: str) -> None:
        assert (self.code, self.out) == (code, ""), self.err
        assert self.err.startswith("error: ")
        assert "\nhint: " in self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command on the database of this test."""
    monkeypatch.setenv("SPARKMOE_SERVICE_DATA_DIR", str(tmp_path / "data"))

    def call(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["spark-service", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        streams = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Done(caught.value.code, streams.out, streams.err)

    return call


@pytest.fixture
def open_database(tmp_path: Path) -> Callable[[], Store]:
    return lambda: Store.open(tmp_path / "data" / "service.duckdb", threads=1)


def test_a_tokens_life(run: Run, open_database: Callable[[], Store]) -> None:
    made = run("token", "create", "--scope", "read", "--scope", "upload", "--name", "build machine")
    text = made.out.removesuffix("\n")
    assert "shown this once" in made.err
    assert text not in made.err
    store = open_database()
    [kept] = Keyring(store).tokens()
    assert Keyring(store).authenticate(text) == kept
    store.close()
    assert (kept.scope, kept.name) == ("upload read", "build machine")

    told = TokenList.model_validate_json(run("token", "list", "--json").out)
    assert told.tokens == [TokenInfo.of(kept)]
    table = run("token", "list").out
    assert kept.token_id in table
    assert "build machine" in table
    assert text[-43:] not in table

    rotated = NewToken.model_validate_json(run("token", "rotate", kept.token_id, "--grace", "60", "--json").out)
    assert rotated.previous_ends_at is not None
    assert json.loads(run("token", "revoke", kept.token_id, "--json").out)["revoked_at"]
    assert run("token", "revoke", kept.token_id).out == f"revoked {kept.token_id}\n"
    run("token", "rotate", kept.token_id).failed(1, "revoked")
    store = open_database()
    assert Keyring(store).authenticate(text) is None
    assert Keyring(store).authenticate(rotated.token) is None
    store.close()

    page = AuditPage.model_validate_json(run("audit", "--json").out)
    assert [(entry.actor, entry.action) for entry in page.entries] == [
        ("cli", "token.create"),
        ("cli", "token.rotate"),
        ("cli", "token.revoke"),
    ]
    lines = run("audit", "--limit", "2")
    assert [line.split("  ")[3] for line in lines.out.splitlines()] == ["token.create", "token.rotate"]
    assert "more: --after 2" in lines.err
    assert [line.split("  ")[3] for line in run("audit", "--after", "2").out.splitlines()] == ["token.revoke"]


@pytest.mark.parametrize(("expires", "days"), [("never", None), ("7", 7), (None, 365)])
def test_when_it_expires(run: Run, expires: str | None, days: int | None) -> None:
    options = [] if expires is None else ["--expires", expires]
    made = NewToken.model_validate_json(run("token", "create", "--scope", "admin", "--json", *options).out)
    assert (None if made.expires_at is None else made.expires_at - made.created_at) == (days and timedelta(days=days))
    rotated = NewToken.model_validate_json(run("token", "rotate", made.id, "--json", "--expires", "never").out)
    assert rotated.expires_at is None
    assert rotated.token != made.token


@pytest.mark.parametrize(
    "args",
    [
        ["token"],
        ["token", "create"],
        ["token", "create", "--scope", "root"],
        ["token", "create", "--scope", "admin", "--scope", "read"],
        ["token", "create", "--scope", "read", "--expires", "0"],
        ["token", "create", "--scope", "read", "--expires", "soon"],
        ["token", "create", "--scope", "read", "--expires", "9" * 50],
        ["token", "create", "--scope", "read", "--name", "a\nb"],
        ["token", "revoke"],
        ["token", "rotate", "x", "--grace", "-1"],
        ["audit", "--after", "-1"],
        ["audit", "--limit", "0"],
        ["retention", "run"],
        ["retention", "run", "--days", "0"],
        ["session", "delete", "abc"],
        ["session", "delete", "G" * 64],
        ["drift", "clear", "mf1-" + "f" * 32],
        ["drift", "clear", "mf2-" + "f" * 32, "code"],
        ["drift", "clear", "mf1-" + "f" * 32, "code:1+docs:1"],
        ["drift", "clear", "mf1-" + "f" * 32, "../audit"],
        ["token", "list", "--service", "ftp://127.0.0.1"],
        ["token", "list", "--service", "http://user:secret@127.0.0.1"],
        ["token", "list", "--service", "http://[::1"],
        ["token", "list", "--service", "127.0.0.1:8710"],
    ],
)
def test_wrong_usage_makes_no_database(run: Run, args: list[str], tmp_path: Path) -> None:
    run(*args).failed(2)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["token", "list"],
        ["token", "revoke", "0" * 12],
        ["token", "rotate", "0" * 12],
        ["audit"],
        ["retention", "run", "--days", "1"],
        ["session", "delete", "0" * 64],
        ["drift", "list"],
        ["drift", "clear", "mf1-" + "f" * 32, "code"],
    ],
)
def test_only_a_new_token_makes_a_database(run: Run, args: list[str], tmp_path: Path) -> None:
    run(*args).failed(1, "found none", "--data-dir")
    assert not (tmp_path / "data").exists()
    assert run("token", "create", "--scope", "admin").code == 0
    done = run(*args)
    assert done.code == (1 if "0" * 12 in args else 0)


@pytest.mark.parametrize("dry_run", [True, False])
def test_retention(run: Run, make: Any, open_database: Callable[[], Store], tmp_path: Path, dry_run: bool) -> None:
    (tmp_path / "data").mkdir()
    store = open_database()
    store.add_upload(make.upload(make.shape(), make.sessions(make.shape(), 3, 0)), "a", "a")
    old = datetime.now(UTC).date() - timedelta(days=40)
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = ? WHERE session_hash = ?", [old, make.hash(0)])
    store.close()
    options = ["--dry-run"] if dry_run else []
    told = json.loads(run("retention", "run", "--days", "30", "--json", *options).out)
    assert told == {"retention_days": 30, "dry_run": dry_run, "parts": 1, "parts_by_day": {old.isoformat(): 1}}
    again = run("retention", "run", "--days", "30", *options).out
    assert again == ("would remove: 1 parts of 1 days\n" if dry_run else "removed: 0 parts of 0 days\n")
    store = open_database()
    assert len(store.part_keys(make.fingerprint, "decode")) == (3 if dry_run else 2)
    store.close()


def test_the_variable_decides_how_long_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("token", "create", "--scope", "admin")
    monkeypatch.setenv("SPARKMOE_SERVICE_RETENTION_DAYS", "30")
    assert json.loads(run("retention", "run", "--json").out)["retention_days"] == 30
    assert json.loads(run("retention", "run", "--json", "--days", "3").out)["retention_days"] == 3


def test_a_session(run: Run, make: Any, open_database: Callable[[], Store], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    store = open_database()
    upload = make.upload(make.shape(), make.sessions(make.shape(), 3, 0))
    store.add_upload(upload, "a", "a")
    store.close()
    gone = make.hash(0)
    assert json.loads(run("session", "delete", gone, "--json").out) == {"session_hash": gone, "removed": 1}
    assert run("session", "delete", gone).out == f"removed 0 parts of session {gone}\n"
    store = open_database()
    assert store.add_upload(upload, "b", "b").accepted == 0
    store.close()
    entries = AuditPage.model_validate_json(run("audit", "--json").out).entries
    assert [entry.object for entry in entries if (entry.actor, entry.action) == ("cli", "session.delete")] == [gone] * 2


@pytest.mark.parametrize("url", ["http://192.0.2.1:8710", "http://service.example"])
def test_a_token_never_travels_in_clear(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("audit", "--service", url).failed(3, "SPARKMOE_SERVICE_TOKEN")
    monkeypatch.setenv("SPARKMOE_SERVICE_TOKEN", "s3cret")
    done = run("audit", "--service", url)
    done.failed(3, "unencrypted")
    assert "s3cret" not in done.err


def test_drift(run: Run, make: Any, open_database: Callable[[], Store], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    store = open_database()
    rates = Interval(0.1, 0.08, 0.12)
    with store.writing() as cursor:
        save_state(cursor, make.fingerprint, "chat", State())
        save_state(
            cursor, make.fingerprint, "code", State("moved", 20_000, True, 3, 20, rates, Interval(0.2, 0.1, 0.3))
        )
    store.close()
    first, second = DriftList.model_validate_json(run("drift", "list", "--json").out).workloads
    assert (first.workload, first.state, first.promised) == ("chat", "steady", None)
    assert (second.workload, second.state, second.since, second.rebuilt) == ("code", "moved", "2024-10-04", True)
    heading, chat, code = run("drift", "list").out.splitlines()
    assert heading.split() == ["fingerprint", "workload", "state", "since", "sessions", "promised", "measured"]
    assert chat.split() == [make.fingerprint, "chat", "steady", "0", "-", "-"]
    assert code.endswith("moved   2024-10-04, rebuilt  20        10.0% (8.0% to 12.0%)  20.0% (10.0% to 30.0%)")
    assert json.loads(run("drift", "clear", make.fingerprint, "code", "--json").out) == {"cleared": True}
    assert run("drift", "clear", make.fingerprint, "docs").out == "nothing was known of docs\n"
    cleared = DriftList.model_validate_json(run("drift", "list", "--json").out).workloads
    assert [(one.workload, one.state, one.since) for one in cleared] == [
        ("chat", "steady", None),
        ("code", "steady", None),
    ]
    [entry] = AuditPage.model_validate_json(run("audit", "--json").out).entries
    assert (entry.actor, entry.action, entry.object) == ("cli", "drift.clear", f"{make.fingerprint}/code")


def test_no_drift_to_list(run: Run, open_database: Callable[[], Store], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    open_database().close()
    done = run("drift", "list")
    assert (done.code, done.out) == (0, "")
    assert done.err == "no session with a manifest of its workload yet\n"
