"""Where fetching early is on when nobody says, and what is told of it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from spark_agent import prefetching
from spark_agent.measured import Measured, measured_of
from spark_agent.prefetch_trials import Conditions, State, keep_trial, trial_of
from spark_agent.prefetching import Prefetch, fetching_engine, plan_prefetch, what_pays
from spark_runtime.simulator.cost import Machine
from spark_runtime.tier_plan import cards

TOKEN = Machine(token_s=0.01, miss_s=0.001)


DAY = dt.date(2026, 11, 30)
HERE = Conditions("mf1-0", "here", "cuda", 0.6, 1, 0.3, "1")
GAINS = (1.05, 1.04, 1.06, 1.05, 1.07, 1.03, 1.05, 1.06)


def measured(gain: float | None, machine: Machine = TOKEN) -> Measured:
    return Measured(machine, None, DAY, expert_bytes=2.7e6, prefetch_gain=gain)


def machine(link_bytes_per_s: float) -> Machine:
    return Machine(token_s=48 * 170e-6, miss_s=0.0, link_bytes_per_s=link_bytes_per_s, n_layers=48)


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_ruled_out", lambda: None)


@pytest.fixture
def ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_ruled_out", lambda: "the host fetches")


@pytest.mark.parametrize(
    ("gain", "use"), [(None, "trial"), (1.1, "on"), (1.02, "on"), (1.01, "trial"), (0.99, "trial"), (0.97, "off")]
)
@pytest.mark.usefixtures("on_a_card")
def test_on_a_card_it_is_on_where_that_was_measured_to_pay(gain: float | None, use: str) -> None:
    found = what_pays(measured(gain))
    assert found.use == use
    assert ("spark-agent bench measured" in found.reason) == (gain is not None)


@pytest.mark.parametrize(("gain", "use"), [(None, "off"), (1.1, "on"), (1.01, "off"), (0.97, "off")])
@pytest.mark.usefixtures("ruled_out")
def test_where_no_copy_can_be_hidden_nothing_is_tried(gain: float | None, use: str) -> None:
    found = what_pays(measured(gain))
    assert found.use == use
    assert ("bench measured" in found.reason) if gain else found.reason == "the host fetches"
    assert what_pays(None, trial_of(HERE, "on", GAINS, 1200, DAY)) == ("off", "the host fetches")


@pytest.mark.parametrize("state", ["on", "off", "undecided"])
@pytest.mark.usefixtures("on_a_card")
def test_what_a_trial_found_holds_until_a_newer_benchmark(state: State) -> None:
    tried = trial_of(HERE, state, GAINS, 1200, DAY)
    use = "on" if state == "on" else "off"
    assert what_pays(None, tried) == what_pays(measured(None, machine(6e9)), tried) == (use, tried.reason)
    later = trial_of(HERE, state, GAINS, 1200, DAY + dt.timedelta(1))
    assert what_pays(measured(0.8), later) == what_pays(measured(1.2), later) == (use, later.reason)
    for earlier in (tried, trial_of(HERE, state, GAINS, 1200, DAY - dt.timedelta(1))):
        assert [what_pays(measured(gain), earlier).use for gain in (0.8, 1.2)] == ["off", "on"], "of one day, too"
        # A benchmark that tells no difference does not take back what a trial told.
        assert what_pays(measured(1.0), earlier) == (use, earlier.reason)


@pytest.mark.parametrize(
    ("link_bytes_per_s", "use", "told"),
    [
        (25e9, "trial", "2.6 MiB in 108 us beside 170 us of computation; serving will tell"),
        (55e9, "trial", "2.6 MiB in 49 us beside 170 us of computation; serving will tell"),
        (6e9, "off", "no expert fits beside a layer: 2.6 MiB in 450 us beside 170 us of computation"),
    ],
)
@pytest.mark.usefixtures("on_a_card")
def test_one_is_tried_where_it_fits_beside_a_layer(link_bytes_per_s: float, use: str, told: str) -> None:
    found = measured(None, machine(link_bytes_per_s))
    plan = plan_prefetch(Prefetch.AUTO, found, HERE, DAY)
    assert plan.early.experts == (use == "trial"), "never more than one, however many would fit"
    assert plan.choice.value == ("1 expert a layer, on trial" if use == "trial" else "off")
    assert plan.use == use
    assert plan.reason.startswith(told)
    asked = plan_prefetch(Prefetch.ON, found, HERE, DAY)
    assert (asked.use, asked.early.experts) == ("on", 1)
    assert asked.reason.startswith("--prefetch on; ")
    assert "beside 170 us of computation" in asked.reason
    assert plan_prefetch(Prefetch.OFF, found, HERE, DAY).choice == ("prefetch", "off", "--prefetch off")


@pytest.mark.usefixtures("on_a_card")
def test_what_was_measured_outranks_what_would_fit() -> None:
    found = measured(1.1, machine(6e9))
    assert found.link_budget is not None
    assert found.link_budget.experts == 0
    assert what_pays(found).use == "on"


@pytest.mark.usefixtures("on_a_card")
def test_a_trial_that_was_cut_short_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    fresh = plan_prefetch(Prefetch.AUTO, None, HERE, DAY)
    assert (fresh.use, fresh.begun) == ("trial", None)
    assert fresh.reason.startswith("nothing was measured here; serving will tell")
    begun = trial_of(HERE, "begun", GAINS[:3], 400, DAY)
    keep_trial(HERE, begun)
    plan = plan_prefetch(Prefetch.AUTO, None, HERE, DAY)
    assert (plan.use, plan.begun) == ("trial", begun)
    assert plan.reason.endswith("on 2026-11-30, 3 pairs of blocks so far")
    keep_trial(HERE, trial_of(HERE, "on", GAINS, 1200, DAY))
    plan = plan_prefetch(Prefetch.AUTO, None, HERE, DAY)
    assert (plan.use, plan.begun, plan.choice.value) == ("on", None, "1 expert a layer")
    assert "5.0% more tokens a second" in plan.choice.reason
    assert plan_prefetch(Prefetch.AUTO, None, HERE, DAY + dt.timedelta(31)).use == "trial"


@pytest.mark.parametrize("missing", ["link", "layers", "bytes"])
def test_without_every_figure_there_is_no_budget(missing: str) -> None:
    known = Machine(0.01, 0.0, None if missing == "link" else 1e9, n_layers=0 if missing == "layers" else 10)
    found = Measured(known, None, DAY, expert_bytes=0.0 if missing == "bytes" else 1e6)
    assert found.link_budget is None


@pytest.mark.skipif(bool(cards()), reason="what is said where there is no card")
def test_without_a_gpu_it_is_off_unless_asked_for() -> None:
    plan = plan_prefetch(Prefetch.AUTO, None, HERE, DAY)
    assert (plan.use, plan.early.experts, plan.choice.value) == ("off", 0, "off")
    assert "no GPU" in plan.choice.reason
    assert fetching_engine() == "host"
    plan = plan_prefetch(Prefetch.ON, None, HERE, DAY)
    assert plan.early.experts == 1
    assert plan.choice == ("prefetch", "1 expert a layer", "--prefetch on")


def test_with_everything_resident_there_is_nothing_to_fetch() -> None:
    plan = plan_prefetch(Prefetch.ON, None, None)
    assert plan.early.experts == 0
    assert plan.choice == ("prefetch", "off", "every expert is resident")


def test_a_kept_benchmark_says_what_it_gained() -> None:
    def row(config: str, tok_s: float, residency: float, ring: float | None = None) -> dict[str, object]:
        return {
            "config": config,
            "decode_tok_s": tok_s,
            "residency": residency,
            "ring": ring,
            "cold_hits_per_token": 2.0,
        }

    rows = [row("all-gpu", 100, 1.0)]
    for residency, gain in ((0.6, 1.05), (0.3, 1.15)):
        rows += [row("calibrated+ring", 50, residency, 0.5), row("calibrated+ring", 60, residency, 1.0)]
        rows.append(row("calibrated+prefetch", 60 * gain, residency, 1.0))
    assert measured_of({"rows": rows, "day": "2026-11-30"}).prefetch_gain == pytest.approx(1.1)
    assert measured_of({"rows": rows[:3], "day": "2026-11-30"}).prefetch_gain is None
