"""One way of running a model that a benchmark compares with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_runtime.engine import EngineOptions
    from spark_runtime.tier_start import TierStart
    from spark_schemas.model import ModelShape

__all__ = ["Configuration", "blocks_on_cpu"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """How an engine is opened; nothing set is llama.cpp with everything on the GPU."""

    name: str
    residency: float = 1.0
    """Share of the experts' bytes in video memory."""
    proxy: bool = False
    tier: Callable[[], TierStart] | None = None
    """Made when the configuration is measured, so that a failure is its own."""
    counting: bool = True
    cpu_blocks: int = 0
    """Blocks whose experts llama.cpp leaves to the CPU."""
    mapped: bool = True
    """Whether the weights that stay on the CPU are used from the mapped file, as llama.cpp does by itself."""
    prefill: bool = True
    """Whether a long prompt is measured, too."""

    def options(self, size: EngineOptions, start: TierStart | None, *, on_gpu: bool) -> EngineOptions:
        """The engine's options, with what :attr:`tier` gave; ``size`` has contexts, batches, threads and devices.

        Counting through the callback of an engine without tiers is never measured here. Without a GPU weights stay as
        they lie in the file: repacked ones are computed by other kernels, with other roundings.
        """
        return replace(
            size,
            count_routing=self.counting and start is not None,
            tier=start,
            proxy=self.proxy,
            repack=on_gpu,
            mapped=self.mapped,
            cpu_expert_blocks=self.cpu_blocks,
        )


def blocks_on_cpu(shape: ModelShape, residency: float) -> int:
    """Blocks for llama.cpp's ``--n-cpu-moe`` that leave about this share of the experts on the GPU."""
    layers = round((1 - residency) * len(shape.layers))
    return shape.layers[layers - 1].block + 1 if layers else 0
