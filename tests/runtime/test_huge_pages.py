"""Which memory is asked about, and that the system hears of it."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime import huge_pages, llama
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.huge_pages import HugePages, anonymous_ranges, gather_small_memory, without
from spark_runtime.models import demo_model_path

MAPS = """\
555555554000-555555556000 r-xp 00002000 fd:00 1234     /usr/bin/thing
555555560000-555555580000 rw-p 00000000 00:00 0        [heap]
7fff00000000-7fff10000000 rw-p 00000000 00:00 0
7fff10000000-7fff20000000 ---p 00000000 00:00 0
7fff20000000-7fff30000000 rw-s 00000000 00:00 0
7fff30000000-7fff40000000 rw-p 00000000 fd:00 77       /opt/a model.gguf
7fff50000000-7fff60000000 rw-p 00000000 00:00 0        [anon: a name]
7fff70000000-7fff80000000 rwxp 00000000 00:00 0
7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0        [stack]
"""
NEW_BYTES = 32 * 2**20


def test_only_anonymous_private_writable_memory_counts() -> None:
    assert anonymous_ranges(MAPS.splitlines()) == [
        (0x7FFF00000000, 0x7FFF10000000),
        (0x7FFF70000000, 0x7FFF80000000),
    ]
    assert anonymous_ranges(MAPS.splitlines(), heap=True)[0] == (0x555555560000, 0x555555580000)


def ranges() -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ascending, without overlaps; some touch."""
    edges = st.lists(st.integers(0, 40), unique=True, max_size=12).map(sorted)
    apart = edges.map(lambda found: list(zip(found[::2], found[1::2], strict=False)))
    touching = edges.map(lambda found: list(itertools.pairwise(found)))
    return st.one_of(apart, touching)


@given(ranges(), ranges())
def test_what_is_left_is_what_only_one_has(mine: list[tuple[int, int]], taken: list[tuple[int, int]]) -> None:
    def addresses(found: list[tuple[int, int]]) -> list[int]:
        return [address for start, end in found for address in range(start, end)]

    left = without(mine, taken)
    assert addresses(left) == sorted(set(addresses(mine)) - set(addresses(taken)))
    assert all(start < end for start, end in left)


@contextmanager
def new_memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, NEW_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        yield memory


def flagged_bytes() -> int:
    """Memory of this process that huge pages were asked for (``hg``; see proc_pid_smaps(5))."""
    size = total = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:") and "hg" in line.split():
            total += size
    return total


needs_huge_pages = pytest.mark.skipif(
    not huge_pages._page_bytes(), reason="no transparent huge pages here, or whoever runs the system wants none"
)


@needs_huge_pages
def test_what_is_new_is_asked_for_once() -> None:
    pages = HugePages()
    before = flagged_bytes()
    with new_memory():
        # At its ends it may be part of a page that begins or ends elsewhere.
        assert pages.ask() >= NEW_BYTES - 2 * huge_pages._page_bytes()
        assert flagged_bytes() - before >= NEW_BYTES - 2 * huge_pages._page_bytes()
        assert pages.ask() == 0


def test_what_was_there_before_is_left_alone() -> None:
    with new_memory():
        assert HugePages().ask() == 0


@needs_huge_pages
def test_what_is_moved_says_what_it_did() -> None:
    page = huge_pages._page_bytes()
    with new_memory() as memory:
        for at in range(0, NEW_BYTES, mmap.PAGESIZE):
            memory[at : at + 8] = at.to_bytes(8)
        moved = gather_small_memory()
        assert all(memory[at : at + 8] == at.to_bytes(8) for at in range(0, NEW_BYTES, mmap.PAGESIZE))
    # A kernel before 6.1 moves nothing, another one at least that.
    assert moved == 0 or moved >= NEW_BYTES - 2 * page
    assert moved % page == 0


def test_a_system_without_them_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "none")
    pages = HugePages()
    with new_memory():
        assert pages.ask() == 0
        assert gather_small_memory() == 0


def test_where_nobody_wants_them_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "_ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(huge_pages, "_PAGE_BYTES", tmp_path / "hpage_pmd_size")
    huge_pages._page_bytes.cache_clear()
    try:
        pages = HugePages()
        with new_memory():
            assert pages.ask() == 0
            assert gather_small_memory() == 0
    finally:
        huge_pages._page_bytes.cache_clear()


@pytest.mark.parametrize("mapped", [True, False])
def test_loading_asks_before_and_after_the_context(monkeypatch: pytest.MonkeyPatch, *, mapped: bool) -> None:
    asked: list[str] = []

    class Noting(HugePages):
        def ask(self) -> int:
            asked.append("asked")
            return super().ask()

    monkeypatch.setattr(llama, "HugePages", Noting)
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, mapped=mapped)) as engine:
        engine.prompt([1, 2, 3])
    assert asked == ["asked", "asked"]
