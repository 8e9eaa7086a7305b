"""What agents measured, and whether traffic has moved, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_agent.output import counted

if TYPE_CHECKING:
    from spark_schemas.drift import Drift
    from spark_schemas.profile import LiveComparison, LivePoint, Profile

__all__ = ["live_lines"]

_RAN = {"live_profile": "with this profile", "live_unprofiled": "without a profile"}


def live_lines(profile: Profile) -> list[str]:
    """One line for each number; none where nothing was measured."""
    lines = [_point(point) for point in profile.live] + [_comparison(one) for one in profile.live_comparisons]
    return lines if profile.drift is None else [*lines, *_drift(profile.drift)]


def _point(point: LivePoint) -> str:
    return (
        f"measured live at {point.residency:.0%} resident, {_RAN[point.policy]}: {point.cold_hit_rate:.3f} "
        f"({point.low:.3f}-{point.high:.3f}) on {counted(point.n_sessions, 'held-out session')}"
    )


def _comparison(one: LiveComparison) -> str:
    if one.high < 0:
        found = "lower with this profile"
    elif one.low > 0:
        found = "lower without it"
    else:
        found = "no telling which is lower"
    return (
        f"measured live at {one.residency:.0%} resident: {found}, {100 * one.difference:+.1f} points "
        f"({100 * one.low:+.1f} to {100 * one.high:+.1f}), though on other sessions"
    )


def _drift(drift: Drift) -> list[str]:
    lines = []
    if drift.promised is not None and drift.measured is not None:
        lines.append(
            f"manifests promised {drift.promised.cold_hit_rate:.1%} if never adapted ({drift.promised.low:.1%} to "
            f"{drift.promised.high:.1%}); on the last {counted(drift.n_sessions, 'session')} it was "
            f"{drift.measured.cold_hit_rate:.1%} ({drift.measured.low:.1%} to {drift.measured.high:.1%})"
        )
    if drift.state == "moved":
        built = "the profile is rebuilt from what came since" if drift.rebuilt else "too few sessions since to rebuild"
        lines.append(f"traffic has moved since {drift.since}: {built}")
    return lines
