"""Files that appear whole or not at all, readable by their owner only unless they are meant to be passed on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["create_once", "replacing"]


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Give a new file that takes the place of ``path`` when the block ends; missing folders are made.

    Readers find the old file or the whole new one, also after a crash. A block that raises changes nothing. Raises
    :class:`OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def create_once(path: Path, content: bytes) -> None:
    """Create a file in an existing folder, or leave the one that another process was faster to create.

    Raises :class:`OSError`.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:  # mode 0600
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        # A link appears whole or not at all, and never replaces.
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
