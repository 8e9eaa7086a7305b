"""The picture of a simulation: every curve has a look of its own, and the same rows give the same bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from spark_agent.errors import SparkError
from spark_agent.simulation.plots import _POLICIES, _PROFILES, _SHARING, _style, save_plot
from spark_agent.simulation.rows import Row
from spark_runtime.simulator.policies import POLICIES
from spark_runtime.simulator.study import PROFILES


def row(policy: str, sharing: str | None, profile: str, residency: float, **changes: Any) -> Row:
    rate = (1 - residency) / 2
    values: dict[str, Any] = {
        "slots": 8, "cold_hit_rate": rate, "low": rate * 0.9, "high": rate * 1.1, "cold_hits_per_token": rate,
        "loads_per_token": rate, "predicted_tok_s": None, "phase": "decode", "n_sessions": 3,
    }  # fmt: skip
    return Row(policy=policy, sharing=sharing, profile=profile, residency=residency, **(values | changes))


def test_every_curve_has_a_look_of_its_own() -> None:
    """Also without colours: shape, line and filling tell them apart, but for what cannot be in one picture."""
    assert {*POLICIES, "scored_tuned"} == set(_POLICIES)
    assert set(PROFILES) <= set(_PROFILES)
    looks = {
        (style["marker"], style["linestyle"], style["fillstyle"])
        for style in (_style(curve) for curve in itertools.product(_POLICIES, _SHARING, PROFILES))
    }
    # Slots that nothing moves through are of each layer as well.
    assert len(looks) == len(_POLICIES) * (len(_SHARING) - 1) * len(PROFILES)
    assert len({colour for colour, _ in _POLICIES.values()}) == len(_POLICIES)


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("speed", [None, 100.0])
@pytest.mark.parametrize("sizes", [None, 2**20, 2**33])
def test_the_same_rows_give_the_same_picture(tmp_path, suffix: str, speed: float | None, sizes: int | None) -> None:
    kinds = [("uniform", None, "none"), ("scored", "pool", "own"), ("lru", "placed", "mixed")]
    kinds += [("belady", "layer", "none"), ("oracle", None, "held-out")]
    rows = [
        row(*kind, share, predicted_tok_s=speed, slot_bytes=None if sizes is None else int(sizes * share))
        for kind in kinds
        for share in (0.3, 0.6)
    ]
    first, second = (tmp_path / f"{name}.{suffix}" for name in "ab")
    save_plot(first, rows)
    save_plot(second, rows)
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size > 10_000


def test_one_row_of_imported_counts(tmp_path) -> None:
    imported = row("oracle", None, "itself", 0.5, low=None, high=None, n_sessions=0, phase="unknown", imported=True)
    save_plot(tmp_path / "a.svg", [imported])
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


def test_a_folder_in_its_place(tmp_path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(SparkError, match="cannot write"):
        save_plot(tmp_path / "a.png", [row("lru", "layer", "none", 0.5)])
