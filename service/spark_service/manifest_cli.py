"""``spark-service manifest``: what a running service has served, and rolling back to it."""

from __future__ import annotations

import http.client
import json
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

import typer

from spark_schemas.local_address import is_loopback
from spark_service import env
from spark_service.errors import RefusedError, ServiceCallError

__all__ = ["manifest_app"]

TIMEOUT_SECONDS = 60
MAX_ANSWER_BYTES = 32 * 2**20

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
    query = {"phase": phase, "vram_bytes": vram_bytes, "n_ctx": n_ctx, "reserve_bytes": reserve_bytes}
    path = f"/manifests/{quote(fingerprint, safe='')}/{quote(workload, safe='')}/history?{urlencode(query)}"
    found = _call(service, "GET", path)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for one in found["manifests"]:
        mark = "  pinned" if one["revision"] == found["pinned"] else ""
        typer.echo(f"{one['first_served_day']}  {one['revision']}  {one['body_bytes']} bytes{mark}")


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
    found = _call(service, "POST", _pin_path(fingerprint, workload, phase), {"revision": revision})
    typer.echo(json.dumps(found) if as_json else f"pinned {found['revision']} for {workload}, {phase}")


@manifest_app.command("unpin")
def unpin_command(
    fingerprint: _Fingerprint,
    workload: _Workload,
    phase: _Phase = "decode",
    service: _Service = _DEFAULT_SERVICE,
    as_json: _Json = False,
) -> None:
    """Have the newest served again."""
    found = _call(service, "DELETE", _pin_path(fingerprint, workload, phase))
    typer.echo(json.dumps(found) if as_json else f"the newest is served for {workload}, {phase}")


def _pin_path(fingerprint: str, workload: str, phase: str) -> str:
    path = f"/admin/manifests/{quote(fingerprint, safe='')}/{quote(workload, safe='')}/pin"
    return f"{path}?{urlencode({'phase': phase})}"


def _call(service: str, method: str, path: str, value: object = None) -> Any:
    """Call a running service and return what it answered, as JSON. Raises :class:`ServiceCallError`."""
    from spark_schemas.api import API_PREFIX, Problem

    connection = _connection(service)
    headers = {"Accept": "application/json"}
    token = env.TOKEN.read()
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    body = None
    if value is not None:
        headers["Content-Type"] = "application/json"
        body = json.dumps(value)
    base = urlsplit(service).path.rstrip("/")
    try:
        connection.request(method, f"{base}{API_PREFIX}{path}", body, headers)
        answer = connection.getresponse()
        content = answer.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ServiceCallError(
            f"no answer from {service}: {error or type(error).__name__}", "start it, or name it with --service URL"
        ) from error
    finally:
        connection.close()
    try:
        if answer.status >= 400:
            problem = Problem.model_validate_json(content)
            raise ServiceCallError(f"{service} answered {answer.status}: {problem.detail}", problem.hint)
        return json.loads(content)
    except ValueError as error:
        raise ServiceCallError(
            f"{service} answered {answer.status} with what is no JSON of a calibration service",
            "check that the address is a calibration service",
        ) from error


def _connection(service: str) -> http.client.HTTPConnection:
    try:
        address = urlsplit(service)
        host, port = address.hostname, address.port
    except ValueError as error:
        raise ServiceCallError(f"--service: found {service!r}, {error}", f"e.g. {_DEFAULT_SERVICE}") from error
    if host is None or address.scheme not in ("http", "https"):
        raise ServiceCallError(
            f"--service: found {service!r}, expected http://HOST[:PORT] or https://HOST[:PORT]",
            f"e.g. {_DEFAULT_SERVICE}",
        )
    if address.scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS)
    if env.TOKEN.read() is not None and not is_loopback(host):
        raise RefusedError(
            f"the token would travel unencrypted to {service}", f"use an https:// address, or unset {env.TOKEN.name}"
        )
    return http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
