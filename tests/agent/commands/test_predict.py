"""``spark predict`` as a person types it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from spark_agent.trace_files import SessionTrace
from spark_agent.traces import TraceFolder
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

KEYS = {"predictor", "loss", "recall_at_8", "recall_at_16", "recall_at_24", "cost_ms"}
WIDTH = 16


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    return read_model_shape(demo_model_path())


def session(shape: ModelShape, number: int, tokens: int = 60, hidden: bool = True) -> SessionTrace:
    """Routers select by what they read, which is what the layer starts from with noise."""
    random = np.random.default_rng(number)
    ids, inputs, routers = [], [], []
    for layer in shape.layers:
        gate = np.random.default_rng(layer.block).normal(size=(WIDTH, layer.n_experts))
        rows = random.normal(size=(tokens, WIDTH))
        read = rows + 0.7 * random.normal(size=rows.shape)
        inputs.append(rows.astype(np.float16))
        routers.append(read.astype(np.float16))
        ids.append(np.argsort(-(read @ gate), axis=1)[:, : layer.top_k])
    kept = {"input": inputs, "router": routers} if hidden else {}
    return SessionTrace(f"{number:064x}", "code", ids, np.arange(tokens) >= 10, 0, kept)


def save(path: Path, shape: ModelShape, numbers, hidden: bool = True) -> Path:
    widths = {kind: [WIDTH] * len(shape.layers) for kind in ("input", "router")} if hidden else {}
    with TraceFolder(path, shape, hidden_widths=widths) as folder:
        for number in numbers:
            folder.add(session(shape, number, hidden=hidden))
    return path


@pytest.fixture
def traces(tmp_path, shape) -> Path:
    assert len({split_of(f"{number:064x}") for number in range(24)}) == 2
    return save(tmp_path / "traces", shape, range(24))


@pytest.fixture
def train(spark_cli, traces):
    return lambda *more: spark_cli("predict", "train", traces, "--epochs", 2, "--width", 16, *more)


def test_all_predictors_of_a_trace(train, tmp_path):
    report = train("--loss", "all", "--json").json
    rows = {(row["predictor"], row["loss"]): row for row in report["rows"]}
    assert all(set(row) >= KEYS for row in report["rows"])
    assert {loss for name, loss in rows if name == "mlp:hidden"} == {"bce", "listnet", "ranknet"}
    assert {loss for name, loss in rows if name == "temporal"} == {None}
    hidden, ceiling = rows["ridge:hidden", "squared"], rows["ridge:router", "squared"]
    assert rows["frequency", None]["recall_at_8"] < hidden["recall_at_8"] < ceiling["recall_at_8"]
    assert (hidden["ceiling"], ceiling["ceiling"]) == (False, True)
    for row in report["rows"]:
        assert 0 <= row["recall_at_8"] <= row["recall_at_16"] <= row["recall_at_24"] <= 1
        assert row["recall_at_top_k"] == row["recall_at_8"]
        low, high = row["intervals"]["8"]
        assert low <= row["recall_at_8"] <= high
        assert len(row["layers"]) == 4
        assert row["cost_ms"] > 0
    n_held_out = sum(split_of(f"{number:064x}") == "held_out" for number in range(24))
    assert (report["n_held_out"], report["n_calibration"]) == (n_held_out, 24 - n_held_out)
    assert report["tokens_held_out"] == 50 * n_held_out
    assert report["device"] == "numpy"
    assert report["output"] is None


def test_kept_predictors_judge_the_same_and_others(train, spark_cli, traces, tmp_path, shape):
    path = tmp_path / "kept" / "predictors.npz"
    first = train("--output", path, "--predictor", "ridge:hidden", "--predictor", "mlp:hidden+layers1", "--json").json
    second = spark_cli("predict", "eval", traces, "--predictors", path, "--json").json
    for one, other in zip(first["rows"], second["rows"], strict=True):
        assert one | {"cost_ms": 0} == other | {"cost_ms": 0}
    unseen = save(tmp_path / "unseen", shape, range(100, 110))
    found = spark_cli("predict", "eval", unseen, "--predictors", path, "--all-sessions", "--json").json
    assert found["n_held_out"] == 10
    assert found["rows"][0]["recall_at_8"] == pytest.approx(first["rows"][0]["recall_at_8"], abs=0.1)


def test_people_read_a_table(train):
    result = train("--predictor", "temporal", "--predictor", "ridge:router")
    assert result.code == 0
    assert "ridge:router" in result.out
    assert "the ceiling, not a predictor" in result.err
    assert "mean over sessions" in result.err


def test_traces_without_hidden_states(spark_cli, tmp_path, shape):
    plain = save(tmp_path / "plain", shape, range(24), hidden=False)
    report = spark_cli("predict", "train", plain, "--json").json
    assert {row["predictor"] for row in report["rows"]} >= {"temporal", "naive-bayes", "ridge:layers2+average"}
    assert not any("hidden" in row["predictor"] for row in report["rows"])
    asked = spark_cli("predict", "train", plain, "--predictor", "ridge:hidden")
    asked.failed(1, "no session has the hidden states", "--hidden")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--loss", "mse"), "--loss: found 'mse'"),
        (("--predictor", "oracle"), "--predictor"),
        (("--predictor", "ridge:words"), "'words'"),
        (("--phase", "training"), "--phase"),
        (("--device", "tpu"), "--device"),
    ],
)
def test_wrong_options(train, arguments, word):
    train(*arguments).failed(2, word, hint=False)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pytorch_that_is_not_there(train, device):
    train("--device", device).failed(1, "PyTorch is not installed", "spark-moe[predict]")
    assert train("--device", device, "--predictor", "temporal").code == 0


def test_one_side_alone_is_too_little(spark_cli, tmp_path, shape):
    side = [number for number in range(24) if split_of(f"{number:064x}") == "held_out"]
    path = save(tmp_path / "traces", shape, side)
    spark_cli("predict", "train", path).failed(1, "0 tokens of calibration sessions")


def test_predictors_of_another_model_or_other_layers(train, spark_cli, tmp_path, shape):
    path = tmp_path / "predictors.npz"
    train("--output", path, "--predictor", "ridge:hidden")
    other = shape.model_copy(update={"fingerprint": "mf1-" + "0" * 32})
    traces = save(tmp_path / "other", other, range(24))
    spark_cli("predict", "eval", traces, "--predictors", path).failed(3, "learned from", "one model")
    spark_cli("predict", "eval", traces, "--predictors", tmp_path / "none.npz").failed(1, "cannot read")
    spark_cli("predict", "eval", tmp_path / "nothing", "--predictors", path).failed(1, "no such trace")


def test_from_a_recording_to_predictors(agent_cli, spark_cli, tmp_path):
    """The demo model over its sessions: what a layer starts from says more than earlier selections, and less than what
    its router reads."""
    traces, kept = tmp_path / "traces", tmp_path / "predictors.npz"
    recorded = agent_cli(
        "record",
        "--demo",
        "--max-tokens",
        40,
        "--threads",
        1,
        "--trace",
        traces,
        "--hidden",
        "--router-input",
        "--json",
    ).json
    names = ("temporal", "ridge:layers2", "ridge:hidden", "ridge:router")
    asked = [word for name in names for word in ("--predictor", name)]
    report = spark_cli("predict", "train", traces, "--output", kept, *asked, "--json").json
    assert report["tokens_calibration"] + report["tokens_held_out"] == recorded["tokens_decode"]
    recall = [row["recall_at_8"] for row in report["rows"]]
    assert recall == sorted(recall)
    assert recall[-1] > 0.6
    again = agent_cli("predict", "eval", traces, "--predictors", kept, "--json").json
    assert [row["recall_at_8"] for row in again["rows"]] == recall
