"""The base of every schema: strict, closed, immutable."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

__all__ = ["FirstOrSecondVersion", "FirstVersion", "Schema"]


def _require_integer(expected: str) -> BeforeValidator:
    # A literal alone takes whatever equals it, and both true and 1.0 equal 1.
    def require(value: Any) -> Any:
        if type(value) is not int:
            raise ValueError(f"Input should be the integer {expected}")
        return value

    return BeforeValidator(require)


FirstVersion = Annotated[Literal[1], _require_integer("1")]
"""The only version of a schema so far."""
FirstOrSecondVersion = Annotated[Literal[1, 2], _require_integer("1 or 2")]
"""Of a schema that has been added to."""


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
