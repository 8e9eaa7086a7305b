"""Request bodies: read, inflated and limited. Neither side of a compression ever holds more than its cap."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import zstandard

from spark_service import env
from spark_service.errors import RequestError

__all__ = ["ENCODINGS", "BodyLimits", "inflate", "is_small", "read_body", "require_encoding"]

ENCODINGS = ("zstd", "gzip", "identity")
_MAX_WINDOW = 2**25
"""Most memory a zstd frame may ask for, bytes; all levels below ``--ultra`` need less."""

SMALL_BYTES = 2**17
"""About one session of 48 layers of 128 experts."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Most bytes of a body as sent, and once inflated."""

    body_bytes: int = env.MAX_BODY_BYTES.default
    inflated_bytes: int = env.MAX_INFLATED_BYTES.default


def require_encoding(header: str | None) -> str:
    """Return the encoding that a Content-Encoding header names. Raises :class:`RequestError` (415) for any other."""
    encoding = (header or "identity").strip().lower() or "identity"
    if encoding not in ENCODINGS:
        expected = ", ".join(ENCODINGS)
        raise RequestError(
            415,
            "unsupported_encoding",
            f"Content-Encoding: found {header!r}, expected one of {expected}",
            field="header.Content-Encoding",
            found=header,
            expected=expected,
            hint="compress the body once, with zstd or gzip, or send it as it is",
            headers={"Accept-Encoding": expected},
        )
    return encoding


async def read_body(chunks: AsyncIterator[bytes], declared: str | None, limit: int) -> bytes:
    """Collect a body of at most ``limit`` bytes; ``declared`` is its Content-Length, which may refuse it unread.

    Raises :class:`RequestError` (413).
    """
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise _too_large("body", f"{declared} bytes", limit)
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise _too_large("body", f"more than {limit} bytes", limit)
    return bytes(body)


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Inflate a body to at most ``limit`` bytes.

    Raises :class:`RequestError`: 413 when it would be larger, 400 for a damaged, cut or continued stream.
    """
    if encoding == "zstd":
        inflated = _inflate_zstd(body, limit)
    elif encoding == "gzip":
        inflated = _inflate_gzip(body, limit)
    else:
        inflated = body
    if len(inflated) > limit:
        raise _too_large("inflated body", f"more than {limit} bytes", limit)
    return inflated


def is_small(body: bytes, encoding: str) -> bool:
    """Whether a body is known, before it is inflated, to be small enough to be read within a millisecond or two."""
    if len(body) > SMALL_BYTES:
        return False
    if encoding == "zstd":
        try:
            return 0 <= zstandard.frame_content_size(body) <= SMALL_BYTES
        except zstandard.ZstdError:
            # It is refused at once.
            return True
    return encoding == "identity"


def _inflate_gzip(body: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        inflated = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise _damaged("gzip", str(error)) from error
    if len(inflated) > limit:
        return inflated
    if not stream.eof:
        raise _damaged("gzip", "the stream ends early")
    if stream.unused_data:
        raise _damaged("gzip", f"{len(stream.unused_data)} bytes after the end of the stream")
    return inflated


def _inflate_zstd(body: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        if 0 < zstandard.frame_content_size(body) <= limit:
            # The frame says its size, and the strict call holds it to that.
            return decompressor.decompress(body, allow_extra_data=False)
        with decompressor.stream_reader(body) as reader:
            inflated = reader.read(limit + 1)
        if len(inflated) > limit:
            return inflated
        # The reader takes a cut stream for its end and ignores what follows the first frame. Now that the size is
        # known, the strict call can be used: it allocates what it is told to, so it must not come first.
        return decompressor.decompress(body, max_output_size=max(len(inflated), 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged("zstd", str(error)) from error


def _too_large(what: str, found: str, limit: int) -> RequestError:
    return RequestError(
        413,
        "body_too_large",
        f"{what}: found {found}, expected at most {limit} bytes",
        field="body",
        found=found,
        expected=f"at most {limit} bytes",
        hint="send fewer sessions per upload",
    )


def _damaged(encoding: str, reason: str) -> RequestError:
    return RequestError(
        400,
        "bad_encoding",
        f"body: found no whole {encoding} stream ({reason}), expected one, as Content-Encoding says",
        field="body",
        found=reason,
        expected=f"one whole {encoding} stream",
        hint="compress the whole body in one call, or send it without Content-Encoding",
    )
