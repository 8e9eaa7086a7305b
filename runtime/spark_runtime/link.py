"""What a copy from host memory takes on this machine: to the GPU through its driver, or within memory without one.

Nothing but the standard library: it measures before or after any model is loaded. A copy takes its launch and its
bytes over the rate, so two sizes tell both; each is the median of many copies.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from spark_runtime.errors import SparkRuntimeError

__all__ = ["Link", "LinkError", "measure_gpu_link", "measure_link", "measure_memory"]

SMALL_BYTES, LARGE_BYTES = 4096, 4 * 2**20
"""A copy that is all launch, and one of the size of an expert or two."""
_COPIES = 64
_SPREAD_BYTES = 128 * 2**20
"""Copies take turns over so much memory: no cache holds it."""
_PORTABLE_MAPPED = 3


class LinkError(SparkRuntimeError):
    """The GPU's driver refused a measurement."""


@dataclass(frozen=True, slots=True)
class Link:
    """Copies into what holds the slots."""

    device: str
    """``gpu``, or ``cpu`` where slots are host memory too."""
    bytes_per_s: float
    """Large copies from locked memory (on the CPU from any)."""
    latency_s: float
    """Of each copy, whatever its size."""
    pageable_bytes_per_s: float
    """Large copies from memory that is not locked."""

    def as_json(self) -> dict[str, float | str]:
        """Its figures."""
        return asdict(self)


def measure_link(*, on_gpu: bool) -> Link:
    """Measure the link that misses take; raises :class:`LinkError`. Takes a fraction of a second."""
    return measure_gpu_link() if on_gpu else measure_memory()


def measure_memory() -> Link:
    """What copies within host memory add to reading what was copied, one thread.

    A computation over the CPU reads its experts either way: from where they lie, or from the slot that they were just
    copied to, which is in a cache by then. So what a miss costs is the difference of the two.
    """
    source, target = (ctypes.create_string_buffer(_SPREAD_BYTES) for _ in range(2))
    from_address, to_address = ctypes.addressof(source), ctypes.addressof(target)
    for address in (from_address, to_address):
        ctypes.memset(address, 1, _SPREAD_BYTES)  # pages are there before the clock runs

    find = ctypes.CDLL(None).memchr
    find.argtypes, find.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p

    def read(offset: int, size: int) -> None:
        find(from_address + offset, 0, size)  # nowhere in it, so that all of it is read

    def copy_and_read(offset: int, size: int) -> None:
        ctypes.memmove(to_address + offset, from_address + offset, size)
        find(to_address + offset, 0, size)

    rate, latency = _rate_and_latency(copy_and_read, read)
    return Link("cpu", rate, latency, rate)


def measure_gpu_link(index: int = 0) -> Link:
    """Copies from host memory to a GPU, each waited for. Raises :class:`LinkError` without a driver or a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LinkError(f"no CUDA driver: {error}", "measure without a GPU, or install its driver") from error
    call = _checked(driver)
    with _context(call, index):
        target, locked = ctypes.c_uint64(), ctypes.c_void_p()
        call("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(_SPREAD_BYTES))
        try:
            call("cuMemHostAlloc", ctypes.byref(locked), ctypes.c_size_t(_SPREAD_BYTES), _PORTABLE_MAPPED)
            try:
                ctypes.memset(locked, 1, _SPREAD_BYTES)
                rate, latency = _rate_and_latency(_copy_to(call, target.value, locked.value or 0))
            finally:
                call("cuMemFreeHost", locked)
            pageable = ctypes.create_string_buffer(_SPREAD_BYTES)
            ctypes.memset(pageable, 1, _SPREAD_BYTES)
            slower, _ = _rate_and_latency(_copy_to(call, target.value, ctypes.addressof(pageable)))
        finally:
            call("cuMemFree_v2", target)
    return Link("gpu", rate, latency, slower)


def _copy_to(call: Callable[..., None], target: int, source: int) -> Callable[[int, int], None]:
    def copy(offset: int, size: int) -> None:
        # On the default stream, and back when the bytes are there.
        call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(target + offset), ctypes.c_void_p(source + offset), ctypes.c_size_t(size)
        )
        call("cuCtxSynchronize")

    return copy


def _checked(driver: ctypes.CDLL) -> Callable[..., None]:
    def call(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status:
            raise LinkError(f"{name} failed with {status}", "see nvidia-smi: another program may hold the GPU's memory")

    return call


@contextmanager
def _context(call: Callable[..., None], index: int) -> Iterator[None]:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)


def _rate_and_latency(
    copy: Callable[[int, int], None], without: Callable[[int, int], None] | None = None
) -> tuple[float, float]:
    """Bytes a second and seconds a copy, from the medians of small and large copies, less what is done without one."""
    small, large = (
        _median_s(copy, size) - (0.0 if without is None else _median_s(without, size))
        for size in (SMALL_BYTES, LARGE_BYTES)
    )
    per_byte = max((large - small) / (LARGE_BYTES - SMALL_BYTES), 1e-15)
    return 1 / per_byte, max(0.0, small - SMALL_BYTES * per_byte)


def _median_s(copy: Callable[[int, int], None], size: int) -> float:
    places = [number * LARGE_BYTES % _SPREAD_BYTES for number in range(_COPIES)]
    copy(places[0], size)
    times = []
    for place in places:
        start = time.perf_counter()
        copy(place, size)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
