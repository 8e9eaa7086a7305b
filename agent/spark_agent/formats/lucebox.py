"""Lucebox: the routing table (CSV) and the placement (JSON) that its server keeps beside a model.

CSV: ``# hotness table: n_layer=L n_expert=E n_expert_used=K``, a comment, then L rows of E counts, with commas, or in
older tables with blanks. JSON: ``arch``, ``version`` 1, ``n_layer``, ``n_expert``, ``n_expert_used``, ``total_hot``,
``hot_counts[L]``, ``hot_expert_ids[L][]`` in rank order. Read from ``server/src/common/moe_hybrid_routing_stats.cpp``
(at 62880e20 and 19446c02) and ``moe_hybrid_placement.cpp`` (at 62880e20 and 0e834acd) of Luce-Org/lucebox.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spark_agent.formats.hints import Hints
from spark_agent.formats.profile import ImportedLayer
from spark_agent.formats.reading import Found, check_sums, digits, fail, integer, layers_of_counts, lines_of, read_json
from spark_schemas.ids import MAX_COUNT
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["csv_text", "placement_value", "ranking_of", "read_csv", "read_placement"]

_TITLE = re.compile(r"#\s*hotness table:")
_HEADER = re.compile(r"#\s*hotness table:\s*n_layer=(\d{1,9}) n_expert=(\d{1,9}) n_expert_used=(\d{1,9})\s*", re.ASCII)
_VERSION = 1


def read_csv(path: Path, hints: Hints) -> Found:
    """The routing table. Its counts are of prompts and generation together, of a model that it does not name."""
    header: tuple[int, int, int] | None = None
    counts: dict[int, list[int]] = {}
    for number, line in lines_of(path):
        if line.startswith("#"):
            if _TITLE.match(line):
                if header is not None or counts:
                    fail(path, f"line {number}: a header after the first line of the table")
                header = _header(path, number, line)
            continue
        if not line.strip():
            continue
        if len(counts) == (MAX_BLOCKS if header is None else header[0]):
            fail(path, f"line {number}: more rows than layers ({len(counts)})")
        cells = [cell.strip(" \t") for cell in line.split(",")] if "," in line else line.split()
        expected = header[1] if header is not None else len(next(iter(counts.values()), cells))
        if len(cells) != expected or len(cells) > MAX_EXPERTS:
            fail(path, f"line {number} has {len(cells)} counts, expected {min(expected, MAX_EXPERTS)}")
        counts[len(counts)] = [
            digits(path, f"line {number}, expert {i}", cell, MAX_COUNT) for i, cell in enumerate(cells)
        ]
    if header is not None and len(counts) != header[0]:
        fail(path, f"{len(counts)} rows, expected n_layer = {header[0]}")
    top_k = hints.top_k if header is None else header[2]
    found = Found(layers_of_counts(path, counts, top_k))
    found.warnings.append("the format names no model: pass --model to check that it fits")
    found.warnings.append("prompts and generation are counted together")
    if header is None:
        found.warnings.append("no header: how many experts a token selects is not known")
    check_sums(found)
    return found


def _header(path: Path, number: int, line: str) -> tuple[int, int, int]:
    match = _HEADER.fullmatch(line)
    if match is None:
        fail(path, f"line {number} is {line[:60]!r}, expected '# hotness table: n_layer=L n_expert=E n_expert_used=K'")
    return int(match[1]), int(match[2]), int(match[3])


def read_placement(path: Path, _hints: Hints) -> Found:
    """The placement: which experts are hot, in order, without counts."""
    value = read_json(path)
    if not isinstance(value, dict):
        fail(path, "no object")
    if "owner" in value and "n_ranks" in value:
        fail(path, "a placement over the machines of a cluster, which says nothing of how often experts are selected")
    if value.get("version") != _VERSION or isinstance(value.get("version"), bool):
        fail(path, f"version is {value.get('version')!r}, expected {_VERSION}")
    n_layers = integer(path, "n_layer", value.get("n_layer"), MAX_BLOCKS, 1)
    n_experts = integer(path, "n_expert", value.get("n_expert"), MAX_EXPERTS, 1)
    top_k = integer(path, "n_expert_used", value.get("n_expert_used"), n_experts, 1)
    arch = value.get("arch")
    if not isinstance(arch, str):
        fail(path, f"arch is {arch!r}, expected a name")
    ids, hot = (_row_of(path, value, name, n_layers) for name in ("hot_expert_ids", "hot_counts"))
    layers, total = [], 0
    for block, (row, count) in enumerate(zip(ids, hot, strict=True)):
        ranking = ranking_of(path, f"hot_expert_ids of layer {block}", row, n_experts)
        if integer(path, f"hot_counts of layer {block}", count, n_experts) != len(ranking):
            fail(path, f"layer {block}: {len(ranking)} hot experts, hot_counts says {count}")
        total += len(ranking)
        layers.append(ImportedLayer(block=block, n_experts=n_experts, top_k=top_k, ranking=ranking))
    if integer(path, "total_hot", value.get("total_hot"), n_layers * n_experts) != total:
        fail(path, f"{total} hot experts, total_hot says {value.get('total_hot')}")
    return Found(layers, ["a placement has an order, no counts; experts that are not hot have none"], model=arch[:200])


def _row_of(path: Path, value: dict[str, Any], name: str, n_layers: int) -> list[Any]:
    rows = value.get(name)
    if not isinstance(rows, list) or len(rows) != n_layers:
        fail(path, f"{name}, expected a list of {n_layers}")
    return rows


def ranking_of(path: Path, what: str, row: Any, n_experts: int) -> tuple[int, ...]:
    """Expert ids in order, each once."""
    if not isinstance(row, list):
        fail(path, f"{what} is {type(row).__name__}, expected a list")
    ranking = tuple(integer(path, what, expert, n_experts - 1) for expert in row)
    if len(set(ranking)) != len(ranking):
        fail(path, f"{what} names an expert twice")
    return ranking


def csv_text(counts: Sequence[Sequence[int]], top_k: int) -> str:
    """The routing table of a model whose layers all have as many experts."""
    head = f"# hotness table: n_layer={len(counts)} n_expert={len(counts[0])} n_expert_used={top_k}\n"
    rows = "".join(",".join(str(count) for count in row) + "\n" for row in counts)
    return head + "# format: one row per layer, one count per expert\n" + rows


def placement_value(arch: str, hot: Sequence[Sequence[int]], n_experts: int, top_k: int) -> dict[str, Any]:
    """The placement with these experts hot."""
    return {
        "arch": arch,
        "version": _VERSION,
        "n_layer": len(hot),
        "n_expert": n_experts,
        "n_expert_used": top_k,
        "total_hot": sum(len(row) for row in hot),
        "hot_counts": [len(row) for row in hot],
        "hot_expert_ids": [list(row) for row in hot],
    }
