"""Whether experts are fetched early, by a guess of what the next layer selects: as asked for, or where it pays.

It is on where it was seen to pay on this machine; where nothing says so yet, a trial on what is decoded anyway tells.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from spark_agent.context_choice import Choice
from spark_agent.sizes import format_size

if TYPE_CHECKING:
    from spark_agent.measured import Measured
    from spark_agent.prefetch_trials import Conditions, KeptTrial
    from spark_runtime.early_fetch import EarlyFetch, LinkBudget

__all__ = [
    "GAIN_TO_START",
    "HOST_FETCHES",
    "PREFETCH_HELP",
    "Paying",
    "Prefetch",
    "PrefetchPlan",
    "Use",
    "describe_budget",
    "fetching_engine",
    "plan_prefetch",
    "what_pays",
]

PREFETCH_HELP = (
    "Fetch experts that the next layer is guessed to select: on, off, or auto, where it was measured to pay here; "
    "where nothing was, blocks of tokens by turns find out."
)
GAIN_TO_START = 1.02
"""How much faster it must have been measured to be on; less is noise."""
GAIN_TO_TRY = 0.99
"""From here on a benchmark leaves open what a trial finds out."""

HOST_FETCHES = "the host fetches, and every layer waits for it already"

Use = Literal["on", "off", "trial"]


class Prefetch(StrEnum):
    """What a person may say."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Paying(NamedTuple):
    """Whether it pays on this machine, or is to be tried, and why."""

    use: Use
    reason: str


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """How a run starts, and what a trial needs."""

    use: Use
    reason: str
    early: EarlyFetch
    """What is fetched early from the first token on; a trial begins with it."""
    conditions: Conditions | None = None
    """What a trial's result will hold for; ``None`` where nothing is tiered."""
    begun: KeptTrial | None = None
    """A trial that was cut short."""

    @property
    def choice(self) -> Choice:
        """For a table of what was chosen."""
        experts = f"{self.early.experts} expert{'' if self.early.experts == 1 else 's'} a layer"
        value = {"on": experts, "off": "off", "trial": f"{experts}, on trial"}[self.use]
        return Choice("prefetch", value, self.reason)


def what_pays(measured: Measured | None = None, tried: KeptTrial | None = None) -> Paying:
    """By the newest of what a benchmark and a trial found here; else by whether a copy fits beside a layer at all.

    Of one day the benchmark: after one that decides no trial begins.
    """
    ruled_out, by_bench = _ruled_out(), _by_bench(measured)
    found = None if tried is None or tried.state == "begun" else tried
    if measured is not None and by_bench is not None and (found is None or found.day <= measured.day):
        if by_bench.use != "trial":
            return by_bench
        if ruled_out is not None:
            return Paying("off", by_bench.reason)
    if ruled_out is not None:
        return Paying("off", ruled_out)
    if found is not None:
        return Paying("on" if found.state == "on" else "off", found.reason)
    budget = None if measured is None else measured.link_budget
    if budget is not None and not budget.experts:
        return Paying("off", describe_budget(budget))
    known = [each for each in (by_bench and by_bench.reason, budget and describe_budget(budget)) if each]
    begun = "" if tried is None else f"; {tried.reason}"
    told = "; ".join(known) or "nothing was measured here"
    return Paying("trial", f"{told}; serving will tell, by blocks of tokens with it and without{begun}")


def _by_bench(measured: Measured | None) -> Paying | None:
    if measured is None or (gain := measured.prefetch_gain) is None:
        return None
    compared = f"{abs(gain - 1):.1%} {'more' if gain >= 1 else 'fewer'} tokens a second"
    use: Use = "on" if gain >= GAIN_TO_START else "off" if gain < GAIN_TO_TRY else "trial"
    return Paying(use, f"spark-agent bench measured {compared} with it on {measured.day}")


def describe_budget(budget: LinkBudget) -> str:
    """What one copy takes, and what it has beside it."""
    took = f"{format_size(round(budget.expert_bytes))} in {_microseconds(budget.copy_s)}"
    beside = f"{took} beside {_microseconds(budget.computing_s)} of computation"
    return beside if budget.experts else f"no expert fits beside a layer: {beside}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def _ruled_out() -> str | None:
    """Why no copy can be hidden here, whatever is guessed."""
    from spark_runtime.tier_plan import cards

    if not cards():
        return "there is no GPU: slots and host memory are the same memory, so no copy can be hidden"
    return HOST_FETCHES if fetching_engine() == "host" else None


def fetching_engine() -> Literal["cuda", "host"]:
    """Who will decide and fetch on this machine: the GPUs, or the host for one of them or over the CPU."""
    from spark_runtime.errors import InstallationError
    from spark_runtime.native_tier import kernel_fault, proxy_devices
    from spark_runtime.tier_plan import cards

    found = cards()
    try:
        slow = not found or any(kernel_fault(index) is not None for index in range(len(proxy_devices(len(found)))))
    except InstallationError:
        slow = True
    return "host" if slow else "cuda"


def plan_prefetch(
    option: Prefetch, measured: Measured | None, conditions: Conditions | None, today: dt.date | None = None
) -> PrefetchPlan:
    """How a run fetches early; ``conditions`` are ``None`` where every expert is resident.

    Never more than one expert for a layer: that is what was measured to pay, however many the link would carry.
    """
    from spark_agent.prefetch_trials import find_trial
    from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch

    if conditions is None:
        return PrefetchPlan("off", "every expert is resident", NO_EARLY_FETCH)
    if option is not Prefetch.AUTO:
        use: Use = "on" if option is Prefetch.ON else "off"
        budget = None if measured is None else measured.link_budget
        beside = f"; {describe_budget(budget)}" if option is Prefetch.ON and budget is not None else ""
        paying, tried = Paying(use, f"--prefetch {option}{beside}"), None
    else:
        tried = find_trial(conditions, today or dt.datetime.now(dt.UTC).date())
        paying = what_pays(measured, tried)
    early = NO_EARLY_FETCH if paying.use == "off" else EarlyFetch(conditions.experts, conditions.threshold)
    begun = tried if paying.use == "trial" else None
    return PrefetchPlan(paying.use, paying.reason, early, conditions, begun)
