"""Names of workloads and of mixes, as a person types them."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from spark_agent.errors import UsageError
from spark_schemas.ids import WorkloadName
from spark_schemas.mix import Mix, MixError

__all__ = ["UNLABELLED", "check_profile_name", "check_workload_name"]

UNLABELLED = "unlabelled"
"""What sessions are counted under that nobody gave a workload."""

_NAME: TypeAdapter[str] = TypeAdapter(WorkloadName)


def check_workload_name(name: str, *, option: str = "--workload") -> str:
    """Return the name of a workload; raise :class:`UsageError` for one that no service would take."""
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        raise UsageError(
            f"{option}: found {name!r}, expected 1 to 63 lower-case letters, digits and hyphens", "e.g. code-heavy"
        ) from error


def check_profile_name(name: str, *, option: str = "NAME") -> str:
    """Return the canonical name of a workload or a mix; raise :class:`UsageError` for what is neither."""
    try:
        return str(Mix.parse(name))
    except MixError as error:
        raise UsageError(
            f"{option}: found {error.found}, expected {error.expected}", "e.g. code-heavy, or code-heavy:7+chat:3"
        ) from error
