"""The dashboard: all its routes, put together."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from spark_service.dashboard.budget_views import add_budget
from spark_service.dashboard.compare_views import add_compare
from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.login import login_router
from spark_service.dashboard.paths import STATIC
from spark_service.dashboard.privacy import add_privacy
from spark_service.dashboard.profile_views import add_profiles
from spark_service.dashboard.render import accepts_gzip
from spark_service.dashboard.team import add_team
from spark_service.errors import RequestError
from spark_service.rate_limit import Rates

__all__ = ["dashboard_router"]

_PAGES = (add_team, add_profiles, add_compare, add_budget, add_privacy)


def dashboard_router(dashboard: Dashboard, rates: Rates) -> APIRouter:
    """Make the routes. The gate decides who may ask; the login decides for itself."""
    router = APIRouter(include_in_schema=False)
    router.include_router(login_router(dashboard, rates.failures))
    _add_static(router, dashboard)
    for add in _PAGES:
        add(router, dashboard)
    return router


def _add_static(router: APIRouter, dashboard: Dashboard) -> None:
    @router.get(f"{STATIC}/{{digest}}/{{name}}")
    async def static(digest: str, name: str, request: Request) -> Response:
        asset = dashboard.assets.at(f"{STATIC}/{digest}/{name}")
        if asset is None:
            raise RequestError(404, "not_found", "path: found no such file, expected one that a page names")
        return asset.response(accepts_gzip=accepts_gzip(request))
