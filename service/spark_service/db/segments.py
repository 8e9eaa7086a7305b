"""Files of histograms that have aged out of the database: Parquet, whole or absent, never changed."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_service.errors import StorageError, StorageFullError

__all__ = ["Segment", "SegmentFolder"]

ROWS_PER_GROUP = 32
"""Histograms that are read at a time: those of a large model take tens of kilobytes each."""

_NAME = re.compile(r"segment-[0-9a-f]{32}\.parquet")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SegmentFolder:
    """Files in one folder, which is created with the first of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, tables: Iterable[pa.Table], schema: pa.Schema) -> tuple[str, int]:
        """Write tables, sorted by content id from one to the next, as a new file; return its name and bytes.

        The file is complete and on disk when this returns. Raises :class:`StorageError`, and leaves no file then.
        """
        name = f"segment-{uuid.uuid4().hex}.parquet"
        part = self.path / f"{name}.part"
        with self._errors(name):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with part.open("xb") as file:
                    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                        for table in tables:
                            writer.write_table(table, row_group_size=ROWS_PER_GROUP)
                    file.flush()
                    os.fsync(file.fileno())
                    size = file.tell()
                part.rename(self.path / name)
                self._sync_folder()
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        return name, size

    def open(self, name: str) -> Segment:
        """Open a file; it stays readable when it is removed meanwhile. Raises :class:`StorageError`."""
        with self._errors(name):
            file = (self.path / name).open("rb")
            try:
                return Segment(name, file)
            except BaseException:
                file.close()
                raise

    def remove(self, name: str) -> None:
        """Remove a file, or nothing where it is gone already."""
        with self._errors(name):
            (self.path / name).unlink(missing_ok=True)

    def sweep(self, known: Collection[str]) -> list[str]:
        """Remove files of this folder's making that are not ``known``, and return their names."""
        if not self.path.is_dir():
            return []
        left_over = [
            file.name
            for file in self.path.iterdir()
            if _NAME.fullmatch(file.name.removesuffix(".part")) and file.name not in known
        ]
        for name in left_over:
            self.remove(name)
        return left_over

    def _sync_folder(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            file = self.path / name
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise StorageFullError(
                    f"segment {file}: no room left ({error})", "free disk space, then retry"
                ) from error
            raise StorageError(
                f"segment {file}: {error}, expected a whole Parquet file that can be read and written",
                "restore the folder from a backup, or correct its permissions",
            ) from error


class Segment:
    """One open file, read forwards in ranges of content ids."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self._parquet = pq.ParquetFile(file)
        self._ranges = [self._range(index) for index in range(self._parquet.metadata.num_row_groups)]
        self._group: tuple[int, pa.Table] | None = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._parquet.close(force=True)

    def tables(self) -> Iterator[pa.Table]:
        """All rows, a group at a time."""
        for index in range(len(self._ranges)):
            yield self._read(index)

    def between(self, first: str, last: str) -> Iterator[pa.Table]:
        """Rows with content ids from ``first`` to ``last``, both included. The last group read is kept for the next."""
        for index, (low, high) in enumerate(self._ranges):
            if low <= last and first <= high:
                ids = pc.field("content_id")
                yield self._read(index).filter((ids >= first) & (ids <= last))

    def _range(self, index: int) -> tuple[str, str]:
        """The first and the last content id of a group."""
        column = self._parquet.schema_arrow.get_field_index("content_id")
        found = self._parquet.metadata.row_group(index).column(column).statistics if column >= 0 else None
        if found is None or not found.has_min_max:
            raise StorageError(f"segment {self.name}: found a file that this service did not write", "restore a backup")
        return str(found.min), str(found.max)

    def _read(self, index: int) -> pa.Table:
        if self._group is None or self._group[0] != index:
            try:
                self._group = (index, self._parquet.read_row_group(index))
            except (OSError, pa.ArrowException) as error:
                raise StorageError(f"segment {self.name} is damaged: {error}", "restore a backup") from error
        return self._group[1]
