from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from spark_service.backup import backup_offline, put_in_place, restore
from spark_service.backup_format import BackupManifest, file_of, pack
from spark_service.db.connection import Database
from spark_service.db.snapshot import copy_snapshot, link_files
from spark_service.db.store import Store
from spark_service.errors import BackupError, DatabaseLockedError, RefusedError, SparkServiceError, StorageFullError
from spark_service.settings import Settings
from spark_service.verification import verify

Post = Callable[..., httpx2.Response]
BACKUP = "/api/v1/admin/backup"


def settings_of(folder: Path) -> Settings:
    return Settings.resolve(data_dir=folder)


def fill(folder: Path, make: Any, sessions: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    shape = make.shape()
    store = Store.open(folder / "service.duckdb", threads=1)
    store.add_upload(make.upload(shape, make.sessions(shape, sessions, 2, prefill=20)), "key-1", "sha")
    store.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def data(tmp_path: Path, make: Any) -> Path:
    folder = tmp_path / "data"
    fill(folder, make)
    (folder / "segments/2026").mkdir(parents=True)
    (folder / "segments/2026/part-1.bin").write_bytes(b"aged out")
    return folder


@pytest.fixture
def archive(data: Path, tmp_path: Path) -> Path:
    return backup_offline(settings_of(data), tmp_path / "backup.tar").path


def test_what_was_backed_up_comes_back(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep/backup.tar"
    made = backup_offline(settings_of(data), target)
    assert made.file == file_of(target, "backup.tar")
    assert target.stat().st_mode & 0o777 == 0o600
    rows = {name: table.rows for name, table in made.manifest.tables.items()}
    assert (rows["histograms"], rows["models"], rows["parts"], rows["uploads"]) == (10, 1, 5, 1)
    assert [file.name for file in made.manifest.segments] == ["segments/2026/part-1.bin"]
    assert verify(target, memory="256MB", threads=1).faults == 0
    other = tmp_path / "other"
    assert restore(settings_of(other), target) == made.manifest
    assert contents(other).keys() == {"service.duckdb", "segments/2026/part-1.bin"}
    assert (other / "segments/2026/part-1.bin").read_bytes() == b"aged out"
    found, expected = (verify(folder, memory="256MB", threads=1) for folder in (other, data))
    assert found == expected
    assert [path.name for path in target.parent.iterdir()] == ["backup.tar"]


def test_nothing_is_written_over_unless_forced(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup.tar"
    target.write_bytes(b"mine")
    with pytest.raises(RefusedError, match="refusing to write over"):
        backup_offline(settings_of(data), target)
    assert target.read_bytes() == b"mine"
    partial = tmp_path / "partial"
    partial.write_bytes(b"new")
    with pytest.raises(RefusedError):
        put_in_place(partial, target, force=False)
    assert target.read_bytes() == b"mine"
    backup_offline(settings_of(data), target, force=True)
    assert verify(target, memory="256MB", threads=1).faults == 0


def test_a_restore_replaces_only_when_forced(data: Path, archive: Path, make: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    fill(other, make, sessions=1)
    (other / "segments").mkdir()
    (other / "segments/old.bin").write_bytes(b"old")
    (other / "notes.txt").write_text("kept")
    before = contents(other)
    with pytest.raises(RefusedError, match="refusing to replace"):
        restore(settings_of(other), archive)
    assert contents(other) == before
    restore(settings_of(other), archive, force=True)
    assert contents(other).keys() == {"service.duckdb", "segments/2026/part-1.bin", "notes.txt"}
    assert verify(other, memory="256MB", threads=1).tables["parts"].rows == 5


def test_a_restore_under_a_running_service_is_refused(data: Path, archive: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from spark_service.db.connection import Database\n"
        "database = Database(pathlib.Path(sys.argv[1]))\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
        "database.close()\n"
    )
    command = [sys.executable, "-c", code, str(data / "service.duckdb")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        for act in (lambda: restore(settings_of(data), archive, force=True), lambda: verify_folder(data)):
            with pytest.raises(DatabaseLockedError, match=f"open in process {owner.pid} "):
                act()
        with pytest.raises(DatabaseLockedError, match=f"{owner.pid}") as caught:
            backup_offline(settings_of(data), archive.with_name("second.tar"))
        assert "--service URL" in str(caught.value.hint)
        owner.communicate()
    restore(settings_of(data), archive, force=True)
    assert verify_folder(data) == 0


def verify_folder(folder: Path) -> int:
    return verify(folder, memory="256MB", threads=1).faults


def test_a_damaged_database_is_replaced(data: Path, archive: Path) -> None:
    (data / "service.duckdb").write_bytes(b"\0" * 20000)
    restore(settings_of(data), archive, force=True)
    assert verify_folder(data) == 0


def test_segments_in_a_folder_of_their_own(data: Path, archive: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere/segments"
    settings = replace(settings_of(tmp_path / "other"), segments_dir=elsewhere)
    for force in (False, True):
        restore(settings, archive, force=force)
        assert contents(tmp_path / "other").keys() == {"service.duckdb"}
        assert contents(elsewhere.parent).keys() == {"segments/2026/part-1.bin"}
    made = backup_offline(settings, tmp_path / "again.tar")
    assert [file.name for file in made.manifest.segments] == ["segments/2026/part-1.bin"]


def test_a_failed_replacement_leaves_the_old_files(data: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(data)
    original = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target == data / "service.duckdb" and ".replaced-" not in str(self):
            raise OSError(5, "Input/output error")
        return original(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(BackupError, match="Input/output error"):
            restore(settings_of(data), archive, force=True)
    assert contents(data) == before
    assert verify_folder(data) == 0


def test_every_damaged_file_is_noticed(archive: Path, tmp_path: Path) -> None:
    """Wherever a byte of a file or of its header changes, nothing is restored."""
    whole = archive.read_bytes()
    with tarfile.open(archive) as opened:
        members = opened.getmembers()[1:]
    places = [member.offset + (512 + member.size - 1) * step // 9 for member in members for step in (0, *range(2, 10))]
    for number, place in enumerate(places):
        damaged = tmp_path / "damaged.tar"
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        target = tmp_path / f"target-{number}"
        with pytest.raises(BackupError, match=r"damaged\.tar is not whole"):
            restore(settings_of(target), damaged)
        assert contents(target) == {}


@pytest.mark.parametrize("length", [0, 1, 511, 600, 5000, -1024])
def test_a_cut_backup_is_refused(archive: Path, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut.tar"
    whole = archive.read_bytes().rstrip(b"\0")
    cut.write_bytes(whole[:length])
    with pytest.raises(BackupError):
        restore(settings_of(tmp_path / "target"), cut)
    assert contents(tmp_path / "target") == {}


def repacked(archive: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The same files under a changed manifest."""
    work = target.with_suffix(".files")
    work.mkdir()
    with tarfile.open(archive) as opened:
        opened.extractall(work, filter="data")
    fields = json.loads((work / "manifest.json").read_text())
    change(fields)
    with target.open("wb") as file:
        pack(BackupManifest.model_validate_json(json.dumps(fields)), work, file)
    return target


def test_a_newer_backup_is_refused(archive: Path, tmp_path: Path) -> None:
    newer = repacked(archive, tmp_path / "newer.tar", lambda fields: fields.update(schema_version=999))
    with pytest.raises(BackupError, match="schema version 999, expected at most") as caught:
        restore(settings_of(tmp_path / "target"), newer)
    assert "upgrade" in str(caught.value.hint)
    assert contents(tmp_path / "target") == {}


def test_rows_that_are_not_those_listed_are_refused(archive: Path, tmp_path: Path) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["tables"]["parts"]["sha256"] = "0" * 64

    wrong = repacked(archive, tmp_path / "wrong.tar", change)
    with pytest.raises(BackupError, match="table parts holds rows=5"):
        restore(settings_of(tmp_path / "target"), wrong)
    report = verify(wrong, memory="256MB", threads=1)
    assert [(check.name, check.faults) for check in report.checks if check.faults] == [("as in the manifest", 1)]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    "hostile",
    [
        member("../outside"),
        member("/outside"),
        member("segments/../../outside"),
        member("segments/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("segments/link", tarfile.LNKTYPE, "service.duckdb"),
        member("segments/device", tarfile.CHRTYPE),
        member("service.duckdb"),
        member("unlisted"),
    ],
    ids=lambda info: f"{info.name}-{info.type.decode()}",
)
def test_hostile_members_reach_nothing(archive: Path, tmp_path: Path, hostile: tarfile.TarInfo) -> None:
    with tarfile.open(archive, "a") as opened:
        opened.addfile(hostile, io.BytesIO(b"evil"))
    target = tmp_path / "a/b/target"
    with pytest.raises(BackupError, match="not in its manifest"):
        restore(settings_of(target), archive)
    assert contents(target) == {}
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "segments/../outside", "segments//a", "segments/.hidden", "manifest.json", "a"]
)
def test_hostile_names_in_a_manifest_are_refused(archive: Path, tmp_path: Path, name: str) -> None:
    with tarfile.open(archive) as opened:
        manifest = opened.extractfile("manifest.json")
        assert manifest is not None
        fields = json.loads(manifest.read())
    fields["segments"][0]["name"] = name
    text = json.dumps(fields).encode()
    hostile = tmp_path / "hostile.tar"
    with tarfile.open(hostile, "w") as opened:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(text)
        opened.addfile(info, io.BytesIO(text))
    with pytest.raises(BackupError, match="expected names of a backup's files"):
        restore(settings_of(tmp_path / "target"), hostile)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8b" + b"x" * 600, b"\0" * 2048])
def test_what_is_no_backup_is_named(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "no.tar"
    source.write_bytes(content)
    for act in (lambda: restore(settings_of(tmp_path / "t"), source), lambda: verify_folder(source)):
        with pytest.raises(BackupError, match=r"no\.tar is not whole"):
            act()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match=r"found no service\.duckdb"):
        backup_offline(settings_of(tmp_path), tmp_path / "a.tar")
    with pytest.raises(BackupError, match="No such file"):
        restore(settings_of(tmp_path / "t"), tmp_path / "nothing.tar")
    with pytest.raises(BackupError, match="found no file"):
        verify(tmp_path / "nothing", memory="256MB", threads=1)


def test_uploads_go_on_while_the_file_is_copied(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than a checkpoint's worth of uploads between the checkpoint and the copy changes nothing in it."""
    shape = make.shape([(4096, 4, 1)] * 16)
    store = Store.open(tmp_path / "service.duckdb", memory="256MB", threads=1)
    sessions = [make.session(shape, make.hash(index), decode=2) for index in range(30)]
    store.add_upload(make.upload(shape, sessions[:10]), "first", "first")
    store.delete_session(sessions[0].session_hash)
    monkeypatch.setattr("spark_service.db.connection.CHECKPOINT_WAL_BYTES", 1_000_000)
    original = copy_snapshot
    logs: list[int] = []

    def upload_first(descriptor: int, target: Path) -> None:
        for index, session in enumerate(sessions[10:]):
            store.add_upload(make.upload(shape, [session]), f"key-{index}", "x")
        logs.append((tmp_path / "service.duckdb.wal").stat().st_size)
        original(descriptor, target)

    monkeypatch.setattr("spark_service.db.store.copy_snapshot", upload_first)
    (tmp_path / "copy").mkdir()
    store.copy_to(tmp_path / "copy/service.duckdb", tmp_path / "copy/segments")
    assert logs[0] > 1_000_000, "the log was never long enough for a checkpoint"
    # What waited is folded in by the next commit.
    store.add_upload(make.upload(shape, [make.session(shape, make.hash(99), decode=2)]), "last", "x")
    assert not (tmp_path / "service.duckdb.wal").exists()
    store.close()
    found = verify(tmp_path / "copy", memory="256MB", threads=1)
    assert (found.faults, found.tables["parts"].rows, found.tables["deleted_sessions"].rows) == (0, 9, 1)
    assert verify(tmp_path, memory="256MB", threads=1).tables["parts"].rows == 30


def test_a_copy_holds_deletions_that_an_open_reader_does_not_see(tmp_path: Path, make: Any) -> None:
    shape = make.shape()
    store = Store.open(tmp_path / "service.duckdb", memory="256MB", threads=1)
    sessions = make.sessions(shape, 3, 0)
    store.add_upload(make.upload(shape, sessions), "first", "first")
    with store._database.cursor() as reader:
        reader.begin()
        assert reader.execute("SELECT count(*) FROM parts").fetchall() == [(3,)]
        store.delete_session(sessions[0].session_hash)
        (tmp_path / "copy").mkdir()
        store.copy_to(tmp_path / "copy/service.duckdb", tmp_path / "copy/segments")
        assert reader.execute("SELECT count(*) FROM parts").fetchall() == [(3,)]
    store.close()
    assert verify(tmp_path / "copy", memory="256MB", threads=1).tables["parts"].rows == 2


def test_a_copy_leaves_the_database_locked(tmp_path: Path) -> None:
    """POSIX gives a process's lock up when any descriptor of the file is closed."""
    store = Store.open(tmp_path / "service.duckdb", memory="256MB", threads=1)
    for number in range(2):
        folder = tmp_path / f"copy-{number}"
        folder.mkdir()
        store.copy_to(folder / "service.duckdb", folder / "segments")
    code = (
        "import fcntl, sys\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        "    try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except OSError: print('locked')\n"
    )
    command = [sys.executable, "-c", code, str(store.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "locked\n"
    store.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_a_checkpoint_during_a_copy_is_noticed(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.duckdb", memory="256MB", threads=1)

    def interfere() -> None:
        with database.frozen(), database.cursor() as cursor:
            cursor.execute("CREATE TABLE t (a INTEGER)")
            cursor.execute("CHECKPOINT")

    with pytest.raises(SparkServiceError, match="was checkpointed while it was copied"):
        interfere()
    database.close()


def test_a_backup_over_http(client: TestClient, post: Post, make: Any, store: Store, tmp_path: Path) -> None:
    shape = make.shape()
    assert post(make.body(shape, make.sessions(shape))).status_code == 202
    made = client.post(BACKUP)
    assert made.status_code == 201
    receipt = made.json()
    assert receipt["tables"]["parts"]["rows"] == 8
    path = f"{BACKUP}s/{receipt['name']}"
    answer = client.get(path)
    assert answer.headers["content-type"] == "application/x-tar"
    fetched = tmp_path / "fetched.tar"
    fetched.write_bytes(answer.content)
    assert file_of(fetched, receipt["name"]).model_dump() == {key: receipt[key] for key in ("name", "bytes", "sha256")}
    assert verify(fetched, memory="256MB", threads=1).faults == 0
    assert [entry.name for entry in (store.path.parent / "backups").iterdir()] == [receipt["name"]]
    assert client.delete(path).json() == {"name": receipt["name"]}
    for method in (client.get, client.delete):
        assert (method(path).status_code, method(path).json()["code"]) == (404, "unknown_backup")
        for name in ("service.duckdb", "..%2fservice.duckdb", "%2e%2e%2fservice.duckdb", receipt["name"] + "%00"):
            assert method(f"{BACKUP}s/{name}").status_code in (404, 422)
    assert store.path.is_file()


def test_one_backup_at_a_time(
    client: TestClient, post: Post, make: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is being made, a second is refused, and uploads are stored."""
    shape = make.shape()
    inside, go_on = threading.Event(), threading.Event()
    original = Store.copy_to

    def wait(self: Store, database: Path, segments: Path) -> None:
        original(self, database, segments)
        inside.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Store, "copy_to", wait)
    answers: list[httpx2.Response] = []
    thread = threading.Thread(target=lambda: answers.append(client.post(BACKUP)))
    thread.start()
    assert inside.wait(30)
    refused = client.post(BACKUP)
    assert (refused.status_code, refused.json()["code"]) == (409, "backup_running")
    assert refused.headers["retry-after"] == "10"
    assert post(make.body(shape, make.sessions(shape))).status_code == 202
    go_on.set()
    thread.join(60)
    assert [answer.status_code for answer in answers] == [201]
    assert answers[0].json()["tables"]["parts"]["rows"] == 0


def test_segments_are_linked_not_copied(data: Path, tmp_path: Path) -> None:
    link_files(data / "segments", tmp_path / "linked")
    assert (tmp_path / "linked/2026/part-1.bin").samefile(data / "segments/2026/part-1.bin")
    link_files(tmp_path / "nowhere", tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("kind", [BackupError, RefusedError, StorageFullError, DatabaseLockedError])
def test_errors_cross_a_process_boundary_whole(kind: type[SparkServiceError]) -> None:
    """A running service's backups are read back in a process of their own."""
    found = pickle.loads(pickle.dumps(kind("what", "do this")))
    assert (type(found), found.message, found.hint) == (kind, "what", "do this")


def test_what_a_killed_process_left_is_removed_by_the_next_backup(client: TestClient, store: Store) -> None:
    left_over = store.path.parent / "backups/.spark-left-over"
    left_over.mkdir(parents=True)
    (left_over / "service.duckdb").write_bytes(b"half")
    name = client.post(BACKUP).json()["name"]
    assert [path.name for path in left_over.parent.iterdir()] == [name]
