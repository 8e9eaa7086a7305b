"""How often a trial of fetching early is right, how soon, and what it costs a token: simulated decoding, no card.

Usage: prefetch_trials.py [--trials 300] [--effect 0 0.02 0.05 …] [--noise 0.05 0.2 …] [--model MODEL] [--out FILE]

A token takes what its conversation's length makes it take, times noise (of the standard deviation of its logarithm);
one in a hundred is disturbed by something else, 2 to 50 times as long; three conversations take turns, new prompts come
in the middle, and the machine is left alone now and then. ``--effect`` is how much faster fetching early makes it.
What a change of the way takes between two tokens is measured on this machine's engine (``--model``: else the demo's).
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from report import parser_of, report

from spark_agent.server.prefetch_trial import PrefetchTrial
from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.tier_start import uniform_start

CONVERSATIONS, LONGEST = 3, 4000


class Traffic:
    """What a trial hears while conversations are decoded by turns; time is that of its own clock."""

    def __init__(self, seed: int, effect: float, noise: float) -> None:
        self.now_s = 0.0
        self.trial = PrefetchTrial(clock=lambda: self.now_s)
        self._chance = random.Random(seed)
        self._effect, self._noise = effect, noise
        self._lengths = [self._chance.uniform(0, LONGEST) for _ in range(CONVERSATIONS)]
        self._turn = 0

    def run(self) -> PrefetchTrial:
        """Decode to the trial's end."""
        while not self.trial.over:
            self._change()
            seconds = self._token_s()
            self.now_s += seconds
            self.trial.decoded(seconds)
        return self.trial

    def _change(self) -> None:
        if self._chance.random() < 0.02:
            self._turn = self._chance.randrange(CONVERSATIONS)
            if self._chance.random() < 0.3:
                self._lengths[self._turn] = self._chance.uniform(0, LONGEST)
                self.trial.interrupted()
            if self._chance.random() < 0.2:
                self.now_s += self._chance.expovariate(0.1)

    def _token_s(self) -> float:
        self._lengths[self._turn] += 1
        seconds = (0.008 + 2e-7 * self._lengths[self._turn]) * math.exp(self._chance.gauss(0, self._noise))
        if self._chance.random() < 0.01:
            seconds *= self._chance.uniform(2, 50)
        return seconds / (1 + self._effect) if self.trial.early else seconds


def trials(effect: float, noise: float, count: int) -> Iterator[PrefetchTrial]:
    """Ended ones, the same ones every time."""
    return (Traffic(seed, effect, noise).run() for seed in range(count))


def row(effect: float, noise: float, count: int) -> dict[str, float]:
    """What became of so many trials."""
    found = list(trials(effect, noise, count))
    tokens = sorted(trial.tokens for trial in found)
    return {
        "effect": effect,
        "noise": noise,
        "trials": count,
        "on": sum(trial.early for trial in found) / count,
        "undecided": sum(trial.pays is None for trial in found) / count,
        "tokens_median": statistics.median(tokens),
        "tokens_most": tokens[-1],
    }


def cost_us() -> float:
    """What hearing of one token takes, mean of a trial's, microseconds."""
    took_s, tokens = 0.0, 0
    for _ in range(5):
        trial = PrefetchTrial()
        began = time.perf_counter()
        while not trial.over:
            trial.decoded(0.008)
        took_s += time.perf_counter() - began
        tokens += trial.tokens
    return took_s / tokens * 1e6


def changes_ms(path: Path, residency: float = 0.6, rounds: int = 20) -> dict[str, float]:
    """What a change takes, with all that was learned set aside or put back, and the two tokens after it; medians."""
    shape = read_model_shape(path)
    early = EarlyFetch()
    options = EngineOptions(n_ctx=1024, n_outputs_max=1, tier=uniform_start(shape, residency), early=early)
    times: dict[str, list[float]] = {}

    def timed(name: str, what: Callable[[], object]) -> None:
        began = time.perf_counter()
        what()
        times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    with Engine.load(path, options) as engine:
        tier = engine.tier
        assert tier is not None
        chance = random.Random(1)

        def decode() -> None:
            engine.feed([chance.randrange(engine.n_vocab)], "decode")
            engine.logits()

        for _ in range(64):
            decode()
        for _ in range(rounds):
            learned = tier.guesses()
            timed("off", lambda: (tier.guesses(), tier.set_early(NO_EARLY_FETCH)))
            for name in ("first_token_off", "second_token_off", *["token_off"] * 8):
                timed(name, decode)
            timed("on", lambda learned=learned: (tier.set_early(early), tier.set_guesses(learned)))  # type: ignore[misc]
            for name in ("first_token_on", "second_token_on", *["token_on"] * 8):
                timed(name, decode)
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--effect", type=float, nargs="+", default=[-0.1, 0.0, 0.01, 0.03, 0.05, 0.1])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.2, 0.4])
    parser.add_argument("--model", type=Path, default=demo_model_path())
    arguments = parser.parse_args()
    rows = [row(effect, noise, arguments.trials) for noise in arguments.noise for effect in arguments.effect]
    costs = {"cost_us_per_token": round(cost_us(), 2), "changes_ms": changes_ms(arguments.model)}
    report({"rows": rows, **costs}, arguments.out)


if __name__ == "__main__":
    main()
