"""Kept trials: found again under the conditions they hold for, and under no others; a file may hold anything."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_agent.errors import SparkError
from spark_agent.paths import prefetch_trials_dir
from spark_agent.prefetch_trials import Conditions, KeptTrial, State, find_trial, find_trials, keep_trial, trial_of

TODAY = dt.date(2026, 11, 30)
HERE = Conditions("mf1-0", "a card", "cuda", 0.6, 1, 0.3, "1.0")
GAINS = (1.05, 1.04, 1.06, 1.05, 1.07, 1.03, 1.05, 1.06)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def kept(conditions: Conditions = HERE, state: State = "on", day: dt.date = TODAY) -> KeptTrial:
    trial = trial_of(conditions, state, GAINS, 1200, day)
    keep_trial(conditions, trial)
    return trial


def test_what_was_kept_is_found_by_its_owner_alone() -> None:
    assert find_trial(HERE, TODAY) is None
    trial = kept()
    assert find_trial(HERE, TODAY) == trial
    [path] = prefetch_trials_dir().iterdir()
    assert path.stat().st_mode & 0o077 == 0
    assert trial.reason == (
        "tried with 60% of the experts in slots on 2026-11-30: 5.0% more tokens a second with it "
        "(99%: +3.0% to +7.0%, 8 pairs of blocks)"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "mf1-1"},
        {"machine": "another card"},
        {"engine": "host"},
        {"resident_share": 0.7},
        {"experts": 2},
        {"threshold": 0.5},
        {"agent_version": "1.1"},
    ],
)
def test_it_holds_under_no_other_conditions(change: dict[str, object]) -> None:
    kept()
    assert find_trial(HERE._replace(**change), TODAY) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("days", "holds"), [(0, True), (30, True), (31, False), (-1, True), (-2, False)])
def test_it_holds_for_a_month(days: int, holds: bool) -> None:
    trial = kept()
    assert (find_trial(HERE, TODAY + dt.timedelta(days)) == trial) == holds


def test_slots_that_differ_by_little_are_the_same_and_the_nearest_is_taken() -> None:
    first, second = kept(), kept(HERE._replace(resident_share=0.68), "off")
    assert find_trial(HERE._replace(resident_share=0.56), TODAY) == first
    assert find_trial(HERE._replace(resident_share=0.63), TODAY) == first
    assert find_trial(HERE._replace(resident_share=0.65), TODAY) == second
    # A new result takes the place of what held for the same.
    third = kept(HERE._replace(resident_share=0.62), "undecided")
    assert find_trials("mf1-0", "a card", "1.0", TODAY) == [third, second]
    assert find_trial(HERE, TODAY) == third


def test_no_more_are_kept_than_could_be_of_use() -> None:
    for number in range(40):
        kept(HERE._replace(threshold=float(number)))
    found = find_trials("mf1-0", "a card", "1.0", TODAY)
    assert [trial.threshold for trial in found] == [float(number) for number in range(39, 23, -1)]


@pytest.mark.parametrize("state", ["begun", "undecided"])
def test_what_it_says_where_it_is_not_sure(state: State) -> None:
    few = trial_of(HERE, state, (), 8192, TODAY)
    assert ("so far" in few.reason) == (state == "begun")
    assert ("too few" in few.reason) == (state == "undecided")
    some = trial_of(HERE, "undecided", GAINS[::-1], 1200, TODAY)
    assert some.reason.endswith("; not sure enough")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_holds_nothing_and_is_replaced(data: st.DataObject) -> None:
    trial = kept()
    [path] = prefetch_trials_dir().iterdir()
    value = json.loads(path.read_bytes())
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
    place = data.draw(st.sampled_from([value, value["trials"][0]]))
    place[data.draw(st.sampled_from(sorted(place)) | st.text())] = data.draw(junk)
    content = json.dumps(value).encode()
    path.write_bytes(data.draw(st.sampled_from([content, content[:-9], b"", b"\xff", b"[" * 100_000])))
    found = find_trial(HERE, TODAY)
    assert found is None or found.gains
    keep_trial(HERE, trial)
    assert find_trial(HERE, TODAY) == trial


def test_where_it_cannot_be_kept_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(SparkError, match="cannot keep the trial"):
        kept()
