"""Archives that lie about themselves, of every kind."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest

from spark_agent.formats.reading import FormatError
from spark_agent.formats.zip_file import opened


def archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytearray:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return bytearray(buffer.getvalue())


def refused(path: Path, data: bytes, reason: str, most: int = 8) -> None:
    path.write_bytes(data)
    with pytest.raises(FormatError, match=reason), opened(path, most):
        pytest.fail("it was opened")


def test_a_sound_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(archive({"a": b"1", "b": b"22"}))
    with opened(path, 2) as found:
        assert {name: found.archive.read(name) for name in found.infos} == {"a": b"1", "b": b"22"}


def test_entries_that_are_too_many_or_there_twice(tmp_path: Path) -> None:
    refused(tmp_path / "a.zip", archive({str(n): b"" for n in range(9)}), "9 entries, expected at most 8")
    twice = archive({"aa": b"1", "ab": b"2"}).replace(b"ab", b"aa")
    refused(tmp_path / "a.zip", twice, "there twice")


def test_entries_that_share_bytes(tmp_path: Path) -> None:
    """A stream of zeros that several entries of the list point to, and one entry within another."""
    data = archive({"a": bytes(4096), "b": b"2"}, zipfile.ZIP_DEFLATED)
    second = data.rfind(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<L", 0)
    refused(tmp_path / "a.zip", data, "shares bytes")
    inner = archive({"x": b"1"})
    data = archive({"a": bytes(inner), "b": b"2"})
    second = data.rfind(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<L", 31)
    refused(tmp_path / "a.zip", data, "shares bytes")


def test_sizes_that_are_untrue(tmp_path: Path) -> None:
    data = archive({"a": bytes(100)})
    entry = data.rfind(b"PK\x01\x02")
    data[entry + 20 : entry + 24] = struct.pack("<L", 2**31)
    refused(tmp_path / "a.zip", data, "claim more bytes|not an archive")
    end = len(data) - 22
    data = archive({"a": bytes(100)})
    data[end + 12 : end + 16] = struct.pack("<L", 2**31)
    refused(tmp_path / "a.zip", data, "a list of entries of")


def test_lies_of_zip64(tmp_path: Path) -> None:
    """The longer end of large archives: a list of a terabyte, sizes of an entry, and an end that is elsewhere."""
    data = archive({"a": bytes(100)})
    at = len(data) - 22
    directory = struct.unpack_from("<LL", data, at + 12)
    end64 = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 2**40, directory[1])
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    end = struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    refused(tmp_path / "a.zip", data[:at] + end64 + locator + end, "a list of entries of 1099511627776 bytes")
    refused(tmp_path / "a.zip", data[:at] + locator + end, "elsewhere|a list of entries")
    entry = bytearray(data)
    listed = entry.rfind(b"PK\x01\x02")
    entry[listed + 20 : listed + 28] = b"\xff" * 8
    extra = struct.pack("<HHQQ", 1, 16, 2**40, 2**40)
    entry[listed + 30 : listed + 32] = struct.pack("<H", len(extra))
    entry[listed + 47 : listed + 47] = extra
    at = len(entry) - 22
    entry[at + 12 : at + 16] = struct.pack("<L", directory[0] + len(extra))
    refused(tmp_path / "a.zip", entry, "claim more bytes")


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x05\x06", b"PK\x05\x06" + bytes(10), b"text" * 100])
def test_files_that_are_no_archive(tmp_path: Path, content: bytes) -> None:
    refused(tmp_path / "a.zip", content, "not an archive")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read"), opened(tmp_path, 2):
        pytest.fail("it was opened")


def test_any_changed_byte_is_an_archive_or_an_error(tmp_path: Path) -> None:
    data = archive({"a": b"1", "b": b"22"})
    path = tmp_path / "a.zip"
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 0xFF
        path.write_bytes(changed)
        try:
            with opened(path, 4) as found:
                for info in found.infos.values():
                    found.archive.read(info)
        except FormatError:
            continue
