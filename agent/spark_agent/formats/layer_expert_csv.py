"""``layer,expert``: one row for each selection, as several forks of llama.cpp trace routing.

The order of rows is the order of tokens, from which text can be rebuilt: rows are added up and forgotten, a MiB at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.hints import Hints
from spark_agent.formats.reading import MOST_CELLS, FormatError, Found, check_sums, fail, layers_of_counts
from spark_schemas.model import MAX_BLOCKS, MAX_EXPERTS

__all__ = ["read_layer_expert_csv"]

_BLOCK_BYTES = 2**20
_COMMA, _NEWLINE, _ZERO, _NINE = ord(","), ord("\n"), ord("0"), ord("9")
_MOST_DIGITS = 7


def read_layer_expert_csv(path: Path, hints: Hints) -> Found:
    """Counts of every layer; memory does not grow with the file."""
    counts = np.zeros((0, 0), dtype=np.int64)
    for first_line, block in _blocks(path):
        rows = _rows(path, first_line, block)
        if not len(rows):
            continue
        n_layers, n_experts = (
            max(len(counts), int(rows[:, 0].max()) + 1),
            max(counts.shape[1], int(rows[:, 1].max()) + 1),
        )
        if n_layers > MAX_BLOCKS or n_experts > MAX_EXPERTS or n_layers * n_experts > MOST_CELLS:
            fail(path, f"layer {n_layers - 1} and expert {n_experts - 1}: no model has so many")
        if (n_layers, n_experts) != counts.shape:
            grown = np.zeros((n_layers, n_experts), dtype=np.int64)
            grown[: len(counts), : counts.shape[1]] = counts
            counts = grown
        counts += np.bincount(rows[:, 0] * n_experts + rows[:, 1], minlength=counts.size).reshape(counts.shape)
    if not counts.size:
        fail(path, "no row")
    warnings = ["rows were in the order of tokens: only their sums are kept"]
    if hints.n_experts is None:
        warnings.append(
            f"experts after {counts.shape[1] - 1} were never selected and are not known: pass --model or --experts"
        )
    elif hints.n_experts < counts.shape[1]:
        fail(path, f"expert {counts.shape[1] - 1}, expected at most {hints.n_experts - 1}")
    else:
        counts = np.pad(counts, ((0, 0), (0, hints.n_experts - counts.shape[1])))
    present = {layer: row for layer, row in enumerate(counts) if row.any()}
    found = Found(layers_of_counts(path, present, hints.top_k), warnings)
    check_sums(found)
    return found


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines, a MiB of them at a time, each with the number of its first one."""
    line = 1
    rest = b""
    try:
        with path.open("rb") as file:
            while data := file.read(_BLOCK_BYTES):
                data = rest + data
                end = data.rfind(b"\n") + 1
                if not end and len(data) > _BLOCK_BYTES:
                    fail(path, f"line {line} is longer than {_BLOCK_BYTES} bytes")
                block, rest = data[:end], data[end:]
                if block:
                    yield line, block
                    line += int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE))
            if rest:
                yield line, rest + b"\n"
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}", "check the path") from error


def _rows(path: Path, first_line: int, block: bytes) -> NDArray[np.int32]:
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if first_line == 1 and block[:1].isalpha():
        head, _, block = block.partition(b"\n")
        if head.strip().lower().replace(b" ", b"") != b"layer,expert":
            fail(path, f"line 1 is {head[:40]!r}, expected 'layer,expert'")
        first_line += 1
    if not block:
        return np.empty((0, 2), dtype=np.int32)
    codes = np.frombuffer(block, dtype=np.uint8)
    # Whatever is below the digits ends a cell, and has to be the comma or the end of line that is expected there.
    ends = np.flatnonzero(codes < _ZERO)
    lengths = np.diff(ends, prepend=-1) - 1
    separators = codes[ends]
    sound = len(ends) % 2 == 0 and codes.max() <= _NINE and lengths.min() >= 1 and lengths.max() <= _MOST_DIGITS
    if not sound or (separators[::2] != _COMMA).any() or (separators[1::2] != _NEWLINE).any():
        _complain(path, first_line, block)
    values = (codes[ends - 1] - np.uint8(_ZERO)).astype(np.int32)
    for digit in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > digit)
        values[longer] += (codes[ends[longer] - 1 - digit] - np.uint8(_ZERO)).astype(np.int32) * np.int32(10**digit)
    return values.reshape(-1, 2)


def _complain(path: Path, first_line: int, block: bytes) -> NoReturn:
    for number, line in enumerate(block.split(b"\n")[:-1], first_line):
        cells = line.split(b",")
        if len(cells) != 2 or not all(cell.isdigit() and len(cell) <= _MOST_DIGITS for cell in cells):
            fail(path, f"line {number} is {line[:40]!r}, expected two whole numbers: layer,expert")
    fail(path, f"lines from {first_line} on, expected two whole numbers in each: layer,expert")
