"""What pages about profiles are made from: profiles that are built, and what follows from them, kept ready.

Everything that may take longer than a page may is made in the background, once for what is stored, and found again by
all requests until something is written. Nothing here is computed anew for a request whose answer is known.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from spark_runtime.placement import layer_sizes
from spark_schemas.ids import Phase
from spark_schemas.mix import Mix, MixError
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile
from spark_service.answers import ByteCache
from spark_service.catalog import Catalog
from spark_service.dashboard.budget_page import BudgetPage, Question, budget_page
from spark_service.dashboard.compare_page import ComparePage, Side, compare_page
from spark_service.dashboard.heat_map import HeatMap, heat_map
from spark_service.dashboard.mismatch import mismatch_matrix
from spark_service.dashboard.profile_list import ProfileList, ProfileRow, missing_row, profile_row
from spark_service.dashboard.profile_page import LiveSessions, ProfilePage, profile_page
from spark_service.dashboard.refreshed import Made, Refreshed
from spark_service.dashboard.shift import Shift, shift_since
from spark_service.dashboard.words import counted, day
from spark_service.db.choices import shapes_by_use, workloads_by_use
from spark_service.db.live import live_parts
from spark_service.db.store import Store
from spark_service.errors import RequestError
from spark_service.ingest import excerpt
from spark_service.live import sessions_measured

__all__ = ["Comparison", "Figures", "Period", "ProfileFigures", "canonical_name", "missing_text", "period_label"]

_NO_PROFILE = frozenset({"no_calibration_sessions", "too_few_sessions", "too_many_builds"})
BUDGETS_BYTES, BUDGET_BYTES = 8 * 2**20, 16 * 2**10
"""What answers about budgets may take together, and what one takes at most."""
SINCE_DAYS = 7
"""How far back "since last week" looks."""


@dataclass(frozen=True, slots=True)
class ProfileFigures:
    """A profile with its page and its picture."""

    profile: Profile
    shape: ModelShape
    page: ProfilePage
    heat: HeatMap


@dataclass(frozen=True, slots=True)
class Period:
    """Which sessions: those of the last ``days``, or all but those; without days as they are served now."""

    days: int | None = None
    is_before: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison is asked of: two workloads, each with a period, and perhaps a mix."""

    a: str
    a_period: Period
    b: str
    b_period: Period
    mix: str | None = None


def period_label(period: Period) -> str:
    """What a period is called."""
    if period.days is None:
        return "as served now"
    if period.is_before:
        return f"as it was {period.days} days ago"
    return "all sessions" if period.days == 0 else f"last {period.days} days"


def canonical_name(text: str, field: str) -> str:
    """A workload's or a mix's canonical spelling. Raises :class:`RequestError` (422)."""
    try:
        # A + that a form did not encode arrives as a blank.
        return str(Mix.parse(text.strip().replace(" ", "+")))
    except MixError as error:
        raise RequestError(
            422,
            "invalid_parameter",
            f"{field}: found {error.found}, expected {error.expected}",
            field=field,
            found=error.found,
            expected=error.expected,
            hint="e.g. code-heavy, or code-heavy:7+chat:3",
        ) from error


def missing_text(error: RequestError) -> str:
    """Why stored sessions give no profile, as a page says it in its place. Raises any other error again."""
    if error.code not in _NO_PROFILE:
        raise error
    message = error.message
    if error.code == "too_few_sessions" and error.found and error.expected:
        name, found, needed = message.partition(":")[0], int(error.found), int(error.expected.split()[-1])
        more = counted(needed - found, "more calibration session")
        message = f"{name}: {more} needed ({found} of {needed})"
    return f"{message}." + (f" {error.hint[0].upper()}{error.hint[1:]}." if error.hint else "")


