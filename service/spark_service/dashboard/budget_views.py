"""The page that explores memory budgets."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from spark_schemas.ids import MAX_COUNT
from spark_schemas.model import ModelShape
from spark_service.dashboard.budget_page import (
    DEFAULT_CONTEXT,
    BudgetPage,
    Question,
    budget_range,
    default_vram,
)
from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.figures import canonical_name, missing_text
from spark_service.dashboard.gpu_classes import GPU_CLASSES
from spark_service.dashboard.pages import add_page
from spark_service.dashboard.profile_page import ModelName
from spark_service.errors import RequestError
from spark_service.ingest import excerpt

__all__ = ["BudgetQuery", "BudgetShown", "GpuChoice", "add_budget"]

DEFAULT_GPU = "rtx-4090"
_CONTEXTS = tuple(2**power for power in range(11, 21))
_HOST = re.compile(r"[A-Za-z0-9.\-]{1,253}(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::[0-9]{1,5})?")
"""A host that can stand in a command without being quoted."""


class BudgetQuery(BaseModel):
    """What a form sends: texts, empty where nothing was chosen."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    of: str = ""
    """The model that the form was made for, whose workload and slider it sends."""
    workload: str = ""
    gpu: str = DEFAULT_GPU
    vram_bytes: int | None = Field(None, ge=0, le=MAX_COUNT)
    n_ctx: int | None = Field(None, ge=1, le=MAX_COUNT)
    reserve_bytes: int = Field(0, ge=0, le=MAX_COUNT)


class GpuChoice(BaseModel):
    """A class of cards that can be chosen."""

    key: str
    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    link: str
    basis: str


class BudgetShown(BaseModel):
    """The page's content as of a moment, and what there is to choose from."""

    as_of: datetime | None
    is_current: bool
    models: tuple[ModelName, ...]
    model: ModelName | None
    workloads: tuple[str, ...]
    workload: str
    gpus: tuple[GpuChoice, ...]
    gpu: str
    contexts: tuple[int, ...]
    n_ctx: int
    reserve_bytes: int
    least_bytes: int
    """Ends and step of the slider; every position is a multiple of the step."""
    most_bytes: int
    step_bytes: int
    vram_bytes: int
    missing: str | None
    """Why there is no profile to plan with."""
    page: BudgetPage | None


def add_budget(router: APIRouter, dashboard: Dashboard) -> None:
    """Add the page."""
    figures = dashboard.figures

    def view(query: Annotated[BudgetQuery, Query()], request: Request) -> BudgetShown:
        if query.gpu not in GPU_CLASSES:
            known = ", ".join(GPU_CLASSES)
            raise RequestError(
                422,
                "invalid_parameter",
                f"query.gpu: found {excerpt(query.gpu)}, expected one of {known}",
                field="query.gpu",
                found=excerpt(query.gpu),
                expected=f"one of {known}",
            )
        models = figures.models()
        shape = figures.model(query.model) if query.model else models[0] if models else None
        workloads = figures.workloads(shape.fingerprint) if shape is not None else []
        if shape is None or not workloads:
            return _empty(query)
        if query.of and query.of != shape.fingerprint:
            query = query.model_copy(update={"workload": "", "vram_bytes": None, "n_ctx": None})
        name = canonical_name(query.workload, "query.workload") if query.workload else workloads[0]
        shown = _choices(query, shape, name, tuple(workloads), tuple(map(ModelName.of, models)))
        try:
            found = figures.profile(shape.fingerprint, name, "decode")
        except RequestError as error:
            return shown.model_copy(update={"missing": missing_text(error)})
        if found is None:
            return shown
        asked = Question(
            gpu=GPU_CLASSES[query.gpu],
            vram_bytes=shown.vram_bytes,
            n_ctx=shown.n_ctx,
            reserve_bytes=shown.reserve_bytes,
            service_url=_service_url(request),
        )
        page = figures.budget(found.value, asked)
        return shown.model_copy(update={"as_of": found.as_of, "is_current": found.is_current, "page": page})

    add_page(router, dashboard.renderer, "/budget", "budget.html", view)


def _choices(
    query: BudgetQuery, shape: ModelShape, name: str, workloads: tuple[str, ...], models: tuple[ModelName, ...]
) -> BudgetShown:
    n_ctx = min(shape.context_length, query.n_ctx or DEFAULT_CONTEXT)
    least, most, step = budget_range(shape, n_ctx, query.reserve_bytes)
    contexts = {one for one in _CONTEXTS if one < shape.context_length} | {shape.context_length, n_ctx}
    vram = default_vram(shape, n_ctx, query.reserve_bytes) if query.vram_bytes is None else query.vram_bytes
    return _empty(query).model_copy(
        update={
            "models": models,
            "model": ModelName.of(shape),
            "workloads": workloads,
            "workload": name,
            "contexts": tuple(sorted(contexts)),
            "n_ctx": n_ctx,
            "least_bytes": -(-least // step) * step,
            "most_bytes": -(-most // step) * step,
            "step_bytes": step,
            "vram_bytes": vram,
        }
    )


def _empty(query: BudgetQuery) -> BudgetShown:
    return BudgetShown(
        as_of=None,
        is_current=False,
        models=(),
        model=None,
        workloads=(),
        workload="",
        gpus=tuple(
            GpuChoice(
                key=card.key,
                name=card.name,
                memory_bytes=card.memory_bytes,
                memory_bytes_per_s=card.memory_bytes_per_s,
                link=card.link,
                basis=card.basis,
            )
            for card in GPU_CLASSES.values()
        ),
        gpu=query.gpu,
        contexts=(),
        n_ctx=DEFAULT_CONTEXT,
        reserve_bytes=query.reserve_bytes,
        least_bytes=0,
        most_bytes=0,
        step_bytes=1,
        vram_bytes=0,
        missing=None,
        page=None,
    )


def _service_url(request: Request) -> str | None:
    """The service's address as its reader reached it; ``None`` where that could not stand in a command."""
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host) or request.url.scheme not in ("http", "https"):
        return None
    return f"{request.url.scheme}://{host}"
