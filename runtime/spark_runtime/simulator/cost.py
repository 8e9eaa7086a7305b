"""From misses to tokens a second, with a machine's own figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Machine", "MeasuredRun"]

_TOLD_APART = 1.5
"""So many times as many misses as another run had: then the two say what one takes."""
_GUESSES_TRIED = 2001
"""Times that a guess may take, from none to as long as a layer."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One way of running a model that was measured."""

    decode_tok_s: float
    loads_per_token: float
    pageable_share: float = 0.0
    """Of the copies, from memory that is not locked."""
    early_layers: tuple[float, ...] | None = None
    """Layers of a token for which one expert was fetched early, two, and so on; ``None``: nothing was guessed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one model's tokens and an expert's copy take on one machine.

    A decoded token takes its time with every expert resident, what looking up slots adds in every layer, and for each
    expert that has to be copied first what a fetch takes and its bytes over the link. Copies of decode are not hidden:
    a layer cannot start before its experts are there. Of a prompt the next layer is fetched while this one computes.

    What is fetched early follows the copies that its layer waited for, one after the other, once the guess is made,
    and the next layer waits for all of it before it brings what else it needs. So there is one copy at a time on the
    link, and early copies cost what of the guess and of them is longer than a layer computes.
    """

    token_s: float
    """A decoded token with every expert resident."""
    miss_s: float
    """For each copy, whatever its size."""
    link_bytes_per_s: float | None = None
    """Of copies from host memory to slots; ``None`` where ``miss_s`` is the whole copy of this model's experts."""
    layer_s: float = 0.0
    """Added to every layer of a token by slots, without a miss: launches, and graphs that are cut."""
    n_layers: int = 0
    """MoE layers; 0 where ``layer_s`` is not known."""
    pageable_bytes_per_s: float | None = None
    """Of copies from memory that is not locked; ``None`` where nobody says."""
    prompt_token_s: float | None = None
    """A prompt's token with every expert resident, in batches of the size that is asked about."""
    guess_s: float = 0.0
    """What passes of a layer until its first early copy begins: guessing, deciding, a launch."""
    guess_token_s: float = 0.0
    """What guesses add to a token that nothing hides: where the processor makes them, every layer waits for them."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for figures that no machine has."""
        above = (self.token_s, self.link_bytes_per_s, self.pageable_bytes_per_s, self.prompt_token_s)
        from_none = (self.miss_s, self.layer_s, self.n_layers, self.guess_s, self.guess_token_s)
        if not all(value is None or 0 < value < math.inf for value in above) or not all(
            0 <= value < math.inf for value in from_none
        ):
            raise ValueError(f"{self}: times and rates, expected numbers above 0")

    def decode_tok_s(
        self,
        loads_per_token: float,
        expert_bytes: float = 0.0,
        pageable_share: float = 0.0,
        early_layers: Sequence[float] | None = None,
    ) -> float:
        """Tokens a second when so many experts are copied for each; ``expert_bytes`` is their mean size.

        ``pageable_share`` of the copies come from memory that is not locked. ``early_layers`` are the layers of a token
        for which one expert is fetched early besides, two, and so on; ``None``: nothing is guessed. Raises
        ``ValueError`` for a share of memory that is not locked where its rate is not known, and for early copies where
        the number of layers is not.
        """
        copy_s = self.miss_s + self._copy_s(expert_bytes, pageable_share)
        early_s = 0.0 if early_layers is None else self.guess_token_s + self._waits_s(copy_s, early_layers)
        return 1.0 / (self.token_s + self.n_layers * self.layer_s + loads_per_token * copy_s + early_s)

    def _waits_s(self, copy_s: float, early_layers: Sequence[float]) -> float:
        """What a token's layers wait for copies that were begun before their routers chose."""
        if not any(early_layers):
            return 0.0
        if not self.n_layers:
            raise ValueError("how many layers a token's time is of is not known, so nothing says what hides a copy")
        computed_s = self.token_s / self.n_layers
        return sum(
            layers * max(0.0, self.guess_s + experts * copy_s - computed_s)
            for experts, layers in enumerate(early_layers, start=1)
        )

    def prefill_tok_s(
        self, tokens_at_once: int, fetched: Sequence[float], expert_bytes: float, pageable_share: float = 0.0
    ) -> float:
        """Prompt tokens a second; ``fetched`` experts of each layer are copied one by one in every batch.

        The first layer waits for its own. Raises ``ValueError`` where neither the link nor a prompt's token is known,
        and as :meth:`decode_tok_s` for ``pageable_share``.
        """
        if self.prompt_token_s is None or self.link_bytes_per_s is None or not fetched:
            raise ValueError("a prompt's token with everything resident, or the link's rate, is not known")
        computed_s = tokens_at_once * self.prompt_token_s / len(fetched)
        copy_s = self.miss_s + self._copy_s(expert_bytes, pageable_share)
        fetches_s = [count * copy_s for count in fetched]
        following = [*fetches_s[1:], 0.0]
        return tokens_at_once / (fetches_s[0] + sum(max(computed_s, fetch_s) for fetch_s in following))

    def _copy_s(self, expert_bytes: float, pageable_share: float) -> float:
        """The bytes of one expert."""
        if not 0 <= pageable_share <= 1:
            raise ValueError(f"{pageable_share} of the copies from memory that is not locked, expected a share")
        copy_s = 0.0 if self.link_bytes_per_s is None else expert_bytes / self.link_bytes_per_s
        if pageable_share:
            if self.pageable_bytes_per_s is None or self.link_bytes_per_s is None:
                raise ValueError("the rate of memory that is not locked is not known")
            copy_s += pageable_share * expert_bytes * (1 / self.pageable_bytes_per_s - 1 / self.link_bytes_per_s)
        return copy_s

    @classmethod
    def fitted(
        cls,
        token_s: float,
        runs: Sequence[MeasuredRun],
        expert_bytes: float = 0.0,
        link_bytes_per_s: float | None = None,
        n_layers: int = 0,
        pageable_bytes_per_s: float | None = None,
        latency_s: float | None = None,
        *,
        host_guesses: bool = False,
    ) -> Machine:
        """The time of a miss, and of a layer's slots where ``n_layers`` is given, from measured runs by least squares.

        Runs that fetched early say only what guesses take: until a copy begins, or with ``host_guesses`` of a token.

        With the link's rate known, what is left of a miss is its launch. Runs that all missed about as often do not
        say what of their time was misses: there a launch takes the ``latency_s`` of the link, where it is known.
        Neither is ever below 0. Raises ``ValueError`` without a run that missed, and for one from memory that is not
        locked where its rate is not known.
        """
        early = [run for run in runs if run.early_layers is not None]
        runs = [run for run in runs if run.early_layers is None]
        machine = cls._fitted_misses(
            token_s, runs, expert_bytes, link_bytes_per_s, n_layers, pageable_bytes_per_s, latency_s
        )
        if not early or not n_layers:
            return machine
        if host_guesses:
            return replace(
                machine, guess_token_s=max(0.0, float(np.mean(_unexplained_s(machine, early, expert_bytes))))
            )
        # What is left does not fall as the guess grows, so the best of a fine grid is as good as any.
        tried = [
            replace(machine, guess_s=share * token_s / n_layers) for share in np.linspace(0.0, 1.0, _GUESSES_TRIED)
        ]
        return min(tried, key=lambda each: float((_unexplained_s(each, early, expert_bytes) ** 2).sum()))

    @classmethod
    def _fitted_misses(
        cls,
        token_s: float,
        runs: Sequence[MeasuredRun],
        expert_bytes: float,
        link_bytes_per_s: float | None,
        n_layers: int,
        pageable_bytes_per_s: float | None,
        latency_s: float | None,
    ) -> Machine:
        loads = np.array([run.loads_per_token for run in runs], dtype=np.float64)
        if not loads.any():
            raise ValueError("no measured run copied experts, so nothing says what a copy takes")
        link = cls(token_s, 0.0, link_bytes_per_s, pageable_bytes_per_s=pageable_bytes_per_s)
        copies_s = [0.0 if link_bytes_per_s is None else link._copy_s(expert_bytes, run.pageable_share) for run in runs]
        more = np.array([1.0 / run.decode_tok_s - token_s for run in runs]) - loads * np.array(copies_s)
        if latency_s is not None and n_layers and loads.max() < _TOLD_APART * loads.min():
            layer_s = max(0.0, float((more - loads * latency_s).mean()) / n_layers)
            return cls(token_s, latency_s, link_bytes_per_s, layer_s, n_layers, pageable_bytes_per_s)
        columns = [loads]
        if n_layers and len(set(loads.tolist())) > 1:
            columns.append(np.full(len(loads), float(n_layers)))
        miss_s, layer_s = _not_negative(np.stack(columns, axis=1), more)
        return cls(token_s, miss_s, link_bytes_per_s, layer_s, n_layers, pageable_bytes_per_s)


def _unexplained_s(machine: Machine, runs: Sequence[MeasuredRun], expert_bytes: float) -> np.ndarray:
    """What a token of each run took longer than predicted."""
    predicted = [
        machine.decode_tok_s(run.loads_per_token, expert_bytes, run.pageable_share, run.early_layers) for run in runs
    ]
    return np.array([1.0 / run.decode_tok_s for run in runs]) - 1.0 / np.array(predicted)


def _not_negative(features: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """The best of least squares over all subsets of one or two columns that are not negative."""
    best, best_error = (0.0, 0.0), float((target**2).sum())
    for kept in ([0], [1], [0, 1])[: 1 if features.shape[1] == 1 else 3]:
        solved = np.linalg.lstsq(features[:, kept], target, rcond=None)[0]
        error = float(((features[:, kept] @ solved - target) ** 2).sum())
        if (solved >= 0).all() and error < best_error:
            values = [0.0, 0.0]
            for column, value in zip(kept, solved.tolist(), strict=True):
                values[column] = value
            best, best_error = (values[0], values[1]), error
    return best
