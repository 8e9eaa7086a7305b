"""Huge pages for what llama.cpp allocates in host memory.

Weights that the CPU rearranges for its kernels, caches and intermediate results lie in ordinary memory. A token reads
all of the weights it needs once, so with pages of 4 KiB every 4 KiB cost a walk through page tables, whose entries are
not in a cache any more. Most systems give larger pages only to those who ask (``madvise`` in
``/sys/kernel/mm/transparent_hugepage/enabled``), and at once only to memory that nobody has touched yet.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = ["HugePages", "anonymous_ranges", "gather_small_memory", "without"]

Range = tuple[int, int]
"""From the first address to the one after the last."""
MIN_BYTES = 8 * 2**20
"""Smaller ones are other people's: each may grow by nearly a page."""
_LARGE_BYTES = 64 * 2**20
_MADV_COLLAPSE = 25
"""Not in Python's ``mmap``."""
_MAPS = Path("/proc/self/maps")
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE_BYTES = _ENABLED.with_name("hpage_pmd_size")


class HugePages:
    """Asks for huge pages in the memory that this process takes while an object of this class exists."""

    def __init__(self) -> None:
        self._known = _ranges()

    def ask(self) -> int:
        """Ask for what was taken since the last time; returns how many bytes that is. Never fails: it is advice."""
        advise, page = _madvise(), _page_bytes()
        if advise is None or not page:
            return 0
        now = _ranges()
        asked = 0
        for start, end in without(now, self._known):
            first, last = -(-start // page) * page, end // page * page
            if last - first >= MIN_BYTES:
                advise(first, last - first, mmap.MADV_HUGEPAGE)
                asked += last - first
        self._known = now
        return asked


def gather_small_memory() -> int:
    """Move what this process has by now into huge pages, mappings under 64 MiB; returns how many bytes that was.

    That is the interpreter's own memory: after some time in which a model was computed, every page of it that is needed
    costs as much again to find as to read. Takes a tenth of a second, and needs Linux 6.1.
    """
    advise, page = _madvise(), _page_bytes()
    gathered = 0
    if advise is not None and page:
        for start, end in anonymous_ranges(_lines(), heap=True):
            if end - start < _LARGE_BYTES:
                # One by one: the first that holds nothing would end the call.
                for at in range(-(-start // page) * page, end // page * page, page):
                    gathered += page if advise(at, page, _MADV_COLLAPSE) == 0 else 0
    return gathered


def anonymous_ranges(maps: Iterable[str], *, heap: bool = False) -> list[Range]:
    """Writable private memory that is no file's and has no name, by the lines of ``/proc/PID/maps``; ascending.

    With ``heap`` also what the C library's first heap is.
    """
    names = ([], ["[heap]"]) if heap else ([],)
    found = []
    for line in maps:
        address, access, _offset, _device, inode, *name = line.split(maxsplit=5)
        if access.startswith("rw") and access.endswith("p") and inode == "0" and name in names:
            start, _, end = address.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def without(ranges: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """What of ``ranges`` is in none of ``taken``; both ascending and each without overlaps."""
    left, at = [], 0
    for begin, end in ranges:
        start = begin
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        # The last one that is looked at may reach into the next range.
        for other_start, other_end in taken[at:]:
            if other_start >= end:
                break
            if other_start > start:
                left.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            left.append((start, end))
    return left


def _ranges() -> list[Range]:
    return anonymous_ranges(_lines())


def _lines() -> list[str]:
    try:
        return _MAPS.read_text().splitlines()
    except OSError:
        return []  # no Linux, or no /proc


@functools.cache
def _page_bytes() -> int:
    """0 where there are none, or where whoever runs the system wants none."""
    try:
        wanted = "[never]" not in _ENABLED.read_text()
        return int(_PAGE_BYTES.read_text()) if wanted else 0
    except (OSError, ValueError):
        return 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    advise.argtypes, advise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return advise
