"""What the commands share: options, the database of a service that is down, output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_service import env
from spark_service.errors import DatabaseError, DatabaseLockedError
from spark_service.settings import Settings

if TYPE_CHECKING:
    from spark_service.db.store import Store

__all__ = ["CLI_ACTOR", "AsJson", "DataDir", "Service", "open_store", "table"]

CLI_ACTOR = "cli"

DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Folder of the database [env: SPARKMOE_SERVICE_DATA_DIR; default: the user's data folder]."
    ),
]
Service = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Ask this running service, with the admin token in SPARKMOE_SERVICE_TOKEN, not the file."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@contextmanager
def open_store(data_dir: Path | None, *, create: bool = False) -> Iterator[Store]:
    """Open the database of a service that is down.

    Raises :class:`DatabaseError` where there is none, unless it may be created, and :class:`DatabaseLockedError` with
    the way around where a running service holds it.
    """
    settings = Settings.resolve(data_dir=data_dir)
    if create:
        settings.prepare_data_dir()
    elif not settings.database.exists():
        raise DatabaseError(
            f"database {settings.database}: found none, expected one made by spark-service",
            "name its folder with --data-dir PATH",
        )

    from spark_service.db.store import Store

    try:
        store = Store.open(settings.database, memory=settings.db_memory, threads=settings.db_threads)
    except DatabaseLockedError as error:
        hint = f"give --service URL, with an admin token in {env.TOKEN.name}, to ask the service that runs, or stop it"
        raise DatabaseLockedError(error.message, hint) from error
    try:
        yield store
    finally:
        store.close()


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
