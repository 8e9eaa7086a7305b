"""No tracked file may name a place on somebody's machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# In pieces, so that this file passes its own test. The look-behind lets through longer paths and addresses in which
# these are only a part.
START = rb"(?<![\w.~}/-])/"
PRIVATE = re.compile(START + rb"(?:" + rb"work|root|home/\w+|Users/\w+" + rb")(?=/)")
TEMPORARY = re.compile(START + rb"tmp" + rb"/\w")


def leaks(path: Path, content: bytes) -> list[str]:
    """Return what looks like an absolute path of a machine; examples in documents may use the temporary folder."""
    found = PRIVATE.findall(content)
    if path.suffix != ".md":
        found += TEMPORARY.findall(content)
    return [match.decode() for match in found]


def test_tracked_files(root: Path, tracked: list[Path]) -> None:
    found = {str(path): leaks(path, (root / path).read_bytes()) for path in tracked}
    assert {path: matches for path, matches in found.items() if matches} == {}


@pytest.mark.parametrize("place", ["work/main/x", "root/.cache", "home/ada/x", "tmp/x"])
def test_a_planted_path_is_found(place: str) -> None:
    assert leaks(Path("x.py"), f'PLACE = "/{place}"'.encode())
    assert not leaks(Path("x.py"), f"see some.site/{place}, or ./{place}".encode())
