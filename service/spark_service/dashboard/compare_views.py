"""The page that compares profiles."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict

from spark_schemas.ids import Phase
from spark_service.dashboard.compare_page import ComparePage
from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.figures import Comparison, Period, canonical_name, period_label
from spark_service.dashboard.pages import add_page
from spark_service.dashboard.profile_page import ModelName
from spark_service.errors import RequestError
from spark_service.ingest import excerpt
from spark_service.windows import WINDOW_STEPS_DAYS

__all__ = ["CompareQuery", "CompareShown", "PeriodChoice", "add_compare"]


_PERIODS = (
    {"": Period()}
    | {str(days): Period(days) for days in WINDOW_STEPS_DAYS}
    | {f"before-{days}": Period(days, is_before=True) for days in WINDOW_STEPS_DAYS if days}
)
"""By what a form sends. A few steps, as for windows: any number of days would take single sessions apart."""
_KEYS = {period: key for key, period in _PERIODS.items()}


class CompareQuery(BaseModel):
    """What a form sends: texts, empty where nothing was chosen."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    phase: Phase = "decode"
    a: str = ""
    a_days: str = ""
    b: str = ""
    b_days: str = ""
    mix: str = ""


class PeriodChoice(BaseModel):
    """Which sessions can be chosen."""

    key: str
    """What the query says: so many of the last days, or ``before-`` and so many."""
    label: str


class CompareShown(BaseModel):
    """The page's content as of a moment, and what there is to choose from."""

    as_of: datetime | None
    is_current: bool
    models: tuple[ModelName, ...]
    model: ModelName | None
    phase: Phase
    workloads: tuple[str, ...]
    periods: tuple[PeriodChoice, ...]
    a: str
    a_days: str
    b: str
    b_days: str
    mix: str
    page: ComparePage | None


def add_compare(router: APIRouter, dashboard: Dashboard) -> None:
    """Add the page."""
    figures = dashboard.figures

    def view(query: Annotated[CompareQuery, Query()]) -> CompareShown:
        models = figures.models()
        shape = figures.model(query.model) if query.model else models[0] if models else None
        if shape is None:
            return _shown(query, (), None, (), None)
        workloads = figures.workloads(shape.fingerprint)
        asked = _asked(query, workloads)
        found = figures.comparison(shape.fingerprint, asked, query.phase)
        shown = _shown(query, tuple(map(ModelName.of, models)), ModelName.of(shape), tuple(workloads), asked)
        if found is None:
            return shown
        return shown.model_copy(update={"as_of": found.as_of, "is_current": found.is_current, "page": found.value})

    add_page(router, dashboard.renderer, "/compare", "compare.html", view)


def _asked(query: CompareQuery, workloads: list[str]) -> Comparison | None:
    if not workloads:
        return None
    a = canonical_name(query.a, "query.a") if query.a else workloads[0]
    b = canonical_name(query.b, "query.b") if query.b else next((one for one in workloads if one != a), a)
    a_period, b_period = _period(query.a_days, "query.a_days"), _period(query.b_days, "query.b_days")
    if not query.b and a == b and not query.b_days:
        b_period = _PERIODS["30"]  # a single workload: its latest sessions beside all of them
    mix = canonical_name(query.mix, "query.mix") if query.mix else None
    return Comparison(a, a_period, b, b_period, mix)


def _shown(
    query: CompareQuery,
    models: tuple[ModelName, ...],
    model: ModelName | None,
    workloads: tuple[str, ...],
    asked: Comparison | None,
) -> CompareShown:
    return CompareShown(
        as_of=None,
        is_current=False,
        models=models,
        model=model,
        phase=query.phase,
        workloads=workloads,
        periods=tuple(PeriodChoice(key=key, label=period_label(one)) for key, one in _PERIODS.items()),
        a="" if asked is None else asked.a,
        a_days="" if asked is None else _KEYS[asked.a_period],
        b="" if asked is None else asked.b,
        b_days="" if asked is None else _KEYS[asked.b_period],
        mix="" if asked is None or asked.mix is None else asked.mix,
        page=None,
    )


def _period(text: str, field: str) -> Period:
    """Which sessions a form chose. Raises :class:`RequestError` (422)."""
    found = _PERIODS.get(text)
    if found is None:
        known = ", ".join(filter(None, _PERIODS))
        raise RequestError(
            422,
            "invalid_parameter",
            f"{field}: found {excerpt(text)}, expected one of {known}, or nothing for what is served now",
            field=field,
            found=excerpt(text),
            expected=f"one of {known}, or nothing",
        )
    return found
