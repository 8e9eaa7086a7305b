"""Answers of services that may be used again: to ask only for what changed, and to go on while a service is away.

Only a copy of what a service has: a damaged file counts as none, and what cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from spark_agent.files import replacing

__all__ = ["AnswerCache", "KeptAnswer"]

MOST_ANSWERS = 200


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A body as it came."""

    content: bytes
    etag: str | None
    at: float
    """Seconds since the epoch when the service last said so."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    at: float
    etag: str | None
    content: str


class AnswerCache:
    """A folder of answers to GET, the ones least recently written leaving first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, url: str) -> KeptAnswer | None:
        """The kept answer of exactly this address."""
        try:
            found = _File.model_validate_json(self._path(url).read_bytes())
        except (OSError, ValidationError):
            return None
        return KeptAnswer(found.content.encode(), found.etag, found.at) if found.url == url else None

    def put(self, url: str, answer: KeptAnswer) -> None:
        """Keep an answer in place of the one before."""
        etag = answer.etag if answer.etag is not None and answer.etag.isascii() and answer.etag.isprintable() else None
        try:
            text = _File(url=url, at=answer.at, etag=etag, content=answer.content.decode()).model_dump_json()
            with replacing(self._path(url)) as file:
                file.write(text.encode())
            self._make_room()
        except (OSError, UnicodeDecodeError):
            return

    def _make_room(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MOST_ANSWERS]:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                path.unlink()

    def _path(self, url: str) -> Path:
        return self._folder / f"{hashlib.sha256(url.encode()).hexdigest()}.json"
