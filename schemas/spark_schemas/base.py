"""The base of every schema: strict, closed, immutable."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Schema"]


class Schema(BaseModel):
    """A value that crosses a process boundary.

    Unknown fields, wrong types (no "3" for 3, no 1.0 for 1) and non-finite numbers are errors, and values never
    change after validation. Read untrusted JSON with ``model_validate_json``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
