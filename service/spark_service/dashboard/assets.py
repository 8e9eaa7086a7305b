"""What pages load: our own scripts and styles, and the vendored libraries where the set-up could fetch them.

Every file's address holds its hash, so browsers keep it for good; pages name the hash again for browsers to check.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response

from spark_service.dashboard.paths import STATIC

__all__ = ["OURS", "VENDORED", "Asset", "Assets"]

OURS = Path(__file__).with_name("static")
VENDORED = Path(__file__).with_name("vendor")
"""Filled by the set-up and in built wheels; not part of the repository."""
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, ready to be sent."""

    name: str
    url: str
    integrity: str
    """For the ``integrity`` attribute: ``sha384-`` and the hash in base64."""
    media_type: str
    body: bytes
    body_gzip: bytes

    @classmethod
    def of(cls, name: str, body: bytes) -> Asset:
        """Raises ``KeyError`` for a kind of file that pages do not load."""
        digest = hashlib.sha384(body).digest()
        return cls(
            name=name,
            url=f"{STATIC}/{digest.hex()[:16]}/{name}",
            integrity=f"sha384-{base64.b64encode(digest).decode()}",
            media_type=_MEDIA_TYPES[Path(name).suffix],
            body=body,
            # Without the time, so that the same bytes come of the same file.
            body_gzip=gzip.compress(body, mtime=0),
        )

    def response(self, *, accepts_gzip: bool) -> Response:
        """The file, good for a year: another content has another address."""
        headers = {"Cache-Control": _FOR_GOOD, "Vary": "Accept-Encoding"}
        if accepts_gzip:
            headers["Content-Encoding"] = "gzip"
        return Response(self.body_gzip if accepts_gzip else self.body, 200, headers, self.media_type)


class Assets:
    """All of them, read once."""

    def __init__(self, folders: Iterable[Path] = (OURS, VENDORED)) -> None:
        """Read what is in the folders; one that does not exist is empty."""
        files = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
        made = [Asset.of(path.name, path.read_bytes()) for path in files if path.suffix in _MEDIA_TYPES]
        self._by_name = {asset.name: asset for asset in made}
        self._by_url = {asset.url: asset for asset in made}

    def get(self, name: str) -> Asset | None:
        """The file of a name; ``None`` for a library that was not fetched."""
        return self._by_name.get(name)

    def at(self, url: str) -> Asset | None:
        """The file at an address."""
        return self._by_url.get(url)
