"""What a simulation says, row by row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spark_runtime.simulator.study import Part

__all__ = ["Report", "Row", "TunedRow"]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one residency."""

    policy: str
    sharing: str | None
    """``layer``, ``placed`` or ``pool``; ``None`` where experts do not move in equal shares of slots."""
    profile: str
    residency: float
    slots: int
    """Of all layers."""
    cold_hit_rate: float
    """Mean over sessions."""
    low: float | None
    high: float | None
    """Ends of its 95% interval over sessions; ``None`` where there are no sessions."""
    cold_hits_per_token: float | None
    loads_per_token: float | None
    predicted_tok_s: float | None
    phase: str
    n_sessions: int
    slot_bytes: int | None = None
    decay: float | None = None
    prior_tokens: float | None = None
    early_experts: int | None = None
    """Experts that may be fetched early for a layer and token; ``None`` where none may."""
    early_threshold: float | None = None
    """The least guess that is worth a copy."""
    early_guesses: str | None = None
    """What guesses start from: ``none``, ``calibrated`` or ``given``."""
    early_per_selection: float | None = None
    """Experts fetched early, over all tokens; of them the used and the wasted ones, the rest still waits at the end."""
    early_used_per_selection: float | None = None
    early_wasted_per_selection: float | None = None
    early_wasted_bytes_per_token: float | None = None
    early_layers_per_token: tuple[float, ...] | None = None
    """Layers of a token for which one expert was fetched early, two, and so on."""
    imported: bool = False
    """From another tool's counts: never a held-out measurement."""
    parts: tuple[Part, ...] = ()

    @property
    def early(self) -> str | None:
        """How experts are fetched early, as it is typed."""
        return None if self.early_experts is None else f"{self.early_experts}:{self.early_threshold:g}"

    def as_json(self) -> dict[str, Any]:
        """The row's columns."""
        return {**asdict(self), "parts": [asdict(part) for part in self.parts]}


@dataclass(frozen=True, slots=True)
class TunedRow:
    """Numbers found for ``scored``."""

    sharing: str
    profile: str
    residency: float
    decay: float
    prior_tokens: float
    cold_hit_rate: float
    default_cold_hit_rate: float
    tried: int
    early_experts: int | None = None
    """Of the way of fetching early with the most predicted tokens a second, 0 for none; ``None``: not searched."""
    early_threshold: float | None = None
    predicted_tok_s: float | None = None
    """On the calibration sessions."""
    default_predicted_tok_s: float | None = None
    """As the runtime fetches early."""

    def as_json(self) -> dict[str, Any]:
        """The row's columns."""
        return asdict(self)


@dataclass(slots=True)
class Report:
    """Everything a simulation found."""

    rows: list[Row]
    tuned: list[TunedRow]
    notes: list[str]
    n_sessions: int = 0
    """Sessions that judged."""
    n_calibration: int = 0
