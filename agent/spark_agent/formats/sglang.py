"""SGLang's expert-distribution recorder (``.pt``), and the JSON that ``--init-expert-location`` takes.

Modes ``stat`` and ``stat_approx``: ``rank``, ``logical_count``, int32 ``[steps, layers, experts]`` of all ranks, and
``average_utilization_rate_over_window``. Modes ``per_pass`` and ``per_token``: a file for each rank, with ``records``
of ``forward_pass_id``, ``rank``, ``gatherer_key`` and ``global_physical_count[layers, physical]``, which early
``per_token`` recordings lack, and ``last_physical_to_logical_map``. ``per_token`` adds ``input_ids``, ``positions``,
``extend_seq_lens``, ``forward_mode``, ``topk_ids_of_layer`` and ``misc_objects``, none of which is read. For
``--init-expert-location``: ``logical_count`` of two or three axes, or ``physical_to_logical_map``. Read from
``python/sglang/srt/eplb/expert_distribution.py`` (at 02295fe5) and ``expert_location.py`` (at 01fec5c2) of
sgl-project/sglang. ``activation_freq[layers, experts]`` is what KTransformers makes of it (``kt-kernel``,
``experts_base.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    fail,
    layers_of_counts,
    read_json,
    whole_counts,
)
from spark_agent.formats.torch_archive import read_torch_archive
from spark_schemas.ids import MAX_COUNT

__all__ = ["location_value", "read_location", "read_recorder"]


def read_recorder(path: Path, hints: Hints) -> Found:
    """Counts of a recording, added up over its steps."""
    value = read_torch_archive(path)
    if not isinstance(value, dict):
        fail(path, "no dict of tensors")
    warnings = [
        "prompts and generation are counted together",
        "the format names no model: pass --model to check that it fits",
    ]
    if "logical_count" in value:
        counts = _table(path, "logical_count", value["logical_count"], (2, 3))
        if counts.ndim == 3:
            silent = int((counts.sum(axis=(1, 2)) == 0).sum())
            if silent:
                warnings.append(f"{silent} of {len(counts)} steps are empty; a full buffer has dropped older ones")
            counts = _added(path, counts)
    elif "activation_freq" in value:
        counts = _table(path, "activation_freq", value["activation_freq"], (2,))
    elif "records" in value:
        counts = _passes(path, value, warnings)
    else:
        fail(path, f"neither logical_count nor records, found {', '.join(sorted(str(key) for key in value))[:80]}")
    found = Found(layers_of_counts(path, dict(enumerate(counts)), hints.top_k), warnings)
    check_sums(found)
    return found


def read_location(path: Path, hints: Hints) -> Found:
    """``logical_count`` of a JSON for ``--init-expert-location``."""
    value = read_json(path)
    if not isinstance(value, dict) or "logical_count" not in value:
        fail(path, "no logical_count; a physical_to_logical_map alone says nothing of how often experts are used")
    rows = value["logical_count"]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        fail(path, "logical_count, expected a list of counts for each layer")
    counts: dict[int, Sequence[int] | NDArray[np.int64]]
    if rows and all(row and isinstance(row[0], list) for row in rows):
        counts = dict(enumerate(_steps(path, rows)))
    else:
        counts = {layer: counts_of(path, f"layer {layer}", row) for layer, row in enumerate(rows)}
    found = Found(
        layers_of_counts(path, counts, hints.top_k), ["the format names no model: pass --model to check that it fits"]
    )
    check_sums(found)
    return found


def _steps(path: Path, steps: Sequence[Sequence[Any]]) -> NDArray[np.int64]:
    """Counts of every step, ``[steps, layers, experts]``, added up."""
    shapes = {tuple(len(row) if isinstance(row, list) else -1 for row in step) for step in steps}
    if len(shapes) != 1 or min(next(iter(shapes))) < 0:
        fail(path, "logical_count of three axes, expected as many layers and experts in each step")
    total: list[list[int]] = [[0] * extent for extent in shapes.pop()]
    for number, step in enumerate(steps):
        for layer, row in enumerate(step):
            counts = counts_of(path, f"step {number}, layer {layer}", row)
            total[layer] = [sum(pair) for pair in zip(total[layer], counts, strict=True)]
    if max((max(row, default=0) for row in total), default=0) > MAX_COUNT or len({len(row) for row in total}) > 1:
        fail(path, f"logical_count, expected as many experts in each layer and sums of at most {MAX_COUNT}")
    return np.array(total, dtype=np.int64)


def location_value(counts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What ``--init-expert-location`` takes."""
    return {"logical_count": [list(row) for row in counts]}


def _table(path: Path, what: str, value: Any, dims: tuple[int, ...]) -> NDArray[np.int64]:
    if not isinstance(value, np.ndarray) or value.ndim not in dims or not value.size:
        fail(
            path,
            f"{what} has the shape {getattr(value, 'shape', None)}, expected {' or '.join(str(d) for d in dims)} axes",
        )
    if value.shape[-2] * value.shape[-1] > MOST_CELLS:
        fail(path, f"{what} has the shape {value.shape}: no model has so many experts")
    return whole_counts(path, what, value)


def _added(path: Path, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    if int(counts.max()) * len(counts) > 2**62:
        fail(path, f"counts of {counts.max()}, expected sums of at most {MAX_COUNT}")
    return whole_counts(path, "the sum of all steps", counts.sum(axis=0))


def _passes(path: Path, value: dict[Any, Any], warnings: list[str]) -> NDArray[np.int64]:
    records, logical = value["records"], value.get("last_physical_to_logical_map")
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        fail(path, "no records")
    if any("global_physical_count" not in record for record in records):
        per_token = any("topk_ids_of_layer" in record for record in records)
        reason = "a recording of single tokens, which holds the text itself" if per_token else "records without counts"
        fail(path, f"{reason}: record with --expert-distribution-recorder-mode stat")
    if not isinstance(logical, np.ndarray) or logical.ndim != 2 or logical.dtype.kind not in "iu":
        fail(path, "no last_physical_to_logical_map, by which replicas are added up")
    n_experts = int(logical.max(initial=-1)) + 1
    if logical.min(initial=0) < 0 or not 0 < len(logical) * n_experts <= MOST_CELLS:
        fail(path, "last_physical_to_logical_map names experts that are none")
    total = np.zeros((len(logical), n_experts), dtype=np.int64)
    rows = np.arange(len(logical))[:, None]
    warnings.append("passes of one rank: every other one wrote a file of its own")
    warnings.append("replicas are added up by the last map: where experts moved while it recorded, that is another one")
    if any("input_ids" in record for record in records):
        warnings.append("the file holds the text itself: only its counts were read, keep it private or remove it")
    for record in records:
        counts = _table(path, "global_physical_count", record["global_physical_count"], (2,))
        if counts.shape != logical.shape:
            fail(path, f"global_physical_count {counts.shape}, expected {logical.shape} as in the map")
        np.add.at(total, (np.broadcast_to(rows, counts.shape), logical.astype(np.int64)), counts)
    return total
