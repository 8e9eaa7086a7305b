"""Profiles and manifests as other tools read them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spark_agent.errors import SparkError, UsageError
from spark_agent.formats.fitz import pin_list_text
from spark_agent.formats.freetoken import pool_profile_value
from spark_agent.formats.llama_cpp import flags_for
from spark_agent.formats.lucebox import csv_text, placement_value
from spark_agent.formats.profile import ImportedLayer, ImportedProfile
from spark_agent.formats.sglang import location_value
from spark_agent.formats.torch_writer import torch_archive_bytes
from spark_runtime.placement import BudgetTooSmallError, LayerSizes, greedy_slots, residency_budget
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape

__all__ = ["EXPORTERS", "Exported", "Wanted", "export", "profile_of_manifest"]

_MASK_NOTE = "a mask [layers, experts] as kt-kernel computes it for its GPU experts; all False where a block has none"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is exported: counts or an order, and for placements how much of it is hot."""

    profile: ImportedProfile
    shape: ModelShape | None = None
    residency: float | None = None
    budget_bytes: int | None = None
    """Of experts."""


@dataclass(slots=True)
class Exported:
    """A file's content, and what it does not say."""

    content: bytes
    warnings: list[str] = field(default_factory=list)


def profile_of_manifest(manifest: PlacementManifest) -> ImportedProfile:
    """A manifest's prior scores in the place of counts: their order and proportions, quantised."""
    layers = tuple(
        ImportedLayer(block=layer.block, n_experts=layer.n_experts, top_k=layer.top_k, counts=tuple(layer.prior))
        for layer in manifest.layers
    )
    return ImportedProfile(
        format="manifest",
        workload=manifest.workload,
        model=None,
        fingerprint=manifest.fingerprint,
        histograms=layers,
        warnings=("numbers are a manifest's prior scores, not counts",),
    )


def export(name: str, wanted: Wanted) -> Exported:
    """Write a format; raise :class:`UsageError` for an unknown one, :class:`SparkError` for what it cannot hold."""
    if name not in EXPORTERS:
        raise UsageError(f"found format {name!r}, expected one of {', '.join(sorted(EXPORTERS))}")
    result = EXPORTERS[name](wanted)
    return Exported(result.content, [*wanted.profile.warnings, *result.warnings])


def _counts(wanted: Wanted) -> list[Sequence[int]]:
    """A row for every layer, of equally many experts."""
    layers = wanted.profile.histograms
    rows = [layer.counts for layer in layers if layer.counts is not None]
    if len(rows) != len(layers):
        raise SparkError(
            "the profile has an order and no counts, and the format takes counts", "export a list of hot experts"
        )
    _equal_experts(layers)
    return list(rows)


def _equal_experts(layers: Sequence[ImportedLayer]) -> int:
    sizes = {layer.n_experts for layer in layers}
    if len(sizes) > 1:
        raise SparkError(f"layers have {min(sizes)} to {max(sizes)} experts, and the format knows one number for all")
    return sizes.pop()


def _top_k(layers: Sequence[ImportedLayer]) -> int:
    found = {layer.top_k for layer in layers}
    if len(found) > 1 or None in found:
        raise SparkError(
            "how many experts a token selects is not known, or differs between layers",
            "pass --model, or import with --top-k",
        )
    [top_k] = found
    if top_k is None:
        raise SparkError("how many experts a token selects is not known")
    return top_k


def _rows(wanted: Wanted) -> int:
    """Rows that a format with a row for every block has."""
    last = wanted.profile.histograms[-1].block
    return last + 1 if wanted.shape is None else wanted.shape.n_blocks


def _hot(wanted: Wanted) -> list[list[int]]:
    """Hot experts of every layer, hottest first; all that are known where nothing limits them."""
    layers = wanted.profile.histograms
    frequency = [layer.frequency() for layer in layers]
    known = [
        int((freq > 0).sum()) if layer.counts is None else layer.n_experts
        for layer, freq in zip(layers, frequency, strict=True)
    ]
    if wanted.residency is None and wanted.budget_bytes is None:
        slots = known
    else:
        sizes = _sizes(wanted)
        budget = residency_budget(sizes, wanted.residency) if wanted.residency is not None else wanted.budget_bytes or 0
        try:
            slots = greedy_slots(frequency, sizes, budget)
        except BudgetTooSmallError as error:
            raise SparkError(str(error), "pass a larger --vram") from error
    # By the counts themselves: as shares, large ones that differ by little are the same number.
    order = [
        -freq if layer.counts is None else -np.array(layer.counts, dtype=np.int64)
        for layer, freq in zip(layers, frequency, strict=True)
    ]
    return [
        np.argsort(keys, kind="stable")[: min(count, most)].tolist()
        for keys, count, most in zip(order, slots, known, strict=True)
    ]


def _sizes(wanted: Wanted) -> list[LayerSizes]:
    layers = wanted.profile.histograms
    if wanted.shape is not None:
        return [LayerSizes(layer.n_experts, layer.top_k, layer.expert_bytes) for layer in wanted.shape.layers]
    if wanted.budget_bytes is not None:
        raise UsageError("--vram needs the bytes of an expert", "pass --model, or --residency in the place of --vram")
    top_k = _top_k(layers)
    return [LayerSizes(layer.n_experts, top_k, 1) for layer in layers]


