"""FreeToken's pool profile (JSON): ``model``, the beginning of a name, and ``expert_counts[layers][experts]``.

Read from ``moe/pool_policy.py``; rows are made shares there, so layers may count different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spark_agent.formats.hints import Hints
from spark_agent.formats.reading import Found, check_sums, counts_of, fail, layers_of_counts, read_json

__all__ = ["pool_profile_value", "read_pool_profile"]


def read_pool_profile(path: Path, hints: Hints) -> Found:
    """Counts of every layer."""
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("expert_counts"), list):
        fail(path, "no expert_counts")
    rows = value["expert_counts"]
    if not rows or not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        fail(path, "expert_counts, expected as many counts for each layer")
    counts = {layer: counts_of(path, f"layer {layer}", row) for layer, row in enumerate(rows)}
    model = value.get("model")
    found = Found(layers_of_counts(path, counts, hints.top_k), model=model[:200] if isinstance(model, str) else None)
    found.warnings.append("prompts and generation are not told apart")
    check_sums(found)
    return found


def pool_profile_value(model: str, counts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A pool profile of a model whose layers all have as many experts."""
    return {"model": model, "expert_counts": [list(row) for row in counts]}
