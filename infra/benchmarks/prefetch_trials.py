"""How often a trial of fetching early is right, how soon, and what it costs a token: simulated decoding, no card.

Usage: prefetch_trials.py [--trials 300] [--effect 0 0.02 0.05 …] [--noise 0.05 0.2 …] [--out FILE]

A token takes what its conversation's length makes it take, times noise (of the standard deviation of its logarithm);
one in a hundred is disturbed by something else, 2 to 50 times as long; three conversations take turns, new prompts come
in the middle, and the machine is left alone now and then. ``--effect`` is how much faster fetching early makes it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator

from report import parser_of, report

from spark_agent.server.prefetch_trial import PrefetchTrial

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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--effect", type=float, nargs="+", default=[-0.1, 0.0, 0.01, 0.03, 0.05, 0.1])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.2, 0.4])
    arguments = parser.parse_args()
    rows = [row(effect, noise, arguments.trials) for noise in arguments.noise for effect in arguments.effect]
    report({"rows": rows, "cost_us_per_token": round(cost_us(), 2)}, arguments.out)


if __name__ == "__main__":
    main()