def _by_block(wanted: Wanted, rows: Sequence[Sequence[int]], empty: Sequence[int]) -> list[Sequence[int]]:
    """Rows for every block, those without experts as they are given."""
    result: list[Sequence[int]] = [empty] * _rows(wanted)
    for layer, row in zip(wanted.profile.histograms, rows, strict=True):
        result[layer.block] = row
    return result


def _lucebox_csv(wanted: Wanted) -> Exported:
    rows = _counts(wanted)
    return Exported(csv_text(_by_block(wanted, rows, [0] * len(rows[0])), _top_k(wanted.profile.histograms)).encode())


def _lucebox_placement(wanted: Wanted) -> Exported:
    layers = wanted.profile.histograms
    n_experts, hot = _equal_experts(layers), _by_block(wanted, _hot(wanted), [])
    arch = wanted.shape.architecture if wanted.shape is not None else "unknown"
    value = placement_value(arch, hot, n_experts, _top_k(layers))
    return Exported(_json(value), [] if wanted.shape is not None else ["no --model: arch is written as unknown"])


def _freetoken(wanted: Wanted) -> Exported:
    rows = _counts(wanted)
    name = _name(wanted)
    warnings = [] if name else ["the model has no name: FreeToken will warn about that"]
    # Its rows are the layers with experts, in their order.
    return Exported(_json(pool_profile_value(name, rows)), warnings)


def _fitz(wanted: Wanted) -> Exported:
    layers = wanted.profile.histograms
    n_experts = _equal_experts(layers)
    hot = []
    for layer, row in zip(layers, _hot(wanted), strict=True):
        # What was never selected is not listed.
        used = layer.frequency() if layer.counts is not None and any(layer.counts) else np.ones(n_experts)
        hot.append([expert for expert in row if used[expert] > 0])
    return Exported(pin_list_text(_by_block(wanted, hot, []), n_experts).encode())


def _sglang(wanted: Wanted) -> Exported:
    rows = _counts(wanted)
    return Exported(_json(location_value(_by_block(wanted, rows, [0] * len(rows[0])))))


def _ktransformers(wanted: Wanted) -> Exported:
    """What ``--init-expert-location FILE.pt`` takes with placement by frequency, which kt-kernel makes its mask of."""
    rows = _counts(wanted)
    table = np.array(_by_block(wanted, rows, [0] * len(rows[0])), dtype=np.int64)
    # A third axis, of steps: SGLang adds it up.
    content = torch_archive_bytes({"logical_count": table[None]}, {"model": _name(wanted)})
    note = "for --init-expert-location FILE.pt with --kt-expert-placement-strategy frequency: it chooses by itself"
    return Exported(content, [note])


def _ktransformers_mask(wanted: Wanted) -> Exported:
    buffer = io.BytesIO()
    np.save(buffer, _mask(wanted), allow_pickle=False)
    return Exported(buffer.getvalue(), [_MASK_NOTE])


def _ktransformers_mask_pt(wanted: Wanted) -> Exported:
    content = torch_archive_bytes({"gpu_experts_mask": _mask(wanted)}, {"model": _name(wanted)})
    return Exported(content, [_MASK_NOTE])


def _mask(wanted: Wanted) -> NDArray[np.bool_]:
    n_experts, hot = _equal_experts(wanted.profile.histograms), _by_block(wanted, _hot(wanted), [])
    mask = np.zeros((len(hot), n_experts), dtype=np.bool_)
    for block, row in enumerate(hot):
        mask[block, list(row)] = True
    return mask


def _name(wanted: Wanted) -> str:
    return (wanted.shape.name if wanted.shape is not None else wanted.profile.model) or ""


def _llama_cpp(wanted: Wanted) -> Exported:
    if wanted.shape is None:
        raise UsageError("flags of llama.cpp need the bytes of every layer", "pass --model")
    if wanted.budget_bytes is None and wanted.residency is None:
        raise UsageError("flags of llama.cpp need a budget", "pass --vram SIZE (of experts), or --residency SHARE")
    budget = wanted.budget_bytes
    if budget is None:
        budget = int((wanted.residency or 0) * wanted.shape.expert_bytes_total)
    flags = flags_for(wanted.shape, budget)
    text = f"-ngl 999 -ot '{flags.override}'\n" if flags.override else "-ngl 999\n"
    if flags.n_cpu_moe:
        text += f"-ngl 999 --n-cpu-moe {flags.n_cpu_moe}\n"
    share = flags.resident_bytes / wanted.shape.expert_bytes_total
    read = f"{flags.decode_share:.1%} of what a token reads"
    note = f"the first line keeps {flags.resident_bytes} bytes of experts in video memory ({share:.1%}; {read})"
    if flags.n_cpu_moe:
        note += f", the second {flags.resident_bytes_n_cpu_moe}"
    return Exported(text.encode(), [note, "llama.cpp moves whole layers: which experts are hot changes nothing"])


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


EXPORTERS: Mapping[str, Callable[[Wanted], Exported]] = {
    "lucebox-csv": _lucebox_csv,
    "lucebox-placement": _lucebox_placement,
    "freetoken": _freetoken,
    "fitz": _fitz,
    "sglang-location": _sglang,
    "ktransformers": _ktransformers,
    "ktransformers-mask": _ktransformers_mask,
    "ktransformers-mask-pt": _ktransformers_mask_pt,
    "llama-cpp": _llama_cpp,
}
