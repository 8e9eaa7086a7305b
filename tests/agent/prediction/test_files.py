"""Files of predictors: what was saved comes back, and nothing else is read."""

from __future__ import annotations

import io
import json
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest

from spark_agent.errors import RefusedError, SparkError
from spark_agent.prediction.files import load_predictors, save_predictors
from spark_runtime.predict.fitted import fit
from spark_runtime.predict.kinds import default_kinds
from spark_runtime.predict.mlp import Training
from spark_runtime.predict.study import Sessions
from spark_runtime.simulator.traces import Trace
from spark_schemas.model import ExpertLayer, ModelShape

TRAINING = Training(width=3, epochs=1)
WIDTHS = {"input": 4, "router": 5}


def shape_of(name: str = "a") -> ModelShape:
    layers = tuple(
        ExpertLayer(block=block, n_experts=n_experts, top_k=2, expert_bytes=7, tensor_types={"up": "q4_K"})
        for block, n_experts in ((0, 9), (2, 6), (3, 6))
    )
    return ModelShape(
        fingerprint="mf1-" + name * 32,
        sibling="ms1-" + name * 32,
        architecture="test",
        n_blocks=4,
        context_length=10,
        core_bytes=0,
        kv_bytes_per_token=0,
        layers=layers,
    )


@pytest.fixture(scope="module")
def fitted():
    random = np.random.default_rng(1)
    ids = tuple(np.argsort(random.random((40, n)), axis=1)[:, :2] for n in (6, 6))
    rows = {kind: random.normal(size=(40, width)) for kind, width in WIDTHS.items()}
    sessions = Sessions(Trace(ids, (6, 6), np.array([0, 40])), lambda kind, layer: rows[kind])
    prior = np.full(6, 1 / 6, np.float32)
    return {
        kind: [fit(kind, sessions.inputs(layer, list(WIDTHS)), prior, TRAINING) for layer in range(2)]
        for kind in default_kinds(tuple(WIDTHS), ("bce", "ranknet"))
    }


@pytest.fixture
def path(tmp_path, fitted) -> Path:
    found = tmp_path / "new" / "predictors.npz"
    save_predictors(found, shape_of(), [1, 2], [WIDTHS, WIDTHS], fitted, phase="decode", width=3, sessions=1, tokens=40)
    return found


def test_a_round_trip(path, fitted):
    about, found = load_predictors(path, shape_of())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (about.fingerprint, about.phase, about.sessions, about.tokens) == (shape_of().fingerprint, "decode", 1, 40)
    assert [layer.block for layer in about.layers] == [2, 3]
    assert list(found) == list(fitted)
    for kind, layers in fitted.items():
        for one, other in zip(layers, found[kind], strict=True):
            assert set(one.arrays) == set(other.arrays)
            for name, array in one.arrays.items():
                np.testing.assert_array_equal(array, other.arrays[name])
    with np.load(path, allow_pickle=False) as plain:
        assert len(plain.files) > len(fitted)


def test_another_models_predictors_are_refused(path):
    with pytest.raises(RefusedError, match=r"learned from mf1-a.*expected mf1-b") as caught:
        load_predictors(path, shape_of("b"))
    assert caught.value.exit_code == 3
    assert load_predictors(path)[0].fingerprint == shape_of().fingerprint


def test_a_file_that_cannot_be_written_leaves_the_old_one(path, fitted, tmp_path):
    with pytest.raises(SparkError, match="cannot write"):
        save_predictors(
            path / "below", shape_of(), [1, 2], [WIDTHS, WIDTHS], fitted, phase="decode", width=3, sessions=1, tokens=4
        )
    assert load_predictors(path)


def npy(array: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)
    return buffer.getvalue()


def about_of(path: Path) -> dict:
    with np.load(path) as file:
        return json.loads(file["about"].tobytes())


def altered(path: Path, name: str, content: bytes | None) -> Path:
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    assert name in entries
    entries.pop(name)
    if content is not None:
        entries[name] = content
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, value in entries.items():
            archive.writestr(entry, value)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"predictors": []},
        {"predictors": [{"name": "gate"}]},
        {"predictors": [{"name": "mlp:hidden"}]},
        {"predictors": [{"name": "ridge:hidden", "loss": "bce"}]},
        {"predictors": [{"name": "temporal"}, {"name": "temporal"}]},
        {"layers": []},
        {"layers": [{"block": 2, "n_experts": 6, "top_k": 2, "hidden": {}}] * 2},
        {"layers": [{"block": 2, "n_experts": 6, "top_k": 2, "hidden": {"output": 4}}] * 2},
        {"fingerprint": "nobody"},
        {"width": 4},
        {"width": 2**40},
        {"more": 1},
    ],
    ids=range(13),
)
def test_what_it_says_of_itself_is_checked(path, changes):
    about = json.dumps(about_of(path) | changes).encode()
    altered(path, "about.npy", npy(np.frombuffer(about, np.uint8)))
    with pytest.raises(SparkError) as caught:
        load_predictors(path)
    assert caught.value.hint


FIRST = "0/0/prior.npy"


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"text",
        npy(np.zeros(7, np.float32)),
        npy(np.zeros((6, 1), np.float32)),
        npy(np.zeros(6, np.float64)),
        npy(np.full(6, np.nan, np.float32)),
        npy(np.zeros(6, np.float32))[:-1],
        npy(np.zeros(6, np.float32)) + bytes(8000),
        npy(np.zeros(6, np.float32), version=(2, 0)),
        npy(np.array([None] * 6, dtype=object), allow_pickle=True),
        npy(np.zeros(6, np.float32)).replace(b"(6,)", b"(6000000000000,)"),
    ],
    ids=range(12),
)
def test_altered_arrays_are_refused(path, content):
    altered(path, FIRST, content)
    with pytest.raises(SparkError) as caught:
        load_predictors(path)
    assert caught.value.hint or content is not None


def test_damaged_files_are_refused_or_read(path):
    data = path.read_bytes()
    refused = 0
    for index in range(0, len(data), 97):
        damaged = bytearray(data)
        damaged[index] ^= 0xFF
        path.write_bytes(damaged)
        try:
            load_predictors(path)
        except SparkError:
            refused += 1
    assert refused > len(data) // 97 // 2  # the archive's own checksums
    for content in (b"", b"text", data[: len(data) // 2]):
        path.write_bytes(content)
        with pytest.raises(SparkError):
            load_predictors(path)
    path.unlink()
    with pytest.raises(SparkError, match="cannot read"):
        load_predictors(path)
