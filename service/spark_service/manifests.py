"""From a profile and a memory budget to a placement manifest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spark_runtime.calibration.evaluation import uniform_slots_for
from spark_runtime.calibration.trials import Trials, first_experts
from spark_runtime.manifest_build import Basis, assemble_manifest, place_layers
from spark_runtime.placement import (
    BudgetTooSmallError,
    floor_bytes,
    greedy_slots,
    layer_sizes,
    stratified_intervals,
)
from spark_schemas.manifest import Expectation, LayerPlacement, PlacementManifest
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile
from spark_service.builders import Judges
from spark_service.errors import RequestError

__all__ = ["Budget", "build_manifest"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Video memory in total, the context it must hold and what to leave alone; bytes and tokens."""

    vram_bytes: int
    n_ctx: int
    reserve_bytes: int = 0


def build_manifest(profile: Profile, shape: ModelShape, budget: Budget, judges: Sequence[Judges]) -> PlacementManifest:
    """Place a model's experts by a profile within a budget.

    ``expected`` is computed from exactly the hot set that the manifest encodes, on the held-out sessions that judge the
    profile; without any of one of its workloads it is ``None``. Raises :class:`RequestError` (422) for a context longer
    than the model's and for a budget below the floor of ``2 * top_k`` slots per layer, with the smallest change that
    would do.
    """
    if budget.n_ctx > shape.context_length:
        raise RequestError(
            422,
            "context_too_long",
            f"n_ctx: found {budget.n_ctx}, expected at most the model's context length {shape.context_length}",
            field="query.n_ctx",
            found=str(budget.n_ctx),
            expected=f"at most {shape.context_length}",
            hint=f"ask for n_ctx={shape.context_length} or less",
        )
    kv_bytes = shape.context_bytes(budget.n_ctx)
    fixed_bytes = shape.core_bytes + kv_bytes + budget.reserve_bytes
    shares = [np.array(layer.shares) for layer in profile.layers]
    try:
        slots = greedy_slots(shares, layer_sizes(shape), budget.vram_bytes - fixed_bytes)
    except BudgetTooSmallError as error:
        raise _too_small(shape, budget, fixed_bytes + error.needed_bytes) from error
    layers = place_layers(shape, shares, slots)
    slot_bytes = sum(layer.slots * layer.expert_bytes for layer in layers)
    basis = Basis(
        profile.workload,
        profile.phase,
        profile.revision,
        profile.n_calibration,
        profile.n_held_out,
        profile.verdict,
        profile.verdict_reason,
    )
    return assemble_manifest(
        shape,
        basis,
        layers,
        _expectation(shape, layers, slot_bytes, judges),
        n_ctx=budget.n_ctx,
        reserve_bytes=budget.reserve_bytes,
        vram_bytes=budget.vram_bytes,
    )


def _expectation(
    shape: ModelShape, layers: Sequence[LayerPlacement], slot_bytes: int, judges: Sequence[Judges]
) -> Expectation | None:
    sizes = layer_sizes(shape)
    uniform = first_experts(uniform_slots_for(sizes, slot_bytes))
    trials = Trials.of(sizes, [[np.array(layer.hot_set) for layer in layers], uniform], (), ())
    strata = []
    for one in judges:
        rates = [trials.judge(batch).static for batch in one.held_out() if len(batch)]
        if not rates:
            return None
        # Sorted, so that the order of batches changes no bit of a mean.
        strata.append(np.sort(np.concatenate(rates), axis=0))
    if not strata:
        return None
    own, even = stratified_intervals(strata, [one.weight for one in judges])
    return Expectation(
        cold_hit_rate=own.mean,
        low=own.low,
        high=own.high,
        uniform_cold_hit_rate=even.mean,
    )


def _too_small(shape: ModelShape, budget: Budget, needed: int) -> RequestError:
    fixes = [f"vram_bytes={needed}"]
    if shape.kv_bytes_per_token:
        n_ctx = budget.n_ctx - -(-(needed - budget.vram_bytes) // shape.kv_bytes_per_token)
        if n_ctx >= 1:
            fixes.append(f"n_ctx={n_ctx}")
    kv_bytes = shape.context_bytes(budget.n_ctx)
    return RequestError(
        422,
        "budget_too_small",
        f"vram_bytes: found {budget.vram_bytes}, expected at least {needed} "
        f"({shape.core_bytes} core + {kv_bytes} context + {budget.reserve_bytes} reserve + "
        f"{floor_bytes(layer_sizes(shape))} for 2 * top_k experts per layer)",
        field="query.vram_bytes",
        found=str(budget.vram_bytes),
        expected=f"at least {needed}",
        hint="smallest change that fits: " + " or ".join(fixes),
    )
