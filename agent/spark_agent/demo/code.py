"""Source files on this machine: Python's standard library, and this project's other languages."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from spark_agent.demo.tree import source_tree

__all__ = ["code_files"]

_PACKAGES = ("spark_agent", "spark_runtime", "spark_service")
_LANGUAGES = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".js", ".mjs", ".sql"})
# Not written here, or written by a machine.
_NOT_OURS = frozenset({"build", "node_modules", "third_party", "vendor"})
_OWN_MIN_BYTES = 1_500
_OWN_MAX = 12

_STDLIB_MIN_BYTES = 4_000
_PER_FAMILY = 3
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_GENERATED = re.compile(rb"\b(?:auto-?generated|generated (?:by|from|automatically)|do not edit)\b", re.IGNORECASE)
_DATA_LINE = re.compile(rb"\s*(?:[\"'\d\[\](){},#]|b['\"])")


def code_files() -> list[Path]:
    """Return this project's own files, then the standard library's, one of each module family before the second."""
    return [*_own_files(), *_stdlib_files(Path(sysconfig.get_path("stdlib")))]


def _own_files() -> list[Path]:
    roots: list[Path] = []
    for name in _PACKAGES:
        # The location only: importing the service is not the agent's business.
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            roots.extend(Path(location) for location in spec.submodule_search_locations)
    tree = source_tree()
    if tree is not None:
        roots.extend(tree / folder for folder in ("agent", "runtime", "service", "infra"))
    files = {path.resolve(): None for root in roots for path in _files(root, _LANGUAGES, _NOT_OURS)}
    large = [path for path in files if not path.stem.endswith(".min") and path.stat().st_size >= _OWN_MIN_BYTES]
    return sorted(large, key=lambda path: _spread(path.name))[:_OWN_MAX]


def _stdlib_files(stdlib: Path) -> list[Path]:
    families: dict[str, list[Path]] = defaultdict(list)
    for path in _files(stdlib, frozenset({".py"}), _SKIPPED_FOLDERS):
        parts = path.relative_to(stdlib).parts
        if path.stat().st_size >= _STDLIB_MIN_BYTES and not _is_data(path):
            families[_family(parts[0])].append(path)
    ranked = (
        (rank, _spread(path.relative_to(stdlib).as_posix()), path)
        for files in families.values()
        for rank, path in enumerate(
            sorted(files, key=lambda file: _spread(file.relative_to(stdlib).as_posix()))[:_PER_FAMILY]
        )
    )
    return [path for _, _, path in sorted(ranked)]


def _family(first_part: str) -> str:
    """``_pydecimal.py`` and ``decimal.py`` are one family, so are a package's modules and ``sre_*``."""
    name = first_part.removesuffix(".py").lstrip("_")
    name = name.removeprefix("py") if first_part.startswith("_py") else name
    return name.split("_")[0] or first_part


def _spread(name: str) -> str:
    # Alphabetical order would take everything from a to c.
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def _is_data(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(32_000)
    lines = [line for line in head.splitlines() if line.strip()]
    data_lines = sum(1 for line in lines if _DATA_LINE.match(line))
    return _GENERATED.search(head[:1_000]) is not None or 2 * data_lines > len(lines)


def _files(root: Path, endings: Iterable[str], skipped: Iterable[str]) -> Iterator[Path]:
    if not root.is_dir():
        return
    for entry in sorted(root.iterdir(), key=lambda path: path.name):
        if entry.is_symlink() or entry.name.startswith("."):
            continue
        if entry.is_dir():
            if entry.name not in skipped:
                yield from _files(entry, endings, skipped)
        elif entry.suffix in endings and entry.is_file():
            yield entry
