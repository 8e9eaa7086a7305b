"""What was learned for fetching early, kept between starts: a file a model, which never leaves this machine.

A line of JSON says which model and which layers, the weights follow as 16-bit numbers, and a SHA-256 of all that ends
the file. It says more of what was computed than counts do, so only its owner can read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.paths import guesses_dir

if TYPE_CHECKING:
    from spark_agent.output import Output
    from spark_runtime.native_tier import LayerGuesses
    from spark_runtime.tier import Tier

__all__ = ["go_on_with_guesses", "guesses_path", "keep_guesses", "read_guesses", "write_guesses"]

VERSION = 1
MOST_HEADER_BYTES = 2**20
MOST_LAYERS = 1024
MOST_EXPERTS = 1024
"""Of a layer, as the native library (``native/device_tables.h``)."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def guesses_path(fingerprint: str) -> Path:
    """The file of a model."""
    return guesses_dir() / f"{fingerprint}.guesses"


def write_guesses(path: Path, fingerprint: str, guesses: Mapping[int, LayerGuesses]) -> None:
    """Put a file in place of the last; raises :class:`OSError`."""
    layers = [
        {"block": block, "sources": layer.sources, "rows": layer.weights.shape[0], "experts": layer.weights.shape[1]}
        for block, layer in sorted(guesses.items())
    ]
    header = json.dumps({"version": VERSION, "fingerprint": fingerprint, "layers": layers}).encode() + b"\n"
    digest = hashlib.sha256()
    with replacing(path) as file:
        for part in (header, *(layer.weights.astype("<i2").tobytes() for _, layer in sorted(guesses.items()))):
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def read_guesses(path: Path, fingerprint: str) -> dict[int, LayerGuesses]:
    """What a file holds; empty if there is none.

    Raises :class:`SparkError` for one that is damaged or not this model's.
    """
    from spark_runtime.native_tier import LayerGuesses

    try:
        with path.open("rb") as file:
            header = file.readline(MOST_HEADER_BYTES)
            layers = _layers(header, fingerprint)
            expected = 2 * sum(rows * experts for _, _, rows, experts in layers) + _DIGEST_BYTES
            found = path.stat().st_size - len(header)
            if found != expected:
                raise ValueError(f"{found} bytes of weights, expected {expected}")
            body = file.read(expected)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SparkError(
            f"{path} holds no guesses of this model: {error}", "it is learned anew; delete the file"
        ) from error
    if hashlib.sha256(header + body[:-_DIGEST_BYTES]).digest() != body[-_DIGEST_BYTES:]:
        raise SparkError(f"{path} is damaged: its checksum is another", "it is learned anew; delete the file")
    guesses, at = {}, 0
    for block, sources, rows, experts in layers:
        size = 2 * rows * experts
        weights = np.frombuffer(body[at : at + size], dtype="<i2").reshape(rows, experts).astype(np.int16)
        guesses[block] = LayerGuesses(sources, weights)
        at += size
    return guesses


def _layers(header: bytes, fingerprint: str) -> list[tuple[int, tuple[int, ...], int, int]]:
    """Block, sources, rows and experts of each layer; raises ``ValueError``, ``KeyError`` or ``TypeError``."""
    value = json.loads(header)
    if value["version"] != VERSION:
        raise ValueError(f"version {value['version']!r}, expected {VERSION}")
    if value["fingerprint"] != fingerprint:
        raise ValueError(f"they are of {value['fingerprint']!r}, expected {fingerprint}")
    layers = value["layers"]
    if len(layers) > MOST_LAYERS:
        raise ValueError(f"{len(layers)} layers, expected at most {MOST_LAYERS}")
    return [
        (
            _number(layer["block"], 2**16),
            tuple(_number(source, 2**16) for source in layer["sources"]),
            _number(layer["rows"], 2 * MOST_EXPERTS + 1),
            _number(layer["experts"], MOST_EXPERTS),
        )
        for layer in layers
    ]


def _number(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"found {value!r}, expected a number up to {most}")
    return value


def go_on_with_guesses(tier: Tier, fingerprint: str, output: Output) -> bool:
    """Let a tier go on with what was kept, if anything was; what cannot be used is said, and learned anew."""
    from spark_runtime.errors import TierError

    if not tier.early.experts:
        return False
    try:
        kept = read_guesses(guesses_path(fingerprint), fingerprint)
        tier.set_guesses(kept)
    except (SparkError, TierError) as error:
        output.warning(f"what the next layer selects is learned anew: {error}")
        return False
    return bool(kept)


def keep_guesses(tier: Tier, fingerprint: str, output: Output) -> None:
    """Keep what a tier has learned for the next start."""
    if not tier.early.experts:
        return
    path = guesses_path(fingerprint)
    try:
        write_guesses(path, fingerprint, tier.guesses())
    except OSError as error:
        output.warning(f"what was learned of the next layers cannot be kept in {path}: {error.strerror}")
