"""Windows of time: the service's own, and those that a reader may choose in its place.

A reader chooses among a few steps. Profiles of two windows differ by the sessions in between, and of two half-lives by
how much each day counts: were any number allowed, a few questions would take the sessions of a single day apart. Steps
also let readers share what is built.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime

from spark_runtime.calibration.tally import Window
from spark_service.errors import RequestError
from spark_service.ingest import excerpt

__all__ = ["WINDOW_STEPS_DAYS", "Windows"]

WINDOW_STEPS_DAYS = (0, 7, 14, 30, 60, 90, 180, 365, 730)
"""What a reader may choose, both as a window and as a half-life, beside the service's own."""


def _today() -> int:
    return (datetime.now(UTC).date() - date(1970, 1, 1)).days


class Windows:
    """Windows as of whatever day they are asked for; where neither bound is set, all days are the same."""

    def __init__(self, days: int = 0, half_life_days: int = 0, *, today: Callable[[], int] = _today) -> None:
        """``days`` and ``half_life_days`` are the service's own bounds, 0 for none; ``today`` is in days since 1970."""
        self._days = days
        self._half_life_days = half_life_days
        self.today = today

    def own(self) -> Window:
        """The window of whoever asks for none."""
        return self._window(self._days, self._half_life_days)

    def chosen(self, days: int | None, half_life_days: float | None) -> Window | None:
        """The window that a reader asks for, with the service's own bound where one is left out.

        ``None`` where that is the service's own window, however it was said. Raises :class:`RequestError` (422) for
        a bound that is none of the steps.
        """
        bounds = (
            _step("window_days", days, self._days),
            _step("half_life_days", half_life_days, self._half_life_days),
        )
        return None if bounds == (self._days, self._half_life_days) else self._window(*bounds)

    def _window(self, days: int, half_life_days: int) -> Window:
        return Window(self.today(), days, half_life_days) if days or half_life_days else Window()


def _step(name: str, wanted: float | None, own: int) -> int:
    if wanted is None:
        return own
    for step in (own, *WINDOW_STEPS_DAYS):
        if wanted == step:
            return step
    steps, found = ", ".join(map(str, sorted({own, *WINDOW_STEPS_DAYS}))), excerpt(wanted)
    raise RequestError(
        422,
        "invalid_parameter",
        f"query.{name}: found {found}, expected one of {steps}",
        field=f"query.{name}",
        found=found,
        expected=f"one of {steps}",
        hint="0 takes all sessions" if name == "window_days" else "0 lets no session fade",
    )
