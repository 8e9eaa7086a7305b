"""A page and its ``.json`` twin: one function says what they show, a template how it looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from spark_service.dashboard.render import Renderer

__all__ = ["add_page"]


def add_page(
    router: APIRouter,
    renderer: Renderer,
    path: str,
    template: str,
    view: Callable[..., BaseModel],
    *,
    twins: tuple[str, ...] | None = None,
) -> None:
    """Add a page at ``path`` and its twin at ``path.json`` (or ``twins``).

    ``view`` is a dependency of FastAPI: its parameters are taken from the path and the query, and what it returns is
    the twin's JSON and the template's ``view``. It runs in a thread, so it may read the store, but nothing that takes
    longer than a page may (see :mod:`~spark_service.dashboard.refreshed`). It raises :class:`RequestError`, which
    browsers see as a page and programs as problem details.
    """
    shown = Annotated[BaseModel, Depends(view)]

    def as_json(request: Request, view: shown) -> Response:
        return renderer.twin(request, view)

    def as_page(request: Request, view: shown) -> Response:
        return renderer.page(request, template, view)

    # Annotations were made here and not in the module, where FastAPI would look their text up.
    as_json.__annotations__ |= {"request": Request, "view": shown, "return": Response}
    as_page.__annotations__ |= {"request": Request, "view": shown, "return": Response}
    # The twin first: a last segment that is a parameter would take its name with the ending.
    for twin in (f"{path}.json",) if twins is None else twins:
        router.add_api_route(twin, as_json, methods=["GET"], include_in_schema=False, response_model=None)
    router.add_api_route(path, as_page, methods=["GET"], include_in_schema=False, response_model=None)
