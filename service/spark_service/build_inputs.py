"""What a profile is built from, as it is stored now."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from spark_runtime.calibration.tally import Tally
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape
from spark_service.build_memory import Asked
from spark_service.builders import HeldOut, Inputs, Member
from spark_service.db.drift import load_states
from spark_service.db.live import live_parts
from spark_service.db.store import Store
from spark_service.db.tallies import Counted, TallyKey
from spark_service.executors import Executor
from spark_service.live import LiveEvaluation, evaluate_live
from spark_service.moved import held_out_since, held_out_until, since_days
from spark_service.tallies import Tallies

__all__ = ["BuildInputs"]


class BuildInputs:
    """Reads tallies, held-out sessions and measurements. May be called from any thread."""

    def __init__(self, store: Store, executor: Executor, *, min_sessions: int) -> None:
        self._store = store
        self._tallies = Tallies(store, executor)
        self._min_sessions = min_sessions

    def of(self, shape: ModelShape, source: ModelShape, asked: Asked) -> Inputs:
        """For a model's profile from the sessions of ``source``, the model itself or a sibling of it."""
        counted, since = self._counted(source, asked.phase)
        until = asked.until_day
        if until is not None:
            counted = {name: Counted(one.tally.until(until), one.number) for name, one in counted.items()}
        nothing = _no_sessions(shape)
        members = []
        for name, weight in asked.mix.members:
            own, day = counted.get(name, nothing), since.get(name)
            held_out: HeldOut = partial(self._tallies.held_out, TallyKey(asked.source, name, asked.phase), own.number)
            if day is not None:
                held_out = partial(held_out_since, day, held_out)
            if until is not None:
                held_out = partial(held_out_until, until, held_out)
            members.append(Member(name, weight, own.tally, held_out, day))
        others = {name: other.tally for name, other in counted.items() if name not in asked.mix.names}
        return Inputs(tuple(members), others, asked.window, self._live(shape, asked, since))

    def tally(self, shape: ModelShape, workload: str, phase: Phase) -> Tally:
        """The sessions of one workload that count now."""
        counted = self._counted(shape, phase)[0].get(workload)
        return counted.tally if counted is not None else _no_sessions(shape).tally

    def tallies(self, shape: ModelShape, phase: Phase) -> dict[str, Tally]:
        """All sessions by workload, whether or not traffic has changed since they came."""
        return {workload: counted.tally for workload, counted in self._tallies.of(shape, phase).items()}

    def _counted(self, shape: ModelShape, phase: Phase) -> tuple[dict[str, Counted], dict[str, int]]:
        """Tallies by workload of the sessions that count, and from which day on they do where traffic has changed."""
        counted = self._tallies.of(shape, phase)
        with self._store.reading() as cursor:
            states = {name: state for (_, name), state in load_states(cursor, shape.fingerprint).items()}
        since = since_days(states, {name: one.tally for name, one in counted.items()}, self._min_sessions)
        recent = {name: Counted(counted[name].tally.since(day), counted[name].number) for name, day in since.items()}
        return counted | recent, since

    def _live(self, shape: ModelShape, asked: Asked, since: Mapping[str, int]) -> LiveEvaluation:
        """What agents measured with this very file, of a workload alone: nobody can say it of a mix."""
        of_the_past = asked.until_day is not None
        if of_the_past or asked.phase != "decode" or len(asked.mix.names) > 1 or asked.source != shape.fingerprint:
            return LiveEvaluation()
        [name] = asked.mix.names
        days = [since[name]] if name in since else []
        if asked.window.days:
            days.append(asked.window.today - asked.window.days + 1)
        with self._store.reading() as cursor:
            parts = live_parts(cursor, shape.fingerprint, name)
        return evaluate_live(parts, name, shape.expert_bytes_total, first_day=max(days, default=None))


def _no_sessions(shape: ModelShape) -> Counted:
    return Counted(Tally(tuple(layer.n_experts for layer in shape.layers)), 0)
