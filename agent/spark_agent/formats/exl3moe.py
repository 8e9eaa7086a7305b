"""exllamav3's placement profiles: what is shipped (``.exl3moe``), what it is made of (``.npz``), and split statistics.

``.exl3moe`` (safetensors): ``ranking`` int32 and, unless they were left out, ``counts`` int64, both
``[layers, experts]``, and a ``census`` of single prompts, which is not read. Metadata, all texts: ``source_bank``,
``layer_keys`` (a JSON list of module names), ``fingerprint`` (a JSON object), and, which are only compared or not read,
``layers``, ``experts``, ``prompts``, ``has_ranking``, ``packed_from``, ``census_shape``, ``capture``, ``corpus``.
``.npz``: ``counts_decode``, ``counts_prefill`` or ``counts``, ``[layers, experts]`` or ``[prompts, layers, experts]``.
``.json``: ``{module name: [counts]}``, as ``EXL3_MOE_CPU_SPLIT_STATS`` names; there a draft head numbers its own layers
from 0 on. Read from ``util/moe_profile_build.py`` and ``util/moe_profile_pack.py`` (at 31cbf7a5, of pull request 315)
and ``exllamav3/modules/block_sparse_mlp_cpu.py`` (at 0cec3813) of turboderp-org/exllamav3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.hints import Hints
from spark_agent.formats.npz_file import read_npz
from spark_agent.formats.profile import ImportedLayer
from spark_agent.formats.reading import (
    MOST_CELLS,
    FormatError,
    Found,
    check_sums,
    counts_of,
    fail,
    layers_of_counts,
    parse_json,
    read_json,
    whole_counts,
)
from spark_agent.formats.safetensors_file import SafetensorsFile
from spark_schemas.ids import MAX_COUNT, Phase
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_exl3moe"]

_BANKS: Mapping[str, Phase | None] = {"counts_decode": "decode", "counts": None, "counts_prefill": "prefill"}
"""In the order in which the tool itself prefers them."""
_KEY = re.compile(r"(?:^|\.)layers\.(\d{1,4})(?:\.|$)", re.ASCII)
_DRAFT = re.compile(r"(?:^|\.)mtp(?:\.|$)", re.ASCII)
"""A head that predicts further tokens."""
_FEW = 20
"""Selections for each expert below which the tool itself calls a ranking noise."""


def read_exl3moe(path: Path, hints: Hints) -> Found:
    """Counts of every layer, or its order in a profile that was packed without them."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        found = _split_statistics(path, hints)
    elif suffix == ".npz":
        found = _census(path, hints)
    else:
        found = _packed(path, hints)
    if found.model is None:
        found.warnings.append("it does not say of which model it is: pass --model to check that it fits")
    if found.phase is None:
        found.warnings.append("prompts and generation are counted together, or it does not say which")
    check_sums(found)
    return found


def _packed(path: Path, hints: Hints) -> Found:
    file = SafetensorsFile.open(path)
    counts, ranking, metadata = file.table("counts"), file.table("ranking"), file.metadata
    table = counts if counts is not None else ranking
    if table is None:
        fail(path, f"neither counts nor ranking, found {', '.join(sorted(file.header))[:80]}")
    blocks = _blocks(path, metadata.get("layer_keys"), len(table))
    if counts is not None:
        layers = layers_of_counts(
            path, dict(zip(blocks, whole_counts(path, "counts", counts), strict=True)), hints.top_k
        )
        if ranking is not None:
            _check_ranking(path, counts, ranking)
    else:
        layers = _ranked(path, blocks, table, hints)
    for name, extent in zip(("layers", "experts"), table.shape, strict=True):
        if metadata.get(name, str(extent)) != str(extent):
            fail(path, f"{extent} {name}, its metadata says {metadata[name][:40]!r}")
    found = Found(layers, model=_fingerprint(path, metadata.get("fingerprint")))
    if counts is None:
        found.warnings.append("it was packed without counts: only an order")
    found.phase = _BANKS.get(metadata.get("source_bank", ""))
    return found


def _check_ranking(path: Path, counts: NDArray[np.generic], ranking: NDArray[np.generic]) -> None:
    """Compare with the order that the tool would have made of these counts."""
    if ranking.shape != counts.shape:
        fail(path, f"ranking {list(ranking.shape)} and counts {list(counts.shape)}, expected the same")
    different = np.flatnonzero((ranking != np.argsort(-counts.astype(np.int64), axis=1, kind="stable")).any(axis=1))
    if len(different):
        fail(path, f"layer {different[0]}: its ranking is not the order of its counts")


