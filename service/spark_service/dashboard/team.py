"""The team's page: what is in use, whether it pays, what needs attention."""

from __future__ import annotations

import datetime as dt
import logging
from collections import defaultdict
from typing import get_args

from fastapi import APIRouter

from spark_schemas.ids import Phase
from spark_service.catalog import Catalog
from spark_service.dashboard.context import Dashboard
from spark_service.dashboard.pages import add_page
from spark_service.dashboard.team_views import (
    RECENT_DAYS,
    Activity,
    Judged,
    Judgement,
    Team,
    activity_of,
    judged_of,
    quiet_workloads,
)
from spark_service.db.activity import LiveSize, live_sizes, sessions_by_day, uploads_by_version
from spark_service.db.store import Store
from spark_service.errors import RequestError, StorageError

__all__ = ["add_team", "flush_agents", "read_activity", "read_judged", "team_of"]

log = logging.getLogger(__name__)

_EPOCH = dt.date(1970, 1, 1)


def add_team(router: APIRouter, dashboard: Dashboard) -> None:
    """Add the page."""

    def view() -> Team:
        return team_of(dashboard)

    add_page(router, dashboard.renderer, "/", "team.html", view, twins=("/index.json", "/.json"))


def team_of(dashboard: Dashboard) -> Team:
    """The page from what was made last. Counting takes a moment; building profiles may take long, so it is apart."""
    store, catalog = dashboard.store, dashboard.catalog
    activity = dashboard.refreshed.get("team activity", lambda: read_activity(store, catalog))
    judged = dashboard.refreshed.get("team judged", lambda: read_judged(store, catalog))
    found = judged.value if judged is not None else None
    if found is not None and activity is not None:
        quiet = quiet_workloads(activity.value, _today())
        found = found.model_copy(update={"attention": [*found.attention, *quiet]})
    moments = [made.as_of for made in (activity, judged) if made is not None]
    return Team(
        as_of=min(moments, default=None),
        is_current=all(made is not None and made.is_current for made in (activity, judged)),
        activity=None if activity is None else activity.value,
        judged=found,
    )


def read_activity(store: Store, catalog: Catalog) -> Activity:
    """Count what was received."""
    models = store.models()
    tokens: dict[tuple[str, str], dict[int, int]] = {}
    for shape in models:
        for phase in get_args(Phase):
            for workload, tally in catalog.tallies(shape, phase).items():
                days = tokens.setdefault((shape.fingerprint, workload), defaultdict(int))
                for of_side in tally.sides.values():
                    for day, one in of_side.items():
                        days[day] += one.votes.tokens
    flush_agents(store)
    with store.snapshot() as cursor:
        counts = sessions_by_day(cursor)
        agents = uploads_by_version(cursor, _recent())
        sizes = live_sizes(cursor, _recent())
    return activity_of(models, counts, tokens, agents, sizes, _today())


def read_judged(store: Store, catalog: Catalog) -> Judged:
    """Ask every workload's profile; what is not built yet is built now."""
    judgements = []
    for shape in store.models():
        for workload in store.workloads(shape.fingerprint):
            try:
                profile = catalog.profile(shape.fingerprint, workload, "decode")
            except RequestError as error:
                judgements.append(Judgement(shape, workload, None, error.message))
            else:
                judgements.append(Judgement(shape, workload, profile))
    sizes, recent = _recently(store)
    return judged_of(judgements, sizes, recent)


def _recently(store: Store) -> tuple[list[LiveSize], dict[tuple[str, str], int]]:
    first = _today() - RECENT_DAYS
    with store.snapshot() as cursor:
        counts, sizes = sessions_by_day(cursor), live_sizes(cursor, _recent())
    recent: dict[tuple[str, str], int] = defaultdict(int)
    for one in counts:
        if one.day > first:
            recent[one.fingerprint, one.workload] += one.calibration + one.held_out
    return sizes, recent


def flush_agents(store: Store) -> None:
    """Let what is shown include the uploads of this minute, if the database takes them."""
    try:
        store.flush_agents()
    except StorageError as error:
        # A full disk is no reason to show nothing: versions of the last minute are missing then.
        log.warning("versions of agents: %s", error)


def _today() -> int:
    return (dt.datetime.now(dt.UTC).date() - _EPOCH).days


def _recent() -> dt.date:
    return dt.datetime.now(dt.UTC).date() - dt.timedelta(days=RECENT_DAYS - 1)
