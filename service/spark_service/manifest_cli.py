"""``spark-service manifest``: what a running service has served, and rolling back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spark_service import env

if TYPE_CHECKING:
    from spark_service.admin_client import AdminClient

__all__ = ["manifest_app"]

manifest_app = typer.Typer(
    no_args_is_help=False, rich_markup_mode=None, help="Manifests that a running service has served; roll back to one."
)

_Fingerprint = Annotated[str, typer.Argument(metavar="FINGERPRINT", help="Of the model, mf1-…")]
_Workload = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="E.g. code-heavy, or a mix such as code-heavy:7+chat:3.")
]
_Service = Annotated[str, typer.Option("--service", help="Address of the service.")]
_Phase = Annotated[str, typer.Option("--phase", help="prefill or decode.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
_DEFAULT_SERVICE = f"http://{env.HOST.default}:{env.PORT.default}"


@manifest_app.command("history")
def history_command(
    fingerprint: _Fingerprint,
    workload: _Workload,
    vram_bytes: Annotated[int, typer.Option(min=1, help="The budget that was asked for, bytes.")],
    n_ctx: Annotated[int, typer.Option(min=1, help="The context that was asked for, tokens.")],
    reserve_bytes: Annotated[int, typer.Option(min=0, help="The reserve that was asked for, bytes.")] = 0,
    phase: _Phase = "decode",
    service: _Service = _DEFAULT_SERVICE,
    as_json: _Json = False,
) -> None:
    """List the manifests that were served for a budget, the latest first."""
    query: dict[str, str | int] = {
        "phase": phase,
        "vram_bytes": vram_bytes,
        "n_ctx": n_ctx,
        "reserve_bytes": reserve_bytes,
    }
    with _client(service) as client:
        found = client.manifest_history(fingerprint, workload, query)
    if as_json:
        typer.echo(found.model_dump_json())
        return
    for one in found.manifests:
        mark = "  pinned" if one.revision == found.pinned else ""
        typer.echo(f"{one.first_served_day}  {one.revision}  {one.body_bytes} bytes{mark}")


@manifest_app.command("pin")
def pin_command(
    fingerprint: _Fingerprint,
    workload: _Workload,
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="Of the profile, 64 hex digits.")],
    phase: _Phase = "decode",
    service: _Service = _DEFAULT_SERVICE,
    as_json: _Json = False,
) -> None:
    """Have a profile revision served, whatever is newer, until it is unpinned."""
    with _client(service) as client:
        found = client.pin_manifest(fingerprint, workload, phase, revision)
    typer.echo(found.model_dump_json() if as_json else f"pinned {found.revision} for {workload}, {phase}")


@manifest_app.command("unpin")
def unpin_command(
    fingerprint: _Fingerprint,
    workload: _Workload,
    phase: _Phase = "decode",
    service: _Service = _DEFAULT_SERVICE,
    as_json: _Json = False,
) -> None:
    """Have the newest served again."""
    with _client(service) as client:
        found = client.unpin_manifest(fingerprint, workload, phase)
    typer.echo(found.model_dump_json() if as_json else f"the newest is served for {workload}, {phase}")


def _client(service: str) -> AdminClient:
    from spark_service.admin_client import AdminClient

    return AdminClient(service, token_needed=False)
