"""What is free inside the C library's heaps goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from spark_runtime import heap
from spark_runtime.heap import share_heaps, trim_heaps

_THREADS = """
import ctypes, sys, threading
from spark_runtime.heap import share_heaps

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
if sys.argv[1] == "shared":
    share_heaps()
found, together = set(), threading.Barrier(8)

def take():
    together.wait()
    # Heaps of threads begin at multiples of 64 MiB; the one of all may reach over such a boundary.
    found.add(libc.malloc(50_000) >> 26)
    together.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(len(found))
"""

_HOLES = """
import ctypes
from pathlib import Path
from spark_runtime.heap import trim_heaps

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
taken = []
for _ in range(400):
    taken.append(libc.malloc(100_000))
    ctypes.memset(taken[-1], 1, 100_000)
    libc.malloc(5000)  # what stays, and keeps the heap from shrinking
for address in taken:
    libc.free(address)
free = resident()
trim_heaps()
print(free - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_free_pages_between_what_is_in_use_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 30_000_000


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    heap._malloc_trim.cache_clear()
    try:
        trim_heaps()
    finally:
        heap._malloc_trim.cache_clear()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
@pytest.mark.parametrize(("how", "shared"), [("alone", False), ("shared", True)])
def test_threads_share_a_heap(how: str, shared: bool) -> None:
    done = subprocess.run([sys.executable, "-c", _THREADS, how], capture_output=True, text=True, check=True)
    assert (int(done.stdout) <= 2) == shared


def test_another_c_library_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    share_heaps()
