"""fitz-tec's pin list: experts of each layer, most frequent first, without counts.

``# EXPERT_CACHE_PIN_LIST v1``, comments (where the trace lay; how many choices of a token counted: ``# top_k: K``),
the numbers of layers and experts after ``n_layer`` and ``n_expert``, then ``layer I: ID ID …`` for every layer; one
without experts has no ids. Read from ``tools/build_pin_list.py`` and ``cli.py`` of fitz-tec 0.1.1, which counts prompts
and generation together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from spark_agent.formats.hints import Hints
from spark_agent.formats.profile import ImportedLayer
from spark_agent.formats.reading import Found, digits, fail, lines_of
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["pin_list_text", "read_pin_list"]

_MAGIC = "# EXPERT_CACHE_PIN_LIST v1"
_SIZE = re.compile(r"#?\s*(n_layer|n_expert)\s*[=:]?\s*(\d{1,9})\s*", re.ASCII)
_TOP_K = re.compile(r"# top_k: (\d{1,5})", re.ASCII)
_LAYER = re.compile(r"layer\s+(\d{1,9})\s*:(.*)", re.ASCII)


def read_pin_list(path: Path, hints: Hints) -> Found:
    """The order of every layer that pins something."""
    sizes, rows = _parsed(path)
    n_layers, n_experts = sizes.get("n_layer", 0), sizes.get("n_expert", 0)
    if not 1 <= n_layers <= MAX_BLOCKS or not 1 <= n_experts <= MAX_EXPERTS:
        fail(path, f"n_layer {n_layers} and n_expert {n_experts}, expected both from 1 on")
    layers = []
    for block, text in sorted(rows.items()):
        if block >= n_layers:
            fail(path, f"layer {block}, expected 0 to {n_layers - 1}")
        ranking = tuple(digits(path, f"layer {block}", word, n_experts - 1) for word in text.split())
        if len(set(ranking)) != len(ranking):
            fail(path, f"layer {block} names an expert twice")
        if ranking:
            layers.append(ImportedLayer(block=block, n_experts=n_experts, top_k=hints.top_k, ranking=ranking))
    if not layers:
        fail(path, "no layer pins an expert")
    warnings = ["a pin list has an order, no counts; experts that it leaves out were never selected, or not pinned"]
    counted = sizes.get("top_k")
    if counted is not None and hints.top_k is not None and counted != hints.top_k:
        warnings.append(f"the first {counted} choices of each token were counted, and the model selects {hints.top_k}")
    warnings.append("the format names no model: pass --model to check that it fits")
    return Found(layers, warnings)


def _parsed(path: Path) -> tuple[dict[str, int], dict[int, str]]:
    sizes: dict[str, int] = {}
    rows: dict[int, str] = {}
    for number, line in lines_of(path):
        if number == 1 and line.strip() != _MAGIC:
            fail(path, f"line 1 is {line[:40]!r}, expected {_MAGIC!r}")
        counted = _TOP_K.fullmatch(line.strip())
        size, layer = _SIZE.fullmatch(line.strip()), _LAYER.fullmatch(line.strip())
        if counted is not None:
            sizes["top_k"] = int(counted[1])
        elif size is not None:
            if size[1] in sizes:
                fail(path, f"line {number}: {size[1]} is there twice")
            sizes[size[1]] = int(size[2])
        elif layer is not None:
            if int(layer[1]) in rows or len(rows) >= MAX_BLOCKS:
                fail(path, f"line {number}: layer {layer[1]} is there twice, or there are too many")
            rows[int(layer[1])] = layer[2]
        elif line.strip() and not line.startswith("#"):
            fail(path, f"line {number} is {line[:40]!r}, expected 'layer I: ID ID …'")
    return sizes, rows


def pin_list_text(hot: Sequence[Sequence[int]], n_experts: int) -> str:
    """A pin list with these experts, layer by layer."""
    rows = "".join(f"layer {layer}:{''.join(f' {expert}' for expert in row)}\n" for layer, row in enumerate(hot))
    return f"{_MAGIC}\nn_layer {len(hot)}\nn_expert {n_experts}\n{rows}"
