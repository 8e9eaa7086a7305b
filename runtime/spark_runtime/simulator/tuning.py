"""Looking for the numbers of ``scored`` on the sessions that calibrate: many on a few of them, the best on all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.simulator.policies import Cache
from spark_runtime.simulator.study import Judgement, ProfileName, Study, TraceTooSmallError

__all__ = ["EARLY_WAYS", "Tuned", "TunedEarly", "tune", "tune_early"]

IntArray = NDArray[np.int64]
Numbers = tuple[float, float]
"""Decay and the prior's weight in tokens."""

_DECAYS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
_PRIOR_TOKENS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
EARLY_WAYS = (NO_EARLY_FETCH, *(EarlyFetch(n, at) for n in (1, 2, 3, 4) for at in (0.2, 0.3, 0.4, 0.5, 0.7)))
"""Ways of fetching early that are tried: more experts are waited for wherever a copy takes as long as a layer."""
_RUNGS = ((1 / 8, 6), (1 / 2, 2))
"""Share of the sessions that judge, and how many numbers go on from there; at last all of them judge."""
_WORSE = 2
"""Steps that get worse, after which a search goes no further that way."""
_FEWEST = 8
"""Sessions of a half that judge on any rung."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best numbers found for ``scored``, and what they gave where they were looked for."""

    decay: float
    prior_tokens: float
    cold_hit_rate: float
    default_cold_hit_rate: float
    """Of the numbers that the search began with, on the same sessions."""
    tried: int


@dataclass(frozen=True, slots=True)
class TunedEarly:
    """The fastest way of fetching early, and how fast it and the usual one were predicted to be where it was found."""

    early: EarlyFetch
    tok_s: float
    usual_tok_s: float
    """Of what the runtime does."""


def tune_early(
    study: Study, cache: Cache, slots: Sequence[int], profile: ProfileName, tok_s: Callable[[Judgement], float]
) -> TunedEarly:
    """Look for how many experts to fetch early, from which guess on, by predicted tokens a second.

    As :func:`tune` looks; the half that calibrates also teaches the guesses. Raises :class:`TraceTooSmallError`.
    """
    search, usual = _Search(study, cache, slots, profile), EarlyFetch()
    left, speeds = list(EARLY_WAYS), dict[EarlyFetch, float]()
    for share, kept in search.rungs:
        for early in left:
            judged = search.judged(share, replace(cache, early=early, early_from="calibrated"))
            speeds[early] = float(np.mean([tok_s(each) for each in judged]))
        ranked = sorted(left, key=lambda early: -speeds[early])
        left = list(dict.fromkeys([*ranked[:kept], usual]))
    # Of equals what the runtime does already.
    best = max(left, key=lambda early: (speeds[early], early == usual))
    return TunedEarly(best, speeds[best], speeds[usual])


def tune(study: Study, cache: Cache, slots: Sequence[int], profile: ProfileName = "own") -> Tuned:
    """Look for the decay and the prior's weight with the fewest cold hits, without the judging sessions.

    One half of the calibration sessions calibrates and the other judges, and the other way round. On a sample of those
    that judge, one number is searched while the other stays, until nothing gets better; the best go on to a larger
    sample and to all, where the numbers of ``cache`` are beaten or kept. Raises :class:`TraceTooSmallError`.
    """
    search = _Search(study, cache, slots, profile)
    usual = (cache.decay, cache.prior_tokens)
    rungs = search.rungs
    _descend(lambda numbers: search.rate(rungs[0][0], numbers), usual, search_prior=profile != "none")
    tried = list(search.rates)
    for (sample, kept), (following, _) in itertools.pairwise(rungs):
        ranked = sorted({numbers for _, numbers in tried}, key=lambda numbers: search.rate(sample, numbers))
        for numbers in {*ranked[:kept], usual}:
            search.rate(following, numbers)
        tried = [(size, numbers) for size, numbers in search.rates if size == following]
    whole = rungs[-1][0]
    best = min((numbers for _, numbers in tried), key=lambda numbers: (search.rate(whole, numbers), numbers != usual))
    rate, usual_rate = search.rate(whole, best), search.rate(whole, usual)
    return Tuned(*best, rate, usual_rate, len({numbers for _, numbers in search.rates}))


