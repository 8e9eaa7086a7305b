from __future__ import annotations

import pickle
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest

from spark_agent.errors import SparkError
from spark_agent.traces import SessionTrace, load_traces, save_traces

FINGERPRINT = "mf1-" + "a" * 32


def session(seed: int, tokens: int) -> SessionTrace:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 1000, (tokens, top_k)) for top_k in (2, 4)]
    return SessionTrace(f"{seed:064x}", f"work-{seed}", ids)


@pytest.fixture
def sessions() -> list[SessionTrace]:
    return [session(1, 5), session(2, 0), session(3, 7)]


@pytest.fixture
def path(tmp_path: Path, sessions) -> Path:
    found = tmp_path / "traces" / "trace.npz"
    save_traces(found, FINGERPRINT, sessions)
    return found


def rewrite(path: Path, **changes: object) -> None:
    with np.load(path) as data:
        arrays = {**dict(data.items()), **changes}
    np.savez_compressed(path, **{name: value for name, value in arrays.items() if value is not None})


def test_a_round_trip(path, sessions):
    found = load_traces(path)
    assert found.fingerprint == FINGERPRINT
    for old, new in zip(sessions, found.sessions, strict=True):
        assert (old.session_hash, old.workload) == (new.session_hash, new.workload)
        for before, after in zip(old.ids, new.ids, strict=True):
            assert np.array_equal(before, after)
            assert after.dtype == np.int64


def test_a_file_is_its_owners_and_replaced_at_once(path, sessions):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    save_traces(path, FINGERPRINT, sessions[:1])
    assert len(load_traces(path).sessions) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["trace.npz"]


def test_nothing_to_write_or_nowhere(tmp_path, sessions):
    with pytest.raises(SparkError, match="no sessions"):
        save_traces(tmp_path / "trace.npz", FINGERPRINT, [])
    (tmp_path / "file").touch()
    with pytest.raises(SparkError, match="cannot write"):
        save_traces(tmp_path / "file" / "trace.npz", FINGERPRINT, sessions)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(SparkError, match="cannot write"):
        save_traces(folder, FINGERPRINT, sessions)
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name != "xdg") == ["file", "folder"]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": np.array(2)},
        {"format": np.array([1, 1])},
        {"format": None},
        {"fingerprint": None},
        {"layer_0": None},
        {"layer_0": np.zeros((12, 2))},
        {"layer_0": np.zeros(24, dtype=np.uint16)},
        {"layer_0": np.zeros((11, 2), dtype=np.uint16)},
        {"layer_0": None, "layer_1": None},
        {"layer_x": np.zeros((12, 2), dtype=np.uint16)},
        {"offsets": np.array([0, 5, 12])},
        {"offsets": np.array([0, 9, 5, 12])},
        {"offsets": np.array([1, 5, 5, 12])},
        {"offsets": np.array([0, 5, 5, 99])},
        {"offsets": np.array([], dtype=np.int64)},
        {"workload": np.array(["only one"])},
    ],
)
def test_altered_files_are_refused(path, changes):
    rewrite(path, **changes)
    with pytest.raises(SparkError, match="is not a trace") as caught:
        load_traces(path)
    assert caught.value.hint


def test_damaged_files_are_refused_or_whole(path):
    data = path.read_bytes()
    expected = load_traces(path)
    refused = 0
    for index in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[index] ^= 0xFF
        path.write_bytes(damaged)
        try:
            found = load_traces(path)
        except SparkError:
            refused += 1
        else:
            assert found.fingerprint == expected.fingerprint
    assert refused > len(data) // 14
    for length in (0, 1, 30, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(SparkError):
            load_traces(path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x93NUMPY"])
def test_other_files_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(SparkError, match="is not a trace"):
        load_traces(path)
    np.save(path.with_suffix(".npy"), np.zeros(3))
    with pytest.raises(SparkError, match="is not a trace"):
        load_traces(path.with_suffix(".npy"))
    for missing in (path.parent, path.with_name("absent")):
        with pytest.raises(SparkError, match="no such trace"):
            load_traces(missing)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def test_nothing_is_ever_unpickled(path):
    rewrite(path, workload=np.array([Bomb(), 1, 2], dtype=object))
    with pytest.raises(SparkError, match="is not a trace"):
        load_traces(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(SparkError, match="is not a trace"):
        load_traces(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("format.npy", pickle.dumps(Bomb()))
    with pytest.raises(SparkError, match="is not a trace"):
        load_traces(path)
