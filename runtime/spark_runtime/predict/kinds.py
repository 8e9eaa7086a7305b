"""Predictors by name: ``temporal``, ``ridge:layers2+average``, ``mlp:hidden`` and so on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from spark_runtime.predict.losses import LOSSES, LossName

__all__ = ["COUNTED", "FEATURES", "TRAINED", "PredictorKind", "default_kinds", "parse_kind"]

Learner = Literal["frequency", "temporal", "moving-average", "naive-bayes", "ridge", "linear", "mlp"]
Feature = Literal["layers1", "layers2", "average", "hidden", "router"]
COUNTED: tuple[Learner, ...] = ("frequency", "temporal", "moving-average", "naive-bayes")
"""What needs no features beside selections."""
TRAINED: tuple[Learner, ...] = ("linear", "mlp")
"""What is trained for a loss, step by step."""
FEATURES: tuple[Feature, ...] = get_args(Feature)
"""The selections of the one or two layers before, the moving average of the layer's own; the hidden state that the
layer starts from, or (the ceiling) what its router reads."""
_EXCLUSIVE: tuple[tuple[Feature, Feature], ...] = (("layers1", "layers2"), ("hidden", "router"))


@dataclass(frozen=True, slots=True)
class PredictorKind:
    """A learner and what it reads."""

    learner: Learner
    features: tuple[Feature, ...] = ()
    loss: LossName | None = None
    """Of what is trained for one."""

    @property
    def name(self) -> str:
        """As it is typed."""
        return f"{self.learner}:{'+'.join(self.features)}" if self.features else self.learner

    @property
    def loss_name(self) -> str | None:
        """What it is trained for; ``None`` where counts are all there is."""
        return "squared" if self.learner == "ridge" else self.loss

    @property
    def n_earlier(self) -> int:
        """Earlier layers that it reads."""
        return 2 if "layers2" in self.features else int("layers1" in self.features or self.learner == "naive-bayes")

    @property
    def hidden(self) -> Literal["input", "router"] | None:
        """The hidden states that it reads."""
        return "input" if "hidden" in self.features else "router" if "router" in self.features else None


def parse_kind(name: str, losses: Sequence[LossName] = LOSSES) -> list[PredictorKind]:
    """The predictor of a name; of what is trained for a loss, one for each of them.

    Raises ``ValueError``, which says what is wrong with the name.
    """
    learner, _, rest = name.partition(":")
    if learner not in get_args(Learner):
        raise ValueError(f"predictor {name!r}, expected one of {', '.join(get_args(Learner))}")
    known = cast(Learner, learner)
    asked = [part for part in rest.split("+") if part]
    if known in COUNTED:
        if asked:
            raise ValueError(f"predictor {name!r}: {learner} reads selections alone, found {rest!r}")
        return [PredictorKind(known)]
    wrong = [feature for feature in asked if feature not in FEATURES]
    if wrong or not asked:
        found = wrong[0] if wrong else "nothing"
        raise ValueError(f"predictor {name!r} reads {found!r}, expected {', '.join(FEATURES)}, joined by +")
    for pair in _EXCLUSIVE:
        if set(pair) <= set(asked):
            raise ValueError(f"predictor {name!r} reads {pair[0]} and {pair[1]}, expected one of them")
    features = tuple(feature for feature in FEATURES if feature in asked)
    if known == "ridge":
        return [PredictorKind(known, features)]
    return [PredictorKind(known, features, loss) for loss in losses]


def default_kinds(hidden: Collection[str], losses: Sequence[LossName]) -> list[PredictorKind]:
    """All that a trace with these hidden states allows."""
    names = [*COUNTED, "ridge:layers1", "ridge:layers2", "ridge:layers1+average", "ridge:layers2+average"]
    if "input" in hidden:
        names += ["ridge:hidden", "ridge:hidden+layers2", "ridge:hidden+layers2+average"]
        names += ["linear:hidden", "mlp:hidden", "mlp:hidden+layers2+average"]
    if "router" in hidden:
        names += ["ridge:router", "linear:router", "mlp:router"]
    return [kind for name in names for kind in parse_kind(name, losses)]
