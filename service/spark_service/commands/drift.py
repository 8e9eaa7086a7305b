"""``spark-service drift``: which workloads' traffic has moved, and counting all of it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spark_service.commands.common import CLI_ACTOR, AsJson, DataDir, Service, open_store, table
from spark_service.errors import UsageError

if TYPE_CHECKING:
    from spark_schemas.drift import RateInterval, WorkloadDrift

__all__ = ["drift_app"]

drift_app = typer.Typer(help="Whether traffic is still what profiles were made from.", rich_markup_mode=None)


@drift_app.command("list")
def drift_list_command(data_dir: DataDir = None, service: Service = None, as_json: AsJson = False) -> None:
    """Print what recent sessions missed against what their manifests promised, as of the service's last look."""
    if service is not None:
        from spark_service.admin_client import AdminClient

        with AdminClient(service) as client:
            found = client.drift()
    else:
        from spark_service.drift_watch import all_drift

        with open_store(data_dir) as store:
            found = all_drift(store)
    if as_json:
        typer.echo(found.model_dump_json())
    elif found.workloads:
        heading = ("fingerprint", "workload", "state", "since", "sessions", "promised", "measured")
        typer.echo(table([heading, *map(_row, found.workloads)]))
    else:
        typer.echo("no session with a manifest of its workload yet", err=True)


@drift_app.command("clear")
def drift_clear_command(
    fingerprint: Annotated[str, typer.Argument(metavar="FINGERPRINT", help="Of the model, mf1-…")],
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="E.g. code-heavy.")],
    data_dir: DataDir = None,
    service: Service = None,
    as_json: AsJson = False,
) -> None:
    """Build a workload's profiles from all its sessions again, whenever they came."""
    from pydantic import TypeAdapter, ValidationError

    from spark_schemas.ids import Fingerprint, WorkloadName
    from spark_service.drift_routes import Cleared

    for name, text, kind in (("FINGERPRINT", fingerprint, Fingerprint), ("WORKLOAD", workload, WorkloadName)):
        try:
            TypeAdapter(kind).validate_python(text)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise UsageError(f"{name}: found {text[:80]!r}, expected: {message}") from None
    if service is not None:
        from spark_service.admin_client import AdminClient

        with AdminClient(service) as client:
            answer = client.delete(f"/drift/{fingerprint}/{workload}", Cleared)
    else:
        from spark_service.drift_watch import clear_drift

        with open_store(data_dir) as store:
            answer = Cleared(cleared=clear_drift(store, fingerprint, workload, CLI_ACTOR))
    done = f"profiles of {workload} count all sessions" if answer.cleared else f"nothing was known of {workload}"
    typer.echo(answer.model_dump_json() if as_json else done)


def _row(one: WorkloadDrift) -> tuple[str, ...]:
    since = "" if one.since is None else one.since + (", rebuilt" if one.rebuilt else "")
    rates = (_rate(one.promised), _rate(one.measured))
    return (one.fingerprint, one.workload, one.state, since, str(one.n_sessions), *rates)


def _rate(rate: RateInterval | None) -> str:
    return "-" if rate is None else f"{rate.cold_hit_rate:.1%} ({rate.low:.1%} to {rate.high:.1%})"
