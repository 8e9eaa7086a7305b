from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_agent.formats.hints import Hints
from spark_agent.formats.profile import ImportedProfile
from spark_agent.formats.registry import import_file

sys.path.append(str(Path(__file__).resolve().parent))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], Path]:
    """A file of bytes, text or JSON."""

    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def read() -> Callable[..., ImportedProfile]:
    def read(name: str, path: Path, **hints: Any) -> ImportedProfile:
        return import_file(name, path, "chat", Hints(**hints))

    return read
