"""Whether experts are fetched early, by a guess of what the next layer selects: as asked for, or where it pays."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from spark_agent.context_choice import Choice
from spark_agent.sizes import format_size

if TYPE_CHECKING:
    from spark_agent.measured import Measured
    from spark_runtime.early_fetch import EarlyFetch, LinkBudget

__all__ = ["PREFETCH_HELP", "Paying", "Prefetch", "choose_prefetch", "describe_budget", "what_pays"]

PREFETCH_HELP = "Fetch experts that the next layer is guessed to select: on, off, or auto, where it pays."
GAIN_TO_START = 1.02
"""How much faster it must have been measured where nothing else speaks for it; less is noise."""
GAIN_TO_STAY = 0.99


class Prefetch(StrEnum):
    """What a person may say."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Paying(NamedTuple):
    """Whether it pays on this machine, and why."""

    pays: bool
    reason: str


def what_pays(measured: Measured | None = None) -> Paying:
    """By what was measured of the model here, else by who fetches and whether a copy fits beside a layer."""
    usual = _by_engine()
    gain = None if measured is None else measured.prefetch_gain
    if measured is not None and gain is not None:
        told = f"spark-agent bench measured {abs(gain - 1):.1%} {'more' if gain >= 1 else 'fewer'} tokens a second"
        pays = gain >= (GAIN_TO_STAY if usual.pays else GAIN_TO_START)
        return Paying(pays, f"{told} with it on {measured.day}")
    budget = None if measured is None else measured.link_budget
    if not usual.pays or budget is None:
        return usual
    return Paying(budget.experts > 0, describe_budget(budget))


def describe_budget(budget: LinkBudget) -> str:
    """What one copy takes, and what it has beside it."""
    took = f"{format_size(round(budget.expert_bytes))} in {_microseconds(budget.copy_s)}"
    beside = f"{took} beside {_microseconds(budget.computing_s)} of computation"
    return beside if budget.experts else f"no expert fits beside a layer: {beside}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def _by_engine() -> Paying:
    from spark_runtime.errors import InstallationError
    from spark_runtime.native_tier import kernel_fault, proxy_devices
    from spark_runtime.tier_plan import cards

    found = cards()
    if not found:
        return Paying(False, "there is no GPU: slots and host memory are the same memory, so no copy can be hidden")
    try:
        slow = any(kernel_fault(index) is not None for index in range(len(proxy_devices(len(found)))))
    except InstallationError:
        slow = True
    if slow:
        return Paying(False, "the host fetches, and every layer waits for it already")
    return Paying(True, "the GPU copies the likeliest missing expert while it computes the layer before")


def choose_prefetch(option: Prefetch, measured: Measured | None, *, tiered: bool) -> tuple[EarlyFetch, Choice]:
    """How experts are fetched early, and how that is told.

    Never more than one for a layer: that is what was measured to pay, however many the link would carry.
    """
    from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch

    if not tiered:
        return NO_EARLY_FETCH, Choice("prefetch", "off", "every expert is resident")
    asked = Paying(option is Prefetch.ON, f"--prefetch {option}")
    paying = what_pays(measured) if option is Prefetch.AUTO else asked
    early = EarlyFetch() if paying.pays else NO_EARLY_FETCH
    value = f"{early.experts} expert{'s' if early.experts > 1 else ''} a layer" if early.experts else "off"
    return early, Choice("prefetch", value, paying.reason)
