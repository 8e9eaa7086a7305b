"""What ``spark-agent run`` will do, decided before anything is loaded: choices with reasons, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from spark_agent.context_choice import Choice, choose_context, host_sequences
from spark_agent.forecast import Forecast, forecast
from spark_agent.prefetching import Prefetch, PrefetchPlan, fetching_engine, plan_prefetch
from spark_agent.sizes import format_size
from spark_agent.tiering import TierOptions, plan_for, plan_table

if TYPE_CHECKING:
    from spark_agent.chosen_placement import ChosenPlacement
    from spark_agent.prefetch_trials import Conditions
    from spark_runtime.confidence import Band
    from spark_runtime.gguf_file import GgufModel
    from spark_runtime.tier_plan import TierPlan
    from spark_schemas.model import ModelShape

__all__ = ["RunPlan", "make_run_plan"]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run."""

    n_ctx: int
    """Of each conversation, tokens."""
    n_seq_max: int
    """Conversations that are kept at once."""
    plan: TierPlan | None
    """``None`` where the host's memory is all there is and nothing is tiered: the system pages what does not fit."""
    choices: tuple[Choice, ...]
    forecast: Forecast
    bands: tuple[Band, ...]
    """How sure it is that experts will be used, by the profile; empty without one, and where nothing is tiered."""
    prefetch: PrefetchPlan
    """What is fetched before a layer's router has chosen."""

    def as_json(self) -> dict[str, Any]:
        """Further keys of a start-up object."""
        return {
            "choices": [choice._asdict() for choice in self.choices],
            "bands": [asdict(band) for band in self.bands],
            **self.forecast.as_json(),
        }

    def table(self) -> str:
        """All of it, for a person."""
        lines = [] if self.plan is None else [plan_table(self.plan), ""]
        rows = [*self.choices, *_band_rows(self.bands), *_expectations(self.forecast)]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines += [f"{row.what:{widths[0]}}  {row.value:{widths[1]}}  {row.reason}".rstrip() for row in rows]
        return "\n".join(lines)


def make_run_plan(
    model: GgufModel,
    shape: ModelShape,
    options: TierOptions,
    chosen: ChosenPlacement,
    asked_ctx: int,
    *,
    prefetch: Prefetch = Prefetch.AUTO,
    always: bool = False,
) -> RunPlan:
    """Decide what is left open; raises as ``tiering.plan_for`` and ``engine.context_for``.

    ``asked_ctx`` are tokens, 0 where nobody says. With ``always`` there is a plan also where none is needed.
    """
    from spark_agent.measured import find_benchmark, machine_name
    from spark_runtime.engine import context_for
    from spark_runtime.host_probe import probe_host
    from spark_runtime.tier_plan import cards

    manifest = chosen.asked

    def plan_at(n_ctx: int, parallel: int = 1) -> TierPlan | None:
        return plan_for(
            model,
            shape,
            replace(options, parallel=parallel),
            manifest,
            n_ctx,
            always=always,
            frequency=chosen.frequency,
            wanted=chosen.is_named,
        )

    free = max(0, probe_host().available_bytes - shape.core_bytes - shape.expert_bytes_total)
    if asked_ctx or manifest is not None:
        n_ctx = context_for(shape, asked_ctx or min(shape.context_length, manifest.n_ctx if manifest else 0))
        reason = "asked for" if asked_ctx else "what the manifest was planned for"
        context = Choice("context", f"{n_ctx} tokens", reason)
    else:
        n_ctx, _, context = choose_context(shape, plan_at, free)
    # The longer context comes first: one conversation that fits is worth more than two that do not.
    plan = plan_at(n_ctx, options.parallel)
    n_seq_max = plan.n_seq_max if plan is not None else options.parallel or host_sequences(shape, n_ctx, free)
    on_cards = bool(cards())
    machine = machine_name(options.devices)
    measured = find_benchmark(shape.fingerprint, machine)
    prefetching = plan_prefetch(prefetch, measured, _conditions(shape, plan, machine))
    choices = [context, _parallel_choice(n_seq_max, options), *_tier_choices(plan, options, chosen, on_cards=on_cards)]
    if prefetching.conditions is not None or prefetch is Prefetch.ON:
        choices.append(prefetching.choice)
    return RunPlan(
        n_ctx,
        n_seq_max,
        plan,
        tuple(choices),
        forecast(
            shape, plan, chosen.in_force(plan), measured, on_cards=on_cards, prefetched=bool(prefetching.early.experts)
        ),
        _bands_of(shape, plan, chosen),
        prefetching,
    )


def _conditions(shape: ModelShape, plan: TierPlan | None, machine: str) -> Conditions | None:
    """What a trial of fetching early would hold for; ``None`` where nothing is tiered."""
    from spark_agent import __version__
    from spark_agent.prefetch_trials import Conditions
    from spark_runtime.early_fetch import EarlyFetch

    if plan is None or plan.start is None:
        return None
    early, share = EarlyFetch(), plan.resident_share
    return Conditions(shape.fingerprint, machine, fetching_engine(), share, early.experts, early.threshold, __version__)


