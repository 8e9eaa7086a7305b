from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_service.db.segments import ROWS_PER_GROUP, SegmentFolder
from spark_service.errors import StorageError, StorageFullError

SCHEMA = pa.schema([("content_id", pa.string()), ("counts", pa.binary())])


def table(*ids: int) -> pa.Table:
    rows = {"content_id": [f"{one:064x}" for one in ids], "counts": [bytes([one]) for one in ids]}
    return pa.table(rows, schema=SCHEMA)


@pytest.fixture
def folder(tmp_path: Path) -> SegmentFolder:
    return SegmentFolder(tmp_path / "deep" / "segments")


def test_rows_come_back_by_range(folder: SegmentFolder) -> None:
    count = 3 * ROWS_PER_GROUP + 5
    name, size = folder.write([table(*range(100)), table(*range(100, count))], SCHEMA)
    assert (folder.path / name).stat().st_size == size
    assert [file.name for file in folder.path.iterdir()] == [name]
    with folder.open(name) as segment:
        for first, last in ((0, 0), (5, 40), (31, 32), (32, 63), (count - 1, count + 9), (0, count)):
            found = pa.concat_tables([table(), *segment.between(f"{first:064x}", f"{last:064x}")])
            assert found.equals(table(*range(first, min(last + 1, count))))
        assert list(segment.between("f" * 64, "f" * 64)) == []
        assert pa.concat_tables(segment.tables()).equals(table(*range(count)))


def test_a_removed_file_stays_readable_where_it_is_open(folder: SegmentFolder) -> None:
    name, _ = folder.write([table(1, 2)], SCHEMA)
    with folder.open(name) as segment:
        folder.remove(name)
        folder.remove(name)
        assert pa.concat_tables(segment.tables()).equals(table(1, 2))
    with pytest.raises(StorageError, match="No such file"):
        folder.open(name)


def test_a_write_that_fails_leaves_no_file(folder: SegmentFolder) -> None:
    def broken() -> Iterator[pa.Table]:
        yield table(1)
        raise KeyError

    with pytest.raises(KeyError):
        folder.write(broken(), SCHEMA)
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize(("number", "kind"), [(28, StorageFullError), (5, StorageError)])
def test_a_disk_that_refuses_is_named(
    folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, "refused")

    with monkeypatch.context() as patched:
        patched.setattr("spark_service.db.segments.os.fsync", fail)
        with pytest.raises(StorageError, match=r"segment .*refused") as caught:
            folder.write([table(1)], SCHEMA)
    assert type(caught.value) is kind
    assert list(folder.path.iterdir()) == []


def test_what_is_left_over_goes_and_nothing_else(folder: SegmentFolder) -> None:
    assert folder.sweep([]) == []
    kept, _ = folder.write([table(1)], SCHEMA)
    lost, _ = folder.write([table(2)], SCHEMA)
    part = f"{lost}.part"
    (folder.path / part).write_bytes(b"half")
    (folder.path / "notes.txt").write_text("mine")
    (folder.path / "other.parquet").write_text("mine")
    assert sorted(folder.sweep([kept])) == sorted([lost, part])
    assert sorted(file.name for file in folder.path.iterdir()) == sorted([kept, "notes.txt", "other.parquet"])


@pytest.mark.parametrize("damage", ["text", "cut", "middle", "foreign"])
def test_damage_is_an_error_that_names_the_file(folder: SegmentFolder, damage: str) -> None:
    name, _ = folder.write([table(*range(50))], SCHEMA)
    file = folder.path / name
    content = bytearray(file.read_bytes())
    if damage == "text":
        file.write_bytes(b"no parquet at all")
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "middle":
        content[4:300] = b"\xff" * 296
        file.write_bytes(content)
    else:
        pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(StorageError, match=name), folder.open(name) as segment:
        list(segment.tables())
