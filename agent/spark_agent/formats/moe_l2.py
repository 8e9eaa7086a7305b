"""moe-l2: the map of preferred experts by domain (JSON), and the router map that is made of it (text).

JSON: ``domains.NAME`` with ``per_layer_domain_preferred``, ``layers`` or ``per_layer`` ``{"layer": [ids]}``; or one of
these, or the layers themselves, at the top; ``num_experts`` and ``model`` where they are given. Most frequent first.
``per_layer_domain_preferred`` of ``generate_expert_map.py`` leaves out what other domains select as often, and
``per_layer_top`` beside it holds the most frequent of all; of ``collect.py`` it holds all, and ``per_layer_top`` its
beginning. Either way ``per_layer_top`` comes first here. The same JSON may lie in a model's GGUF under
``moe_l2.domain_expert_map``. Text: ``# EXPERT_TOTAL n``, then ``layer id id …`` a line, in the order of the ids. Read
from ``collect.py``, ``router_table.py``, ``domain_router_flywheel.py``, ``gguf_embed.py`` and
``data/generate_expert_map.py`` of moe-l2 0.14.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_agent.formats.hints import Hints
from spark_agent.formats.lucebox import ranking_of
from spark_agent.formats.profile import ImportedLayer
from spark_agent.formats.reading import (
    MOST_CELLS,
    MOST_JSON_BYTES,
    Found,
    digits,
    fail,
    integer,
    lines_of,
    parse_json,
    read_json,
)
from spark_runtime.errors import SparkRuntimeError
from spark_runtime.gguf_file import read_gguf
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_moe_l2"]

_TABLES = ("per_layer_domain_preferred", "layers", "per_layer")
_TOP = "per_layer_top"
_EMBEDDED = "moe_l2.domain_expert_map"
_TOTAL = "# EXPERT_TOTAL "


def read_moe_l2(path: Path, hints: Hints) -> Found:
    """The order of every layer, of one domain (``--domain``) where there are several."""
    value: Any = {}
    warnings = ["a map has an order, no counts; experts that it leaves out were rarely or never selected"]
    if path.suffix in {".json", ".gguf"}:
        value = read_json(path) if path.suffix == ".json" else _embedded(path)
        if not isinstance(value, dict):
            fail(path, "no object")
        rows = _rows(path, value, hints)
    else:
        rows = _text(path)
        warnings.append("a router map lists experts by their ids: which of them are hotter is not said")
    stated = value.get("num_experts")
    n_experts = hints.n_experts
    if stated is not None:
        stated = integer(path, "num_experts", stated, MAX_EXPERTS, 1)
        if n_experts is not None and n_experts != stated:
            fail(path, f"num_experts {stated}, expected {n_experts}")
        n_experts = stated
    rankings = {layer: ranking_of(path, f"layer {layer}", row, n_experts or MAX_EXPERTS) for layer, row in rows.items()}
    if n_experts is None:
        n_experts = max((max(ranking, default=0) for ranking in rankings.values()), default=0) + 1
        warnings.append(f"the number of experts is not said: taken as {n_experts}; pass --model or --experts")
    layers = [
        ImportedLayer(block=layer, n_experts=n_experts, top_k=hints.top_k, ranking=ranking)
        for layer, ranking in sorted(rankings.items())
        if ranking
    ]
    if not layers:
        fail(path, "no layer with experts")
    model = value.get("model")
    # The file's own experts_per_token is not taken: it is 16 in a published map of a model that selects 8.
    return Found(layers, warnings, model=model[:200] if isinstance(model, str) else None)


def _rows(path: Path, value: Mapping[str, Any], hints: Hints) -> dict[int, Any]:
    domains = value.get("domains")
    if isinstance(domains, dict) and domains:
        names = sorted(str(name) for name in domains)
        if hints.domain is None and len(names) > 1:
            fail(path, f"holds {len(names)} domains, pass --domain with one of {', '.join(names)[:300]}")
        chosen = domains.get(hints.domain if hints.domain is not None else names[0])
        if not isinstance(chosen, dict):
            fail(path, f"no domain {hints.domain!r}, found {', '.join(names)[:300]}")
    else:
        chosen = value
    table = next((chosen[name] for name in _TABLES if name in chosen), None)
    if table is None and _TOP in chosen:
        table = {}
    if table is None and chosen and all(key.isascii() and key.isdigit() for key in chosen):
        table = chosen
    if not isinstance(table, dict):
        fail(path, f"neither domains nor one of {', '.join((*_TABLES, _TOP))}")
    rows = {digits(path, "a layer", str(key), MAX_BLOCKS - 1): row for key, row in table.items()}
    return _with_top(path, rows, chosen.get(_TOP, {}))


def _with_top(path: Path, rows: dict[int, Any], top: Any) -> dict[int, Any]:
    """The most frequent first, where they are listed; what follows in ``rows`` was selected less often than they."""
    if not isinstance(top, dict):
        fail(path, f"{_TOP}, expected experts by layer")
    for key, first in top.items():
        layer = digits(path, "a layer", str(key), MAX_BLOCKS - 1)
        following = rows.get(layer, [])
        if not isinstance(first, list) or not isinstance(following, list):
            fail(path, f"layer {layer}, expected lists of experts")
        # Bounded: both come from a file of bounded size, and ids are checked where they become a ranking.
        listed = {expert for expert in first if isinstance(expert, int)}
        rows[layer] = [*first, *(expert for expert in following if not (type(expert) is int and expert in listed))]
    return rows


def _embedded(path: Path) -> Any:
    try:
        text = read_gguf(path).metadata.get(_EMBEDDED)
    except SparkRuntimeError as error:
        fail(path, str(error))
    if not isinstance(text, str) or len(text) > MOST_JSON_BYTES:
        fail(path, f"no map under {_EMBEDDED}")
    return parse_json(path, text)


def _text(path: Path) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    total: int | None = None
    for number, line in lines_of(path):
        if line.startswith(_TOTAL):
            total = digits(path, f"line {number}", line.removeprefix(_TOTAL).strip(), MOST_CELLS)
        if not line.strip() or line.startswith("#"):
            continue
        layer, *ids = (digits(path, f"line {number}", word, MAX_EXPERTS - 1) for word in line.split())
        if layer in rows or layer >= MAX_BLOCKS:
            fail(path, f"line {number}: layer {layer} is there twice, or no model has so many")
        rows[layer] = ids
    if total is not None and not rows:
        fail(path, "a placeholder, which names no expert yet")
    if total is not None and total != sum(len(ids) for ids in rows.values()):
        fail(path, f"{sum(len(ids) for ids in rows.values())} experts, EXPERT_TOTAL says {total}")
    return rows
