"""What a memory budget would give: bytes by tier, expected misses, a first idea of speed, and the command. Pure.

Rates come from the profile's curves, which held-out sessions gave at every tenth of the experts' bytes, and lie on a
straight line between two of them. ``spark pull-profile`` judges the exact budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from spark_runtime.placement import floor_bytes, greedy_slots, layer_sizes, residency_budget
from spark_schemas.ids import Policy
from spark_schemas.model import ModelShape
from spark_schemas.profile import CurvePoint, Profile
from spark_service.dashboard.gpu_classes import SOURCES, GpuClass, speed
from spark_service.dashboard.heat_map import shares_of
from spark_service.dashboard.profile_page import ModelName, VerdictView, verdict_of
from spark_service.dashboard.words import count, counted, size, size_argument

__all__ = [
    "DEFAULT_CONTEXT",
    "BudgetPage",
    "BudgetRow",
    "ExpectedRate",
    "Question",
    "SpeedView",
    "Tier",
    "budget_page",
    "budget_range",
    "default_vram",
    "pull_command",
]

DEFAULT_CONTEXT = 8192
"""Tokens, as agents take where nobody says, or as many as the model was trained for."""
DEFAULT_RESIDENCY = 0.6
_STEPS = tuple(2**power for power in range(41))
_OTHERS: tuple[Policy, ...] = ("uniform", "lru")
_FINEST = 240
"""Positions of the slider at most."""


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Tier(_View):
    """What lies where."""

    tier: str
    holds: str
    n_bytes: int


class ExpectedRate(_View):
    """What one way of using the memory is expected to miss."""

    policy: Policy | Literal["live_profile"]
    label: str
    cold_hit_rate: float
    low: float | None
    high: float | None
    basis: str


class SpeedView(_View):
    """Decoded tokens a second of one stream, with a short context."""

    low: float
    high: float
    resident_low: float
    """With every expert resident, by the same figures."""
    resident_high: float
    kept: float
    """Share of that which is left, at the end of the range where it is smaller."""


class BudgetRow(_View):
    """One residency of the overview."""

    residency: float
    vram_bytes: int
    own: float
    uniform: float | None
    lru: float | None
    speed: SpeedView


class BudgetPage(_View):
    """The page for one question."""

    model: ModelName
    workload: str
    revision: str
    gpu: str
    gpu_name: str
    gpu_memory_bytes: int
    gpu_link: str
    gpu_basis: Literal["measured", "published", "estimated"]
    vram_bytes: int
    n_ctx: int
    reserve_bytes: int
    least_bytes: int
    """The smallest budget that works: twice as many experts in every layer as a token selects."""
    everything_bytes: int
    """With every expert in video memory."""
    step_bytes: int
    problem: str | None
    """Why there is no placement for this budget, with the smallest change that would do."""
    fits: str
    """Whether a card of the class holds it."""
    tiers: tuple[Tier, ...]
    slots: int
    experts: int
    residency: float
    """Share of the experts' bytes in video memory."""
    rates: tuple[ExpectedRate, ...]
    rates_missing: str | None
    speed: SpeedView | None
    speed_note: str
    rows: tuple[BudgetRow, ...]
    command: str
    n_calibration: int
    n_held_out: int
    verdict: VerdictView
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked, bytes and tokens."""

    gpu: GpuClass
    vram_bytes: int
    n_ctx: int
    reserve_bytes: int = 0
    service_url: str | None = None


def budget_range(shape: ModelShape, n_ctx: int, reserve_bytes: int = 0) -> tuple[int, int, int]:
    """The smallest budget, the one that holds everything, and a step between them, all in bytes."""
    sizes = layer_sizes(shape)
    fixed = shape.core_bytes + shape.context_bytes(n_ctx) + reserve_bytes
    least, most = fixed + floor_bytes(sizes), fixed + shape.expert_bytes_total
    step = next((step for step in _STEPS if (most - least) / step <= _FINEST), _STEPS[-1])
    return least, most, step


def default_vram(shape: ModelShape, n_ctx: int, reserve_bytes: int = 0) -> int:
    """What most of the experts take, on a step of the slider."""
    least, most, step = budget_range(shape, n_ctx, reserve_bytes)
    fixed = shape.core_bytes + shape.context_bytes(n_ctx) + reserve_bytes
    wanted = fixed + residency_budget(layer_sizes(shape), DEFAULT_RESIDENCY)
    return max(least, min(most, -(-wanted // step) * step))


def budget_page(profile: Profile, shape: ModelShape, asked: Question) -> BudgetPage:
    """Answer a question; one that cannot work is answered with what would."""
    least, most, step = budget_range(shape, asked.n_ctx, asked.reserve_bytes)
    problem, slots = _problem(shape, asked, least), []
    sizes = layer_sizes(shape)
    if problem is None:
        fixed = shape.core_bytes + shape.context_bytes(asked.n_ctx) + asked.reserve_bytes
        slots = greedy_slots(shares_of(profile), sizes, asked.vram_bytes - fixed)
    slot_bytes = sum(n * layer.expert_bytes for n, layer in zip(slots, sizes, strict=False))
    residency = slot_bytes / shape.expert_bytes_total
    rates = () if problem else _rates(profile, shape, residency)
    at = next((one.cold_hit_rate for one in rates if one.policy == "own"), 0.0 if residency == 1.0 else None)
    return BudgetPage(
        model=ModelName.of(shape),
        workload=profile.workload,
        revision=profile.revision,
        gpu=asked.gpu.key,
        gpu_name=asked.gpu.name,
        gpu_memory_bytes=asked.gpu.memory_bytes,
        gpu_link=asked.gpu.link,
        gpu_basis=asked.gpu.basis,
        vram_bytes=asked.vram_bytes,
        n_ctx=asked.n_ctx,
        reserve_bytes=asked.reserve_bytes,
        least_bytes=least,
        everything_bytes=most,
        step_bytes=step,
        problem=problem,
        fits=_fits(asked),
        tiers=() if problem else _tiers(shape, asked, slots, slot_bytes),
        slots=sum(slots),
        experts=sum(layer.n_experts for layer in sizes),
        residency=residency,
        rates=rates,
        rates_missing=None if rates or problem else _no_rates(profile),
        speed=None if problem or at is None else _speed(shape, asked.gpu, at),
        speed_note=_speed_note(asked.gpu),
        rows=_rows(profile, shape, asked),
        command=pull_command(profile, shape, asked),
        n_calibration=profile.n_calibration,
        n_held_out=profile.n_held_out,
        verdict=verdict_of(profile),
        sources=SOURCES,
    )


def pull_command(profile: Profile, shape: ModelShape, asked: Question) -> str:
    """The command that fetches exactly this placement. The model's file is the one thing that only its owner knows."""
    parts = ["spark pull-profile", profile.workload, "--model MODEL.gguf", f"--vram {size_argument(asked.vram_bytes)}"]
    if asked.n_ctx != min(shape.context_length, DEFAULT_CONTEXT):
        parts.append(f"--ctx {asked.n_ctx}")
    if asked.reserve_bytes:
        parts.append(f"--reserve {size_argument(asked.reserve_bytes)}")
    if asked.service_url is not None:
        parts.append(f"--service {asked.service_url}")
    return " ".join(parts)


