"""The base of every schema: strict, closed, immutable."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

__all__ = ["FirstVersion", "Schema"]


def _require_integer(value: Any) -> Any:
    # A literal alone takes whatever equals it, and both true and 1.0 equal 1.
    if type(value) is not int:
        raise ValueError("Input should be the integer 1")
    return value


FirstVersion = Annotated[Literal[1], BeforeValidator(_require_integer)]
"""The only version of a schema so far."""


class Schema(BaseModel):
    """A value that crosses a process boundary.

    Unknown fields, wrong types (no "3" for 3, no 1.0 for 1) and non-finite numbers are errors, and values never
    change after validation. Read untrusted JSON with ``model_validate_json``.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # What stands under a field is its description in the exported schemas, too.
        use_attribute_docstrings=True,
    )
