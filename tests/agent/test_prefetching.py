"""Where fetching early is on when nobody says, and what is told of it."""

from __future__ import annotations

import datetime as dt

import pytest

from spark_agent import prefetching
from spark_agent.measured import Measured, measured_of
from spark_agent.prefetching import Paying, Prefetch, choose_prefetch, what_pays
from spark_runtime.simulator.cost import Machine
from spark_runtime.tier_plan import cards

TOKEN = Machine(token_s=0.01, miss_s=0.001)


def measured(gain: float | None) -> Measured:
    return Measured(TOKEN, None, dt.date(2026, 11, 30), prefetch_gain=gain)


@pytest.mark.parametrize(
    ("by_engine", "gain", "pays"),
    [
        (True, None, True),
        (True, 1.1, True),
        (True, 0.97, False),
        (False, None, False),
        (False, 1.1, True),
        (False, 1.01, False),
    ],
)
def test_what_was_measured_decides(
    monkeypatch: pytest.MonkeyPatch, by_engine: bool, gain: float | None, pays: bool
) -> None:
    monkeypatch.setattr(prefetching, "_by_engine", lambda: Paying(by_engine, "usual"))
    found = what_pays(measured(gain))
    assert found.pays == pays
    assert found.reason == "usual" if gain is None else "spark-agent bench measured" in found.reason


@pytest.mark.parametrize(
    ("link_bytes_per_s", "pays", "told"),
    [
        (25e9, True, "2.6 MiB in 108 us beside 170 us of computation"),
        (55e9, True, "2.6 MiB in 49 us beside 170 us of computation"),
        (6e9, False, "no expert fits beside a layer: 2.6 MiB in 450 us beside 170 us of computation"),
    ],
)
def test_one_is_fetched_where_it_fits_beside_a_layer(
    monkeypatch: pytest.MonkeyPatch, link_bytes_per_s: float, pays: bool, told: str
) -> None:
    monkeypatch.setattr(prefetching, "_by_engine", lambda: Paying(True, "usual"))
    machine = Machine(token_s=48 * 170e-6, miss_s=0.0, link_bytes_per_s=link_bytes_per_s, n_layers=48)
    found = Measured(machine, None, dt.date(2026, 11, 30), expert_bytes=2.7e6)
    early, choice = choose_prefetch(Prefetch.AUTO, found, tiered=True)
    assert early.experts == pays, "never more than one, however many would fit"
    assert choice == ("prefetch", "1 expert a layer" if pays else "off", told)
    assert choose_prefetch(Prefetch.ON, found, tiered=True)[0].experts == 1


def test_what_was_measured_outranks_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "_by_engine", lambda: Paying(True, "usual"))
    machine = Machine(token_s=0.01, miss_s=0.0, link_bytes_per_s=1e9, n_layers=10)
    found = Measured(machine, None, dt.date(2026, 11, 30), expert_bytes=2e6, prefetch_gain=1.1)
    assert found.link_budget is not None
    assert found.link_budget.experts == 0
    assert what_pays(found).pays


@pytest.mark.parametrize("missing", ["link", "layers", "bytes"])
def test_without_every_figure_there_is_no_budget(missing: str) -> None:
    machine = Machine(0.01, 0.0, None if missing == "link" else 1e9, n_layers=0 if missing == "layers" else 10)
    found = Measured(machine, None, dt.date(2026, 11, 30), expert_bytes=0.0 if missing == "bytes" else 1e6)
    assert found.link_budget is None


@pytest.mark.skipif(bool(cards()), reason="over the CPU")
def test_without_a_gpu_it_is_off_unless_asked_for() -> None:
    early, choice = choose_prefetch(Prefetch.AUTO, None, tiered=True)
    assert early.experts == 0
    assert choice.value == "off"
    assert "no GPU" in choice.reason
    early, choice = choose_prefetch(Prefetch.ON, None, tiered=True)
    assert early.experts == 1
    assert choice == ("prefetch", "1 expert a layer", "--prefetch on")


def test_with_everything_resident_there_is_nothing_to_fetch() -> None:
    early, choice = choose_prefetch(Prefetch.ON, None, tiered=False)
    assert early.experts == 0
    assert choice.reason == "every expert is resident"


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
