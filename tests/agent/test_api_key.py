"""The key of the agent's own API: which one counts, and files that hold none."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_agent.api_key import ApiKey, named_api_key, own_api_key, shown_api_key
from spark_agent.env import Environment
from spark_agent.errors import ConfigError
from spark_agent.paths import api_key_path


def key_file(path: Path, content: bytes = b"from-a-file\n", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_which_one_counts(tmp_path):
    option, variable = key_file(tmp_path / "option", b"a"), key_file(tmp_path / "variable", b"  b \n")
    environment = Environment(api_key="c", api_key_file=str(variable))
    assert named_api_key(environment, option) == ApiKey("a", option)
    assert named_api_key(environment, None) == ApiKey("c", None)
    assert named_api_key(Environment(api_key_file=str(variable)), None) == ApiKey("b", variable)
    assert named_api_key(Environment(), None) is None
    assert "'c'" not in repr(ApiKey("c", None))


def test_ones_own_is_made_once_and_kept_to_oneself():
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: own_api_key(), range(8)))
    assert len({key.value for key in made}) == 1
    assert len(made[0].value) >= 43
    assert stat.S_IMODE(api_key_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(api_key_path().parent.stat().st_mode) == 0o700
    assert own_api_key() == ApiKey(made[0].value, api_key_path(), is_new=False)
    assert [path.name for path in api_key_path().parent.iterdir()] == ["api.key"]


def test_what_a_script_is_shown():
    key = own_api_key().value
    assert shown_api_key(key) == f"$(cat '{api_key_path()}')"
    assert shown_api_key("another") == "$SPARKMOE_API_KEY"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"s3cret", 0o644, ["mode 0644", "0600"]),
        (b"s3cret", 0o620, ["mode 0620"]),
        (b"", 0o600, ["0 bytes", "one key"]),
        (b"\n", 0o600, ["one key"]),
        (b"two words", 0o600, ["without spaces"]),
        (b"one\ntwo\n", 0o600, ["without spaces"]),
        ("schlüssel".encode(), 0o600, ["printable ASCII"]),
        (b"x" * 5000, 0o600, ["at most 4096"]),
    ],
)
def test_files_that_hold_no_key_are_said_and_left(tmp_path, content, mode, words):
    for path in (tmp_path / "named", api_key_path()):
        path.parent.mkdir(parents=True, exist_ok=True)
        key_file(path, content, mode)
        with pytest.raises(ConfigError) as refused:
            own_api_key() if path == api_key_path() else named_api_key(Environment(), path)
        for word in (*words, str(path)):
            assert word in str(refused.value)
        assert refused.value.hint
        assert path.read_bytes() == content
        if content.strip():
            assert content.decode().strip() not in str(refused.value)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent", Path("/dev/null")):
        with pytest.raises(ConfigError, match="API key file"):
            named_api_key(Environment(), path)


def test_a_folder_that_cannot_be_written_to(monkeypatch):
    api_key_path().parent.parent.mkdir(parents=True)
    api_key_path().parent.write_text("in the way")
    with pytest.raises(ConfigError, match="cannot keep a key") as refused:
        own_api_key()
    assert "SPARKMOE_API_KEY" in str(refused.value.hint)
