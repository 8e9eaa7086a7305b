"""The pages of profiles: the list of all, one in full, and one layer of it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict

from spark_schemas.ids import Fingerprint, Phase
from spark_service.conditional import etag_of, none_match
from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.figures import ProfileFigures, canonical_name, missing_text
from spark_service.dashboard.heat_map import LayerView, layer_view
from spark_service.dashboard.pages import add_page
from spark_service.dashboard.profile_list import ProfileList
from spark_service.dashboard.profile_page import ModelName, ProfilePage
from spark_service.dashboard.refreshed import Made
from spark_service.errors import RequestError

__all__ = ["LayerShown", "ProfileListShown", "ProfileShown", "add_profiles", "being_made"]

PROFILES = "/profiles"
_PROFILE = f"{PROFILES}/{{fingerprint}}/{{workload}}"
MAX_BLOCK = 2**16

_PathFingerprint = Annotated[Fingerprint, Path()]


class _PhaseQuery(BaseModel):
    """Unknown parameters are errors: a misspelt one would be ignored silently."""

    model_config = ConfigDict(extra="forbid")

    phase: Phase = "decode"


class _Shown(BaseModel):
    """A page's content as of a moment; without content while it is being made for the first time."""

    as_of: datetime | None
    is_current: bool


class ProfileListShown(_Shown):
    """The list."""

    page: ProfileList | None


class ProfileShown(_Shown):
    """One profile."""

    model: ModelName
    workload: str
    phase: Phase
    missing: str | None
    """Why there is no profile, and how much more it needs."""
    page: ProfilePage | None


class LayerShown(_Shown):
    """One layer of one profile."""

    workload: str
    phase: Phase
    page: LayerView | None


def add_profiles(router: APIRouter, dashboard: Dashboard) -> None:
    """Add the pages."""
    figures = dashboard.figures

    def made(fingerprint: str, workload: str, phase: Phase) -> tuple[str, Made[ProfileFigures] | None]:
        name = canonical_name(workload, "path.workload")
        return name, figures.profile(fingerprint, name, phase)

    def profiles(query: Annotated[_PhaseQuery, Query()]) -> ProfileListShown:
        found = figures.profiles(query.phase)
        if found is None:
            return ProfileListShown(as_of=None, is_current=False, page=None)
        return ProfileListShown(as_of=found.as_of, is_current=found.is_current, page=found.value)

    def profile(fingerprint: _PathFingerprint, workload: str, query: Annotated[_PhaseQuery, Query()]) -> ProfileShown:
        shown = ProfileShown(
            as_of=None,
            is_current=False,
            model=ModelName.of(figures.model(fingerprint)),
            workload=canonical_name(workload, "path.workload"),
            phase=query.phase,
            missing=None,
            page=None,
        )
        try:
            _, found = made(fingerprint, workload, query.phase)
        except RequestError as error:
            return shown.model_copy(update={"missing": missing_text(error)})
        if found is None:
            return shown
        return shown.model_copy(update={"as_of": found.as_of, "is_current": found.is_current, "page": found.value.page})

    def layer(
        fingerprint: _PathFingerprint,
        workload: str,
        block: Annotated[int, Path(ge=0, le=MAX_BLOCK)],
        query: Annotated[_PhaseQuery, Query()],
    ) -> LayerShown:
        name, found = made(fingerprint, workload, query.phase)
        if found is None:
            return LayerShown(as_of=None, is_current=False, workload=name, phase=query.phase, page=None)
        page = layer_view(found.value.profile, found.value.shape, block)
        if page is None:
            known = [str(one.block) for one in found.value.page.layers]
            raise RequestError(
                404,
                "unknown_layer",
                f"path.block: found {block}, expected a block with experts: {known[0]} to {known[-1]}",
                field="path.block",
                found=str(block),
                expected=", ".join(known),
            )
        return LayerShown(as_of=found.as_of, is_current=found.is_current, workload=name, phase=query.phase, page=page)

    # Before the pages of single profiles, whose twins end alike.
    _add_heat(router, dashboard)
    add_page(router, dashboard.renderer, PROFILES, "profiles.html", profiles)
    add_page(router, dashboard.renderer, f"{_PROFILE}/layers/{{block}}", "layer.html", layer)
    add_page(router, dashboard.renderer, _PROFILE, "profile.html", profile)


def _add_heat(router: APIRouter, dashboard: Dashboard) -> None:
    @router.get(f"{_PROFILE}/heat.json", include_in_schema=False)
    def heat(
        fingerprint: _PathFingerprint, workload: str, query: Annotated[_PhaseQuery, Query()], request: Request
    ) -> Response:
        """What the canvas draws."""
        name = canonical_name(workload, "path.workload")
        found = dashboard.figures.profile(fingerprint, name, query.phase)
        if found is None:
            raise being_made()
        response = dashboard.renderer.twin(request, found.value.heat)
        etag = etag_of(found.value.heat.revision.encode())
        if not none_match(request.headers.get("if-none-match"), etag):
            response = Response(None, 304)
        response.headers["ETag"] = etag
        return response


def being_made() -> RequestError:
    """What a program is told while something is made for the first time."""
    return RequestError(
        503,
        "being_made",
        "the profile is being built from what is stored",
        hint="ask again in a moment",
        headers={"Retry-After": "2"},
    )
