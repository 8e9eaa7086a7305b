"""``spark-service``: run and maintain the calibration service. Heavy imports happen inside commands."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from spark_service import version
from spark_service.cli_backup import add_backup_commands
from spark_service.commands import drift, records, tokens
from spark_service.errors import SparkServiceError
from spark_service.key_cli import key_app
from spark_service.manifest_cli import manifest_app
from spark_service.settings import Settings

__all__ = ["app", "main"]

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130

app = typer.Typer(
    help="Collect routing histograms, build profiles, serve placement manifests.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

add_backup_commands(app)
app.add_typer(key_app, name="key")
app.add_typer(manifest_app, name="manifest")

_DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Folder of the database [env: SPARKMOE_SERVICE_DATA_DIR; default: the user's data folder]."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spark-service {version()}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on [env: SPARKMOE_SERVICE_HOST; default: 127.0.0.1].")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", "-p", min=0, max=65535, help="Port, 0 for a free one [env: SPARKMOE_SERVICE_PORT; default: 8710]."
        ),
    ] = None,
    data_dir: _DataDir = None,
    open_access: Annotated[
        bool,
        typer.Option("--open", help="Ask for no token: all on this machine may do everything. Loopback only."),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Build profiles on this Ray cluster, or on one of this machine with auto; the results are the same "
            "[env: SPARKMOE_SERVICE_RAY].",
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = Settings.resolve(host=host, port=port, data_dir=data_dir, open_access=open_access, ray=ray)
    # Before the imports that take a second: refusals are immediate.
    settings.require_safe_address()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from spark_service.db.migrate import available
    from spark_service.server import serve

    def announce(base_url: str) -> None:
        started = {
            "base_url": base_url,
            "data_dir": str(settings.data_dir),
            "schema_version": len(available()),
            "version": version(),
        }
        typer.echo(
            json.dumps(started) if as_json else f"spark-service {version()} on {base_url}, data in {settings.data_dir}"
        )
        sys.stdout.flush()

    serve(settings, announce)


@app.command()
def migrate(
    data_dir: _DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be applied.")] = False,
    as_json: _Json = False,
) -> None:
    """Bring the database's schema up to date; the service must not be running."""
    settings = Settings.resolve(data_dir=data_dir)

    from spark_service.db.connection import Database
    from spark_service.db.migrate import available, pending
    from spark_service.db.migrate import migrate as apply

    if dry_run and not settings.database.exists():
        found = available()
    else:
        settings.prepare_data_dir()
        database = Database(settings.database, memory=settings.db_memory, threads=settings.db_threads)
        try:
            found = pending(database) if dry_run else apply(database)
        finally:
            database.close()
    names = [f"{migration.version:04d}_{migration.name}" for migration in found]
    if as_json:
        done = {"pending": names, "applied": []} if dry_run else {"pending": [], "applied": names}
        typer.echo(json.dumps({"data_dir": str(settings.data_dir), "schema_version": len(available()), **done}))
    elif names:
        typer.echo(f"{'would apply' if dry_run else 'applied'}: {', '.join(names)}")
    else:
        typer.echo(f"nothing to do: schema version {len(available())}")


app.add_typer(tokens.app, name="token")
app.add_typer(records.retention_app, name="retention")
app.add_typer(records.session_app, name="session")
app.add_typer(drift.drift_app, name="drift")
app.command("audit")(records.audit_command)


def main() -> None:
    """Run the command line and exit: 0 done, 1 an error to correct, 2 wrong usage, 3 refused for safety."""
    sys.exit(_main())


def _main() -> int:
    try:
        code = app(standalone_mode=False, prog_name="spark-service")
    except SparkServiceError as error:
        return _fail(error.message, error.hint, error.exit_code)
    except typer.TyperException as error:
        return _fail(error.format_message(), "spark-service --help lists commands and options", USAGE_EXIT_CODE)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED_EXIT_CODE
    return code if isinstance(code, int) else 0


def _fail(message: str, hint: str | None, code: int) -> int:
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)
    return code


if __name__ == "__main__":
    main()
