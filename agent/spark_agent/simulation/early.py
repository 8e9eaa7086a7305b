"""Fetching early in a simulation: what was typed, and what guesses start from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from spark_agent.errors import SparkError, UsageError
from spark_runtime.early_fetch import EarlyFetch
from spark_runtime.errors import TierError

if TYPE_CHECKING:
    from spark_agent.simulation.sources import Source
    from spark_runtime.simulator.guesses import EarlyStart, Weights
    from spark_runtime.simulator.traces import LayerClass, Trace

__all__ = ["KEPT", "early_start", "given_guesses", "is_given", "parse_early"]

KEPT = "kept"
"""What this machine has learned of the model so far, in its usual file."""
_NOT_FILES = ("none", "calibrated")
_EXAMPLE = "e.g. --early 1:0.3"


def parse_early(texts: Sequence[str]) -> tuple[EarlyFetch, ...]:
    """``EXPERTS`` or ``EXPERTS:THRESHOLD`` each; raises :class:`UsageError`."""
    found = []
    for text in texts:
        experts, colon, threshold = text.partition(":")
        try:
            early = EarlyFetch(int(experts), float(threshold) if colon else EarlyFetch().threshold)
        except (ValueError, TierError) as error:
            reason = f": {error}" if isinstance(error, TierError) else ""
            raise UsageError(
                f"--early: found {text!r}, expected EXPERTS or EXPERTS:THRESHOLD{reason}", _EXAMPLE
            ) from error
        if not math.isfinite(early.threshold):
            raise UsageError(f"--early: found {text!r}, expected a finite threshold", _EXAMPLE)
        if not early.experts:
            raise UsageError(
                f"--early: found {text!r}, expected at least 1 expert", "without it nothing is fetched early"
            )
        found.append(early)
    return tuple(dict.fromkeys(found))


def early_start(typed: str | None, profile: str, n_calibration: int) -> EarlyStart:
    """What guesses start from; unless typed, a cache that starts with a profile has seen its sessions before."""
    if typed is None:
        return "calibrated" if profile != "none" and n_calibration else "none"
    return "given" if is_given(typed) else cast("EarlyStart", typed)


def is_given(typed: str | None) -> bool:
    """Whether what was typed names a file."""
    return typed is not None and typed not in _NOT_FILES


def given_guesses(typed: str, source: Source, trace: Trace, kept: Sequence[int]) -> Mapping[LayerClass, Weights]:
    """Of a file, for the layers of a trace, which are those of the source that were ``kept``.

    Raises :class:`SparkError` for a file that is missing, damaged, of another model, or of other layers.
    """
    from spark_agent.guesses import guesses_path, read_guesses

    if source.fingerprint is None or len(source.blocks) != len(source.layers):
        raise SparkError("the input says no model, so no guesses can be its", "use a recorded trace")
    path = guesses_path(source.fingerprint) if typed == KEPT else Path(typed)
    read = read_guesses(path, source.fingerprint)
    if not read:
        raise SparkError(f"there are no guesses in {path}", "none and calibrated need no file")
    found: dict[LayerClass, Weights] = {}
    for of in trace.classes():
        blocks = [source.blocks[kept[layer]] for layer in of.layers]
        weights = []
        for place, block in enumerate(blocks):
            sources = tuple(blocks[place - back] for back in (1, 2) if back <= place)
            rows = len(sources) * of.n_experts + (place > 0)
            layer = read.get(block)
            if layer is None and place == 0:
                weights.append(np.zeros((0, of.n_experts), np.int16))  # The first layer is not guessed.
                continue
            if layer is None or layer.sources != sources or layer.weights.shape != (rows, of.n_experts):
                told = "nothing" if layer is None else f"{layer.weights.shape} from blocks {list(layer.sources)}"
                raise SparkError(
                    f"{path} guesses block {block} by {told}, expected {(rows, of.n_experts)} from {list(sources)}",
                    "layers that were left out, or experts of other bytes: --guesses none or calibrated",
                )
            weights.append(layer.weights)
        found[of] = weights
    return found
