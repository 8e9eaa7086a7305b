"""mbolt: the permutations that it lays experts out by (JSON), whose ``heat`` are counts.

``n_layers``, ``n_expert``, ``n_tokens`` (those that were counted), ``train_frac``, ``train_tokens``, ``layers[]`` with
``layer``, ``heat[n_expert]`` (whole numbers as floats) and ``heat_perm``, the experts by it; the other permutations
(``clique_perm``, ``chain_perm``) and what describes them are not read. Read from ``cluster.py``, ``trace.py`` and
``sim_cli.py`` of mbolt 0.1.0, which counts decoded tokens, by default the first 80% of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spark_agent.formats.hints import Hints
from spark_agent.formats.reading import Found, check_sums, counts_of, fail, integer, layers_of_counts, read_json
from spark_schemas.ids import MAX_COUNT
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_mbolt"]


def read_mbolt(path: Path, hints: Hints) -> Found:
    """Counts of every layer, numbered without those that have no experts."""
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("layers"), list):
        fail(path, "no layers")
    n_layers = integer(path, "n_layers", value.get("n_layers"), MAX_BLOCKS, 1)
    n_experts = integer(path, "n_expert", value.get("n_expert"), MAX_EXPERTS, 1)
    n_tokens = integer(path, "n_tokens", value.get("n_tokens"), MAX_COUNT)
    if len(value["layers"]) != n_layers:
        fail(path, f"{len(value['layers'])} layers, n_layers says {n_layers}")
    counts: dict[int, tuple[int, ...]] = {}
    for entry in value["layers"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("heat"), list):
            fail(path, "a layer without heat")
        layer = integer(path, "layer", entry.get("layer"), n_layers - 1)
        if layer in counts or len(entry["heat"]) != n_experts:
            fail(
                path,
                f"layer {layer} is there twice, or has {len(entry['heat'])} counts where n_expert says {n_experts}",
            )
        counts[layer] = counts_of(path, f"layer {layer}", entry["heat"])
        _check_order(path, layer, counts[layer], entry.get("heat_perm"))
        if max(counts[layer]) > n_tokens:
            fail(path, f"layer {layer}: an expert selected {max(counts[layer])} times by {n_tokens} tokens")
        if n_tokens and sum(counts[layer]) % n_tokens:
            fail(path, f"layer {layer}: {sum(counts[layer])} selections are no multiple of n_tokens = {n_tokens}")
    top_ks = {sum(row) // n_tokens for row in counts.values()} if n_tokens else set()
    top_k = hints.top_k
    if len(top_ks) == 1:
        [counted] = top_ks
        if top_k is not None and counted != top_k:
            fail(path, f"its tokens selected {counted} experts each, expected {top_k}")
        top_k = counted or None
    found = Found(layers_of_counts(path, counts, top_k), phase="decode", tokens=n_tokens)
    share = value.get("train_frac")
    if isinstance(share, int | float) and not isinstance(share, bool) and share < 1:
        found.warnings.append(f"counted over the first {share:.0%} of the tokens")
    found.warnings.append("the format names no model: pass --model to check that it fits")
    check_sums(found)
    return found


def _check_order(path: Path, layer: int, counts: tuple[int, ...], order: Any) -> None:
    """Compare the file's own order by heat, where it has one: whoever changed the one has left the other."""
    if order is None:
        return
    experts = list(range(len(counts)))
    if order != sorted(experts, key=lambda expert: -counts[expert]):
        fail(path, f"layer {layer}: heat_perm is not the order of its heat")
