"""``/spark/placement``: what the slots run by, and a pulled profile taken over without a restart."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spark_agent.errors import RefusedError, SparkError
from spark_agent.server.api_error import ApiError
from spark_agent.signatures import SignedBy
from spark_runtime.errors import ModelMismatchError, SparkRuntimeError
from spark_schemas.ids import WorkloadName

if TYPE_CHECKING:
    from starlette.requests import Request

    from spark_agent.server.placement_control import PlacementControl

__all__ = ["MAX_BODY_BYTES", "PlacementOrder", "placement_routes"]

MAX_BODY_BYTES = 64 * 2**20
"""A manifest is at most 32 MiB as it comes from a service, and is a string in this body."""


class PlacementOrder(BaseModel):
    """Body of ``POST /spark/placement``: signed bytes from a service, or a workload of this machine's own sessions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    content: Annotated[str, Field(min_length=1)] | None = None
    """The manifest's JSON exactly as it was signed."""
    signed: SignedBy | None = None
    local: WorkloadName | None = None


def placement_routes(control: PlacementControl) -> list[Route]:
    """The route, for ``create_app(extra_routes=...)``."""

    async def show(_request: Request) -> Response:
        return JSONResponse(control.describe())

    async def replace(request: Request) -> Response:
        order = _parsed(await _body(request))
        try:
            if order.local is not None:
                found = await run_in_threadpool(control.own_order, order.local)
            elif order.content is not None and order.signed is not None:
                found = await run_in_threadpool(control.signed_order, order.content.encode(), order.signed)
            else:
                raise ApiError(403, "an unsigned manifest is not taken over while serving", "unsigned")
            await asyncio.wrap_future(control.place(found))
        except RefusedError as error:
            raise ApiError(403, _sentence(error), "refused") from error
        except ModelMismatchError as error:
            raise ApiError(409, _sentence(error), "other_model") from error
        except (SparkError, SparkRuntimeError) as error:
            raise ApiError(409, _sentence(error), "not_placed") from error
        return JSONResponse(control.describe())

    return [
        Route("/spark/placement", show, methods=["GET"]),
        Route("/spark/placement", replace, methods=["POST"]),
    ]


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the placement is over {MAX_BODY_BYTES} bytes", "too_large")
    return bytes(body)


def _parsed(body: bytes) -> PlacementOrder:
    try:
        order = PlacementOrder.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise ApiError(400, f"{where}: {first['msg']}", "invalid_placement", param=where) from error
    if (order.content is None) == (order.local is None):
        raise ApiError(400, "expected either content with signed, or local", "invalid_placement")
    return order


def _sentence(error: SparkError | SparkRuntimeError) -> str:
    return f"{error}: {error.hint}" if error.hint else str(error)
