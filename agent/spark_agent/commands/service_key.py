"""``spark service-key``: which key of a calibration service this machine believes."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_agent.context import AgentContext
from spark_agent.errors import RefusedError, UsageError
from spark_agent.paths import service_keys_dir
from spark_agent.service_keys import KeyRing, PinnedKey
from spark_agent.signatures import keys_leading_to
from spark_schemas.signature import key_id_of

__all__ = ["service_key_app"]

service_key_app = typer.Typer(
    no_args_is_help=True,
    help="Keys that sign a service's manifests. The first one seen is pinned, and another one later is refused.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Service = Annotated[str | None, typer.Option("--service", help="Address of the calibration service.")]


@service_key_app.command("show")
def show_command(service: Service = None, json: Json = False) -> None:
    """Show the pinned keys of all services, or with --service also the key which that one shows now."""
    context = AgentContext.create(json_mode=json)
    ring = KeyRing(service_keys_dir())
    offered = None
    if service is not None:
        with context.client(service) as client:
            url, offered = client.base_url, client.signing_key()
        pins = [pin for pin in (ring.get(url),) if pin is not None]
    else:
        pins = ring.all()
    value: dict[str, object] = {
        "pinned": [
            {
                "service": pin.service_url,
                "key_id": pin.key_id,
                "key": pin.key,
                "earlier_key_ids": [key_id_of(key) for key in pin.earlier],
            }
            for pin in pins
        ],
        "offered": None if offered is None else {"key_id": key_id_of(offered.key), "key": offered.key},
        "given": context.environment.signing_key,
    }
    rows = [["pinned", pin.service_url, pin.key_id, pin.key] for pin in pins]
    if offered is not None:
        rows.append(["offered", url, key_id_of(offered.key), offered.key])
    context.output.result(value, lambda: context.output.table(["", "service", "key id", "key"], rows))
    if context.environment.signing_key is not None:
        context.output.info(
            f"SPARKMOE_SIGNING_KEY counts alone while it is set: {key_id_of(context.environment.signing_key)}"
        )
    elif not pins:
        context.output.info("no key is pinned: the first pull pins one")


@service_key_app.command("trust")
def trust_command(
    key_id: Annotated[
        str, typer.Argument(metavar="KEY_ID", help="Of the key, as `spark-service key show` prints it there.")
    ],
    service: Service = None,
    json: Json = False,
) -> None:
    """Pin the key that a service shows now, if it is the one named, in place of any other."""
    context = AgentContext.create(json_mode=json)
    wanted = key_id.lower()
    if len(wanted) != 32 or set(wanted) - set("0123456789abcdef"):
        raise UsageError(f"KEY_ID: found {key_id!r}, expected 32 hex digits", "as `spark-service key show` prints it")
    ring = KeyRing(service_keys_dir())
    with context.client(service) as client:
        url, offered = client.base_url, client.signing_key()
    shown = key_id_of(offered.key)
    if shown != wanted:
        raise RefusedError(
            f"{url} shows key {shown}, expected {wanted}",
            "compare with `spark-service key show` on the service's own machine; a key between is not to be trusted",
        )
    before = ring.get(url)
    way = None if before is None else keys_leading_to(before.key, offered)
    ring.put(PinnedKey(service_url=url, key=offered.key, earlier=(*before.earlier, *way) if before and way else ()))
    context.output.result(
        {"service": url, "key_id": shown, "replaced": before.key_id if before and before.key != offered.key else None},
        f"pinned {shown} for {url}",
    )


@service_key_app.command("forget")
def forget_command(service: Service = None, json: Json = False) -> None:
    """Trust no key of a service: the next pull pins the one that it finds."""
    context = AgentContext.create(json_mode=json)
    url = context.service_url(service)
    removed = KeyRing(service_keys_dir()).forget(url)
    context.output.result(
        {"service": url, "forgotten": removed},
        f"forgot the key of {url}" if removed else f"no key of {url} was pinned",
    )
