"""Whether a running agent fetches experts early, and the trial that finds out.

The trial is on the computing thread, between two steps, so no output changes; what is told of it may be asked for by
any thread.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_agent.errors import SparkError
from spark_agent.prefetch_trials import Conditions, State, keep_trial, trial_of
from spark_agent.prefetching import HOST_FETCHES, PrefetchPlan, Use
from spark_agent.server.prefetch_trial import PrefetchTrial, TrialRules
from spark_runtime.early_fetch import NO_EARLY_FETCH
from spark_runtime.errors import TierError

if TYPE_CHECKING:
    from spark_agent.output import Output
    from spark_agent.paired_gain import GainInterval
    from spark_agent.server.running import Running
    from spark_agent.server.worker import Worker
    from spark_runtime.engine import Engine
    from spark_runtime.native_tier import LayerGuesses
    from spark_runtime.tier import Tier
    from spark_runtime.tier_start import TierStart

__all__ = ["PrefetchControl", "PrefetchState"]


@dataclass(frozen=True, slots=True)
class PrefetchState:
    """At one moment."""

    use: Use
    reason: str
    experts: int
    """Fetched early for a layer and token at most, at this moment: in a trial by turns 0."""
    pairs: int | None = None
    """Of blocks with and without that were compared; ``None`` where nothing was tried in this run."""
    most_pairs: int | None = None
    tokens: int | None = None
    """Decoded tokens that the trial took."""
    gain: GainInterval | None = None
    """Speed with over speed without, by the pairs; ``None`` for too few of them."""

    def as_json(self) -> dict[str, Any]:
        """For ``/spark/stats``."""
        trial = None
        if self.pairs is not None:
            gain = None if self.gain is None else self.gain._asdict()
            trial = {"pairs": self.pairs, "most_pairs": self.most_pairs, "tokens": self.tokens, "gain": gain}
        return {"use": self.use, "reason": self.reason, "experts": self.experts, "trial": trial}


@dataclass(slots=True)
class _Ongoing:
    """A trial while it goes on."""

    trial: PrefetchTrial
    tier: Tier
    conditions: Conditions
    start: TierStart | None
    """The placement that the present pair of blocks is decoded under."""


class PrefetchControl:
    """One model's fetching early."""

    def __init__(
        self,
        engine: Engine,
        plan: PrefetchPlan,
        output: Output,
        *,
        learned: bool = False,
        rules: TrialRules | None = None,
        today: Callable[[], dt.date] = lambda: dt.datetime.now(dt.UTC).date(),
    ) -> None:
        """``learned`` says whether the tier began with guesses that were kept. Call before anything is computed."""
        self._engine = engine
        self._early = plan.early
        self._output = output
        self._today = today
        self._told: tuple[Use, str] = plan.use, plan.reason
        self._guesses: dict[int, LayerGuesses] = {}
        self._trial: PrefetchTrial | None = None
        self._ongoing: _Ongoing | None = None
        tier = engine.tier
        if plan.use != "trial" or plan.conditions is None or tier is None:
            return
        if {device.engine for device in tier.devices} != {plan.conditions.engine}:
            # The plan expected the GPU to fetch, and it does not: memory that cannot be locked, for one.
            self._end(tier, "off", HOST_FETCHES)
            return
        gains, tokens = ((), 0) if plan.begun is None else (plan.begun.gains, plan.begun.tokens)
        self._trial = PrefetchTrial(gains, tokens, learned=learned, rules=rules)
        self._ongoing = _Ongoing(self._trial, tier, plan.conditions, tier.start)

    @property
    def state(self) -> PrefetchState:
        """What is done now; from any thread."""
        tier, trial = self._engine.tier, self._trial
        experts = 0 if tier is None else tier.early.experts
        use, reason = self._told
        if trial is None:
            return PrefetchState(use, reason, experts)
        return PrefetchState(
            use, reason, experts, len(trial.gains), trial.rules.looks[-1], trial.tokens, trial.interval
        )

    def listen(self, worker: Worker) -> None:
        """Hear of the worker's steps for as long as there is something to try; before it starts."""
        if self._ongoing is not None:
            worker.watch(self.stepped)

    def stepped(self, running: Running, in_prompt: bool) -> bool:
        """Hear of a step on the computing thread; ``False`` once the trial is over."""
        if (ongoing := self._ongoing) is None:
            return False
        trial, tier = ongoing.trial, ongoing.tier
        if tier.start is not ongoing.start:
            ongoing.start = tier.start
            trial.restart()
        if in_prompt or running.in_wait:
            # A token that waits for its grammar is computed in one step and chosen in another.
            trial.interrupted()
        else:
            trial.decoded(running.step_s)
        if trial.over:
            self._finish(ongoing)
        elif trial.early != bool(tier.early.experts):
            self._turn(tier, early=trial.early)
        return self._ongoing is not None

    def close(self) -> None:
        """After the last step: a trial that was cut short is kept, to be gone on with at the next start."""
        ongoing, self._ongoing = self._ongoing, None
        if ongoing is None:
            return
        if ongoing.trial.gains:
            self._keep(ongoing, "begun")
        if not ongoing.tier.early.experts:
            self._turn(ongoing.tier, early=True)  # so that what was learned can be kept, too

    def _finish(self, ongoing: _Ongoing) -> None:
        pays = ongoing.trial.pays
        reason = self._keep(ongoing, "undecided" if pays is None else "on" if pays else "off")
        self._end(ongoing.tier, "on" if pays else "off", reason)

    def _end(self, tier: Tier, use: Use, reason: str) -> None:
        self._ongoing, self._told = None, (use, reason)
        if bool(tier.early.experts) != (use == "on"):
            self._turn(tier, early=use == "on")
        self._guesses = {}
        told, why = self._told
        self._output.info(f"prefetch: {told}; {why}")

    def _turn(self, tier: Tier, *, early: bool) -> None:
        """Fetch early or not from the next token on. What was learned is set aside meanwhile."""
        try:
            if early:
                tier.set_early(self._early)
                tier.set_guesses(self._guesses)
                self._guesses = {}
            else:
                self._guesses = tier.guesses()
                tier.set_early(NO_EARLY_FETCH)
        except TierError as error:
            self._ongoing, self._told = None, ("off", f"it could not be changed: {error}")
            self._output.warning(f"experts are not fetched early any more: {error}")
            try:
                tier.set_early(NO_EARLY_FETCH)
                if tier.start is not None:
                    self._engine.place(tier.start)  # a device that failed in the middle has no slots until then
            except TierError as fault:
                # The next step says so to whom it concerns; whoever ends the agent must get on with it.
                self._output.warning(f"slots could not be filled again: {fault}")

    def _keep(self, ongoing: _Ongoing, state: State) -> str:
        """Keep what was found, and tell it."""
        gains, tokens = tuple(ongoing.trial.gains), ongoing.trial.tokens
        found = trial_of(ongoing.conditions, state, gains, tokens, self._today())
        try:
            keep_trial(ongoing.conditions, found)
        except SparkError as error:
            self._output.warning(f"the next start tries again whether fetching early pays: {error}")
        return found.reason
