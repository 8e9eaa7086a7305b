"""What to expect of a plan before anything is loaded, and of llama.cpp's own offload within the same memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from spark_agent.formats.llama_cpp import flags_for

if TYPE_CHECKING:
    from spark_agent.measured import Measured
    from spark_runtime.placement import FloatArray
    from spark_runtime.tier_plan import TierPlan
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = ["Forecast", "Misses", "OffloadForecast", "Speed", "expected_misses", "forecast"]

NOT_MEASURED = "not measured here: spark-agent bench MODEL"
NOT_LOCKED = "not measured here from memory that is not locked, where these experts would be: spark-agent bench MODEL"


@dataclass(frozen=True, slots=True)
class Misses:
    """Selections that find their expert outside of video memory."""

    cold_hit_rate: float
    cold_hits_per_token: float
    basis: Literal["resident", "held_out", "profile", "uniform"]
    note: str
    low: float | None = None
    high: float | None = None
    """Ends of the rate's 95% interval, where sessions were held out."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoded tokens a second; ``None`` where nobody knows, and why."""

    decode_tok_s: float | None
    note: str


@dataclass(frozen=True, slots=True)
class OffloadForecast:
    """llama.cpp itself, with whole layers' experts left to the CPU until the rest fits."""

    flags: str
    n_cpu_moe: int
    blocks: int
    """Blocks with experts."""
    blocks_on_gpu: int
    resident_share: float
    """Of the experts' bytes."""
    speed: Speed


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect."""

    misses: Misses
    speed: Speed
    offload: OffloadForecast | None
    """``None`` without a GPU: there is nothing to offload from."""

    def as_json(self) -> dict[str, Any]:
        """The objects ``expected`` and ``llama_cpp`` of a plan."""
        return {
            "expected": {
                **asdict(self.misses),
                "decode_tok_s": self.speed.decode_tok_s,
                "decode_tok_s_note": self.speed.note,
            },
            "llama_cpp": None
            if self.offload is None
            else {
                "flags": self.offload.flags,
                "n_cpu_moe": self.offload.n_cpu_moe,
                "blocks": self.offload.blocks,
                "blocks_on_gpu": self.offload.blocks_on_gpu,
                "resident_share": self.offload.resident_share,
                "decode_tok_s": self.offload.speed.decode_tok_s,
                "decode_tok_s_note": self.offload.speed.note,
            },
        }


def forecast(
    shape: ModelShape,
    plan: TierPlan | None,
    manifest: PlacementManifest | None,
    measured: Measured | None,
    *,
    on_cards: bool,
    prefetched: bool = False,
) -> Forecast:
    """What to expect of a plan; without one every expert is resident. ``prefetched``: experts are fetched early."""
    slots = None if plan is None or plan.start is None else plan.memory.slots
    misses = expected_misses(shape, slots, manifest)
    offload = _offload(shape, plan, measured) if on_cards and plan is not None else None
    # A device locks all experts or none of them; without one there is nothing that memory is locked for.
    pageable = float(on_cards and slots is not None and plan is not None and not plan.memory.host.pinned)
    return Forecast(misses, _speed(measured, misses, pageable, prefetched=prefetched), offload)


def expected_misses(shape: ModelShape, slots: Sequence[int] | None, manifest: PlacementManifest | None) -> Misses:
    """Cold hits with so many slots a layer, if what is in them never changed; ``None``: every expert is resident.

    By held-out sessions where a manifest was judged with these very slots, else by its profile, else as if all experts
    were selected equally often.
    """
    per_token = sum(layer.top_k for layer in shape.layers)
    if slots is None or all(count >= layer.n_experts for count, layer in zip(slots, shape.layers, strict=True)):
        return Misses(0.0, 0.0, "resident", "every expert is resident")
    if manifest is None:
        cold = [layer.top_k * (1 - count / layer.n_experts) for count, layer in zip(slots, shape.layers, strict=True)]
        rate = sum(cold) / per_token
        return Misses(rate, sum(cold), "uniform", "assuming that all experts are selected equally often: no profile")
    judged, workload = manifest.expected, manifest.workload
    if judged is not None and tuple(slots) == tuple(layer.slots for layer in manifest.layers):
        rate = judged.cold_hit_rate
        note = f"on {manifest.n_held_out} held-out sessions of {workload}"
        return Misses(rate, rate * per_token, "held_out", note, judged.low, judged.high)
    from spark_runtime.tier_start import manifest_frequency

    missed = [
        layer.top_k * _outside(frequency, count)
        for layer, frequency, count in zip(shape.layers, manifest_frequency(manifest), slots, strict=True)
    ]
    return Misses(sum(missed) / per_token, sum(missed), "profile", f"by the profile {workload}, not held out")


def _outside(frequency: FloatArray, slots: int) -> float:
    """Share of a layer's selections outside of its hottest experts."""
    frequencies: list[float] = frequency.tolist()
    return max(0.0, 1.0 - sum(sorted(frequencies, reverse=True)[:slots]))


def _speed(measured: Measured | None, misses: Misses, pageable_share: float, *, prefetched: bool) -> Speed:
    if measured is None:
        return Speed(None, NOT_MEASURED)
    tok_s = measured.tiered_tok_s(misses.cold_hits_per_token, pageable_share, prefetched=prefetched)
    if tok_s is None:
        return Speed(None, NOT_LOCKED)
    note = f"from a benchmark of this model here on {measured.day}"
    if pageable_share and misses.cold_hits_per_token:
        note += "; experts come from memory that is not locked"
    if prefetched and misses.cold_hits_per_token:
        if measured.early is None:
            note += ", which fetched nothing early"
        else:
            note += f", where fetching early saved {measured.early.saved_share:.0%} of the cold hits"
    return Speed(round(tok_s, 1), note)


def _offload(shape: ModelShape, plan: TierPlan, measured: Measured | None) -> OffloadForecast:
    parts = zip(plan.memory.memory, plan.memory.devices, strict=True)
    # What slots and their tables take, and what is left over: llama.cpp would have all of it for whole layers.
    budget = sum(
        max(0, memory.room_bytes - part.total) + part.experts + part.scratch + part.tables for memory, part in parts
    )
    flags = flags_for(shape, budget)
    blocks = len(shape.layers)
    on_gpu = sum(layer.block >= flags.n_cpu_moe for layer in shape.layers)
    share = flags.resident_bytes_n_cpu_moe / shape.expert_bytes_total
    tok_s = None if measured is None else measured.offload_tok_s(1.0 - share)
    if tok_s is None:
        speed = Speed(None, NOT_MEASURED)
    else:
        speed = Speed(round(tok_s, 1), "between what the benchmark measured")
    return OffloadForecast(f"-ngl 999 --n-cpu-moe {flags.n_cpu_moe}", flags.n_cpu_moe, blocks, on_gpu, share, speed)
