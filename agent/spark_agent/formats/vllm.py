"""vLLM: the JSON lines of expert-load statistics, and the answer of ``GET /v1/routed-experts/stats``.

Lines (``expert_load_stats_path``, in an earlier version ``write_stats_path``, pull request 41141): ``record_type``
``eplb_load_stats``, ``version`` 1, ``step``, ``num_ranks``, ``expert_load[layers][physical]``,
``p2l_map[layers][physical]``, which its own reader adds up over all steps; ``eplb_load_meta`` with ``model`` and
sizes; ``session_metadata``, ``bench_run_start`` and whatever else is passed over, as there;
``eplb_initial_mapping`` is no statistics. Read from ``tools/eplb/generate_static_mapping.py`` of
vllm-project/vllm at 63727bfc and from its tests; what writes the lines was not at hand. Answer (pull request 46146):
``num_experts``, ``num_layers``, ``top_k``, ``total_tokens_processed``, ``layer_expert_activation_counts`` ``{layer:
{expert: count}}`` without those that are 0, of all ranks together; ``expert_activation_counts``, its sums over the
layers; ``total_requests_processed``, ``is_collecting``, ``load_balance_score``, ``most_activated_experts`` and
``least_activated_experts`` are not read. Read from its collector. Neither was merged when this was read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.hints import Hints
from spark_agent.formats.reading import (
    MOST_CELLS,
    Found,
    check_sums,
    counts_of,
    digits,
    fail,
    integer,
    layers_of_counts,
    lines_of,
    parse_json,
    read_json,
)
from spark_schemas.ids import MAX_COUNT
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_load_stats", "read_routed_experts"]

_NO_MODEL = "prompts and generation are counted together"


def read_load_stats(path: Path, hints: Hints) -> Found:
    """Loads of all steps, replicas added up; one line in memory at a time."""
    total: NDArray[np.int64] | None = None
    model: str | None = None
    for number, line in lines_of(path):
        if not line.strip():
            continue
        record = _record(path, number, line)
        if isinstance(record.get("model"), str):
            model = record["model"][:200]
        if record.get("record_type") != "eplb_load_stats":
            continue
        loads, logical = _loads(path, number, record)
        n_experts = int(logical.max(initial=-1)) + 1
        if n_experts > MAX_EXPERTS or len(loads) > MAX_BLOCKS or len(loads) * n_experts > MOST_CELLS:
            fail(path, f"line {number}: {len(loads)} layers of {n_experts} experts: no model has so many")
        if total is None:
            total = np.zeros((len(loads), n_experts), dtype=np.int64)
        if total.shape != (len(loads), n_experts):
            fail(path, f"line {number}: {len(loads)} layers of {n_experts} experts, expected {total.shape}")
        rows = np.broadcast_to(np.arange(len(loads))[:, None], loads.shape)
        there = logical >= 0
        np.add.at(total, (rows[there], logical[there]), loads[there])
        if total.max(initial=0) > MAX_COUNT:
            fail(path, f"line {number}: counts above {MAX_COUNT}")
    if total is None:
        fail(path, "no record of type eplb_load_stats")
    found = Found(layers_of_counts(path, dict(enumerate(total)), hints.top_k), [_NO_MODEL], model=model)
    found.warnings.append("layers are numbered without those that have no experts")
    check_sums(found)
    return found


def read_routed_experts(path: Path, _hints: Hints) -> Found:
    """The answer of the endpoint; experts that it leaves out were not selected."""
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("layer_expert_activation_counts"), dict):
        fail(path, "no layer_expert_activation_counts")
    n_experts = integer(path, "num_experts", value.get("num_experts"), MAX_EXPERTS, 1)
    n_layers = integer(path, "num_layers", value.get("num_layers"), MAX_BLOCKS, 1)
    top_k = integer(path, "top_k", value.get("top_k"), n_experts, 1)
    if n_layers * n_experts > MOST_CELLS:
        fail(path, f"{n_layers} layers of {n_experts} experts: no model has so many")
    tokens = integer(path, "total_tokens_processed", value.get("total_tokens_processed"), MAX_COUNT)
    counts: dict[int, list[int]] = {layer: [0] * n_experts for layer in range(n_layers)}
    for key, row in value["layer_expert_activation_counts"].items():
        layer = digits(path, "a layer", key, n_layers - 1)
        if not isinstance(row, dict):
            fail(path, f"layer {layer}, expected counts by expert")
        for expert, count in row.items():
            what = f"layer {layer}, expert {expert[:20]}"
            counts[layer][digits(path, what, expert, n_experts - 1)] = integer(path, what, count, MAX_COUNT)
    _compare_sums(path, counts, value.get("expert_activation_counts"))
    found = Found(layers_of_counts(path, counts, top_k), [_NO_MODEL], tokens=tokens)
    if value.get("is_collecting") is False:
        found.warnings.append("it was not collecting any more when it was asked")
    sums = {sum(row) for row in counts.values() if any(row)}
    if sums != {tokens * top_k}:
        found.warnings.append(
            f"layers count {min(sums)} to {max(sums)} selections, {tokens} tokens would select {tokens * top_k}: "
            "some were counted elsewhere"
        )
    check_sums(found)
    return found


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    """An object of a type and version that is known, or of a type that is passed over."""
    record = parse_json(path, line)
    if not isinstance(record, dict):
        fail(path, f"line {number} is no object")
    if record.get("record_type") == "eplb_initial_mapping":
        fail(path, f"line {number} is a mapping, which says nothing of how often experts are selected")
    version = record.get("version")
    if record.get("record_type") == "eplb_load_stats" and (version != 1 or isinstance(version, bool)):
        fail(path, f"line {number}: version {version!r}, expected 1")
    return record


def _compare_sums(path: Path, counts: dict[int, list[int]], stated: Any) -> None:
    """Compare with the sums over the layers, where the answer has them."""
    if stated is None:
        return
    if not isinstance(stated, dict):
        fail(path, "expert_activation_counts, expected counts by expert")
    sums = {expert: total for expert, total in enumerate(map(sum, zip(*counts.values(), strict=True))) if total}
    n_experts = len(next(iter(counts.values())))
    found = {digits(path, "an expert", key, n_experts - 1): count for key, count in stated.items()}
    for expert in sorted(sums.keys() | found.keys()):
        if found.get(expert, 0) != sums.get(expert, 0):
            fail(
                path,
                f"expert {expert} is selected {sums.get(expert, 0)} times in all layers, expert_activation_counts says "
                f"{str(found.get(expert, 0))[:40]}",
            )


def _loads(path: Path, number: int, record: dict[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    loads, logical = (_matrix(path, f"line {number}: {key}", record.get(key)) for key in ("expert_load", "p2l_map"))
    if loads.shape != logical.shape or loads.size > MOST_CELLS:
        fail(path, f"line {number}: expert_load {loads.shape} and p2l_map {logical.shape}, expected the same")
    if (loads[logical < 0] != 0).any() or loads.min(initial=0) < 0:
        fail(path, f"line {number}: a load below 0, or of a place without an expert")
    return loads, logical


def _matrix(path: Path, what: str, value: Any) -> NDArray[np.int64]:
    if not isinstance(value, list) or not value or not all(isinstance(row, list) for row in value):
        fail(path, f"{what}, expected a list for each layer")
    if len({len(row) for row in value}) != 1 or not value[0]:
        fail(path, f"{what}, expected as many numbers for each layer")
    if "p2l_map" in what:
        return np.array([[integer(path, what, x, MAX_EXPERTS, -1) for x in row] for row in value], dtype=np.int64)
    return np.array([counts_of(path, what, row) for row in value], dtype=np.int64)
