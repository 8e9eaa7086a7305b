from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
from pathlib import Path

import pytest

from spark_agent.errors import ConfigError
from spark_agent.identity import load_or_create_key, session_hash, session_key
from spark_agent.paths import local_key_path


def test_the_hash_is_keyed():
    expected = hmac.new(b"k" * 32, b"lineage", hashlib.sha256).hexdigest()
    assert session_hash(b"k" * 32, "lineage") == expected
    assert session_hash(b"l" * 32, "lineage") != expected
    assert len(session_hash(b"k" * 32, "\udcff ünïcode")) == 64


def test_a_team_key_comes_before_the_local_one(tmp_path: Path):
    path = tmp_path / "state" / "session.key"
    assert session_key((None, b"config" * 4), path) == b"config" * 4
    assert session_key((b"env" * 8, b"config" * 4), path) == b"env" * 8
    assert not path.exists()
    local = session_key((None, None), path)
    assert len(local) == 32
    assert session_key((None, None), path) == local
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["session.key"]


def test_agents_that_start_at_once_share_one_key():
    path = local_key_path()
    code = "import sys, pathlib; from spark_agent.identity import *; sys.stdin.read(); " + (
        "print(load_or_create_key(pathlib.Path(sys.argv[1])).hex())"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
    keys = set()
    for process in started:
        with process:
            assert process.stdout is not None
            keys.add(process.stdout.read().strip())
    assert keys == {load_or_create_key(path).hex()}


@pytest.mark.parametrize("content", [b"", b"abc", b"zz" * 32, b"ab" * 8, b"\xff\xfe"])
def test_a_damaged_key_is_never_replaced(tmp_path: Path, content: bytes):
    path = tmp_path / "session.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"session\.key"):
        load_or_create_key(path)
    assert path.read_bytes() == content


def test_an_exposed_key_is_refused(tmp_path: Path):
    path = tmp_path / "session.key"
    load_or_create_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others") as caught:
        load_or_create_key(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create the session key"):
        load_or_create_key(tmp_path / "file" / "session.key")
