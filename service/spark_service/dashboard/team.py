"""The team's page: what is in use, whether it pays, what needs attention."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.pages import add_page
from spark_service.db.store import Store

__all__ = ["ModelInUse", "Team", "add_team", "team_of"]


class ModelInUse(BaseModel):
    """A model with sessions."""

    fingerprint: str
    name: str | None
    workloads: list[str]


class Team(BaseModel):
    """What the page shows."""

    models: list[ModelInUse]


def team_of(store: Store) -> Team:
    """Read it."""
    return Team(
        models=[
            ModelInUse(fingerprint=shape.fingerprint, name=shape.name, workloads=store.workloads(shape.fingerprint))
            for shape in store.models()
        ]
    )


def add_team(router: APIRouter, dashboard: Dashboard) -> None:
    """Add the page."""

    def view() -> Team:
        return team_of(dashboard.store)

    add_page(router, dashboard.renderer, "/", "team.html", view, twins=("/index.json", "/.json"))
