"""ZIP archives that nobody vouches for, opened only after their own account of themselves has been checked."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spark_agent.formats.reading import FormatError, fail

__all__ = ["ZipEntries", "opened"]

_MOST_DIRECTORY_BYTES = 2**24
"""Of the list of entries, which is read as a whole."""
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END_BYTES, _END64_BYTES, _LOCATOR64_BYTES, _LOCAL_BYTES = 22, 56, 20, 30
_MOST_COMMENT_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class ZipEntries:
    """An open archive, and its entries by name."""

    archive: zipfile.ZipFile
    infos: dict[str, zipfile.ZipInfo]


@contextmanager
def opened(path: Path, most_entries: int, what: str = "an archive") -> Iterator[ZipEntries]:
    """Open an archive, which a file of ``what`` is; raise :class:`FormatError` for one that lies.

    Refused are more entries than expected, a list of them that is longer than any, entries that are there twice or
    share bytes (one stream of zeros that is many files), and more bytes than the file has.
    """
    try:
        _check_end(path, what)
        with zipfile.ZipFile(path) as archive:
            yield ZipEntries(archive, _checked(path, archive, most_entries))
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}", "check the path") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, RuntimeError, zlib.error) as error:
        raise FormatError(f"{path.name}: not {what}: {error}") from error


def _check_end(path: Path, what: str) -> None:
    """How long the list of entries is, as the file's end says, in whichever of its two places."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_BYTES - _MOST_COMMENT_BYTES - _END64_BYTES - _LOCATOR64_BYTES))
        tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_BYTES:
        fail(path, f"not {what}")
    lengths = [struct.unpack_from("<L", tail, at + 12)[0]]
    before = at - _LOCATOR64_BYTES - _END64_BYTES
    if before >= 0 and tail[before : before + 4] == _END64:
        lengths = [struct.unpack_from("<Q", tail, before + 40)[0]]
    elif at >= _LOCATOR64_BYTES and tail[at - _LOCATOR64_BYTES :].startswith(_LOCATOR64):
        fail(path, "its end points to a list of entries elsewhere")
    if max(lengths) > min(_MOST_DIRECTORY_BYTES, size):
        fail(path, f"a list of entries of {max(lengths)} bytes in a file of {size}")


def _checked(path: Path, archive: zipfile.ZipFile, most_entries: int) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if len(infos) > most_entries:
        fail(path, f"{len(infos)} entries, expected at most {most_entries}")
    by_name = {info.filename: info for info in infos}
    if len(by_name) != len(infos):
        fail(path, "an entry is there twice")
    if sum(info.compress_size for info in infos) > path.stat().st_size:
        fail(path, "its entries claim more bytes than the file has")
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.header_offset < end:
            fail(path, f"{info.filename} shares bytes with another entry")
        end = info.header_offset + _LOCAL_BYTES + len(info.filename.encode()) + info.compress_size
    return by_name
