"""Stored rows of counts as the sessions they came from, unchecked, so that they can be checked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark_schemas.histogram import LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.ids import Split

__all__ = ["PHASE_COLUMNS", "StoredPart", "StoredPhase", "parts_of", "session_of"]

PHASE_COLUMNS = ("content_id", "phase", "tokens", "blocks", "n_experts", "layer_tokens", "counts", "reuse")


@dataclass(frozen=True, slots=True)
class StoredPhase:
    """One row of counts. What is left over of a list whose length is wrong stands in a list of its own."""

    content_id: str
    phase: str
    tokens: int
    blocks: list[int]
    layer_tokens: list[int]
    counts: list[list[int]]
    reuse: list[list[int]] | None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What is stored of a part beside its counts."""

    content_id: str
    fingerprint: str
    workload: str
    session_hash: str
    split: Split


def parts_of(
    batches: Iterable[pa.Table], phases_of: Callable[[list[str]], Mapping[str, int]]
) -> Iterator[dict[str, list[StoredPhase]]]:
    """Group rows with the columns of ``PHASE_COLUMNS`` by content id, each group once all its rows are there.

    ``phases_of`` says how many rows there are of each of some content ids. Rows of one part may be in different
    batches; memory holds a batch and the parts that are not complete. Raises ``ValueError`` for rows that cannot be
    read as counts.
    """
    pending: dict[str, list[StoredPhase]] = {}
    for batch in batches:
        for index in range(batch.num_rows):
            row = _phase({name: batch[name][index] for name in PHASE_COLUMNS})
            pending.setdefault(row.content_id, []).append(row)
        expected = phases_of(list(pending))
        complete = {name: rows for name, rows in pending.items() if len(rows) >= expected.get(name, 0)}
        for name in complete:
            del pending[name]
        yield complete
    yield pending


def session_of(part: StoredPart, phases: Iterable[StoredPhase]) -> SessionHistogram:
    """The session as it was sent, without validation. Raises ``ValueError`` where lists do not fit each other."""
    by_name = {phase.phase: phase for phase in phases}
    decode = by_name.get("decode")
    reuse = None
    if decode is not None and decode.reuse is not None:
        reuse = tuple(
            LayerReuse.model_construct(block=block, distances=tuple(distances))
            for block, distances in zip(decode.blocks, decode.reuse, strict=True)
        )
    return SessionHistogram.model_construct(
        session_hash=part.session_hash,
        split=part.split,
        workload=part.workload,
        prefill=_histogram(by_name.get("prefill")),
        decode=_histogram(decode),
        reuse=reuse,
    )


def _histogram(phase: StoredPhase | None) -> PhaseHistogram | None:
    if phase is None:
        return None
    layers = tuple(
        LayerCounts.model_construct(block=block, tokens=tokens, counts=tuple(counts))
        for block, tokens, counts in zip(phase.blocks, phase.layer_tokens, phase.counts, strict=True)
    )
    return PhaseHistogram.model_construct(tokens=phase.tokens, layers=layers)


def _phase(row: Mapping[str, Any]) -> StoredPhase:
    n_experts = np.array(row["n_experts"].as_py(), dtype=np.int64)
    return StoredPhase(
        content_id=row["content_id"].as_py(),
        phase=row["phase"].as_py(),
        tokens=row["tokens"].as_py(),
        blocks=row["blocks"].as_py(),
        layer_tokens=row["layer_tokens"].as_py(),
        counts=_unflatten(row["counts"], n_experts),
        reuse=_unflatten(row["reuse"], n_experts + 1) if row["reuse"].is_valid else None,
    )


def _unflatten(value: Any, lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[list[int]]:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if pa.types.is_binary(value.type):
        # Little-endian unsigned numbers of the width that the length tells.
        content: bytes = value.as_py()
        width = len(content) // total if total else 1
        if width not in (1, 2, 4, 8) or width * total != len(content):
            raise ValueError(f"found {len(content)} bytes, expected {total} numbers of 1, 2, 4 or 8 bytes")
        flat = np.frombuffer(content, dtype=f"<u{width}")
    else:
        flat = value.values.to_numpy(zero_copy_only=False)
    parts = [part.tolist() for part in np.split(flat, ends)]
    return parts if parts[-1] else parts[:-1]
