"""Reading files that nobody vouches for: bounded, strict, and every fault said with what was found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from spark_agent.errors import SparkError
from spark_agent.formats.profile import ImportedLayer
from spark_schemas.ids import MAX_COUNT, Phase
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = [
    "MOST_CELLS",
    "MOST_JSON_BYTES",
    "FormatError",
    "Found",
    "check_sums",
    "counts_of",
    "digits",
    "fail",
    "integer",
    "layers_of_counts",
    "lines_of",
    "parse_json",
    "read_json",
    "whole_counts",
]

IntArray = NDArray[np.int64]
MOST_JSON_BYTES = 2**27
MOST_LINE_BYTES = 2**24
MOST_CELLS = 2**24
"""Layers times experts: far above any model."""
_INTEGER = re.compile(r"[0-9]{1,19}", re.ASCII)


class FormatError(SparkError):
    """The file is not what its format says, or says what cannot be."""


@dataclass(slots=True)
class Found:
    """What a reader found in a file."""

    layers: list[ImportedLayer]
    warnings: list[str] = field(default_factory=list)
    model: str | None = None
    tokens: int | None = None
    phase: Phase | None = None


def fail(path: Path, text: str) -> NoReturn:
    """Raise :class:`FormatError` for a file."""
    raise FormatError(f"{path.name}: {text}", "check that the file is complete and of this format: spark import --help")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines without their ends, with their numbers from 1 on, one in memory at a time.

    Raises :class:`FormatError` for a line that is too long or no text, and for what cannot be opened.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    fail(path, f"line {number} is longer than {MOST_LINE_BYTES} bytes")
                if b"\0" in line:
                    fail(path, f"line {number} is not text")
                yield number, line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path.name}: not text: {error}") from error
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}", "check the path") from error


def read_json(path: Path) -> Any:
    """A whole JSON file; raise :class:`FormatError` when it is too large, no JSON, or names a key twice."""
    try:
        size = path.stat().st_size
        if size > MOST_JSON_BYTES:
            fail(path, f"{size} bytes, expected at most {MOST_JSON_BYTES}")
        with path.open("rb") as file:
            data = file.read(MOST_JSON_BYTES + 1)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}", "check the path") from error
    return parse_json(path, data)


def parse_json(path: Path, data: bytes | str) -> Any:
    """JSON without ``NaN`` and without keys named twice; raises :class:`FormatError`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key is there twice")
        return result

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    try:
        return json.loads(data, object_pairs_hook=once, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path.name}: not JSON: {error}") from error


def integer(path: Path, what: str, value: Any, most: int, least: int = 0) -> int:
    """A whole number in its range; raise :class:`FormatError` for anything else, also ``true`` and ``2.0``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        fail(path, f"{what} is {value!r}, expected a whole number from {least} to {most}")
    return value


def digits(path: Path, what: str, text: str, most: int) -> int:
    """A whole number as it is written, without sign, blanks or exponent; raises :class:`FormatError`."""
    if not _INTEGER.fullmatch(text) or int(text) > most:
        shown = text if len(text) <= 40 else text[:40] + "…"
        fail(path, f"{what} is {shown!r}, expected a whole number from 0 to {most}")
    return int(text)


def counts_of(path: Path, what: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Counts of a JSON list: whole numbers, or floats that are whole; raises :class:`FormatError`."""
    return tuple(_count(path, f"{what}, expert {index}", value) for index, value in enumerate(values))


def _count(path: Path, what: str, value: Any) -> int:
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            fail(path, f"{what}: {value!r}, expected a count")
        value = int(value)
    return integer(path, what, value, MAX_COUNT)


def whole_counts(path: Path, what: str, values: NDArray[np.generic]) -> IntArray:
    """Counts of a table of any number type; raise :class:`FormatError` for negative, broken or non-finite ones."""
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            fail(path, f"{what} holds {values[~finite].flat[0]}, expected counts")
        if (values != np.floor(values)).any():
            fail(path, f"{what} holds {values[values != np.floor(values)].flat[0]}, expected whole counts")
    elif values.dtype.kind not in "iu":
        fail(path, f"{what} is of type {values.dtype}, expected numbers")
    if values.size and values.min() < 0:
        fail(path, f"{what} holds {values.min()}, expected no count below 0")
    if values.size and values.max() > MAX_COUNT:
        fail(path, f"{what} holds {values.max()}, expected no count above {MAX_COUNT}")
    return values.astype(np.int64)


def layers_of_counts(
    path: Path, counts: Mapping[int, Sequence[int] | IntArray], top_k: int | None = None
) -> list[ImportedLayer]:
    """Layers in their order; raise :class:`FormatError` for no layer, too many, or experts that are none."""
    if not counts:
        fail(path, "no layer with experts")
    layers = []
    for block in sorted(counts):
        values = counts[block]
        if not 0 <= block < MAX_BLOCKS:
            fail(path, f"layer {block}, expected 0 to {MAX_BLOCKS - 1}")
        if not 1 <= len(values) <= MAX_EXPERTS:
            fail(path, f"layer {block}: {len(values)} experts, expected 1 to {MAX_EXPERTS}")
        if top_k is not None and top_k > len(values):
            fail(path, f"layer {block}: top_k {top_k} of {len(values)} experts")
        listed = tuple(values.tolist() if isinstance(values, np.ndarray) else values)
        layers.append(ImportedLayer(block=block, n_experts=len(listed), top_k=top_k, counts=listed))
    if not any(any(layer.counts or ()) for layer in layers):
        fail(path, "every count is 0")
    return layers


def check_sums(found: Found) -> None:
    """Warn when layers do not agree on how many selections there were, and set the tokens where they do."""
    sums = {sum(layer.counts or ()) for layer in found.layers if any(layer.counts or ())}
    top_ks = {layer.top_k for layer in found.layers}
    if len(sums) > 1:
        found.warnings.append(f"layers count {min(sums)} to {max(sums)} selections: not all saw the same tokens")
    elif sums and len(top_ks) == 1 and None not in top_ks and found.tokens is None:
        [total], [top_k] = sums, top_ks
        if top_k and total % top_k == 0:
            found.tokens = total // top_k if total // top_k <= MAX_COUNT else None
        elif top_k:
            found.warnings.append(f"{total} selections a layer are no multiple of top_k = {top_k}")
    silent = [layer.block for layer in found.layers if layer.counts is not None and not any(layer.counts)]
    if silent:
        found.warnings.append(f"{len(silent)} layers have no counts (the first is {silent[0]})")
