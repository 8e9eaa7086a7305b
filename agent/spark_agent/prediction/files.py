"""Files of predictors: NumPy's ``.npz`` without pickled objects, read by what its own account says must be there.

They stay on this machine: weights that were fitted to sessions say far more about them than frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from spark_agent.errors import RefusedError, SparkError
from spark_agent.files import replacing
from spark_agent.formats.zip_file import ZipEntries, opened
from spark_runtime.hidden_kinds import HiddenKind
from spark_runtime.predict.fitted import FittedLayer, fitted_shapes
from spark_runtime.predict.kinds import PredictorKind, parse_kind
from spark_runtime.predict.losses import LossName
from spark_schemas.base import Schema
from spark_schemas.ids import Fingerprint
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS, ModelShape

__all__ = ["PredictorFile", "load_predictors", "save_predictors"]

_ABOUT = "about"
_MOST_ABOUT_BYTES = 2**24
_MOST_BYTES = 2**34
_HEADER_BYTES = 2**12
Fitted = Mapping[PredictorKind, Sequence[FittedLayer]]


class _Kind(Schema):
    name: Annotated[str, Field(max_length=80)]
    loss: LossName | None = None

    def parsed(self) -> PredictorKind:
        (kind,) = parse_kind(self.name, [self.loss] if self.loss else ["bce"])
        if (kind.loss is None) != (self.loss is None):
            raise ValueError(f"{self.name} with the loss {self.loss}")
        return kind


class _Layer(Schema):
    block: Annotated[int, Field(ge=0, lt=MAX_BLOCKS)]
    n_experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    top_k: Annotated[int, Field(ge=1)]
    hidden: dict[HiddenKind, Annotated[int, Field(ge=1, le=2**17)]]


class PredictorFile(Schema):
    """What a file of predictors says of itself."""

    format: Literal[1] = 1
    fingerprint: Fingerprint
    phase: Literal["decode", "prefill", "both"]
    layers: Annotated[tuple[_Layer, ...], Field(min_length=1, max_length=MAX_BLOCKS)]
    width: Annotated[int, Field(ge=1, le=2**17)]
    """Of the networks' hidden layers."""
    sessions: int
    """Learned from."""
    tokens: int
    predictors: Annotated[tuple[_Kind, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _kinds_parse(self) -> Self:
        kinds = [kind.parsed() for kind in self.predictors]
        if len(set(kinds)) != len(kinds):
            raise ValueError("a predictor is named twice")
        for kind in kinds:
            if kind.hidden is not None and not all(kind.hidden in layer.hidden for layer in self.layers):
                raise ValueError(f"{kind.name} reads hidden states of which no width is given")
        return self

    @property
    def kinds(self) -> list[PredictorKind]:
        """The predictors."""
        return [kind.parsed() for kind in self.predictors]

    def shapes(self, kind: PredictorKind, layer: int) -> dict[str, tuple[int, ...]]:
        """Arrays of a predictor of a layer."""
        n_experts = tuple(one.n_experts for one in self.layers)
        width = None if kind.hidden is None else self.layers[layer].hidden[kind.hidden]
        return fitted_shapes(kind, layer, n_experts, self.width, width)


def save_predictors(
    path: Path,
    shape: ModelShape,
    layers: Sequence[int],
    hidden_widths: Sequence[Mapping[str, int]],
    fitted: Fitted,
    *,
    phase: str,
    width: int,
    sessions: int,
    tokens: int,
) -> None:
    """Write predictors of a model's layers, whole or not at all; raise :class:`SparkError` when that fails."""
    about = PredictorFile.model_validate(
        {
            "fingerprint": shape.fingerprint,
            "phase": phase,
            "layers": tuple(
                {
                    "block": shape.layers[layer].block,
                    "n_experts": shape.layers[layer].n_experts,
                    "top_k": shape.layers[layer].top_k,
                    "hidden": dict(widths),
                }
                for layer, widths in zip(layers, hidden_widths, strict=True)
            ),
            "width": width,
            "sessions": sessions,
            "tokens": tokens,
            "predictors": tuple({"name": kind.name, "loss": kind.loss} for kind in fitted),
        }
    )
    arrays: dict[str, Any] = {_ABOUT: np.frombuffer(about.model_dump_json().encode(), dtype=np.uint8)}
    for number, per_layer in enumerate(fitted.values()):
        for layer, one in enumerate(per_layer):
            arrays |= {f"{number}/{layer}/{name}": array for name, array in one.arrays.items()}
    try:
        with replacing(path) as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise SparkError(f"cannot write {path}: {error.strerror}", "check the folder and its space") from error


def load_predictors(path: Path, shape: ModelShape | None = None) -> tuple[PredictorFile, Fitted]:
    """Read predictors, of a certain model if one is given.

    Raises :class:`SparkError` for another file or a damaged one, :class:`RefusedError` for another model's.
    """
    with opened(path, 10**6, "a file of predictors") as entries:
        about = _about(path, entries)
        if shape is not None and about.fingerprint != shape.fingerprint:
            raise RefusedError(
                f"{path} was learned from {about.fingerprint}, expected {shape.fingerprint}",
                hint="predictors are of one model only: spark predict train on its own traces",
            )
        fitted: dict[PredictorKind, list[FittedLayer]] = {}
        for number, kind in enumerate(about.kinds):
            fitted[kind] = [
                FittedLayer(
                    kind,
                    {
                        name: _array(path, entries, f"{number}/{layer}/{name}", extent)
                        for name, extent in about.shapes(kind, layer).items()
                    },
                )
                for layer in range(len(about.layers))
            ]
    return about, fitted


def _about(path: Path, entries: ZipEntries) -> PredictorFile:
    info = entries.infos.get(f"{_ABOUT}.npy")
    if (
        info is None
        or info.file_size > _MOST_ABOUT_BYTES
        or sum(one.file_size for one in entries.infos.values()) > (_MOST_BYTES)
    ):
        raise SparkError(f"{path} is not a file of predictors", "spark predict train writes one")
    with entries.archive.open(info) as file:
        content = _parsed(path, file, (None,), np.dtype(np.uint8), info.file_size)
    try:
        return PredictorFile.model_validate_json(content.tobytes())
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "about"
        raise SparkError(f"{path} is not a file of predictors: {where}: {fault['msg']}", "train again") from error


def _array(path: Path, entries: ZipEntries, name: str, extent: tuple[int, ...]) -> NDArray[np.float32]:
    info = entries.infos.get(f"{name}.npy")
    if info is None:
        raise SparkError(f"{path} has no {name}", "the file is damaged: train again")
    with entries.archive.open(info) as file:
        values = cast("NDArray[np.float32]", _parsed(path, file, extent, np.dtype(np.float32), info.file_size))
    if not np.isfinite(values).all():
        raise SparkError(f"{path}: {name} holds what is no number", "the file is damaged: train again")
    return values


def _parsed(
    path: Path, file: IO[bytes], extent: tuple[int | None, ...], kind: np.dtype[Any], size: int
) -> NDArray[Any]:
    """An array whose header says what was expected, before anything of its size is allocated."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version of NumPy's format")
        found, by_columns, found_kind = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise SparkError(f"{path} is not a file of predictors: {error}", "train again") from error
    wanted = tuple(one if one is not None else other for one, other in zip(extent, found, strict=False))
    n_bytes = int(np.prod(found, dtype=object)) * kind.itemsize
    fits = found == wanted and found_kind == kind and not (by_columns and len(found) > 1)
    if not fits or not n_bytes <= size <= n_bytes + _HEADER_BYTES:
        raise SparkError(
            f"{path}: found an array {found} of {found_kind} in {size} bytes, expected {extent} of {kind}",
            "the file is damaged: train again",
        )
    content = file.read(n_bytes + 1)
    if len(content) != n_bytes:
        raise SparkError(f"{path}: {len(content)} bytes of an array, expected {n_bytes}", "the file is damaged")
    return np.frombuffer(content, dtype=kind).reshape(found)
