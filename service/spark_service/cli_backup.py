"""``spark-service backup``, ``restore`` and ``verify``. Heavy imports happen inside commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from spark_service import env
from spark_service.errors import VerificationError
from spark_service.settings import Settings

__all__ = ["add_backup_commands"]

_DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Folder of the database [env: SPARKMOE_SERVICE_DATA_DIR; default: the user's data folder]."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def add_backup_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("backup")(backup_command)
    app.command("restore")(restore_command)
    app.command("verify")(verify_command)


def backup_command(
    target: Annotated[Path, typer.Argument(help="File to write, a tar archive.")],
    service: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Let this running service make the backup, and fetch it [token: SPARKMOE_SERVICE_TOKEN].",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="With --service: leave the service its copy, too.")] = False,
    data_dir: _DataDir = None,
    as_json: _Json = False,
) -> None:
    """Write a backup that every row of was read back: database, segments and a manifest with their checksums."""
    target = target.absolute()
    if service is not None:
        if data_dir is not None:
            raise typer.BadParameter("--service and --data-dir name two sources, expected one")

        from spark_service.backup_client import fetch_backup

        made = fetch_backup(service, target, token=env.TOKEN.read(), force=force, keep=keep)
        tables = {name: table["rows"] for name, table in made["tables"].items()}
        size_bytes, sha256, schema_version = made["bytes"], made["sha256"], made["schema_version"]
    else:
        if keep:
            raise typer.BadParameter("--keep needs --service: nothing but TARGET is written without it")

        from spark_service.backup import backup_offline

        backup = backup_offline(Settings.resolve(data_dir=data_dir), target, force=force)
        tables = {name: table.rows for name, table in backup.manifest.tables.items()}
        size_bytes, sha256 = backup.file.bytes, backup.file.sha256
        schema_version = backup.manifest.schema_version
    done = {
        "path": str(target),
        "bytes": size_bytes,
        "sha256": sha256,
        "schema_version": schema_version,
        "rows": tables,
    }
    rows = ", ".join(f"{name} {count}" for name, count in tables.items())
    typer.echo(json.dumps(done) if as_json else f"{target}: {size_bytes} bytes, SHA-256 {sha256}\nrows: {rows}")


def restore_command(
    source: Annotated[Path, typer.Argument(help="Backup to put back.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the database that is there.")] = False,
    data_dir: _DataDir = None,
    as_json: _Json = False,
) -> None:
    """Put a backup in the place of the database; the service must not be running."""
    settings = Settings.resolve(data_dir=data_dir)

    from spark_service.backup import restore
    from spark_service.signing import KEY_NAME

    manifest = restore(settings, source.absolute(), force=force)
    served = manifest.tables.get("manifests")
    if served is not None and served.rows and not (settings.data_dir / KEY_NAME).exists():
        typer.echo(
            f"note: {settings.data_dir} has no {KEY_NAME}, and backups hold no keys: put the old one there before the "
            "service starts, or every agent must be told to trust a new one",
            err=True,
        )
    done: dict[str, Any] = {
        "data_dir": str(settings.data_dir),
        "schema_version": manifest.schema_version,
        "created_at": manifest.created_at,
        "rows": {name: table.rows for name, table in manifest.tables.items()},
        "segments": len(manifest.segments),
    }
    typer.echo(json.dumps(done) if as_json else f"restored the backup of {manifest.created_at} to {settings.data_dir}")


def verify_command(
    path: Annotated[
        Path | None, typer.Argument(help="Database, its folder, or a backup [default: the data folder].")
    ] = None,
    data_dir: _DataDir = None,
    as_json: _Json = False,
) -> None:
    """Read every row and recompute what is known of it; exit 1 if anything contradicts itself. Changes nothing."""
    if path is not None and data_dir is not None:
        raise typer.BadParameter("PATH and --data-dir name two databases, expected one")
    settings = Settings.resolve(data_dir=data_dir)
    chosen = settings.data_dir if path is None else path.absolute()

    from spark_service.verification import verify

    segments = settings.segments_dir if path is None else None
    report = verify(chosen, memory=settings.db_memory, threads=settings.db_threads, segments=segments)
    if not report.complete:
        typer.echo("note: counts of an older schema are checked once the service has been started on it", err=True)
    if as_json:
        checks = [
            {"name": check.name, "checked": check.checked, "faults": check.faults, "named": list(check.named)}
            for check in report.checks
        ]
        done: dict[str, Any] = {
            "path": str(chosen),
            "schema_version": report.schema_version,
            "complete": report.complete,
            "faults": report.faults,
            "checks": checks,
            "tables": {name: table.model_dump() for name, table in report.tables.items()},
        }
        typer.echo(json.dumps(done))
    else:
        for name, table in report.tables.items():
            typer.echo(f"{name:24} {table.rows:>12} rows  {table.sha256[:16]}")
        for check in report.checks:
            typer.echo(f"{check.name:24} {check.checked:>12} checked  {check.faults} faults")
    if report.faults:
        named = [fault for check in report.checks for fault in check.named]
        for fault in named[1:]:
            typer.echo(f"fault: {fault}", err=True)
        raise VerificationError(
            f"{report.faults} faults in {chosen}, the first: {named[0]}",
            "restore a backup that verifies; what is stored here cannot be true",
        )
