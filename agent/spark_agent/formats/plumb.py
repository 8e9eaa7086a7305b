"""plumb-moe: its report (JSON), its snapshot (JSON), and the array of ``--eplb-output`` (``.npy``).

Report: ``model_name``, ``layers[]`` with ``layer_id`` and ``experts[]`` of ``expert_id`` and ``token_count``. Snapshot:
``expert_counts`` and, the same, ``expert_loads``: ``{"layer:expert": count}``. Array: float32 ``[layers, experts]``.
Read from ``counter.py``, ``hook.py``, ``autoattach.py``, ``session.py`` and ``report/`` of plumb-moe 0.1.0. Its counter
keeps the last 1,000 selections of every expert (5,000 where it attaches itself), so there a count ends; it takes the
first two choices of a token unless its caller says otherwise, and when it attaches itself always. The report's
``hardware_config`` begins with the host's name: it is not kept.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from spark_agent.formats.hints import Hints
from spark_agent.formats.npy_file import read_npy
from spark_agent.formats.reading import (
    MOST_CELLS,
    Found,
    check_sums,
    digits,
    fail,
    integer,
    layers_of_counts,
    read_json,
    whole_counts,
)
from spark_schemas.ids import MAX_COUNT
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_plumb"]

_WINDOWS = (1000, 5000)
"""Where counts end: of its ``Session``, and where it attaches itself."""
_COUNTS = ("expert_counts", "expert_loads")


def read_plumb(path: Path, hints: Hints) -> Found:
    """Counts of every layer; experts that are not listed were not selected."""
    if path.suffix == ".npy":
        found = Found(layers_of_counts(path, dict(enumerate(_array(path))), hints.top_k))
    else:
        value = read_json(path)
        if not isinstance(value, dict):
            fail(path, "no object")
        counted = next((name for name in _COUNTS if name in value), None)
        cells = list(_report(path, value) if counted is None else _snapshot(path, value, counted))
        found = Found(_layers(path, cells, hints))
        name = value.get("model_name")
        found.model = name[:200] if isinstance(name, str) else None
        if hints.n_experts is None:
            found.warnings.append(
                "experts that were never selected are not listed, so the last may be missing: pass --model or --experts"
            )
    found.warnings.append("prompts and generation are counted together")
    found.warnings.append("plumb counts the first two choices of each token unless it was told of more")
    most = max(max(layer.counts or (0,)) for layer in found.layers)
    ended = sum(row == most for layer in found.layers for row in layer.counts or ())
    if most in _WINDOWS and ended > 1:
        found.warnings.append(
            f"{ended} experts are at {most}, where plumb stops counting: which of them are hotter is not known"
        )
    check_sums(found)
    return found


def _layers(path: Path, cells: list[tuple[int, int, int]], hints: Hints) -> Any:
    if not cells:
        fail(path, "no counts")
    n_experts = max(expert for _, expert, _ in cells) + 1
    if hints.n_experts is not None:
        if n_experts > hints.n_experts:
            fail(path, f"expert {n_experts - 1}, expected at most {hints.n_experts - 1}")
        n_experts = hints.n_experts
    layers = sorted({layer for layer, _, _ in cells})
    if len(layers) * n_experts > MOST_CELLS:
        fail(path, f"{len(layers)} layers of {n_experts} experts: no model has so many")
    counts = {layer: [0] * n_experts for layer in layers}
    seen: set[tuple[int, int]] = set()
    for layer, expert, count in cells:
        if (layer, expert) in seen:
            fail(path, f"layer {layer} names expert {expert} twice")
        seen.add((layer, expert))
        counts[layer][expert] = count
    return layers_of_counts(path, counts, hints.top_k)


def _snapshot(path: Path, value: dict[str, Any], name: str) -> Any:
    counts = value[name]
    if not isinstance(counts, dict):
        fail(path, f"{name}, expected an object")
    for key, count in counts.items():
        layer, _, expert = key.partition(":")
        yield (
            digits(path, f"a layer in {key[:40]!r}", layer, MAX_BLOCKS - 1),
            digits(path, f"an expert in {key[:40]!r}", expert, MAX_EXPERTS - 1),
            integer(path, f"the count of {key[:40]!r}", count, MAX_COUNT),
        )


def _report(path: Path, value: dict[str, Any]) -> Any:
    layers = value.get("layers")
    if not isinstance(layers, list):
        fail(path, f"neither layers nor {_COUNTS[0]}")
    for entry in layers:
        if not isinstance(entry, dict) or not isinstance(entry.get("experts"), list):
            fail(path, "a layer without experts")
        layer = integer(path, "layer_id", entry.get("layer_id"), MAX_BLOCKS - 1)
        for expert in entry["experts"]:
            if not isinstance(expert, dict):
                fail(path, f"layer {layer}: an expert that is none")
            share = expert.get("activation_fraction")
            if isinstance(share, float) and not (math.isfinite(share) and 0 <= share <= 1):
                fail(path, f"layer {layer}: activation_fraction {share}, expected 0 to 1")
            yield (
                layer,
                integer(path, f"layer {layer}: expert_id", expert.get("expert_id"), MAX_EXPERTS - 1),
                integer(path, f"layer {layer}: token_count", expert.get("token_count"), MAX_COUNT),
            )


def _array(path: Path) -> Any:
    values = read_npy(path)
    if values.ndim != 2 or not 0 < values.size <= MOST_CELLS:
        fail(path, f"an array of shape {values.shape}, expected layers x experts")
    return whole_counts(path, "the array", values)
