"""A model by the name that ``spark-agent models ls`` shows. Names and paths alone: no model file is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from spark_agent.errors import SparkError
from spark_agent.models.listing import same_files
from spark_agent.models.stores import Candidate, survey

__all__ = ["find_model", "match_name"]

_SHOWN = 8


def find_model(name: str) -> Path:
    """The file of a model on this machine; raise :class:`SparkError` where no name, or more than one model, matches."""
    found = survey(os.environ, Path.home())
    groups = same_files(match_name(name, [each for each in found.candidates if not each.part]))
    if not groups:
        places = ", ".join(str(folder) for _, folder in found.folders) or "no folder of a known tool exists"
        raise SparkError(
            f"no model {name!r}: it is no file, and no name on this machine ({places})",
            "see the names: spark-agent models ls",
        )
    if len(groups) > 1:
        names = [group[0].name for group in groups]
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise SparkError(f"{name!r} may be any of {len(names)} models: {shown}", "give one of these names in full")
    return groups[0][0].path


def match_name(name: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that a name means: the whole name, else its last part, else a part of it; letters' case never matters.

    An Ollama name without a tag is the one tagged ``latest``.
    """
    wanted = name.casefold().removesuffix(".gguf")
    whole = [each for each in candidates if each.name.casefold() in {wanted, f"{wanted}:latest"}]
    if whole or not wanted:
        return whole
    last = [each for each in candidates if each.name.casefold().rpartition("/")[2] in {wanted, f"{wanted}:latest"}]
    return last or [each for each in candidates if wanted in each.name.casefold()]
