"""Benchmarks of this machine, kept by ``spark-agent bench`` for plans to predict from: the newest of each model."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.paths import benchmarks_dir
from spark_agent.simulation.machines import PREFETCHED, RING, fitted_machine
from spark_runtime.early_fetch import LinkBudget
from spark_runtime.simulator.cost import Machine

__all__ = [
    "PREFETCHED",
    "RING",
    "EarlyEffect",
    "Measured",
    "find_benchmark",
    "keep_benchmark",
    "machine_name",
    "measured_of",
]


@dataclass(frozen=True, slots=True)
class EarlyEffect:
    """What one expert fetched early for a layer and token did to cold hits."""

    saved_share: float
    """Of the cold hits; below 0 where there were more."""
    fetched_per_cold_hit: float
    """Experts fetched early for each cold hit that there would have been."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model on one machine."""

    machine: Machine
    offload_s: float | None
    """What a token takes longer with all experts left to the CPU, as llama.cpp offloads; ``None``: not measured."""
    day: dt.date
    expert_bytes: float = 0.0
    """Mean bytes of a selected expert; 0 where a miss was measured as a whole."""
    prefetch_gain: float | None = None
    """Tokens a second with experts fetched early over those without, mean of residencies; ``None``: not measured."""
    early: EarlyEffect | None = None
    """``None`` where nothing was fetched early, or nothing says beside how many layers."""

    @property
    def link_budget(self) -> LinkBudget | None:
        """What is copied for nothing beside a layer; ``None`` where the link or the number of layers was not measured.

        A layer computes for its share of a token with every expert resident, and what lies between it and the next one
        is in that share.
        """
        machine = self.machine
        if not (machine.link_bytes_per_s and machine.n_layers and self.expert_bytes):
            return None
        return LinkBudget(self.expert_bytes, machine.link_bytes_per_s, machine.token_s / machine.n_layers)

    def tiered_tok_s(
        self, cold_hits_per_token: float, pageable_share: float = 0.0, *, prefetched: bool = False
    ) -> float | None:
        """Decoded tokens a second with so many cold hits, a share of them from memory that is not locked.

        They are those without fetching early; ``prefetched`` saves the share of them that it was measured to save.
        Without any, every expert is resident and there are no slots. ``None`` where nothing says what those take.
        """
        if not cold_hits_per_token:
            return 1.0 / self.machine.token_s
        if pageable_share and self.machine.pageable_bytes_per_s is None:
            return None
        if not prefetched or self.early is None:
            return self.machine.decode_tok_s(cold_hits_per_token, self.expert_bytes, pageable_share)
        left = cold_hits_per_token * (1.0 - self.early.saved_share)
        # At most one for each layer but the first.
        fetched = min(cold_hits_per_token * self.early.fetched_per_cold_hit, self.machine.n_layers - 1.0)
        return self.machine.decode_tok_s(left, self.expert_bytes, pageable_share, (fetched,))

    def offload_tok_s(self, share_on_cpu: float) -> float | None:
        """The same with such a share of the experts' bytes left to the CPU, between what was measured."""
        return None if self.offload_s is None else 1.0 / (self.machine.token_s + share_on_cpu * self.offload_s)


def machine_name(n_devices: int = 0) -> str:
    """What computes: this machine's GPUs, or its processor without any; 0 devices are all."""
    from spark_runtime.buffer_sizes import HOST
    from spark_runtime.devices import registered_devices

    devices = registered_devices()
    cards = [device.description for device in devices if device.is_card]
    return ", ".join(cards[: n_devices or None] or [each.description for each in devices if each.buffers == HOST])


def keep_benchmark(value: Mapping[str, Any], machine: str) -> Path:
    """Keep what ``spark-agent bench --json`` says in place of the last; raise :class:`SparkError` if it cannot be."""
    path = _path(str(value["fingerprint"]), machine)
    kept = {**value, "machine_name": machine, "day": dt.datetime.now(dt.UTC).date().isoformat()}
    try:
        with replacing(path) as file:
            file.write(json.dumps(kept).encode())
    except OSError as error:
        raise SparkError(
            f"cannot keep the benchmark in {path}: {error.strerror}", "check the folder's space"
        ) from error
    return path


def find_benchmark(fingerprint: str, machine: str) -> Measured | None:
    """What was measured of a model on this machine; ``None`` where nothing was, or nothing that can be used."""
    try:
        value = json.loads(_path(fingerprint, machine).read_bytes())
        return measured_of(value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SparkError):
        # Never measured; or by another version: it can be measured again.
        return None


def measured_of(value: Mapping[str, Any]) -> Measured:
    """Figures of a kept benchmark; raise ``ValueError``, ``KeyError`` or ``TypeError`` where its rows tell none."""
    rows = [row for row in value["rows"] if row.get("decode_tok_s")]
    resident = next((float(row["decode_tok_s"]) for row in rows if row["config"] == "all-gpu"), None)
    if resident is None:
        raise ValueError("no row with every expert resident")
    token_s = 1.0 / resident
    offload = [
        (1.0 - float(row["residency"]), 1.0 / float(row["decode_tok_s"]) - token_s)
        for row in rows
        if row["config"] == "llama-offload"
    ]
    weight = sum(share**2 for share, _ in offload)
    offload_s = max(0.0, sum(share * more for share, more in offload) / weight) if weight else None
    paired = [
        (row, other)
        for row in rows
        for other in rows
        if row["config"] == PREFETCHED
        and other["config"] == RING
        and (other["residency"], other["ring"]) == (row["residency"], 1.0)
    ]
    gains = [float(row["decode_tok_s"]) / float(other["decode_tok_s"]) for row, other in paired]
    gain = sum(gains) / len(gains) if gains else None
    machine = fitted_machine(value, token_s)
    expert_bytes = 0.0 if machine.link_bytes_per_s is None else float(value["expert_bytes"])
    early = _early_effect(paired) if machine.n_layers > 1 else None
    return Measured(machine, offload_s, dt.date.fromisoformat(value["day"]), expert_bytes, gain, early)


def _early_effect(paired: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> EarlyEffect | None:
    """Of rows with experts fetched early, each with the one that differs in nothing else."""
    counted = [
        (float(row["cold_hits_per_token"]), float(row["early_per_token"]), float(other["cold_hits_per_token"]))
        for row, other in paired
        if row.get("early_per_token") is not None and other.get("cold_hits_per_token")
    ]
    if not counted:
        return None
    cold, early, without = (sum(each) for each in zip(*counted, strict=True))
    return EarlyEffect(1.0 - cold / without, early / without)


def _path(fingerprint: str, machine: str) -> Path:
    return benchmarks_dir() / f"{fingerprint}-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
