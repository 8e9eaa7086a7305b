"""What is made on this machine and kept: one folder a key, which is over everything that the result depends on."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from spark_runtime.errors import InstallationError

__all__ = ["PACKAGE", "cache_key", "complaints", "kept", "packaged"]

PACKAGE = Path(__file__).resolve().parent
_SHOWN_LINES = 12


def cache_key(parts: Iterable[str | bytes]) -> str:
    """32 hexadecimal digits over all parts and their order; no two lists of parts can pass for each other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return digest.hexdigest()[:32]


def kept(key: str, name: str, make: Callable[[Path], None]) -> Path:
    """The file of this key, made now by ``make(path)`` if it is not there; the folder of that path is temporary.

    Processes that start at once make it once. A file that is not what was made, by a killed process or a damaged
    disk, is made again: loading one can end the process. Raises :class:`InstallationError` where none can be written,
    and whatever ``make`` raises; nothing is left then.
    """
    folder = platformdirs.user_cache_path("spark", appauthor=False) / "native" / key
    path = folder / name
    try:
        if not _is_intact(path):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / "lock"):
                if not _is_intact(path):
                    _remove_leftovers(folder)
                    _make(path, make)
    except OSError as error:
        raise InstallationError(
            f"cannot build {name} in {folder}: {error.strerror}", "check the folder and its space"
        ) from error
    return path


def packaged(*suffixes: str) -> list[Path]:
    """The sources with these suffixes that come with the package, by name."""
    return sorted(path for path in PACKAGE.iterdir() if path.suffix in suffixes)


def complaints(output: str) -> str:
    """The first lines of what a compiler said."""
    return "\n".join(output.strip().splitlines()[:_SHOWN_LINES])


def _make(path: Path, make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        make(made)
        digest = _digest(made)
        made.replace(path)
        # After the file: a process killed in between leaves a digest that does not fit, and the file is made again.
        _digest_path(path).write_bytes(digest)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was making; who holds the lock is the only one that makes."""
    for left in folder.glob("tmp*"):
        shutil.rmtree(left)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_intact(path: Path) -> bool:
    try:
        return _digest_path(path).read_bytes() == _digest(path)
    except FileNotFoundError:
        return False


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()
