from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import anyio
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_service.errors import RequestError
from spark_service.inflate import SMALL_BYTES, inflate, is_small, read_body, require_encoding

STEADY = settings(deadline=None, derandomize=True)
PACK = {
    "zstd": lambda raw: zstandard.ZstdCompressor().compress(raw),
    "gzip": lambda raw: gzip.compress(raw),
    "identity": lambda raw: raw,
}
unsized_zstd = zstandard.ZstdCompressor(write_content_size=False)


@pytest.mark.parametrize("encoding", list(PACK))
@STEADY
@given(raw=st.binary(max_size=2000), slack=st.integers(-50, 50))
def test_inflates_exactly_up_to_the_limit(encoding: str, raw: bytes, slack: int) -> None:
    limit = max(0, len(raw) + slack)
    if len(raw) <= limit:
        assert inflate(PACK[encoding](raw), encoding, limit) == raw
    else:
        with pytest.raises(RequestError) as caught:
            inflate(PACK[encoding](raw), encoding, limit)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
@STEADY
@given(data=st.binary(max_size=200))
def test_noise_is_a_problem_or_a_stream(encoding: str, data: bytes) -> None:
    caught = None
    try:
        inflate(data, encoding, 1000)
    except RequestError as error:
        caught = error.code
    assert caught in (None, "bad_encoding", "body_too_large")


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
@STEADY
@given(raw=st.binary(min_size=1, max_size=500), cut=st.floats(0, 1, exclude_max=True))
def test_cut_streams_are_named(encoding: str, raw: bytes, cut: float) -> None:
    packed = PACK[encoding](raw)
    with pytest.raises(RequestError) as caught:
        inflate(packed[: int(cut * len(packed))], encoding, 1000)
    assert (caught.value.status, caught.value.code) == (400, "bad_encoding")


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_anything_after_the_stream_is_refused(encoding: str) -> None:
    packed = PACK[encoding](b"{}")
    for tail in (b"x", packed):
        with pytest.raises(RequestError, match="no whole"):
            inflate(packed + tail, encoding, 1000)


def test_zstd_without_a_content_size_is_read() -> None:
    packed = unsized_zstd.compress(b"abc" * 100)
    assert inflate(packed, "zstd", 300) == b"abc" * 100
    with pytest.raises(RequestError, match="no whole"):
        inflate(packed[:-2], "zstd", 300)


@pytest.mark.parametrize("kind", ["zstd", "unsized zstd", "gzip"])
def test_a_bomb_never_inflates_beyond_the_cap(kind: str) -> None:
    raw = bytes(256 * 2**20)
    pack = {
        "zstd": PACK["zstd"],
        "unsized zstd": unsized_zstd.compress,
        "gzip": lambda data: zlib.compress(data, 1, 31),
    }
    bomb = pack[kind](raw)
    del raw
    tracemalloc.start()
    with pytest.raises(RequestError, match="at most 1000000 bytes"):
        inflate(bomb, kind.split()[-1], 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


def test_a_frame_that_wants_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True, write_content_size=False)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = packed.compress(b"a" * 100) + packed.flush()
    with pytest.raises(RequestError) as caught:
        inflate(data, "zstd", 1000)
    assert caught.value.code == "bad_encoding"


@pytest.mark.parametrize(
    ("header", "encoding"),
    [(None, "identity"), ("", "identity"), ("ZSTD", "zstd"), (" gzip ", "gzip"), ("identity", "identity")],
)
def test_known_encodings(header: str | None, encoding: str) -> None:
    assert require_encoding(header) == encoding


@pytest.mark.parametrize("header", ["br", "deflate", "gzip, zstd", "x" * 500])
def test_unknown_encodings(header: str) -> None:
    with pytest.raises(RequestError) as caught:
        require_encoding(header)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_encoding")
    assert caught.value.headers == {"Accept-Encoding": "zstd, gzip, identity"}


def read(chunks: list[bytes], declared: str | None, limit: int) -> tuple[bytes | RequestError, int]:
    taken = 0

    async def stream() -> AsyncIterator[bytes]:
        nonlocal taken
        for chunk in chunks:
            taken += 1
            yield chunk

    async def run() -> bytes | RequestError:
        try:
            return await read_body(stream(), declared, limit)
        except RequestError as error:
            return error

    return anyio.run(run), taken


def test_a_body_is_read_up_to_its_limit() -> None:
    assert read([b"ab", b"cd"], None, 4) == (b"abcd", 2)
    assert read([], "0", 4) == (b"", 0)


def test_a_body_without_a_length_stops_at_the_limit() -> None:
    error, taken = read([b"abc"] * 100, None, 4)
    assert isinstance(error, RequestError)
    assert (error.status, taken) == (413, 2)


def test_a_declared_length_is_refused_unread() -> None:
    error, taken = read([b"abc"], "5", 4)
    assert isinstance(error, RequestError)
    assert (error.code, error.found, taken) == ("body_too_large", "5 bytes", 0)


@pytest.mark.parametrize("encoding", list(PACK))
def test_small_is_what_is_known_to_be(encoding: str) -> None:
    sized = encoding != "gzip"
    assert is_small(PACK[encoding](b"x" * SMALL_BYTES), encoding) is sized
    # However little is sent, the frame says what becomes of it.
    assert not is_small(PACK[encoding](b"x" * (SMALL_BYTES + 1)), encoding)
    assert not is_small(b"x" * (SMALL_BYTES + 1), encoding)
    assert not is_small(unsized_zstd.compress(b"x"), "zstd")
    assert is_small(b"no frame", "zstd")
