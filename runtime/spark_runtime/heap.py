"""The C library's heaps: what was freed into them, and is still this process's.

Memory that is freed goes back to the system only from a heap's end, or where it was so large that it had a mapping of
its own. What is free between other things is kept, and as every request leaves it cut differently, the heaps grow long
after what is in use has stopped growing. And each thread takes a heap of its own, up to eight for each processor, in
which the room stays that its largest piece of work took.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["share_heaps", "trim_heaps"]

_M_ARENA_MAX = -8
_ARENAS = 1


def share_heaps() -> None:
    """Let all threads share one heap, before they are started; nothing where the C library cannot.

    They seldom wait for each other: each thread has a store of small pieces of its own, and most of what allocates
    holds the interpreter's lock anyway.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    mallopt(_M_ARENA_MAX, _ARENAS)


def trim_heaps() -> None:
    """Give whole free pages back to the system, from all heaps; nothing where the C library cannot (other than glibc).

    Takes half a millisecond where 15 of 95 MB are free; threads that allocate meanwhile wait.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
