"""``spark-service token``: make, list, end and renew tokens."""

from __future__ import annotations

from datetime import date, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from spark_service.commands.common import CLI_ACTOR, AsJson, DataDir, Service, open_store, table
from spark_service.errors import UsageError
from spark_service.tokens import (
    DEFAULT_EXPIRY_DAYS,
    MAX_EXPIRY_DAYS,
    MAX_GRACE_SECONDS,
    NewToken,
    TokenInfo,
    TokenList,
    TokenRequest,
    TokenRotation,
    grant_of,
)

if TYPE_CHECKING:
    from spark_service.admin_client import AdminClient

__all__ = ["app"]

app = typer.Typer(help="Who may use the service: make, list, revoke and rotate tokens.", rich_markup_mode=None)

_Id = Annotated[str, typer.Argument(metavar="ID", help="The token's id, the part after spark_.")]


@app.command("create")
def create_command(
    scope: Annotated[
        list[str],
        typer.Option(
            metavar="upload|read|admin",
            help="upload: send histograms; read: get profiles and manifests; admin: all. Give it twice for both.",
        ),
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="A label, such as the machine or the person.")] = "",
    expires: Annotated[
        str, typer.Option(metavar="DAYS|never", help=f"Days until it expires, at most {MAX_EXPIRY_DAYS}.")
    ] = str(DEFAULT_EXPIRY_DAYS),
    data_dir: DataDir = None,
    service: Service = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once; only a hash of its secret is kept."""
    days = _expiry(expires)
    grant = grant_of(scope)
    if grant is None:
        raise UsageError(
            f"--scope: found {' and '.join(scope)[:80]}, expected upload, read, upload and read, or admin alone"
        )
    try:
        request = TokenRequest(scope=grant, name=name, expires_days=None if days == "never" else days)
    except ValidationError as error:
        raise UsageError(
            f"--name: found {name[:80]!r}, expected at most 64 visible ASCII characters, no space at either end"
        ) from error
    if service is not None:
        with _client(service) as client:
            made = client.post("/tokens", request, NewToken)
    else:
        with open_store(data_dir, create=True) as store:
            from spark_service.keyring import Keyring

            made = NewToken.with_secret(*Keyring(store).create(request, CLI_ACTOR))
    _tell_secret(made, as_json)


@app.command("list")
def list_command(data_dir: DataDir = None, service: Service = None, as_json: AsJson = False) -> None:
    """List all tokens, those revoked or expired too; no secret can be shown."""
    if service is not None:
        with _client(service) as client:
            found = client.get("/tokens", TokenList)
    else:
        with open_store(data_dir) as store:
            from spark_service.keyring import Keyring

            found = TokenList(tokens=[TokenInfo.of(token) for token in Keyring(store).tokens()])
    if as_json:
        typer.echo(found.model_dump_json())
        return
    header = ("id", "scope", "created", "expires", "last used", "revoked", "name")
    rows = [
        (
            token.id,
            token.scope,
            _day(token.created_at, ""),
            _day(token.expires_at, "never"),
            _day(token.last_used_day, "never"),
            _day(token.revoked_at, "no"),
            token.name,
        )
        for token in found.tokens
    ]
    typer.echo(table([header, *rows]))


@app.command("revoke")
def revoke_command(token_id: _Id, data_dir: DataDir = None, service: Service = None, as_json: AsJson = False) -> None:
    """End a token at once and for good."""
    if service is not None:
        with _client(service) as client:
            token = client.delete(f"/tokens/{_segment(token_id)}", TokenInfo)
    else:
        with open_store(data_dir) as store:
            from spark_service.keyring import Keyring

            token = TokenInfo.of(Keyring(store).revoke(token_id, CLI_ACTOR))
    typer.echo(token.model_dump_json() if as_json else f"revoked {token.id}")


@app.command("rotate")
def rotate_command(
    token_id: _Id,
    grace: Annotated[
        int,
        typer.Option(metavar="SECONDS", min=0, max=MAX_GRACE_SECONDS, help="How long the old secret stays valid."),
    ] = 0,
    expires: Annotated[
        str | None, typer.Option(metavar="DAYS|never", help="Days from now until it expires [default: as before].")
    ] = None,
    data_dir: DataDir = None,
    service: Service = None,
    as_json: AsJson = False,
) -> None:
    """Give a token a new secret and print it, this once; the old one ends after the grace."""
    rotation = TokenRotation(grace_seconds=grace, expires_days="unchanged" if expires is None else _expiry(expires))
    if service is not None:
        with _client(service) as client:
            made = client.post(f"/tokens/{_segment(token_id)}/rotate", rotation, NewToken)
    else:
        with open_store(data_dir) as store:
            from spark_service.keyring import Keyring

            made = NewToken.with_secret(*Keyring(store).rotate(token_id, rotation, CLI_ACTOR))
    _tell_secret(made, as_json)


def _client(service: str) -> AdminClient:
    from spark_service.admin_client import AdminClient

    return AdminClient(service)


def _segment(token_id: str) -> str:
    from urllib.parse import quote

    return quote(token_id, safe="")


def _expiry(text: str) -> int | Literal["never"]:
    if text == "never":
        return "never"
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_EXPIRY_DAYS):
        raise UsageError(f"--expires: found {text[:80]!r}, expected never or days from 1 to {MAX_EXPIRY_DAYS}")
    return int(text)


def _tell_secret(made: NewToken, as_json: bool) -> None:
    typer.echo(made.model_dump_json() if as_json else made.token)
    until = "never expires" if made.expires_at is None else f"expires {made.expires_at:%Y-%m-%d}"
    typer.echo(f"token {made.id}, scope {made.scope}, {until}; it is shown this once", err=True)


def _day(moment: date | datetime | None, otherwise: str) -> str:
    return otherwise if moment is None else f"{moment:%Y-%m-%d}"
