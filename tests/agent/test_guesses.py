"""What was learned for fetching early, kept: whole, of the right model, and no hostile file harms anything."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.errors import SparkError
from spark_agent.guesses import guesses_path, read_guesses, write_guesses
from spark_runtime.native_tier import LayerGuesses

FINGERPRINT = "ab" * 32


def some_guesses() -> dict[int, LayerGuesses]:
    random = np.random.default_rng(1)
    return {
        block: LayerGuesses(sources, random.integers(-(2**15), 2**15, (rows, 8)).astype(np.int16))
        for block, sources, rows in ((3, (1,), 9), (5, (3, 1), 17))
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "some.guesses"
    write_guesses(made, FINGERPRINT, some_guesses())
    return made


def test_they_come_back_as_they_were(path: Path) -> None:
    found = read_guesses(path, FINGERPRINT)
    assert found.keys() == some_guesses().keys()
    for block, layer in some_guesses().items():
        assert found[block].sources == layer.sources
        np.testing.assert_array_equal(found[block].weights, layer.weights)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert guesses_path(FINGERPRINT).name == f"{FINGERPRINT}.guesses"


def test_nothing_kept_is_nothing(tmp_path: Path) -> None:
    assert read_guesses(tmp_path / "none", FINGERPRINT) == {}


def test_of_another_model_they_are_refused(path: Path) -> None:
    with pytest.raises(SparkError, match="holds no guesses of this model"):
        read_guesses(path, "cd" * 32)


@given(data=st.data())
def test_any_damage_is_noticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = tmp_path_factory.mktemp("guesses") / "some.guesses"
    write_guesses(made, FINGERPRINT, some_guesses())
    whole = made.read_bytes()
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))] + data.draw(st.binary(max_size=3))
    else:
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    if damaged == whole:
        return
    made.write_bytes(damaged)
    with pytest.raises(SparkError, match=r"holds no guesses|is damaged"):
        read_guesses(made, FINGERPRINT)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"layers": 7},
        {"layers": [{"block": 1, "sources": [0], "rows": 10**12, "experts": 8}]},
        {"layers": [{"block": -1, "sources": [0], "rows": 9, "experts": 8}]},
        {"layers": [{"block": 1, "sources": ["x"], "rows": 9, "experts": 8}]},
        {"layers": [{"block": True, "sources": [], "rows": 9, "experts": 8}]},
        {"layers": [{}] * 2000},
        {"fingerprint": None},
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused(path: Path, change: dict[str, object]) -> None:
    header, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(header) | change).encode() + b"\n" + rest)
    with pytest.raises(SparkError, match="holds no guesses of this model"):
        read_guesses(path, FINGERPRINT)


@pytest.mark.parametrize("content", [b"", b"\n", b"[]\n", b"null\n", b"{}\n", b"\xff\xfe\n", b"x" * (2**20 + 5)])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    made = tmp_path / "some.guesses"
    made.write_bytes(content)
    with pytest.raises(SparkError, match="holds no guesses of this model"):
        read_guesses(made, FINGERPRINT)


def test_a_folder_in_its_place_is_told(tmp_path: Path) -> None:
    with pytest.raises(SparkError, match="holds no guesses"):
        read_guesses(tmp_path, FINGERPRINT)