def _problem(shape: ModelShape, asked: Question, least: int) -> str | None:
    if asked.n_ctx > shape.context_length:
        return (
            f"A context of {count(asked.n_ctx)} tokens is longer than the {count(shape.context_length)} that this "
            "model was trained for: choose a shorter one."
        )
    if asked.vram_bytes < least:
        return (
            f"{size(asked.vram_bytes)} is too little: the smallest placement takes {size(least)} with a context of "
            f"{count(asked.n_ctx)} tokens ({least - asked.vram_bytes:,} bytes more), as every layer needs twice as "
            "many experts in video memory as a token selects."
        )
    return None


def _tiers(shape: ModelShape, asked: Question, slots: Sequence[int], slot_bytes: int) -> tuple[Tier, ...]:
    context, experts = shape.context_bytes(asked.n_ctx), sum(layer.n_experts for layer in shape.layers)
    total = shape.core_bytes + context + slot_bytes + asked.reserve_bytes
    return (
        Tier(tier="video memory", holds="core weights", n_bytes=shape.core_bytes),
        Tier(tier="video memory", holds=f"context, {count(asked.n_ctx)} tokens", n_bytes=context),
        Tier(tier="video memory", holds=f"{sum(slots):,} of {experts:,} experts", n_bytes=slot_bytes),
        Tier(tier="video memory", holds="reserve", n_bytes=asked.reserve_bytes),
        Tier(tier="video memory", holds="in all", n_bytes=total),
        Tier(tier="host memory", holds="all experts", n_bytes=shape.expert_bytes_total),
    )


