"""A loaded model's tiers over all its devices: place, count, look, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.errors import TierError
from spark_runtime.native_tier import DeviceTier, LayerCounts, LayerGuesses, TierMemory
from spark_runtime.tier_start import TierStart, keeping
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape

__all__ = ["PHASES", "Tier", "TierCounters"]

IntArray = NDArray[np.int64]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
"""In the native library's numbering."""
_NO_ENGINE = "none"
"""What a device calls its engine that failed in the middle of being filled."""


@dataclass(frozen=True, slots=True)
class TierCounters:
    """What was selected since the counters were reset. Lists are by MoE layer, in block order."""

    counts: dict[Phase, list[IntArray]]
    """Selections of every expert."""
    tokens: dict[Phase, list[int]]
    """Tokens that each layer routed; the last one of a model may route fewer of a prompt."""
    cold: dict[Phase, list[int]]
    """Cold hits: selections whose expert was not in video memory."""
    loads: dict[Phase, list[int]]
    """Experts that a step needed and copied from host memory, without what is fetched ahead for a prompt."""
    bytes_moved: dict[Phase, int]
    """Bytes of ``loads``."""
    early: dict[Phase, list[int]]
    """Experts fetched early, by a guess."""
    early_used: dict[Phase, list[int]]
    """Of those, selected while they were in video memory; some may be fetched before the counters were reset."""
    early_wasted: dict[Phase, list[int]]
    """Of those, gone again before anything selected them."""
    early_bytes: dict[Phase, int]
    """Bytes of ``early``."""
    early_used_bytes: dict[Phase, int]
    early_wasted_bytes: dict[Phase, int]
    reuse: list[IntArray]
    """Reuse distances in decode, ``[n_experts + 1]`` a layer, as in :mod:`spark_runtime.recency`."""

    def cold_hit_rate(self, phase: Phase) -> float | None:
        """Cold hits over selections; ``None`` without selections."""
        selections = sum(int(layer.sum()) for layer in self.counts[phase])
        return sum(self.cold[phase]) / selections if selections else None

    def cold_hits_per_token(self, phase: Phase) -> float | None:
        """Cold hits of all layers a token; ``None`` without tokens."""
        tokens = max(self.tokens[phase], default=0)
        return sum(self.cold[phase]) / tokens if tokens else None


