"""Loading a model through the proxy devices, with its experts in tiers or with nothing tiered."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_runtime.llama import LlamaContext, LoadOptions
from spark_runtime.native_tier import proxy_devices, set_tiering, take_tiers
from spark_runtime.tier import Tier
from spark_runtime.tier_start import TierStart

if TYPE_CHECKING:
    from spark_schemas.model import ModelShape

__all__ = ["load_tiered"]

_loading = threading.Lock()
"""Which model a device's newest tier belongs to is known only while no other one loads."""


def load_tiered(
    path: Path, shape: ModelShape, start: TierStart | None, options: LoadOptions, *, devices: int, **context: Any
) -> tuple[LlamaContext, Tier | None]:
    """Load on the first ``devices`` proxy devices; without ``start`` nothing is tiered.

    Slots are taken before the context, so that a lack of memory shows early. ``context`` are arguments of
    :class:`LlamaContext`. Raises what that raises, and :class:`TierError`.
    """
    addresses = proxy_devices(devices)
    tiers: list[Tier] = []

    def place() -> None:
        found = take_tiers(devices)
        if start is not None:
            tier = Tier(shape, found)
            tier.place(start)
            tiers.append(tier)

    with _loading:
        set_tiering(devices, on=start is not None)
        loaded = LlamaContext(
            path,
            options=replace(options, n_gpu_layers=-1, devices=addresses, repack=False, loaded=place),
            **context,
        )
    return loaded, tiers[0] if tiers else None