def _rates(profile: Profile, shape: ModelShape, residency: float) -> tuple[ExpectedRate, ...]:
    labels: tuple[tuple[Policy, str], ...] = (
        ("own", "this profile, if it is never adapted"),
        ("lru", "a cache without a profile, started empty"),
        ("uniform", "the first experts instead"),
    )
    found = []
    for policy, label in labels:
        curve = _by_real_residency(profile, shape, policy)
        if curve:
            rate, low, high, basis = _between(curve, residency)
            single = profile.n_held_out < 2
            found.append(
                ExpectedRate(
                    policy=policy,
                    label=label,
                    cold_hit_rate=rate,
                    low=None if single else low,
                    high=None if single else high,
                    basis=f"{basis}, {counted(profile.n_held_out, 'held-out session')}",
                )
            )
    near = [one for one in profile.live if one.policy == "live_profile" and abs(one.residency - residency) <= 0.05]
    if near:
        one = min(near, key=lambda point: (abs(point.residency - residency), -point.n_sessions))
        found.append(
            ExpectedRate(
                policy="live_profile",
                label="this profile in a cache, as agents ran it",
                cold_hit_rate=one.cold_hit_rate,
                low=one.low,
                high=one.high,
                basis=f"measured at {one.residency:.0%}, {counted(one.n_sessions, 'other held-out session')}",
            )
        )
    return tuple(found)


def _by_real_residency(profile: Profile, shape: ModelShape, policy: Policy) -> list[tuple[float, CurvePoint]]:
    """A curve's points with the share of bytes that they had: never less than the floor of every layer."""
    sizes, total = layer_sizes(shape), shape.expert_bytes_total
    found = {residency_budget(sizes, one.residency) / total: one for one in profile.curves if one.policy == policy}
    return sorted(found.items())


def _between(curve: Sequence[tuple[float, CurvePoint]], residency: float) -> tuple[float, float, float, str]:
    """A curve at a residency: mean, ends of the interval, and between which of its points that is."""
    below = [one for one in curve if one[0] <= residency + 1e-9]
    above = [one for one in curve if one[0] >= residency - 1e-9]
    (start, left), (end, right) = (below[-1] if below else curve[0]), (above[0] if above else curve[-1])
    if start == end:
        return left.cold_hit_rate, left.low, left.high, f"judged at {start:.0%}"
    part = (residency - start) / (end - start)
    rate, low, high = (
        one + part * (other - one)
        for one, other in (
            (left.cold_hit_rate, right.cold_hit_rate),
            (left.low, right.low),
            (left.high, right.high),
        )
    )
    return rate, low, high, f"between what was judged at {start:.0%} and {end:.0%}"


def _no_rates(profile: Profile) -> str:
    return (
        f"No held-out sessions have tested this profile, so nothing honest can be promised: {profile.verdict_reason}."
    )


def _fits(asked: Question) -> str:
    left = asked.gpu.memory_bytes - asked.vram_bytes
    if left < 0:
        return f"Does not fit: {size(-left)} more than the {size(asked.gpu.memory_bytes)} of such a card."
    return (
        f"Leaves {size(left)} of the {size(asked.gpu.memory_bytes)} of such a card; its driver, a display and the "
        "buffers of computation usually take 0.5 to 1.5 GiB."
    )


def _speed(shape: ModelShape, card: GpuClass, rate: float) -> SpeedView:
    found = speed(shape, card, rate)
    return SpeedView(
        low=found.low,
        high=found.high,
        resident_low=found.resident_low,
        resident_high=found.resident_high,
        kept=found.kept,
    )


def _speed_note(card: GpuClass) -> str:
    base = {
        "measured": "From a measurement on one such card, with another model",
        "published": "From a published measurement on one such card, with another model and runtime",
        "estimated": "An estimate: nobody has measured Spark on such a card",
    }[card.basis]
    return (
        f"{base}; one stream, short context, experts in locked host memory over {card.link}, every miss as if the "
        "profile were never adapted. Your own machine's figure: spark-agent bench MODEL.gguf."
    )


def _rows(profile: Profile, shape: ModelShape, asked: Question) -> tuple[BudgetRow, ...]:
    fixed = shape.core_bytes + shape.context_bytes(asked.n_ctx) + asked.reserve_bytes
    uniform, lru = (
        {residency: one.cold_hit_rate for residency, one in _by_real_residency(profile, shape, policy)}
        for policy in _OTHERS
    )
    return tuple(
        BudgetRow(
            residency=residency,
            vram_bytes=fixed + round(residency * shape.expert_bytes_total),
            own=one.cold_hit_rate,
            uniform=uniform.get(residency),
            lru=lru.get(residency),
            speed=_speed(shape, asked.gpu, one.cold_hit_rate),
        )
        for residency, one in _by_real_residency(profile, shape, "own")
    )
