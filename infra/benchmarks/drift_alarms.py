"""How often steady traffic is taken for moved, and how soon traffic that moves is found.

Usage: drift_alarms.py [--workloads N] [--out FILE]. Each workload has a promise from so many held-out sessions, then a
month of five sessions a day with a look every day. Cold-hit rates of sessions are beta distributed, mean 0.12, standard
deviation 0.04; in the middle of the month the mean grows by a share, or not at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from report import parser_of, report

from spark_runtime.placement import bootstrap_interval
from spark_service.drift import Evidence, State, reviewed

MEAN, SPREAD = 0.12, 0.04
DAYS, PER_DAY = 30, 5
CHANGE_DAY = DAYS // 2
JUDGES = (5, 8, 15, 40)
SHARES = (0.0, 0.25, 0.5, 1.0)


def rates(rng: np.random.Generator, mean: float, count: int) -> NDArray[np.float64]:
    """Cold-hit rates of sessions."""
    size = mean * (1 - mean) / SPREAD**2 - 1
    return rng.beta(mean * size, (1 - mean) * size, count)


def flagged(seed: int, judges: int, share: float) -> tuple[int, int | None] | None:
    """The day of the flag, and the day that the change is said to have begun on; ``None`` without a flag."""
    rng = np.random.default_rng(seed)
    promise = bootstrap_interval(rates(rng, MEAN, judges).tolist())
    rows: list[tuple[int, float, float, float, float, int]] = []
    state = State()
    for day in range(DAYS):
        mean = MEAN * (1 + share) if day >= CHANGE_DAY else MEAN
        rows += [(day, rate, promise.mean, promise.low, promise.high, judges) for rate in rates(rng, mean, PER_DAY)]
        state = reviewed(state, Evidence.of(rows), newest_sequence=0)
        if state.state == "moved":
            return day, state.since_day
    return None


def row(judges: int, share: float, workloads: int) -> dict[str, object]:
    """Flags of some workloads, and days from the change to the flag."""
    found = [one for seed in range(workloads) if (one := flagged(seed, judges, share)) is not None]
    late = [one for one in found if one[0] >= CHANGE_DAY and share]
    return {
        "held_out_sessions": judges,
        "growth": share,
        "flagged": len(found),
        "median_days_to_flag": float(np.median([day - CHANGE_DAY for day, _ in late])) if late else None,
        "median_error_of_the_day": float(np.median([abs((since or 0) - CHANGE_DAY) for _, since in late]))
        if late
        else None,
    }


def main() -> None:
    """Simulate and print (or write) the numbers."""
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", type=int, default=100)
    options = parser.parse_args()
    rows = [row(judges, share, options.workloads) for judges in JUDGES for share in SHARES]
    report({"workloads": options.workloads, "days": DAYS, "sessions_a_day": PER_DAY, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
