"""What another tool's file says about a model's experts, as it is kept here: marked as imported, never as measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_schemas.base import FirstVersion, Schema
from spark_schemas.ids import Count, Fingerprint, Phase, WorkloadName
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS, ModelShape

__all__ = ["ImportedLayer", "ImportedProfile", "bind", "load_profile", "save_profile"]

_MOST_BYTES = 2**28


class ImportedLayer(Schema):
    """One layer with experts: its counts, or where the format has none, only an order."""

    block: Annotated[int, Field(ge=0, lt=MAX_BLOCKS)]
    """The model's block where a model was named, else the layer's number in the file."""
    n_experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    top_k: Annotated[int, Field(ge=1)] | None = None
    counts: Annotated[tuple[Count, ...], Field(max_length=MAX_EXPERTS, fail_fast=True)] | None = None
    ranking: Annotated[tuple[int, ...], Field(max_length=MAX_EXPERTS, fail_fast=True)] | None = None
    """Hottest first; experts that the file does not name are missing. Only where there are no counts."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.counts is None) == (self.ranking is None):
            raise ValueError(f"layer {self.block}: expected either counts or a ranking")
        if self.counts is not None and len(self.counts) != self.n_experts:
            raise ValueError(f"layer {self.block}: {len(self.counts)} counts, expected {self.n_experts}")
        if self.top_k is not None and self.top_k > self.n_experts:
            raise ValueError(f"layer {self.block}: top_k {self.top_k}, expected at most {self.n_experts}")
        ranking = self.ranking or ()
        if len(set(ranking)) != len(ranking) or any(not 0 <= expert < self.n_experts for expert in ranking):
            raise ValueError(
                f"layer {self.block}: a ranking of experts, expected each of 0 to {self.n_experts - 1} once"
            )
        return self

    def frequency(self) -> NDArray[np.float64]:
        """A share for every expert; a ranking becomes falling shares, of which only the order means anything."""
        if self.counts is not None:
            counts = np.asarray(self.counts, dtype=np.float64)
            total = counts.sum()
            return counts / total if total else np.full(self.n_experts, 1.0 / self.n_experts)
        shares = np.zeros(self.n_experts)
        ranking = list(self.ranking or ())
        shares[ranking] = np.arange(len(ranking), 0, -1)
        return shares / shares.sum() if len(ranking) else np.full(self.n_experts, 1.0 / self.n_experts)


class ImportedProfile(Schema):
    """Everything a file said, and what it could not say."""

    schema_version: FirstVersion = 1
    imported: Literal[True] = True
    format: Annotated[str, Field(min_length=1, max_length=64)]
    workload: WorkloadName
    phase: Phase | None = None
    """``None`` where the format does not tell prefill from decode."""
    tokens: Count | None = None
    model: Annotated[str, Field(max_length=200)] | None = None
    """As the file names it."""
    fingerprint: Fingerprint | None = None
    """Of the model that the file was checked against."""
    histograms: Annotated[tuple[ImportedLayer, ...], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True)]
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        blocks = [layer.block for layer in self.histograms]
        if blocks != sorted(set(blocks)):
            raise ValueError(f"layers must be unique and in order, found {blocks}")
        return self

    @property
    def has_counts(self) -> bool:
        """Whether every layer has counts."""
        return all(layer.counts is not None for layer in self.histograms)


def bind(profile: ImportedProfile, shape: ModelShape) -> ImportedProfile:
    """Take a profile as one of this model.

    Layers that are numbered by their blocks fit as they are; those that are numbered without the blocks that have no
    experts are renumbered. Raises :class:`SparkError` when the numbers of layers, experts or selections differ.
    """
    warnings = list(profile.warnings)
    blocks = [layer.block for layer in shape.layers]
    found = list(profile.histograms)
    dense = set(range(shape.n_blocks)) - set(blocks)
    # Some formats write a row for every block, of zeros where there are no experts.
    empty = [layer for layer in found if layer.block in dense and not any(layer.counts or layer.ranking or ())]
    found = [layer for layer in found if layer not in empty]
    if len(found) > len(blocks) and found[len(blocks)].block >= len(blocks):
        # Those of a draft model, which some engines count in the same table.
        warnings.append(f"{len(found) - len(blocks)} layers after the model's own are left out")
        found = found[: len(blocks)]
    if [layer.block for layer in found] != blocks:
        if [layer.block for layer in found] != list(range(len(blocks))):
            raise SparkError(
                f"the profile has layers {_span([layer.block for layer in found])}, the model's are {_span(blocks)}",
                "it is of another model",
            )
        warnings.append("layers are numbered without those that have no experts: taken in the model's order")
    layers = []
    for layer, own in zip(found, shape.layers, strict=True):
        if layer.n_experts != own.n_experts:
            raise SparkError(
                f"block {own.block} has {own.n_experts} experts, the profile {layer.n_experts}",
                "it is of another model",
            )
        if layer.top_k is not None and layer.top_k != own.top_k:
            raise SparkError(
                f"block {own.block} selects {own.top_k} experts, the profile says {layer.top_k}",
                "it is of another model",
            )
        layers.append(layer.model_copy(update={"block": own.block, "top_k": own.top_k}))
        total = sum(layer.counts or ())
        if total % own.top_k:
            warnings.append(f"block {own.block}: {total} selections are no multiple of top_k = {own.top_k}")
    return profile.model_copy(
        update={"histograms": tuple(layers), "fingerprint": shape.fingerprint, "warnings": tuple(warnings)}
    )


def save_profile(path: Path, profile: ImportedProfile) -> None:
    """Write a profile; raise :class:`SparkError` when that fails."""
    try:
        with replacing(path) as file:
            file.write(profile.model_dump_json().encode() + b"\n")
    except OSError as error:
        raise SparkError(f"cannot write {path}: {error.strerror}", "check the folder and its space") from error


def load_profile(path: Path) -> ImportedProfile:
    """Read what ``spark import`` wrote; raise :class:`SparkError` for anything else."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SparkError(f"{path} is too large for a profile ({path.stat().st_size} bytes)")
        return ImportedProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SparkError(f"cannot read {path}: {error.strerror}", "check the path") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SparkError(
            f"{path} is no profile of spark import: {where} {first['msg']}", "spark import --help"
        ) from error


def _span(blocks: list[int]) -> str:
    return "none" if not blocks else f"{blocks[0]} to {blocks[-1]} ({len(blocks)})"
