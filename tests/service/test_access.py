"""The real process: who gets in, what ends that at once, and the commands that ask a running service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from spark_service.db.store import Store
from spark_service.keyring import Keyring
from spark_service.tokens import TokenRequest, join_token


@dataclass
class Machine:
    """One data folder, and the commands on it."""

    data: Path
    stderr: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "spark_service.cli", *arguments, "--data-dir", str(self.data)]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def json(self, *arguments: str, **environment: str) -> dict[str, Any]:
        done = self.run(*arguments, "--json", **environment)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    @contextmanager
    def serving(self, *options: str, **environment: str) -> Iterator[str]:
        """A running service; its base URL. It must stop cleanly."""
        with (
            self.stderr.open("a") as stderr,
            subprocess.Popen(
                self.command("run", "-p", "0", "--json", *options),
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, self.stderr.read_text()
                yield json.loads(line)["base_url"]
                process.send_signal(signal.SIGTERM)
                assert process.wait(120) == 0
            finally:
                process.kill()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "data", tmp_path / "stderr")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def status(base_url: str, path: str, token: str | None) -> int:
    return httpx2.get(base_url + path, headers={} if token is None else bearer(token), timeout=240).status_code


def test_tokens_scopes_rotation_and_revocation_while_it_runs(machine: Machine, make: Any) -> None:
    admin = machine.json("token", "create", "--scope", "admin")["token"]
    agent = machine.json("token", "create", "--scope", "upload")
    reader = machine.json("token", "create", "--scope", "read")
    shape = make.shape()
    body = make.body(shape, make.sessions(shape, 3, 1))
    with machine.serving() as url:

        def upload(token: str) -> int:
            headers = {**bearer(token), "Content-Type": "application/json", "Idempotency-Key": "a"}
            return httpx2.post(f"{url}/api/v1/histograms", content=body, headers=headers, timeout=240).status_code

        assert [upload(token) for token in (reader["token"], "nonsense", agent["token"])] == [403, 401, 202]
        assert [status(url, "/api/v1/profiles", one) for one in (None, agent["token"], reader["token"])] == [
            401,
            403,
            200,
        ]
        assert [status(url, "/api/v1/admin/audit", one) for one in (reader["token"], admin)] == [403, 200]
        assert [status(url, path, None) for path in ("/healthz", "/readyz", "/version")] == [200, 401, 401]

        # The file belongs to the service; the commands ask it instead.
        held = machine.run("token", "list")
        assert (held.returncode, held.stdout) == (1, "")
        assert "is open in process" in held.stderr
        assert "hint: give --service URL" in held.stderr
        remote = {"SPARKMOE_SERVICE_TOKEN": admin}
        ask = ("--service", url)
        assert len(machine.json("token", "list", *ask, **remote)["tokens"]) == 3

        rotated = machine.json("token", "rotate", reader["id"], *ask, **remote)
        assert [status(url, "/api/v1/profiles", one["token"]) for one in (reader, rotated)] == [401, 200]
        again = machine.json("token", "rotate", reader["id"], "--grace", "3600", *ask, **remote)
        assert [status(url, "/api/v1/profiles", one["token"]) for one in (reader, rotated, again)] == [401, 200, 200]
        machine.json("token", "revoke", reader["id"], *ask, **remote)
        assert [status(url, "/api/v1/profiles", one["token"]) for one in (rotated, again)] == [401, 401]

        made = machine.json("token", "create", "--scope", "upload", "--scope", "read", *ask, **remote)
        assert status(url, "/api/v1/profiles", made["token"]) == 200
        assert machine.json("session", "delete", make.hash(0), *ask, **remote)["removed"] == 1
        kept = machine.json("retention", "run", "--days", "1", *ask, **remote)
        assert kept == {"retention_days": 1, "dry_run": False, "parts": 0, "parts_by_day": {}}
        endless = machine.run("retention", "run", *ask, **remote)
        assert (endless.returncode, endless.stdout) == (1, "")
        assert "this service keeps everything" in endless.stderr
        assert machine.json("drift", "list", *ask, **remote) == {"workloads": []}
        assert machine.json("drift", "clear", make.fingerprint, "code", *ask, **remote) == {"cleared": False}
        refused = machine.run("token", "list", *ask, SPARKMOE_SERVICE_TOKEN=made["token"])
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "answered 403" in refused.stderr
        assert "scope admin" in refused.stderr
        unknown = machine.run("token", "revoke", "../audit", *ask, **remote)
        assert (unknown.returncode, unknown.stdout) == (1, "")
        admin_id = admin.split("_")[1]
        entries = machine.json("audit", *ask, **remote)["entries"]
    wanted = [
        ("cli", "token.create"),
        ("cli", "token.create"),
        ("cli", "token.create"),
        (agent["id"], "upload.accept"),
        (admin_id, "token.rotate"),
        (admin_id, "token.rotate"),
        (admin_id, "token.revoke"),
        (admin_id, "token.create"),
        (admin_id, "session.delete"),
    ]
    # The housekeeper notes first uses when it wakes.
    assert [(entry["actor"], entry["action"]) for entry in entries if entry["action"] != "token.first_use"] == wanted
    # Stopped, the file can be opened again; what was used is known by now.
    listed = {token["id"]: token for token in machine.json("token", "list")["tokens"]}
    assert all(token["last_used_day"] is not None for token in listed.values())
    first_uses = [one for one in machine.json("audit")["entries"] if one["action"] == "token.first_use"]
    assert {one["actor"] for one in first_uses} == set(listed)
    log = machine.stderr.read_text()
    for secret in (admin, agent["token"], made["token"]):
        assert secret[-43:] not in log
    down = machine.run("token", "list", *ask, **remote)
    assert (down.returncode, down.stdout) == (1, "")
    assert "no answer" in down.stderr


def test_an_expired_token_is_none(machine: Machine) -> None:
    machine.data.mkdir()
    store = Store.open(machine.data / "service.duckdb", threads=1)
    texts = []
    for age in (timedelta(days=2), timedelta(hours=23)):
        keyring = Keyring(store, lambda age=age: datetime.now(UTC) - age)  # type: ignore[misc]
        token, secret = keyring.create(TokenRequest(scope="read", expires_days=1), "cli")
        texts.append(join_token(token.token_id, secret))
    keyring.revoke(token.token_id, "cli")
    store.close()
    # The one that has not expired is revoked: nobody could get in.
    refused = machine.run("run", "-p", "0")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "hint: make one with spark-service token create --scope admin, or" in refused.stderr
    assert "--open" in refused.stderr
    with machine.serving(SPARKMOE_SERVICE_TOKEN="shared") as url:
        assert [status(url, "/api/v1/profiles", text) for text in (*texts, "shared")] == [401, 401, 200]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_open_is_refused_off_loopback(machine: Machine, host: str) -> None:
    for environment in ({}, {"SPARKMOE_SERVICE_TOKEN": "shared"}):
        refused = machine.run("run", "-p", "0", "--host", host, "--open", **environment)
        assert (refused.returncode, refused.stdout) == (3, "")
        assert refused.stderr.startswith(f"error: refusing --open on {host}")
        assert not machine.data.exists()


def test_open_on_loopback_needs_no_token_and_answers_no_rebound_name(machine: Machine) -> None:
    with machine.serving("--open") as url:
        assert status(url, "/api/v1/profiles", None) == 200
        foreign = httpx2.get(f"{url}/api/v1/profiles", headers={"Host": "evil.example"}, timeout=240)
        assert (foreign.status_code, foreign.json()["code"]) == (403, "not_local")


def test_rates_from_the_environment(machine: Machine) -> None:
    rates = {f"SPARKMOE_SERVICE_{kind}_RATE": "0.01" for kind in ("READ", "FAILURE")}
    bursts = {"SPARKMOE_SERVICE_READ_BURST": "2", "SPARKMOE_SERVICE_FAILURE_BURST": "3"}
    with machine.serving(SPARKMOE_SERVICE_TOKEN="shared", **rates, **bursts) as url:
        assert [status(url, "/version", "shared") for _ in range(3)] == [200, 200, 429]
        assert [status(url, "/version", None) for _ in range(4)] == [401, 401, 401, 429]
        answer = httpx2.get(f"{url}/version", headers=bearer("shared"), timeout=240)
        assert answer.headers["content-type"] == "application/problem+json"
        assert 1 <= int(answer.headers["retry-after"]) <= 100


def test_what_is_too_old_goes_when_it_starts(machine: Machine, make: Any) -> None:
    machine.data.mkdir()
    store = Store.open(machine.data / "service.duckdb", threads=1)
    store.add_upload(make.upload(make.shape(), make.sessions(make.shape(), 3, 0)), "a", "a")
    old = datetime.now(UTC).date() - timedelta(days=40)
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = ? WHERE session_hash = ?", [old, make.hash(0)])
    store.close()
    with machine.serving("--open", SPARKMOE_SERVICE_RETENTION_DAYS="30"):
        pass
    store = Store.open(machine.data / "service.duckdb", threads=1)
    assert len(store.part_keys(make.fingerprint, "decode")) == 2
    store.close()
    entries = machine.json("audit")["entries"]
    assert [(one["actor"], one["object"]) for one in entries if one["action"] == "retention.run"] == [
        ("service", old.isoformat())
    ]
