"""Traces as predictors take them: which tokens, which hidden states, which side."""

from __future__ import annotations

import numpy as np
import pytest

from spark_agent.errors import SparkError
from spark_agent.prediction.inputs import read_recorded
from spark_agent.trace_files import SessionTrace
from spark_agent.traces import TraceFolder
from spark_schemas.model import ExpertLayer, ModelShape
from spark_schemas.split import split_of

WIDTHS = {"input": [3, 4], "router": [5, 6]}


def shape_of(name: str = "a") -> ModelShape:
    layers = tuple(
        ExpertLayer(block=block, n_experts=9, top_k=2, expert_bytes=7, tensor_types={"up": "q4_K"}) for block in (1, 2)
    )
    return ModelShape(
        fingerprint="mf1-" + name * 32,
        sibling="ms1-" + name * 32,
        architecture="test",
        n_blocks=3,
        context_length=10,
        core_bytes=0,
        kv_bytes_per_token=0,
        layers=layers,
    )


def session(seed: int, tokens: int, kinds=("input", "router"), workload: str = "chat") -> SessionTrace:
    """Hidden states say which token of which session they are of."""
    random = np.random.default_rng(seed)
    ids = [np.argsort(random.random((tokens, 9)), axis=1)[:, :2] for _ in range(2)]
    decode = np.arange(tokens) >= tokens // 3
    ids[1][~decode] = -1
    rows = seed + np.arange(tokens)[:, None] / 64
    hidden = {kind: [np.tile(rows, width).astype(np.float16) for width in WIDTHS[kind]] for kind in kinds}
    return SessionTrace(f"{seed:064x}", workload, ids, decode, 0, hidden)


def save(path, sessions, kinds=("input", "router"), name="a"):
    widths = {kind: WIDTHS[kind] for kind in kinds}
    with TraceFolder(path, shape_of(name), hidden_widths=widths) as folder:
        for one in sessions:
            folder.add(one)
    return path


@pytest.mark.parametrize("phase", ["decode", "prefill", "both"])
def test_hidden_states_are_those_of_the_tokens(tmp_path, phase):
    sessions = [session(seed, 30 + seed) for seed in range(6)]
    recorded = read_recorded([save(tmp_path, sessions)], phase)
    assert recorded.hidden_kinds == ["input", "router"]
    assert recorded.layers == ([0, 1] if phase == "decode" else [0])
    assert recorded.blocks == ([1, 2] if phase == "decode" else [1])
    chosen = {"decode": lambda one: one.decode, "prefill": lambda one: ~one.decode, "both": lambda one: one.decode >= 0}
    for held_out in (True, False, None):
        wanted = [one for one in sessions if held_out is None or (split_of(one.session_hash) == "held_out") == held_out]
        side = recorded.side(held_out=held_out)
        assert side.trace.n_sessions == len(wanted)
        inputs = side.inputs(0, ["router"])
        expected = np.concatenate([one.hidden["router"][0][chosen[phase](one)] for one in wanted])
        np.testing.assert_array_equal(inputs.hidden["router"], expected)
        np.testing.assert_array_equal(
            side.trace.ids[0], np.concatenate([one.ids[0][chosen[phase](one)] for one in wanted])
        )
    assert recorded.hidden_width("input", 0) == 3


def test_no_more_tokens_than_wanted_and_short_sessions_whole(tmp_path):
    recorded = read_recorded([save(tmp_path, [session(seed, 9 if seed % 2 else 300) for seed in range(12)])], "decode")
    whole, some = recorded.side(held_out=None), recorded.side(held_out=None, most_tokens=400)
    assert 380 < some.trace.n_tokens <= 400 < whole.trace.n_tokens
    assert min(some.trace.lengths) == min(whole.trace.lengths)
    starts = some.trace.offsets[:-1]
    np.testing.assert_array_equal(
        some.inputs(1, ["input"]).hidden["input"][starts, 0],
        whole.inputs(1, ["input"]).hidden["input"][whole.trace.offsets[:-1], 0],
    )


def test_several_inputs_and_sessions_without_hidden_states(tmp_path):
    first = save(tmp_path / "one", [session(1, 30), session(2, 30)])
    second = save(tmp_path / "two", [session(2, 60), session(3, 30)])
    plain = save(tmp_path / "three", [session(4, 30, ())], ())
    recorded = read_recorded([first, second, plain], "decode")
    assert recorded.side(held_out=None).trace.lengths.tolist() == [20, 40, 20]
    assert recorded.notes == ["1 of 4 sessions are left out: they lack hidden states that are read"]
    everything = read_recorded([first, second, plain], "decode", ())
    assert everything.side(held_out=None).trace.n_sessions == 4
    assert everything.hidden_kinds == []
    with pytest.raises(SparkError, match="has the hidden states that are read"):
        read_recorded([plain], "decode", ["input"])


def test_of_one_model_only(tmp_path):
    with pytest.raises(SparkError, match="another model"):
        read_recorded(
            [save(tmp_path / "one", [session(1, 30)]), save(tmp_path / "two", [session(2, 30)], name="b")], "decode"
        )
