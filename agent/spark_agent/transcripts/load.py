"""From a file on disk to UTF-8 bytes, text and JSON lines, within limits."""

from __future__ import annotations

import codecs
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from spark_agent.transcripts.model import Limits, Problems, UnusableError, describe

__all__ = ["decode_text", "json_objects", "load"]

# UTF-32's little-endian mark starts with UTF-16's: longest first.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Absent on some systems. O_NONBLOCK: opening a pipe must not wait for its writer.
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


def load(path: Path, limits: Limits) -> bytes:
    """Return the file's bytes as UTF-8 without a byte order mark, not yet checked to be valid UTF-8."""
    try:
        with open(os.open(path, _OPEN_FLAGS), "rb") as file:  # noqa: PTH123 - pathlib can not pass flags
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnusableError("found a pipe, socket or device, expected a regular file")
            # One byte more tells a file that is too large, also one that grows meanwhile.
            data = file.read(limits.max_file_bytes + 1)
    except OSError as error:
        raise UnusableError(f"can not be opened: {error.strerror or type(error).__name__}") from error
    if len(data) > limits.max_file_bytes:
        raise UnusableError(f"found more than {limits.max_file_bytes:,} bytes, expected at most that many")
    if not data.strip():
        raise UnusableError("line 1: found an empty file, expected a conversation or text")
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding).encode()
            except UnicodeError as error:
                name = encoding.upper()
                raise UnusableError(f"found a {name} byte order mark, expected valid {name} text after it") from error
    return data.removeprefix(codecs.BOM_UTF8)


def decode_text(data: bytes) -> str:
    """Return the text, line endings as LF, or refuse what is not UTF-8 text."""
    if (at := data.find(b"\0")) >= 0:
        raise UnusableError(f"line {_line_of(data, at)}: found a NUL byte (a binary file?), expected UTF-8 text")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        found = f"found byte 0x{data[error.start]:02x}, which is not UTF-8"
        raise UnusableError(
            f"line {_line_of(data, error.start)}: {found}, expected UTF-8 or UTF-16 with a byte order mark "
            "(for Latin-1, convert it with `iconv -f latin1 -t utf-8`)"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_objects(data: bytes, limits: Limits, problems: Problems) -> Iterator[tuple[int, dict[str, object]]]:
    """Give each line's number and JSON object; count the lines that hold something else."""
    for number, line in enumerate(io.BytesIO(data), start=1):
        if line.isspace():
            continue
        if len(line) > limits.max_line_bytes:
            problems.add(number, f"found {len(line):,} bytes, expected at most {limits.max_line_bytes:,}")
            continue
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError:
            problems.add(number, "found bytes that are not UTF-8, expected a JSON object")
        except RecursionError:
            problems.add(number, "found JSON nested too deeply, expected a JSON object")
        except ValueError:
            # Also integers with more digits than Python converts.
            problems.add(number, "found text that is not JSON, expected a JSON object")
        else:
            if isinstance(value, dict):
                yield number, value
            else:
                problems.add(number, f"found {describe(value)}, expected a JSON object")


def _line_of(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1