def _ranked(path: Path, blocks: Sequence[int], table: NDArray[np.generic], hints: Hints) -> list[ImportedLayer]:
    n_experts = table.shape[1]
    if table.dtype.kind not in "iu" or n_experts > MAX_EXPERTS or len(table) > MAX_BLOCKS:
        fail(path, f"ranking is of type {table.dtype} {list(table.shape)}, expected ids of a model's experts")
    if not (np.sort(table, axis=1) == np.arange(n_experts)).all():
        fail(path, f"ranking, expected each of 0 to {n_experts - 1} once in every layer")
    return [
        ImportedLayer(block=block, n_experts=n_experts, top_k=hints.top_k, ranking=tuple(row))
        for block, row in sorted(zip(blocks, table.tolist(), strict=True))
    ]


def _census(path: Path, hints: Hints) -> Found:
    banks = {name: _summed(path, name, array) for name, array in read_npz(path, tuple(_BANKS)).items()}
    chosen = next((name for name in _BANKS if name in banks and banks[name].any()), None)
    if chosen is None:
        fail(path, f"none of {', '.join(_BANKS)} counts anything")
    counts = banks[chosen]
    about = _sidecar(path)
    keys = about.get("layer_keys")
    blocks = _blocks(path, None if keys is None else json.dumps(keys), len(counts))
    found = Found(layers_of_counts(path, dict(zip(blocks, counts, strict=True)), hints.top_k), phase=_BANKS[chosen])
    fingerprint = about.get("fingerprint")
    found.model = None if fingerprint is None else _fingerprint(path, json.dumps(fingerprint))
    if counts.sum() < _FEW * counts.size:
        found.warnings.append(f"fewer than {_FEW} selections for each expert: its order is largely chance")
    return found


def _summed(path: Path, name: str, array: NDArray[np.generic]) -> NDArray[np.int64]:
    if array.ndim not in (2, 3) or not array.size or array.shape[-1] * array.shape[-2] > MOST_CELLS:
        fail(path, f"{name} has the shape {array.shape}, expected [prompts,] layers, experts")
    counts = whole_counts(path, name, array)
    if counts.ndim == 2:
        return counts
    if int(counts.max()) * len(counts) > 2**62:
        fail(path, f"{name}: counts of {counts.max()}, expected sums of at most {MAX_COUNT}")
    return whole_counts(path, f"the sum of {name}", counts.sum(axis=0))


def _sidecar(path: Path) -> dict[str, Any]:
    """``NAME.meta.json``, which the tool writes beside a census; nothing where there is none."""
    beside = path.with_name(f"{path.stem}.meta.json")
    if not beside.is_file():
        return {}
    value = read_json(beside)
    if not isinstance(value, dict):
        fail(beside, "no object")
    return value


def _split_statistics(path: Path, hints: Hints) -> Found:
    value = read_json(path)
    if not isinstance(value, dict) or not value or not all(isinstance(row, list) for row in value.values()):
        fail(path, "expected an object with counts for each module")
    kept = {key: row for key, row in value.items() if not _DRAFT.search(key)}
    blocks = _blocks(path, json.dumps(list(kept)), len(kept))
    counts = {block: counts_of(path, key, row) for block, (key, row) in zip(blocks, kept.items(), strict=True)}
    found = Found(layers_of_counts(path, counts, hints.top_k))
    if len(kept) < len(value):
        found.warnings.append(f"{len(value) - len(kept)} layers of a draft head are left out")
    return found


def _blocks(path: Path, text: str | None, n_rows: int) -> list[int]:
    """The block of every row: by the modules' names where they are known, else one after the other."""
    if text is None:
        return list(range(n_rows))
    keys = parse_json(path, text)
    if not isinstance(keys, list) or len(keys) != n_rows or not all(isinstance(key, str) for key in keys):
        fail(path, f"layer_keys, expected a name for each of {n_rows} layers")
    found = [_KEY.search(key) for key in keys]
    blocks = [int(match[1]) for match in found if match is not None]
    if len(blocks) != n_rows:
        fail(path, f"layer_keys name no layer: {', '.join(keys)[:80]}")
    if len(set(blocks)) != n_rows:
        fail(path, "layer_keys name a layer twice")
    return blocks


def _fingerprint(path: Path, text: Any) -> str | None:
    """The model that the profile is bound to, as text; the JSON inside must be an object."""
    if text is None:
        return None
    try:
        value = parse_json(path, text) if isinstance(text, str) else None
    except FormatError:
        value = None
    if not isinstance(value, dict):
        fail(path, f"its fingerprint is {str(text)[:40]!r}, expected an object as JSON text")
    return json.dumps(value, sort_keys=True)[:200]