def _bands_of(shape: ModelShape, plan: TierPlan | None, chosen: ChosenPlacement) -> tuple[Band, ...]:
    from spark_runtime.confidence import bands
    from spark_runtime.placement import layer_sizes
    from spark_runtime.tier_start import manifest_frequency

    frequency = manifest_frequency(chosen.asked) if chosen.asked is not None else chosen.frequency
    if plan is None or plan.start is None or frequency is None:
        return ()
    return tuple(bands(frequency, layer_sizes(shape), [layer.slots for layer in plan.start.layers]))


def _band_rows(found: Sequence[Band]) -> list[Choice]:
    """Where the experts of each band are; all of them are in host memory, too."""
    rows, low = [], 0.0
    for band in found:
        if band.experts:
            what = f"{low:.0%} to {band.coverage:.0%}"
            value = f"{band.experts} experts, {format_size(band.bytes)}"
            rest = band.experts - band.in_slots
            where = f"{band.in_slots} in slots, {rest} fetched from host memory when selected"
            often = f"each selected at least every {_every(band.least_per_token)} tokens"
            rows.append(Choice(f"sure {what}", value, f"{where}; {often}"))
        low = band.coverage
    return rows


def _every(per_token: float) -> str:
    return "so many" if per_token <= 0 else f"{max(1.0, 1 / per_token):.3g}"


def _parallel_choice(n_seq_max: int, options: TierOptions) -> Choice:
    if options.parallel:
        reason = "asked for"
    elif n_seq_max > 1:
        reason = "as many as cost next to nothing: tools alternate between conversations, and none is computed again"
    else:
        reason = "another one's keys and values would take experts' place; see --parallel"
    return Choice("parallel", f"{n_seq_max} conversation{'s' if n_seq_max > 1 else ''}", reason)


def _tier_choices(
    plan: TierPlan | None, options: TierOptions, chosen: ChosenPlacement, *, on_cards: bool
) -> list[Choice]:
    if plan is None or plan.start is None:
        return [Choice("experts", "all resident", _why_resident(options, on_cards=on_cards))]
    start = plan.start
    total = sum(len(layer.order) for layer in start.layers)
    pinned = sum(layer.pinned for layer in start.layers)
    batch = plan.memory.n_ubatch
    reserve = sum(memory.reserve_bytes for memory in plan.memory.memory)
    choices = [
        Choice("profile", chosen.source_of(plan), chosen.reason),
        Choice("hot set", f"{start.slots} of {total} experts", _why_slots(options, chosen)),
        Choice(
            "ring",
            f"{start.slots - pinned} slots",
            f"experts move through them; {pinned} hold the hottest for good"
            if pinned
            else "every slot: pinning was not asked for (--pinned-share)",
        ),
        Choice(
            "batch",
            f"{batch} tokens",
            "asked for" if options.ubatch else "the largest that fits: a layer's experts are fetched once a batch",
        ),
    ]
    if reserve:
        choices.append(Choice("reserve", format_size(reserve), "left free for other programs' memory, which grows"))
    return choices


def _why_resident(options: TierOptions, *, on_cards: bool) -> str:
    if options.no_tier:
        return "--no-tier"
    if on_cards:
        return "the model fits entirely, so nothing is tiered"
    return "there is no GPU, so nothing is gained by tiers"


def _why_slots(options: TierOptions, chosen: ChosenPlacement) -> str:
    by = "by the profile" if chosen.source != "none" else "the same share of every layer"
    if options.coverage is not None:
        return f"the fewest that cover {options.coverage:.0%} of the selections that the profile expects (--coverage)"
    if options.residency is not None:
        return f"--residency {options.residency:g}, {by}"
    if options.vram is not None:
        return f"what --vram {options.vram} holds, {by}"
    if chosen.asked is not None:
        return "as many as the manifest says"
    return f"what free video memory holds, {by}"


def _expectations(found: Forecast) -> list[Choice]:
    misses, speed = found.misses, found.speed
    rows = []
    if misses.basis != "resident":
        interval = "" if misses.low is None or misses.high is None else f" ({misses.low:.1%} to {misses.high:.1%})"
        rows.append(Choice("cold hits", f"{misses.cold_hit_rate:.1%}{interval}", misses.note))
    rows.append(Choice("decode", _rate(speed.decode_tok_s), speed.note))
    if (offload := found.offload) is not None:
        reason = (
            f"{offload.flags}: {offload.blocks_on_gpu} of {offload.blocks} blocks' experts in the same memory; "
            f"{offload.speed.note}"
        )
        rows.append(Choice("llama.cpp", _rate(offload.speed.decode_tok_s), reason))
    return rows


def _rate(tok_s: float | None) -> str:
    return "unknown" if tok_s is None else f"{tok_s:.1f} tok/s"
