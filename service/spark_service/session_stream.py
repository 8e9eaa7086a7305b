"""From stored rows in any order to whole sessions, batch by batch, in bounded memory."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from spark_runtime.calibration.sessions import Rows, Sessions, merge_rows

__all__ = ["whole_sessions"]

IN_MEMORY_BYTES = 64 * 2**20
"""Rows of sessions in several parts that wait in memory; more wait on disk."""
_FOLDERS = 256


def whole_sessions(rows: Iterable[Rows], repeated: Collection[str]) -> Iterator[Sessions]:
    """Batches of sessions, each session whole in one of them; ``repeated`` are those with more than one row."""
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        waiting = _Waiting(Path(folder))
        for batch in rows:
            again = np.array([session_hash in repeated for session_hash in batch.hashes], dtype=bool)
            if not again.any():
                yield merge_rows(batch)
                continue
            waiting.add(batch.take(np.flatnonzero(again)))
            if not again.all():
                yield merge_rows(batch.take(np.flatnonzero(~again)))
        yield from waiting.sessions()


class _Waiting:
    """Rows that wait for others of their session, by the first byte of its hash once they are many."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: list[Rows] = []
        self._held_bytes = 0
        self._files = 0

    def add(self, rows: Rows) -> None:
        self._held.append(rows)
        self._held_bytes += rows.counts.nbytes + (rows.reuse.nbytes if rows.reuse is not None else 0)
        if self._held_bytes > IN_MEMORY_BYTES:
            self._write()

    def sessions(self) -> Iterator[Sessions]:
        if not self._files:
            if self._held:
                yield merge_rows(Rows.joined(self._held))
            return
        self._write()
        for folder in sorted(self._folder.iterdir()):
            yield merge_rows(Rows.joined([_read(path) for path in sorted(folder.iterdir())]))

    def _write(self) -> None:
        if not self._held:
            return
        rows = Rows.joined(self._held)
        self._held, self._held_bytes = [], 0
        keys = np.array([int(session_hash[:2], 16) % _FOLDERS for session_hash in rows.hashes])
        for key in np.unique(keys).tolist():
            folder = self._folder / f"{key:02x}"
            folder.mkdir(exist_ok=True)
            part = rows.take(np.flatnonzero(keys == key))
            arrays = {"days": part.days, "tokens": part.tokens, "counts": part.counts}
            if part.reuse is not None:
                arrays["reuse"] = part.reuse
            names = {"ids": np.array(part.content_ids), "hashes": np.array(part.hashes)}
            np.savez(folder / f"{self._files:06d}.npz", **arrays, **names)  # type: ignore[arg-type]
        self._files += 1


def _read(path: Path) -> Rows:
    with np.load(path, allow_pickle=False) as arrays:
        return Rows(
            arrays["ids"].tolist(),
            arrays["hashes"].tolist(),
            arrays["days"],
            arrays["tokens"],
            arrays["counts"],
            arrays.get("reuse"),
        )
