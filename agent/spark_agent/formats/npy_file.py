"""An array of numpy's ``.npy``, refused before anything is allocated where it is not what its header says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.formats.reading import FormatError, fail

__all__ = ["read_npy"]

_MOST_BYTES = 2**28


def read_npy(path: Path) -> NDArray[Any]:
    """The array; raise :class:`FormatError` for arrays of objects, untrue sizes, and what is no array."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            fail(path, f"{path.stat().st_size} bytes, expected at most {_MOST_BYTES}")
        # Mapped: a header that claims more than the file holds is refused before anything is allocated.
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}", "check the path") from error
    except (ValueError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise FormatError(f"{path.name}: no array of numbers: {error}") from error
    if not isinstance(values, np.ndarray):
        fail(path, "an archive of arrays, expected one array")
    return np.asarray(values)
