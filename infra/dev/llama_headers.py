"""The headers of the pinned llama.cpp, which its wheel leaves out and our declarations are tested against."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath

from setup_console import SetupError

#: Of llama.cpp's folder; each must be there.
HEADERS = ("ggml/include/*.h", "ggml/src/ggml-impl.h", "ggml/src/ggml-backend-impl.h", "include/llama.h")
#: Where they lie in a virtual environment.
PLACE = "share/llama.cpp-headers"
#: llama.cpp's folder in the archive, below the archive's own.
_VENDORED = ("vendor", "llama.cpp")


def are_whole(folder: Path) -> bool:
    """Tell whether a folder has all headers."""
    return all(any(folder.glob(pattern)) for pattern in HEADERS)


def extract_headers(archive: Path, folder: Path) -> None:
    """Write the headers of a source archive into a folder, laid out as in llama.cpp."""
    with tarfile.open(archive) as members:
        for member in members:
            place = _place(member.name)
            content = members.extractfile(member) if place and member.isfile() else None
            if place and content:
                target = folder / place
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
    if not are_whole(folder):
        raise SetupError(f"{archive.name} lacks headers of llama.cpp: wanted {', '.join(HEADERS)}")


def place_headers(headers: Path, venv: Path) -> None:
    """Put the headers into a virtual environment, in place of those that are there."""
    target = venv / PLACE
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(headers, target)


def _place(name: str) -> PurePosixPath | None:
    """Where a member of the archive goes, if it is a header that we want."""
    parts = PurePosixPath(name).parts
    if parts[1:3] != _VENDORED:
        return None
    place = PurePosixPath(*parts[3:])
    wanted = (PurePosixPath(pattern) for pattern in HEADERS)
    # Folder by folder: a pattern alone would also match deeper folders.
    return place if any(place.parent == header.parent and place.match(header.name) for header in wanted) else None
