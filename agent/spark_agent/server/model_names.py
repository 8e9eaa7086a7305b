"""Which model names are answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from spark_agent.server.api_error import ApiError

__all__ = ["ModelNames"]


class ModelNames:
    """The served model's name and its aliases, which may be shell patterns as ``claude-*``."""

    def __init__(self, name: str, aliases: Sequence[str] = (), *, n_ctx: int) -> None:
        self._name = name
        self._n_ctx = n_ctx
        self._aliases = tuple(aliases)
        self._started = int(time.time())

    def checked(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, else the model's own; raise :class:`ApiError` for another's."""
        if not asked:
            return self._name
        if asked == self._name or any(fnmatchcase(asked, alias) for alias in self._aliases):
            return asked
        also = f" (also as {', '.join(self._aliases)})" if self._aliases else ""
        message = f"no model {asked[:200]!r}: this agent serves {self._name}{also}"
        raise ApiError(404, message, "model_not_found", param="model")

    def entry(self, name: str | None = None) -> dict[str, Any]:
        """The model, in the words of both dialects; its context, in tokens, by each name that clients look for."""
        name = name or self._name
        started = datetime.fromtimestamp(self._started, UTC).isoformat().replace("+00:00", "Z")
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "spark",
            "type": "model",
            "display_name": name,
            "created_at": started,
            "lifecycle": "active",
            "max_input_tokens": self._n_ctx - 1,
            "max_tokens": self._n_ctx - 1,
            "context_length": self._n_ctx,
            "max_model_len": self._n_ctx,
            "meta": {"n_ctx": self._n_ctx},
        }

    def listed(self) -> dict[str, Any]:
        """All that can be named; patterns cannot."""
        names = [self._name, *(alias for alias in self._aliases if not set(alias) & set("*?["))]
        data = [self.entry(name) for name in names]
        return {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}
