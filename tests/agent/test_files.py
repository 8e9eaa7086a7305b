from __future__ import annotations

import stat
from pathlib import Path

import pytest

from spark_agent.files import create_once, replacing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "file"


def write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def test_a_file_is_its_owners_and_alone(path: Path) -> None:
    write(path, b"old")
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_readers_see_the_old_file_until_the_end(path: Path) -> None:
    write(path, b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, b"old")

    def fail(_descriptor: int) -> None:
        raise error

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(type(error)):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_the_first_to_create_wins(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_once(path, b"first")
    create_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "xdg"] == ["key"]
