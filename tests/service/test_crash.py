"""The real process under traffic: killed, stopped, without room. What it acknowledged is there, once."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import httpx2
import pytest

from spark_schemas.histogram import SessionHistogram
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of
from spark_service.backup import backup_offline
from spark_service.db.store import Store
from spark_service.settings import Settings

SENDERS = 4
Start = Callable[..., "Service"]


@dataclass
class Service:
    """A running ``spark-service``."""

    process: subprocess.Popen[str]
    base_url: str

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start it over one data folder; ``file_bytes`` is the size that no file of the process may exceed."""
    running: list[subprocess.Popen[str]] = []

    def run(file_bytes: int | None = None) -> Service:
        command = [
            sys.executable,
            "-m",
            "spark_service.cli",
            "run",
            "--open",
            "-p",
            "0",
            "--data-dir",
            str(tmp_path / "data"),
        ]
        with (tmp_path / "stderr").open("a") as stderr:
            process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=stderr, text=True)
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (tmp_path / "stderr").read_text()
        if file_bytes is not None:
            limit_files(process.pid, file_bytes)
        return Service(process, json.loads(line)["base_url"])

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def limit_files(pid: int, limit_bytes: int) -> None:
    """Let no file of a process grow beyond a size: writes fail as they do on a full disk."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))


@dataclass(frozen=True)
class Upload:
    key: str
    body: bytes
    content_id: str


@pytest.fixture(scope="module")
def uploads(make: Any) -> list[Upload]:
    """Uploads of one session each, large enough that a few hundred fill the log up to a checkpoint."""
    shape: ModelShape = make.shape([(256, 4, 1)] * 16)
    pattern: SessionHistogram = make.session(shape, make.hash(0), decode=60)
    made = []
    for number in range(1600):
        session_hash = f"{number:064x}"
        session = pattern.model_copy(update={"session_hash": session_hash, "split": split_of(session_hash)})
        if number % 2:
            session = make.live(shape, session, profile=make.profile())
        body = make.body(shape, [session])
        made.append(Upload(f"key-{number}", body, session.content_id(shape.fingerprint)))
    return made


@dataclass
class Traffic:
    """Uploads being sent by several threads until the service is gone or there are none left."""

    base_url: str
    waiting: Iterator[Upload]
    acknowledged: list[Upload] = field(default_factory=list)
    refused: list[tuple[Upload, httpx2.Response]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> Traffic:
        self._threads = [threading.Thread(target=self._send) for _ in range(SENDERS)]
        for thread in self._threads:
            thread.start()
        return self

    def wait_for(self, acknowledged: int) -> None:
        """Until so many are, or the service answers no more."""
        while len(self.acknowledged) < acknowledged and any(thread.is_alive() for thread in self._threads):
            threading.Event().wait(0.005)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _send(self) -> None:
        with httpx2.Client(base_url=self.base_url, timeout=240) as client:
            while True:
                with self._lock:
                    upload = next(self.waiting, None)
                if upload is None:
                    return
                try:
                    answer = post(client, upload)
                except httpx2.TransportError:
                    return
                with self._lock:
                    if answer.status_code == 202:
                        self.acknowledged.append(upload)
                    else:
                        self.refused.append((upload, answer))
                        return


def post(client: httpx2.Client, upload: Upload) -> httpx2.Response:
    headers = {"Idempotency-Key": upload.key, "Content-Type": "application/json"}
    return client.post("/api/v1/histograms", content=upload.body, headers=headers)


def resend(base_url: str, uploads: Sequence[Upload], prefix: str = "") -> list[dict[str, int]]:
    with httpx2.Client(base_url=base_url, timeout=240) as client:
        answers = [post(client, Upload(prefix + upload.key, upload.body, "")) for upload in uploads]
    assert {answer.status_code for answer in answers} <= {202}
    return [answer.json() for answer in answers]


def stored(data: Path) -> list[str]:
    with duckdb.connect(str(data / "service.duckdb"), read_only=True) as connection:
        parts = connection.sql("SELECT content_id FROM parts").fetchall()
        histograms = connection.sql("SELECT content_id FROM histograms").fetchall()
        # Every other upload was measured.
        odd = "SELECT content_id FROM parts WHERE contains('13579bdf', right(session_hash, 1))"
        assert sorted(connection.sql("SELECT content_id FROM live").fetchall()) == sorted(
            connection.sql(odd).fetchall()
        )
    assert sorted(parts) == sorted(histograms)
    return [row[0] for row in parts]


def require_verified(path: Path) -> None:
    command = [sys.executable, "-m", "spark_service.cli", "verify", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["faults"] == 0


def test_kills_under_traffic_lose_and_double_nothing(start: Start, uploads: list[Upload], tmp_path: Path) -> None:
    moments = random.Random(4)
    waiting = iter(uploads)
    acknowledged: list[Upload] = []
    for least in (0, 2, 8, 16, 30):
        service = start()
        traffic = Traffic(service.base_url, waiting).start()
        traffic.wait_for(least)
        threading.Event().wait(moments.uniform(0.0, 0.1))
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        traffic.join()
        assert not traffic.refused
        acknowledged += traffic.acknowledged
        require_verified(tmp_path / "data")
        found = stored(tmp_path / "data")
        assert len(found) == len(set(found))
        assert {upload.content_id for upload in acknowledged} <= set(found)
        # Besides those, at most what was under way when it died.
        assert len(found) <= len(acknowledged) + 4 * SENDERS
    assert len(acknowledged) > 20
    service = start()
    before = sorted(stored_through(service, tmp_path))
    # The same key gives the same receipt, another key finds nothing new.
    assert resend(service.base_url, acknowledged[::5]) == [{"accepted": 1, "duplicates": 0}] * len(acknowledged[::5])
    assert resend(service.base_url, acknowledged[::5], "again-") == [{"accepted": 0, "duplicates": 1}] * len(
        acknowledged[::5]
    )
    assert service.end(signal.SIGTERM) == 0
    assert sorted(stored(tmp_path / "data")) == before
    require_verified(tmp_path / "data")


def stored_through(service: Service, tmp_path: Path) -> list[str]:
    """What a running service has, from a backup of it."""
    target = tmp_path / f"backup-{service.process.pid}.tar"
    spark_service("backup", str(target), "--service", service.base_url)
    spark_service("restore", str(target), "--data-dir", str(target.with_suffix("")))
    return stored(target.with_suffix(""))


def spark_service(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "spark_service.cli", *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_backup_under_traffic_holds_all_that_was_acknowledged_before(
    start: Start, uploads: list[Upload], tmp_path: Path
) -> None:
    service = start()
    traffic = Traffic(service.base_url, iter(uploads[:300])).start()
    traffic.wait_for(20)
    acknowledged = {upload.content_id for upload in traffic.acknowledged[:]}
    target = tmp_path / "backup.tar"
    made = spark_service("backup", str(target), "--service", service.base_url)
    traffic.join()
    assert len(traffic.acknowledged) == 300
    require_verified(target)
    spark_service("restore", str(target), "--data-dir", str(tmp_path / "restored"))
    found = stored(tmp_path / "restored")
    assert len(found) == len(set(found)) == made["rows"]["parts"]
    assert acknowledged
    assert acknowledged <= set(found)
    assert list((tmp_path / "data/backups").iterdir()) == []
    assert service.end(signal.SIGTERM) == 0


def test_a_stop_under_traffic_keeps_all_that_was_acknowledged(
    start: Start, uploads: list[Upload], tmp_path: Path
) -> None:
    service = start()
    traffic = Traffic(service.base_url, iter(uploads)).start()
    traffic.wait_for(50)
    assert service.end(signal.SIGTERM) == 0
    traffic.join()
    assert traffic.acknowledged
    assert {upload.content_id for upload in traffic.acknowledged} <= set(stored(tmp_path / "data"))
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"service.duckdb"}
    require_verified(tmp_path / "data")


@pytest.mark.parametrize("file_bytes", [1_000_000, 5_000_000])
def test_without_room_uploads_are_refused_until_there_is_some(
    start: Start, uploads: list[Upload], tmp_path: Path, file_bytes: int
) -> None:
    service = start(file_bytes)
    traffic = Traffic(service.base_url, iter(uploads)).start()
    traffic.join()
    assert traffic.acknowledged
    assert traffic.refused
    for _, answer in traffic.refused:
        assert answer.headers["content-type"] == "application/problem+json"
        assert (answer.status_code, answer.json()["code"]) in {(507, "storage_full"), (503, "storage_unavailable")}
        assert str(tmp_path) not in answer.text
    assert httpx2.get(f"{service.base_url}/healthz", timeout=240).status_code == 200
    limit_files(service.process.pid, resource.RLIM_INFINITY)
    refused = [upload for upload, _ in traffic.refused]
    assert resend(service.base_url, refused) == [{"accepted": 1, "duplicates": 0}] * len(refused)
    assert resend(service.base_url, traffic.acknowledged[::7], "again-") == [{"accepted": 0, "duplicates": 1}] * len(
        traffic.acknowledged[::7]
    )
    assert service.process.poll() is None
    assert service.end(signal.SIGTERM) == 0
    expected = sorted(upload.content_id for upload in (*traffic.acknowledged, *refused))
    assert sorted(stored(tmp_path / "data")) == expected
    require_verified(tmp_path / "data")


def test_a_backup_without_room_is_refused_and_leaves_nothing(
    start: Start, uploads: list[Upload], tmp_path: Path
) -> None:
    service = start()
    traffic = Traffic(service.base_url, iter(uploads[:50])).start()
    traffic.join()
    limit_files(service.process.pid, 300_000)
    answer = httpx2.post(f"{service.base_url}/api/v1/admin/backup", timeout=240)
    assert (answer.status_code, answer.json()["code"]) == (507, "storage_full")
    assert list((tmp_path / "data/backups").iterdir()) == []
    limit_files(service.process.pid, resource.RLIM_INFINITY)
    assert httpx2.post(f"{service.base_url}/api/v1/admin/backup", timeout=240).status_code == 201
    assert service.end(signal.SIGTERM) == 0
    assert len(stored(tmp_path / "data")) == 50


def test_a_kill_during_a_restore_leaves_the_old_or_the_new(tmp_path: Path, make: Any) -> None:
    """At every file operation of the swap in turn: what was there is there under its name, or aside."""
    shape = make.shape()
    for name, count in (("old", 1), ("new", 3)):
        (tmp_path / name).mkdir()
        store = Store.open(tmp_path / name / "service.duckdb", threads=1)
        store.add_upload(make.upload(shape, make.sessions(shape, count, 0)), "a", "a")
        store.close()
    backup_offline(Settings.resolve(data_dir=tmp_path / "new"), tmp_path / "new.tar")
    original = (tmp_path / "old/service.duckdb").read_bytes()
    code = (
        "import os, pathlib, sys\n"
        "from spark_service.backup import restore\n"
        "from spark_service.settings import Settings\n"
        "left, replace = int(sys.argv[1]), pathlib.Path.replace\n"
        "def count(self, target):\n"
        "    global left\n"
        "    if left == 0: os.kill(os.getpid(), 9)\n"
        "    left -= 1\n"
        "    return replace(self, target)\n"
        "pathlib.Path.replace = count\n"
        "restore(Settings.resolve(data_dir=pathlib.Path(sys.argv[2])), pathlib.Path(sys.argv[3]), force=True)\n"
    )
    endings = []
    for allowed in range(3):
        data = tmp_path / f"data-{allowed}"
        data.mkdir()
        (data / "service.duckdb").write_bytes(original)
        command = [sys.executable, "-c", code, str(allowed), str(data), str(tmp_path / "new.tar")]
        endings.append(subprocess.run(command, check=False, timeout=240).returncode)
        aside = [path.read_bytes() for path in data.glob(".replaced-*/service.duckdb")]
        if allowed == 0:
            assert (len(stored(data)), aside) == (1, [])
        elif allowed == 1:
            assert not (data / "service.duckdb").exists()
            assert aside == [original]
        else:
            assert (len(stored(data)), aside) == (3, [])
    assert endings == [-signal.SIGKILL, -signal.SIGKILL, 0]
