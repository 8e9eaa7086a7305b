"""Writing generated files, or with ``--check`` only comparing them with what would be written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_or_check(files: Mapping[Path, str], present: Iterable[Path] = ()) -> int:
    """Write ``files`` and remove what else is ``present`` of their kind; return the exit status.

    With ``--check`` on the command line nothing is written, and the status is 1 if anything would change.
    """
    surplus = [path for path in present if path not in files]
    if "--check" in sys.argv[1:]:
        stale = surplus + [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
        for path in stale:
            sys.stderr.write(f"error: {path.name} is not up to date\nhint: make generate\n")
        return int(bool(stale))
    for path in surplus:
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0