class _Search:
    """Cold-hit rates by how large a sample judges."""

    def __init__(self, study: Study, cache: Cache, slots: Sequence[int], profile: ProfileName) -> None:
        self._study, self._cache, self._slots, self._profile = study, cache, slots, profile
        workloads = [study.workloads[session] for session in study.calibrating]
        self._halves = _halves(study.calibrating, workloads)
        self.rates: dict[tuple[float, Numbers], float] = {}

    @property
    def rungs(self) -> list[tuple[float, int]]:
        """Shares of the sessions with how many numbers go on, from the smallest sample that says anything to all."""
        fewest = min(len(half) for half in self._halves)
        return [*((share, kept) for share, kept in _RUNGS if share * fewest >= _FEWEST), (1.0, 1)]

    def rate(self, share: float, numbers: Numbers) -> float:
        """Mean of both halves, judged by this share of their sessions, with profiles of the whole other half."""
        key = (share, numbers)
        if key not in self.rates:
            tried = replace(self._cache, decay=numbers[0], prior_tokens=numbers[1])
            self.rates[key] = float(np.mean([each.cold_hit_rate.mean for each in self.judged(share, tried)]))
        return self.rates[key]

    def judged(self, share: float, cache: Cache) -> list[Judgement]:
        """Of so many of each half's sessions, with what the whole other half says."""
        return [
            self._study.judge_among(
                cache, self._slots, self._profile, np.sort(judging[: round(share * len(judging))]), calibrating
            )
            for judging, calibrating in (self._halves, self._halves[::-1])
        ]


def _halves(sessions: IntArray, workloads: Sequence[str]) -> tuple[IntArray, IntArray]:
    """Two halves with as many sessions of each workload, up to one; workloads take turns in each."""
    of: dict[str, list[int]] = {}
    for session, workload in zip(sessions.tolist(), workloads, strict=True):
        of.setdefault(workload, []).append(session)
    known = [found for found in of.values() if len(found) > 1]
    if not known:
        raise TraceTooSmallError(f"{len(sessions)} sessions to tune on, expected at least 2 of one workload")
    first, second = (
        np.array(list(_by_turns([found[start::2] for found in known])), dtype=np.int64) for start in (0, 1)
    )
    return first, second


def _by_turns(lists: Sequence[Sequence[int]]) -> Iterator[int]:
    """So that any beginning of it holds as much of every workload as the whole."""
    places = [((number + 0.5) / len(found), found[number]) for found in lists for number in range(len(found))]
    return (session for _, session in sorted(places))


def _descend(rate: Callable[[Numbers], float], start: Numbers, *, search_prior: bool) -> Numbers:
    best = start
    while True:
        before = best
        best = _walk(rate, [(tried, before[1]) for tried in sorted({*_DECAYS, before[0]})], best)
        if search_prior:
            best = _walk(rate, [(best[0], tried) for tried in sorted({*_PRIOR_TOKENS, best[1]})], best)
        if rate(best) >= rate(before):
            return before


def _walk(rate: Callable[[Numbers], float], line: Sequence[Numbers], start: Numbers) -> Numbers:
    """The best numbers on the ways up and down a line from the start, each of which ends where it got worse twice."""
    best, place = start, line.index(start)
    for way in (line[place + 1 :], line[:place][::-1]):
        worse, last = 0, start
        for numbers in way:
            worse = worse + 1 if rate(numbers) > rate(last) else 0
            best, last = min(best, numbers, key=rate), numbers
            if worse == _WORSE:
                break
    return best
