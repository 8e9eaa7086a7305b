"""Names of workloads, as a person types them."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from spark_agent.errors import UsageError
from spark_schemas.ids import WorkloadName

__all__ = ["check_workload_name"]

_NAME: TypeAdapter[str] = TypeAdapter(WorkloadName)


def check_workload_name(name: str, *, option: str = "--workload") -> str:
    """Return the name of a workload; raise :class:`UsageError` for one that no service would take."""
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        raise UsageError(
            f"{option}: found {name!r}, expected 1 to 63 lower-case letters, digits and hyphens", "e.g. code-heavy"
        ) from error
