"""Formats by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from spark_agent.errors import SparkError, UsageError
from spark_agent.formats.exl3moe import read_exl3moe
from spark_agent.formats.fitz import read_pin_list
from spark_agent.formats.freetoken import read_pool_profile
from spark_agent.formats.hints import Hints
from spark_agent.formats.imatrix import read_imatrix
from spark_agent.formats.ktransformers import read_mask
from spark_agent.formats.layer_expert_csv import read_layer_expert_csv
from spark_agent.formats.lucebox import read_csv, read_placement
from spark_agent.formats.mbolt import read_mbolt
from spark_agent.formats.moe_l2 import read_moe_l2
from spark_agent.formats.plumb import read_plumb
from spark_agent.formats.profile import ImportedProfile, bind
from spark_agent.formats.reading import Found
from spark_agent.formats.sglang import read_location, read_recorder
from spark_agent.formats.vllm import read_load_stats, read_routed_experts
from spark_schemas.model import ModelShape

__all__ = ["IMPORTERS", "import_file"]

IMPORTERS: Mapping[str, Callable[[Path, Hints], Found]] = {
    "imatrix": read_imatrix,
    "lucebox-csv": read_csv,
    "lucebox-placement": read_placement,
    "layer-expert-csv": read_layer_expert_csv,
    "sglang": read_recorder,
    "sglang-location": read_location,
    "ktransformers-mask": read_mask,
    "vllm-eplb": read_load_stats,
    "vllm-stats": read_routed_experts,
    "plumb": read_plumb,
    "mbolt": read_mbolt,
    "fitz": read_pin_list,
    "moe-l2": read_moe_l2,
    "exl3moe": read_exl3moe,
    "freetoken": read_pool_profile,
}


def import_file(name: str, path: Path, workload: str, hints: Hints, shape: ModelShape | None = None) -> ImportedProfile:
    """Read a file of a format, and check it against a model where one is given.

    Raises :class:`UsageError` for an unknown format and :class:`SparkError` for a file that is not what it should be.
    """
    if name not in IMPORTERS:
        raise UsageError(f"found format {name!r}, expected one of {', '.join(sorted(IMPORTERS))}")
    if not path.is_file():
        raise SparkError(f"no such file: {path}", "check the path")
    found = IMPORTERS[name](path, hints)
    profile = ImportedProfile(
        format=name,
        workload=workload,
        phase=found.phase,
        tokens=found.tokens,
        model=found.model,
        histograms=tuple(found.layers),
        warnings=tuple(found.warnings),
    )
    return profile if shape is None else bind(profile, shape)