class Figures:
    """May be asked from any thread; what it gives is as of the moment that comes with it."""

    def __init__(self, store: Store, catalog: Catalog, refreshed: Refreshed) -> None:
        self._store = store
        self._catalog = catalog
        self._refreshed = refreshed
        self._windows = catalog.windows
        self._min_sessions = catalog.min_sessions
        self._budgets: ByteCache[tuple[str, str, Question], BudgetPage] = ByteCache(BUDGETS_BYTES)

    def models(self) -> list[ModelShape]:
        """Models that have sessions, the busiest first."""
        with self._store.reading() as cursor:
            return shapes_by_use(cursor)

    def model(self, fingerprint: str) -> ModelShape:
        """A model that has sessions. Raises :class:`RequestError` (404)."""
        shape = self._store.model(fingerprint)
        if shape is None:
            raise RequestError(
                404,
                "unknown_model",
                f"model: found {excerpt(fingerprint)}, expected one with uploaded sessions",
                field="model",
                found=excerpt(fingerprint),
                hint="the list of profiles names every model and workload that there is",
            )
        return shape

    def workloads(self, fingerprint: str) -> list[str]:
        """Workloads of a model, the busiest first."""
        with self._store.reading() as cursor:
            return workloads_by_use(cursor, fingerprint)

    def require_workloads(self, fingerprint: str, name: str) -> None:
        """Raise :class:`RequestError` (404) unless sessions of every workload of a mix are stored."""
        known = self.workloads(fingerprint)
        for workload in Mix.parse(name).names:
            if workload not in known:
                told = ", ".join(sorted(known)) or "none yet"
                raise RequestError(
                    404,
                    "unknown_workload",
                    f"workload: found {workload}, expected one of this model's: {told}",
                    field="workload",
                    found=workload,
                    expected=told,
                    hint="the list of profiles names every model and workload that there is",
                )

    def profile(self, fingerprint: str, name: str, phase: Phase) -> Made[ProfileFigures] | None:
        """A profile in the service's own window, by its canonical name; ``None`` while it is being built.

        Raises :class:`RequestError` where there is none, as the catalog does.
        """
        shape = self.model(fingerprint)
        self.require_workloads(fingerprint, name)
        return self._refreshed.get(("profile", fingerprint, name, phase), lambda: self._profile(shape, name, phase))

    def budget(self, found: ProfileFigures, asked: Question) -> BudgetPage:
        """What a budget would give; a revision's answer to a question is found again."""
        key = (found.profile.fingerprint, found.profile.revision, asked)
        page = self._budgets.get(key)
        if page is None:
            page = budget_page(found.profile, found.shape, asked)
            self._budgets.put(key, page, BUDGET_BYTES)
        return page

    def profiles(self, phase: Phase) -> Made[ProfileList] | None:
        """Every workload of every model in a line; ``None`` while they are being built."""
        return self._refreshed.get(("profiles", phase), lambda: self._profiles(phase))

    def comparison(self, fingerprint: str, asked: Comparison | None, phase: Phase) -> Made[ComparePage] | None:
        """Two profiles side by side and all of the model; without ``asked`` all of the model alone.

        ``None`` while they are being built.
        """
        shape = self.model(fingerprint)
        if asked is not None:
            for name in (asked.a, asked.b, *([asked.mix] if asked.mix else [])):
                self.require_workloads(fingerprint, name)
        key: Hashable = ("comparison", fingerprint, asked, phase)
        return self._refreshed.get(key, lambda: self._comparison(shape, asked, phase))

    def _profile(self, shape: ModelShape, name: str, phase: Phase) -> ProfileFigures:
        profile = self._catalog.profile(shape.fingerprint, name, phase)
        shift, live = None, LiveSessions(0, 0)
        if len(Mix.parse(name).names) == 1:
            shift = self._shift(shape, name, phase)
            if phase == "decode":
                live = self._live(shape, name)
        return ProfileFigures(profile, shape, profile_page(profile, shape, shift, live), heat_map(profile, shape))

    def _shift(self, shape: ModelShape, workload: str, phase: Phase) -> Shift:
        tally = self._catalog.tally(shape.fingerprint, workload, phase)
        first_day = self._windows.today() - SINCE_DAYS + 1
        return shift_since(layer_sizes(shape), tally, self._windows.own(), first_day, min_sessions=self._min_sessions)

    def _live(self, shape: ModelShape, workload: str) -> LiveSessions:
        with self._store.reading() as cursor:
            parts = live_parts(cursor, shape.fingerprint, workload)
        found = sessions_measured(parts, workload, shape.expert_bytes_total)
        return LiveSessions(found["live_profile"], found["live_unprofiled"])

    def _profiles(self, phase: Phase) -> ProfileList:
        rows: list[ProfileRow] = []
        for shape in self.models():
            built = self._catalog.profiles(shape.fingerprint, phase)
            for workload in self.workloads(shape.fingerprint):
                if workload in built:
                    rows.append(profile_row(shape, built[workload]))
                else:
                    tally = self._catalog.tally(shape.fingerprint, workload, phase)
                    rows.append(missing_row(shape, workload, phase, tally, self._windows.own(), self._min_sessions))
        return ProfileList(phase=phase, rows=tuple(rows))

    def _comparison(self, shape: ModelShape, asked: Comparison | None, phase: Phase) -> ComparePage:
        matrix = mismatch_matrix(self._catalog.profiles(shape.fingerprint, phase))
        sides: tuple[Side, Side] | None = None
        missing: str | None = "This model has no workloads yet."
        mixed: Profile | str | None = None
        if asked is not None:
            try:
                sides = (
                    self._side(shape, asked.a, asked.a_period, phase),
                    self._side(shape, asked.b, asked.b_period, phase),
                )
                missing = None
            except RequestError as error:
                missing = missing_text(error)
        if asked is not None and asked.mix is not None:
            try:
                mixed = self._catalog.profile(shape.fingerprint, asked.mix, phase)
            except RequestError as error:
                mixed = missing_text(error)
        return compare_page(shape, phase, sides, missing, matrix, mixed)

    def _side(self, shape: ModelShape, name: str, period: Period, phase: Phase) -> Side:
        if period.days is None:
            return Side(self._catalog.profile(shape.fingerprint, name, phase))
        if period.is_before:
            until = self._windows.today() - period.days
            return Side(self._catalog.profile_as_of(shape.fingerprint, name, phase, until), f"as of {day(until)}")
        window = self._windows.chosen(period.days, None)
        profile = self._catalog.profile(shape.fingerprint, name, phase, window=window)
        return Side(profile, None if window is None else period_label(period))
