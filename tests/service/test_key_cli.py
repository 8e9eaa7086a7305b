from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_service import cli
from spark_service.signing import KEY_NAME, Signer


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run ``spark-service key``; give the exit code and both streams."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["spark-service", "key", *args, "--data-dir", str(tmp_path / "data")])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        streams = capsys.readouterr()
        return int(str(caught.value.code)), streams.out, streams.err

    return run


def test_show_makes_the_key_and_rotate_replaces_it(key: Any, tmp_path: Path) -> None:
    first = json.loads(key("show", "--json")[1])
    assert first == {**json.loads(key("show", "--json")[1]), "earlier_key_ids": []}
    assert first["key"] == Signer(tmp_path / "data").info().key
    second = json.loads(key("rotate", "--json")[1])
    assert second["earlier_key_ids"] == [first["key_id"]]
    code, out, err = key("show")
    assert (code, err) == (0, "")
    assert out == f"key id  {second['key_id']}\nkey     {second['key']}\nafter   {first['key_id']}\n"


@pytest.mark.parametrize("command", ["show", "rotate"])
def test_an_unusable_key(key: Any, tmp_path: Path, command: str) -> None:
    key("show")
    (tmp_path / "data" / KEY_NAME).chmod(0o644)
    code, out, err = key(command)
    assert (code, out) == (1, "")
    assert "expected 0600" in err
    assert "hint: chmod 600" in err


def test_no_command_is_wrong_usage(key: Any) -> None:
    assert key()[0] == 2
