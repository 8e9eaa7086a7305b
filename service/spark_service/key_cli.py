"""``spark-service key``: the key that signs manifests. Works on the data folder, whether the service runs or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_service.settings import Settings

if TYPE_CHECKING:
    from spark_schemas.signature import SigningKeyInfo
    from spark_service.signing import Signer

__all__ = ["key_app"]

key_app = typer.Typer(
    no_args_is_help=False, rich_markup_mode=None, help="The key that signs manifests, kept in the data folder."
)

_DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Folder of the key [env: SPARKMOE_SERVICE_DATA_DIR; default: the user's data folder]."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@key_app.command("show")
def show_command(data_dir: _DataDir = None, as_json: _Json = False) -> None:
    """Print the public key and its id, for agents to compare or to pin with SPARKMOE_SIGNING_KEY."""
    _print(_signer(data_dir).info(), as_json=as_json)


@key_app.command("rotate")
def rotate_command(data_dir: _DataDir = None, as_json: _Json = False) -> None:
    """Replace the key by a new one that the old one vouches for: agents follow by themselves.

    Where the old key was stolen this is not enough, because a thief can vouch, too: tell everyone the new id.
    """
    _print(_signer(data_dir).rotate(), as_json=as_json)


def _signer(data_dir: Path | None) -> Signer:
    from spark_service.signing import Signer

    settings = Settings.resolve(data_dir=data_dir)
    settings.prepare_data_dir()
    return Signer(settings.data_dir)


def _print(info: SigningKeyInfo, *, as_json: bool) -> None:
    from spark_schemas.signature import key_id_of

    earlier = [key_id_of(rotation.old_key) for rotation in info.rotations]
    if as_json:
        typer.echo(json.dumps({"key_id": info.key_id, "key": info.key, "earlier_key_ids": earlier}))
        return
    typer.echo(f"key id  {info.key_id}\nkey     {info.key}")
    if earlier:
        typer.echo(f"after   {', '.join(earlier)}")
