"""What serving engines record of their experts, and what is refused: small files of our own making."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from found import COUNTS, counts, says
from torch_file import save

from spark_agent.formats.reading import FormatError

# ---- sglang


def test_sglang_stat(tmp_path, read):
    table = np.array([COUNTS, [[0, 0, 0], [0, 0, 0]], COUNTS], dtype="<i4")
    found = read("sglang", save(tmp_path / "a.pt", {"rank": 0, "logical_count": table, "average": None}), top_k=2)
    assert counts(found) == (2 * np.array(COUNTS)).tolist()
    assert says(found, "1 of 3 steps are empty")
    assert found.tokens == 6
    flat = save(tmp_path / "b.pt", {"activation_freq": np.array(COUNTS, dtype="<f4")})
    assert counts(read("sglang", flat)) == COUNTS


def test_sglang_passes_add_replicas_up(tmp_path, read):
    physical = np.array([[0, 1, 2, 0], [2, 1, 0, 1]], dtype="<i8")
    record = {"forward_pass_id": 1, "global_physical_count": np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype="<i4")}
    value = {"records": [record, record], "last_physical_to_logical_map": physical}
    found = read("sglang", save(tmp_path / "a.pt", value))
    assert counts(found) == [[10, 4, 6], [14, 28, 10]]
    assert says(found, "every other one wrote a file of its own")
    assert not says(found, "the text itself")


def test_sglang_of_single_tokens_leaves_the_text_behind(tmp_path, read):
    """As ``per_token`` writes a pass: its counts beside everything that the text can be rebuilt from."""
    record = {
        "forward_pass_id": 1,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": [4711, 4712],
        "positions": [0, 1],
        "extend_seq_lens": None,
        "forward_mode": 1,
        "topk_ids_of_layer": np.array([[[0, 1], [2, 0]]], dtype="<i4"),
        "misc_objects": [{"layer_id": 0, "num_tokens_per_rank": [2]}],
        "global_physical_count": np.array([[2, 1, 1]], dtype="<i4"),
    }
    value = {"records": [record], "last_physical_to_logical_map": np.array([[0, 1, 2]], dtype="<i8")}
    found = read("sglang", save(tmp_path / "a.pt", value))
    assert counts(found) == [[2, 1, 1]]
    assert says(found, "holds the text itself")
    assert "4711" not in found.model_dump_json()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"records": [{"topk_ids_of_layer": np.zeros((1, 1), "<i8"), "input_ids": [1]}]}, "the text itself"),
        ({"records": [{"rank": 0}]}, "records without counts"),
        ({"records": []}, "no records"),
        ({"records": [{"global_physical_count": np.ones((1, 2), "<i4")}]}, "no last_physical_to_logical_map"),
        ({"rank": 0}, "neither logical_count nor records"),
        ([1], "no dict"),
        ({"logical_count": np.ones(3, "<i4")}, "expected 2 or 3 axes"),
        ({"logical_count": np.zeros((1, 0), "<i4")}, "expected 2 or 3 axes"),
        ({"logical_count": np.full((1, 2), -1, "<i4")}, "no count below 0"),
        ({"logical_count": np.full((1, 2), np.nan, "<f4")}, "nan"),
        ({"logical_count": np.full((1, 2), 0.5, "<f4")}, "whole counts"),
        ({"logical_count": np.zeros((1, 2), "<i4")}, "every count is 0"),
        ({"logical_count": np.full((4, 1, 2), 2**62, "<i8")}, "no count above"),
        ({"logical_count": "text"}, "expected 2 or 3 axes"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_sglang_recordings_that_are_none(tmp_path, read, value, reason):
    with pytest.raises(FormatError, match=reason):
        read("sglang", save(tmp_path / "a.pt", value))


def test_sglang_maps_that_are_none(tmp_path, read):
    record = {"global_physical_count": np.ones((1, 2), "<i4")}
    for logical in ([[0, -1]], [[0]], [[0, 2**40]]):
        value = {"records": [record], "last_physical_to_logical_map": np.array(logical, dtype="<i8")}
        with pytest.raises(FormatError):
            read("sglang", save(tmp_path / "a.pt", value))


def test_sglang_location(write, read):
    assert counts(read("sglang-location", write("a.json", {"logical_count": COUNTS}))) == COUNTS
    steps = {"logical_count": [COUNTS, COUNTS]}
    assert counts(read("sglang-location", write("a.json", steps))) == (2 * np.array(COUNTS)).tolist()
    for value in (
        {"physical_to_logical_map": [[0]]},
        {"logical_count": [1]},
        {"logical_count": [[-1, 2]]},
        {"logical_count": [COUNTS, COUNTS[:1]]},
        {"logical_count": [[[1, 2], [1]], [[1, 2], [1]]]},
        {"logical_count": [[[1, 2]], [[1, -2]]]},
        {"logical_count": [[[1, 2]], [3]]},
        {"logical_count": [[[1, 2], 3]]},
        {"logical_count": [[[2**53, 2]]] * 2},
        [],
        3,
    ):
        with pytest.raises(FormatError):
            read("sglang-location", write("a.json", value))


# ---- vllm


def line(**changes: Any) -> str:
    record = {
        "record_type": "eplb_load_stats",
        "version": 1,
        "step": 1,
        "expert_load": [[1, 2, 3, 0], [5, 6, 7, 8]],
        "p2l_map": [[0, 1, 0, -1], [2, 1, 0, 1]],
    }
    return json.dumps(record | changes) + "\n"


def test_vllm_load_stats(write, read):
    head = json.dumps({"record_type": "eplb_load_meta", "model": "m", "version": 1}) + "\n\n"
    wide = {"p2l_map": [[0, 1, 2, -1], [2, 1, 0, 1]]}
    found = read("vllm-eplb", write("a.jsonl", head + line(**wide) + line(**wide)))
    assert counts(found) == [[2, 4, 6], [14, 28, 10]]
    assert found.model == "m"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}\n",
        "[]\n",
        "{\n",
        line(version=2),
        line(version=True),
        line(expert_load=[[1, 2, 3, 4], [5, 6, 7, 8]]),  # a load where no expert is
        line(expert_load=[[1, -2, 3, 0], [5, 6, 7, 8]]),
        line(expert_load=[[1, 2, 3], [5, 6, 7]]),
        line(expert_load=[[1, 2, 3, 0], [5, 6, 7]]),
        line(expert_load=[[1, 2.5, 3, 0], [5, 6, 7, 8]]),
        line(p2l_map=None),
        line(p2l_map=[[0, 1, 0, -2], [2, 1, 0, 1]]),
        line(p2l_map=[[0, 1, 0, 10**9], [2, 1, 0, 1]]),
        line() + line(p2l_map=[[0, 1, 2, -1], [3, 1, 0, 1]]),
        line(expert_load="NaN").replace('"NaN"', "NaN"),
        json.dumps({"record_type": "eplb_initial_mapping", "version": 1, "initial_global_assignments": {"0": [0]}}),
    ],
    ids=lambda text: text[:30],
)
def test_vllm_load_stats_that_are_none(write, read, content):
    with pytest.raises(FormatError):
        read("vllm-eplb", write("a.jsonl", content))


ANSWER = {
    "total_tokens_processed": 3,
    "total_requests_processed": 1,
    "num_experts": 3,
    "num_layers": 2,
    "top_k": 2,
    "layer_expert_activation_counts": {"0": {"0": 4, "2": 2}, "1": {"0": 1, "1": 5}},
    "is_collecting": True,
    "load_balance_score": 0.9,
    "expert_activation_counts": {"0": 5, "1": 5, "2": 2},
    "most_activated_experts": [{"expert_id": 0, "count": 5, "percentage": 41.6667}],
    "least_activated_experts": [],
}


def test_vllm_routed_experts(write, read):
    found = read("vllm-stats", write("a.json", ANSWER))
    assert (counts(found), found.tokens, found.histograms[0].top_k) == (COUNTS, 3, 2)
    assert says(read("vllm-stats", write("a.json", ANSWER | {"total_tokens_processed": 4})), "counted elsewhere")
    assert says(read("vllm-stats", write("a.json", ANSWER | {"is_collecting": False})), "not collecting any more")
    bare = {key: value for key, value in ANSWER.items() if key != "expert_activation_counts"}
    assert counts(read("vllm-stats", write("a.json", bare))) == COUNTS


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 2},
        {"num_layers": 1},
        {"num_layers": 4096, "num_experts": 65536},
        {"top_k": 9},
        {"layer_expert_activation_counts": {"0": {"-1": 4}}},
        {"layer_expert_activation_counts": {"0": {"0": -4}}},
        {"layer_expert_activation_counts": {"0": {"0": True}}},
        {"layer_expert_activation_counts": {"0": [4]}},
        {"layer_expert_activation_counts": []},
        {"total_tokens_processed": None},
        {"expert_activation_counts": {"0": 5, "1": 5, "2": 3}},
        {"expert_activation_counts": {"0": 5, "1": 5}},
        {"expert_activation_counts": {"3": 1}},
        {"expert_activation_counts": [5, 5, 2]},
    ],
    ids=str,
)
def test_vllm_answers_that_are_none(write, read, changes):
    with pytest.raises(FormatError):
        read("vllm-stats", write("a.json", ANSWER | changes))


# ---- plumb


def report(**changes: Any) -> dict[str, Any]:
    layers = [
        {
            "layer_id": layer + 1,
            "imbalance_ratio": 1.0,
            "experts": [
                {"expert_id": e, "token_count": n, "activation_fraction": n / 6} for e, n in enumerate(row) if n
            ],
        }
        for layer, row in enumerate(COUNTS)
    ]
    return {"model_name": "Mixtral", "hardware_config": "my-host 4xA100", "layers": layers} | changes


def test_plumb(write, read, tmp_path):
    found = read("plumb", write("a.json", report()))
    assert (counts(found), [layer.block for layer in found.histograms]) == (COUNTS, [1, 2])
    assert found.model == "Mixtral"
    assert "my-host" not in found.model_dump_json()
    assert counts(read("plumb", write("a.json", report()), n_experts=5))[0] == [4, 0, 2, 0, 0]
    snapshot = {"expert_counts": {"0:0": 4, "0:2": 2, "1:1": 5, "1:0": 1}}
    assert counts(read("plumb", write("a.json", snapshot))) == COUNTS
    loads = {"expert_loads": snapshot["expert_counts"], "pass_count": 3, "imbalance": []}
    assert counts(read("plumb", write("a.json", loads))) == COUNTS
    np.save(tmp_path / "a.npy", np.array(COUNTS, dtype=np.float32))
    assert counts(read("plumb", tmp_path / "a.npy")) == COUNTS


def test_plumb_counts_end_somewhere(write, read):
    """It keeps the last thousand selections of each expert, or the last five thousand."""
    for window in (1000, 5000):
        found = read("plumb", write("a.json", {"expert_counts": {"0:0": window, "0:1": window, "0:2": 7}}))
        assert says(found, f"2 experts are at {window}, where plumb stops counting")
    one = read("plumb", write("a.json", {"expert_counts": {"0:0": 1000, "0:1": 999}}))
    assert not says(one, "stops counting")


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"layers": [{"layer_id": 0}]},
        {"layers": [{"layer_id": -1, "experts": [{"expert_id": 0, "token_count": 1}]}]},
        {"layers": [{"layer_id": 0, "experts": [{"expert_id": -1, "token_count": 1}]}]},
        {"layers": [{"layer_id": 0, "experts": [{"expert_id": 0, "token_count": -1}]}]},
        {"layers": [{"layer_id": 0, "experts": [{"expert_id": 0, "token_count": 1}] * 2}]},
        {"layers": [{"layer_id": 0, "experts": [{"expert_id": 0, "token_count": 1, "activation_fraction": 1.5}]}]},
        {"layers": [{"layer_id": 0, "experts": [7]}]},
        {"expert_counts": {}},
        {"expert_counts": {"0": 1}},
        {"expert_counts": {"0:-1": 1}},
        {"expert_counts": {"0:1": 1.5}},
        {"expert_counts": {f"{layer}:65535": 1 for layer in range(300)}},
        '{"expert_counts": {"0:1": 1, "0:1": 2}}',
        '{"expert_counts": {"0:1": NaN}}',
        "[" * 100_000,
    ],
    ids=lambda value: str(value)[:40],
)
def test_plumb_reports_that_are_none(write, read, value):
    with pytest.raises(FormatError):
        read("plumb", write("a.json", value))


def test_plumb_arrays_that_are_none(write, read, tmp_path):
    for name, array in {
        "negative": np.array([[1.0, -1.0]]),
        "nan": np.array([[1.0, np.nan]]),
        "flat": np.ones(3),
        "text": np.array([["a"]]),
        "empty": np.zeros((0, 3)),
    }.items():
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(FormatError):
            read("plumb", tmp_path / f"{name}.npy")
    np.save(tmp_path / "object.npy", np.array([[{}]]), allow_pickle=True)
    with pytest.raises(FormatError):
        read("plumb", tmp_path / "object.npy")
    np.save(tmp_path / "good.npy", np.ones((2, 3)))
    claims = (tmp_path / "good.npy").read_bytes().replace(b"(2, 3)", b"(9999999999, 3)".ljust(6))
    for content in (claims, b"", b"\x93NUMPY\x01\x00", b"text"):
        with pytest.raises(FormatError):
            read("plumb", write("bad.npy", content))