class Tier:
    """One model's experts. Used by the thread that computes, between its calls."""

    def __init__(self, shape: ModelShape, devices: Sequence[DeviceTier]) -> None:
        self.shape = shape
        self.devices = tuple(devices)
        self.start: TierStart | None = None
        """Where experts were put last."""
        self.early = NO_EARLY_FETCH
        """How experts are fetched early."""
        self._device_of = {block: device for device in devices for block in device.blocks}
        missing = [layer.block for layer in shape.layers if layer.block not in self._device_of]
        if missing:
            raise TierError(
                f"the experts of blocks {missing} did not come to a tier",
                "the model may keep them in tensors of another name: report its architecture",
            )

    def close(self) -> None:
        """The model is about to go; every other call raises :class:`ClosedError` from now on."""
        for device in self.devices:
            device.close()

    def place(self, start: TierStart) -> None:
        """Put experts where ``start`` says, before the first token or between two; the output does not change.

        Experts that stay are not copied again; counts and scores go on. Raises :class:`TierError` for a start that is
        not this model's or makes no sense, or without memory for its slots; every device has its experts where they
        were then. Where even that fails, :attr:`start` is ``None``, and nothing computes before another start is taken.
        """
        blocks = [layer.block for layer in start.layers]
        expected = [layer.block for layer in self.shape.layers]
        if blocks != expected:
            raise TierError(f"a start for blocks {blocks}, expected {expected}", "make it for this model")
        for layer, mine in zip(start.layers, self.shape.layers, strict=True):
            if len(layer.order) != mine.n_experts or len(layer.prior) != mine.n_experts:
                raise TierError(
                    f"block {mine.block}: {len(layer.order)} experts with {len(layer.prior)} priors, "
                    f"expected {mine.n_experts}",
                    "make it for this model",
                )
            if layer.top_k != mine.top_k:
                found = f"block {mine.block}: top_k {layer.top_k}"
                raise TierError(f"{found}, expected {mine.top_k}", "make it for this model")
        before = self.start
        resident = None if before is None else self.resident()
        self.start = None
        for index, device in enumerate(self.devices):
            try:
                _place_on(device, start)
            except TierError as error:
                if before is not None and resident is not None:
                    # A device that refuses keeps what it had, unless it failed halfway.
                    touched = [
                        one for one in self.devices[: index + 1] if one is not device or one.engine == _NO_ENGINE
                    ]
                    self._put_back(touched, keeping(before, resident), error)
                    self.start = before
                raise
        self.start = start

    replace = place

    @staticmethod
    def _put_back(devices: Sequence[DeviceTier], before: TierStart, why: TierError) -> None:
        for device in devices:
            try:
                _place_on(device, before)
            except TierError as error:
                raise TierError(
                    f"{why}; and the experts cannot be put back where they were: {error}", "load the model again"
                ) from why

    def set_early(self, early: EarlyFetch) -> None:
        """How experts are fetched early from the next step on; the output does not change.

        Without any, what was learned is forgotten. Raises :class:`TierError` without memory for it on a device.
        """
        for device in self.devices:
            device.set_early(early)
        self.early = early

    def guesses(self) -> dict[int, LayerGuesses]:
        """What has been learned for fetching early, by block; empty while nothing is fetched early."""
        return {block: layer for device in self.devices for block, layer in device.guesses().items()}

    def set_guesses(self, guesses: Mapping[int, LayerGuesses]) -> None:
        """Go on with what :meth:`guesses` gave, of the same model on as many devices.

        Raises :class:`TierError` for anything else; nothing has changed then, unless there are several devices.
        """
        unknown = sorted(guesses.keys() - self._device_of.keys())
        if unknown:
            raise TierError(f"guesses of blocks {unknown}, which have no experts here", "learn them anew")
        for device in self.devices:
            device.set_guesses({block: layer for block, layer in guesses.items() if block in device.blocks})

    def set_phase(self, phase: Phase) -> None:
        """What the tokens to come are."""
        for device in self.devices:
            device.set_phase(PHASES.index(phase))

    def counters(self, *, reset: bool = False) -> TierCounters:
        """Read the counters, which waits for what is being computed; ``reset`` starts them anew."""
        self._read()
        layers = self.shape.layers
        of_phase = {
            phase: [self._device_of[layer.block].counts(layer.block, number) for layer in layers]
            for number, phase in enumerate(PHASES)
        }
        if reset:
            self.reset_counts()

        def moved(count_of: Callable[[LayerCounts], int]) -> dict[Phase, int]:
            return {
                phase: sum(mine.expert_bytes * count_of(layer) for mine, layer in zip(layers, found, strict=True))
                for phase, found in of_phase.items()
            }

        return TierCounters(
            counts={phase: [layer.selections for layer in found] for phase, found in of_phase.items()},
            tokens={phase: [layer.tokens for layer in found] for phase, found in of_phase.items()},
            cold={phase: [layer.cold for layer in found] for phase, found in of_phase.items()},
            loads={phase: [layer.loads for layer in found] for phase, found in of_phase.items()},
            bytes_moved=moved(lambda layer: layer.loads),
            early={phase: [layer.early for layer in found] for phase, found in of_phase.items()},
            early_used={phase: [layer.early_used for layer in found] for phase, found in of_phase.items()},
            early_wasted={phase: [layer.early_wasted for layer in found] for phase, found in of_phase.items()},
            early_bytes=moved(lambda layer: layer.early),
            early_used_bytes=moved(lambda layer: layer.early_used),
            early_wasted_bytes=moved(lambda layer: layer.early_wasted),
            reuse=[layer.reuse for layer in of_phase["decode"]],
        )

    def reset_counts(self) -> None:
        """Start counting anew."""
        for device in self.devices:
            device.reset_counts()

    def resident(self) -> list[IntArray]:
        """Expert ids in slots now, in order, one array per MoE layer."""
        self._read()
        return [
            np.flatnonzero(self._device_of[layer.block].slots(layer.block) >= 0).astype(np.int64)
            for layer in self.shape.layers
        ]

    def recency(self) -> list[NDArray[np.uint32]]:
        """How recently the counted session used each expert: larger is later, 0 never. By MoE layer."""
        self._read()
        return [self._device_of[layer.block].recency(layer.block) for layer in self.shape.layers]

    def set_recency(self, stamps: Sequence[NDArray[np.uint32]]) -> None:
        """Count reuse distances of another session from now on, given its :meth:`recency`."""
        self._read()
        by_block = {layer.block: values for layer, values in zip(self.shape.layers, stamps, strict=True)}
        for device in self.devices:
            device.set_recency({block: values for block, values in by_block.items() if block in device.blocks})

    def memory(self) -> TierMemory:
        """Bytes of all devices."""
        parts = [device.memory() for device in self.devices]
        return TierMemory(
            slots=sum(part.slots for part in parts),
            scratch=sum(part.scratch for part in parts),
            tables=sum(part.tables for part in parts),
            host=sum(part.host for part in parts),
            host_pinned=sum(part.host_pinned for part in parts),
        )

    def check(self) -> None:
        """Raise :class:`TierError` with why a step failed, if one did. What it computed is of no use."""
        faults = [fault for device in self.devices if (fault := device.take_fault())]
        if faults:
            raise TierError(faults[0])

    def _read(self) -> None:
        for device in self.devices:
            device.read()


def _place_on(device: DeviceTier, start: TierStart) -> None:
    device.place([layer for layer in start.layers if layer.block in device.blocks], start.decay)
