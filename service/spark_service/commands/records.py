"""``spark-service audit``, ``retention`` and ``session``: what is kept, what was done with it, and its removal."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from spark_service import env
from spark_service.commands.common import CLI_ACTOR, AsJson, DataDir, Service, open_store
from spark_service.errors import UsageError

if TYPE_CHECKING:
    from spark_service.retention import RetentionReceipt

__all__ = ["retention_app", "session_app"]

retention_app = typer.Typer(help="Remove what was received too long ago.", rich_markup_mode=None)
session_app = typer.Typer(help="Remove a session.", rich_markup_mode=None)

MAX_ENTRIES = 1000
RETENTION_SECONDS = 3600.0
"""What a service may take: it removes a day at a time, in between uploads."""


def audit_command(
    after: Annotated[int, typer.Option(min=0, metavar="N", help="Only entries numbered above this one.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ENTRIES, metavar="N", help="Most entries to print.")] = 100,
    data_dir: DataDir = None,
    service: Service = None,
    as_json: AsJson = False,
) -> None:
    """Print who changed what, and when, oldest first."""
    from spark_service.db.audit import AuditPage, entries_after

    if service is not None:
        from spark_service.admin_client import AdminClient

        with AdminClient(service) as client:
            page = client.get(f"/audit?after={after}&limit={limit}", AuditPage)
    else:
        with open_store(data_dir) as store, store.reading() as cursor:
            page = entries_after(cursor, after, limit)
    if as_json:
        typer.echo(page.model_dump_json())
        return
    for entry in page.entries:
        detail = " ".join(f"{key}={json.dumps(value)}" for key, value in entry.detail.items())
        moment = f"{entry.recorded_at:%Y-%m-%dT%H:%M:%SZ}"
        typer.echo(f"{entry.entry}  {moment}  {entry.actor}  {entry.action}  {entry.object}  {detail}".rstrip())
    if page.next_after is not None:
        typer.echo(f"more: --after {page.next_after}", err=True)


@retention_app.command("run")
def retention_run_command(
    days: Annotated[
        int | None,
        typer.Option(
            min=1, max=36_500, metavar="DAYS", help="Keep this many days [env: SPARKMOE_SERVICE_RETENTION_DAYS]."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    data_dir: DataDir = None,
    service: Service = None,
    as_json: AsJson = False,
) -> None:
    """Remove for good what was received too long ago; a running service does this once a day."""
    from spark_service.retention import RetentionReceipt, RetentionRequest, apply_retention, overdue

    if service is not None:
        from spark_service.admin_client import AdminClient

        with AdminClient(service) as client:
            wanted = RetentionRequest(retention_days=days, dry_run=dry_run)
            receipt = client.post("/retention", wanted, RetentionReceipt, timeout_seconds=RETENTION_SECONDS)
        _tell_retention(receipt, as_json=as_json)
        return
    retention_days = days if days is not None else env.RETENTION_DAYS.read()
    if not retention_days:
        raise UsageError(
            f"retention: found no number of days, expected --days DAYS or {env.RETENTION_DAYS.name}",
            "everything is kept until one of them is set",
        )
    today = datetime.now(UTC).date()
    with open_store(data_dir) as store:
        if dry_run:
            removed = overdue(store, retention_days, today)
        else:
            removed = apply_retention(store, retention_days, today, CLI_ACTOR)
    _tell_retention(RetentionReceipt.of(retention_days, removed, dry_run=dry_run), as_json=as_json)


def _tell_retention(receipt: RetentionReceipt, *, as_json: bool) -> None:
    done = "would remove" if receipt.dry_run else "removed"
    text = f"{done}: {receipt.parts} parts of {len(receipt.parts_by_day)} days"
    typer.echo(receipt.model_dump_json() if as_json else text)


@session_app.command("delete")
def session_delete_command(
    session_hash: Annotated[str, typer.Argument(metavar="HASH", help="The session's hash, 64 hex digits.")],
    data_dir: DataDir = None,
    service: Service = None,
    as_json: AsJson = False,
) -> None:
    """Remove a session from every later profile, for good: sent again, it is ignored."""
    if len(session_hash) != 64 or not set(session_hash) <= set("0123456789abcdef"):
        raise UsageError(f"HASH: found {session_hash[:80]!r}, expected 64 hex digits, lower case")
    if service is not None:
        from spark_service.admin_client import AdminClient

        with AdminClient(service) as client:
            removed = client.delete_session(session_hash)
    else:
        with open_store(data_dir) as store:
            removed = store.delete_session(session_hash, CLI_ACTOR)
    told = {"session_hash": session_hash, "removed": removed}
    typer.echo(json.dumps(told) if as_json else f"removed {removed} parts of session {session_hash}")
