"""``spark simulate --early``: what the runtime's own slots and guesses did, from every start of the guesses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_agent.guesses import guesses_path, write_guesses
from spark_agent.traces import SessionTrace, TraceFolder
from spark_runtime.early_fetch import EarlyFetch
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.native_tier import LayerGuesses
from spark_runtime.placement import frequencies, layer_sizes, residency_budget, uniform_slots
from spark_runtime.session_counts import SessionCounts
from spark_runtime.slot_pool import SlotPool
from spark_runtime.tier_start import profile_start, slots_start
from spark_schemas.histogram import HistogramUpload
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

N_EXPERTS, TOP_K = 16, 2
SCORED = ("--policy", "scored", "--sharing", "pool", "--residency", 0.4)
COUNTS = ("cold", "early", "early_used", "early_wasted")


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    demo = read_model_shape(demo_model_path())
    update = {"n_experts": N_EXPERTS, "top_k": TOP_K, "expert_bytes": 3000}
    layers = tuple(layer.model_copy(update=update) for layer in demo.layers)
    return demo.model_copy(update={"layers": layers})


@pytest.fixture(scope="session")
def sessions(shape: ModelShape) -> list[SessionTrace]:
    """Of two workloads on both sides of the split; a layer's selection tells the next one's."""
    model, random = np.random.default_rng(1), np.random.default_rng(2)
    renamed = np.stack([model.permutation(N_EXPERTS) for _ in shape.layers])
    found = []
    for number in range(16):
        topic = random.gumbel(size=(120, N_EXPERTS)) + model.gumbel(size=N_EXPERTS)
        ids = np.argsort(-topic[:, renamed], axis=2)[:, :, :TOP_K]
        name = "code" if number % 2 else "chat"
        found.append(SessionTrace(f"{number:064x}", name, list(ids.swapaxes(0, 1)), np.arange(120) >= 20))
    return found


@pytest.fixture
def folder(tmp_path: Path, shape: ModelShape, sessions: list[SessionTrace]) -> Path:
    with TraceFolder(tmp_path / "traces", shape) as opened:
        for item in sessions:
            opened.add(item)
    return tmp_path / "traces"


def side(sessions: Sequence[SessionTrace], name: str) -> list[SessionTrace]:
    return [item for item in sessions if split_of(item.session_hash) == name]


def decoded(item: SessionTrace) -> np.ndarray:
    """``[token, layer, k]``"""
    return np.stack([ids[item.decode] for ids in item.ids], axis=1)


def taught(shape: ModelShape, sessions: Sequence[SessionTrace]) -> list[np.ndarray]:
    pool = SlotPool(slots_start(shape, [N_EXPERTS] * len(shape.layers)))
    pool.set_early(EarlyFetch(1, float("inf")))
    for item in side(sessions, "calibration"):
        pool.decode(decoded(item))
    return [pool.guesses(layer) for layer in range(pool.n_layers)]


def by_the_runtime(
    shape: ModelShape,
    sessions: Sequence[SessionTrace],
    early: EarlyFetch,
    weights: Sequence[np.ndarray] | None,
    *,
    profiled: bool,
) -> dict[str, float]:
    """Counts for each selection, and the rate as the mean over sessions."""
    sizes = layer_sizes(shape)
    slots = uniform_slots(sizes, residency_budget(sizes, 0.4))
    start = slots_start(shape, slots)
    if profiled:
        calibrating = [decoded(item) for item in side(sessions, "calibration")]
        counts = [
            [np.bincount(ids[:, layer].ravel(), minlength=N_EXPERTS) for layer in range(len(sizes))]
            for ids in calibrating
        ]
        start = profile_start(shape, frequencies(counts, [len(ids) for ids in calibrating]), slots)
    totals, rates, n_selections = dict.fromkeys(COUNTS, 0), [], 0
    for item in side(sessions, "held_out"):
        pool = SlotPool(start)
        pool.set_early(early)
        for layer, values in enumerate(weights or ()):
            pool.set_guesses(layer, values)
        pool.decode(decoded(item))
        counted = [pool.counts(layer, "decode") for layer in range(pool.n_layers)]
        for name in COUNTS:
            totals[name] += sum(getattr(count, name) for count in counted)
        rates.append(sum(count.cold for count in counted) / decoded(item).size)
        n_selections += decoded(item).size
    return {"rate": float(np.mean(rates)), **{name: totals[name] / n_selections for name in COUNTS}}


def row_of(rows: Sequence[dict[str, Any]], early: EarlyFetch | None) -> dict[str, Any]:
    wanted = (None, None) if early is None else (early.experts, early.threshold)
    [found] = [row for row in rows if (row["early_experts"], row["early_threshold"]) == wanted]
    return found


@pytest.mark.parametrize("start", ["none", "calibrated", "kept", "file"])
def test_it_is_what_the_runtime_does(spark_cli, tmp_path, folder, shape, sessions, start) -> None:
    weights = None if start == "none" else taught(shape, sessions)
    given = start
    if start in {"kept", "file"}:
        path = guesses_path(shape.fingerprint) if start == "kept" else tmp_path / "some.guesses"
        assert weights is not None
        blocks = [layer.block for layer in shape.layers]
        kept = {
            block: LayerGuesses(tuple(blocks[max(0, place - 2) : place][::-1]), values)
            for place, (block, values) in enumerate(zip(blocks, weights, strict=True))
            if place
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_guesses(path, shape.fingerprint, kept)
        given = "kept" if start == "kept" else str(path)
    ways = [EarlyFetch(1, 0.3), EarlyFetch(3, 0.05)]
    arguments = (*SCORED, "--profile", "mixed", "--guesses", given, "--early", "1", "--early", "3:0.05", "--json")
    rows = spark_cli("simulate", folder, *arguments).json["rows"]
    assert len(rows) == 3
    for early in ways:
        row, expected = row_of(rows, early), by_the_runtime(shape, sessions, early, weights, profiled=True)
        assert row["cold_hit_rate"] == pytest.approx(expected["rate"])
        assert row["cold_hits_per_token"] == pytest.approx(expected["cold"] * TOP_K * len(shape.layers))
        assert row["early_per_selection"] == pytest.approx(expected["early"])
        assert row["early_used_per_selection"] == pytest.approx(expected["early_used"])
        assert row["early_wasted_per_selection"] == pytest.approx(expected["early_wasted"])
        per_token = expected["early_wasted"] * TOP_K * len(shape.layers)
        assert row["early_wasted_bytes_per_token"] == pytest.approx(per_token * 3000)
        fetched = sum(experts * layers for experts, layers in enumerate(row["early_layers_per_token"], start=1))
        assert fetched == pytest.approx(expected["early"] * TOP_K * len(shape.layers))
        assert row["early_guesses"] == (start if start in {"none", "calibrated"} else "given")
    off = row_of(rows, None)
    assert off["early_per_selection"] is None
    assert row_of(rows, ways[1])["cold_hit_rate"] < off["cold_hit_rate"]


def test_guesses_start_as_the_profile_does(spark_cli, folder, shape, sessions) -> None:
    rows = spark_cli("simulate", folder, *SCORED, "--early", "2:0.1", "--json").json["rows"]
    early = {row["profile"]: row for row in rows if row["early_experts"]}
    assert {name: row["early_guesses"] for name, row in early.items()} == {"none": "none", "own": "calibrated"}
    expected = by_the_runtime(shape, sessions, EarlyFetch(2, 0.1), None, profiled=False)
    assert early["none"]["cold_hit_rate"] == pytest.approx(expected["rate"])
    assert early["none"]["early_per_selection"] == pytest.approx(expected["early"])


def test_speed_is_predicted_from_what_each_layer_fetched(spark_cli, folder, shape, tmp_path) -> None:
    """Copies of 3 kB at 1 GB/s after 1 us: two of them and the guess are longer than the 10 us of a layer."""
    n_layers = len(shape.layers)
    figures = {"token_s": n_layers * 1e-5, "miss_s": 1e-6, "link_bytes_per_s": 1e9, "guess_s": 3e-6}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(figures))
    arguments = (*SCORED, "--profile", "own", "--early", "3:0.05", "--machine", path, "--json")
    rows = spark_cli("simulate", folder, *arguments).json["rows"]
    off, row = row_of(rows, None), row_of(rows, EarlyFetch(3, 0.05))
    one, two, three = row["early_layers_per_token"]
    missed_s = row["loads_per_token"] * 4e-6
    expected = 1 / (n_layers * 1e-5 + missed_s + two * 1e-6 + three * 5e-6)
    assert min(one, two, three) > 0
    assert row["predicted_tok_s"] == pytest.approx(expected, abs=0.01)
    assert off["predicted_tok_s"] == pytest.approx(1 / (n_layers * 1e-5 + off["loads_per_token"] * 4e-6), abs=0.01)
    on_host = {**figures, "guess_s": 0.0, "guess_token_s": 1e-5}
    path.write_text(json.dumps(on_host))
    row = row_of(spark_cli("simulate", folder, *arguments).json["rows"], EarlyFetch(3, 0.05))
    expected = 1 / (n_layers * 1e-5 + missed_s + 1e-5 + three * 2e-6)
    assert row["predicted_tok_s"] == pytest.approx(expected, abs=0.01)


def test_a_person_sees_what_was_fetched(spark_cli, folder) -> None:
    asked = spark_cli("simulate", folder, "--policy", "scored", "--residency", 0.4, "--early", "1:0.1")
    head, *lines = asked.out.splitlines()
    assert re.split(r"\s{2,}", head)[10:15] == ["early", "fetched", "used", "wasted", "wasted/token"]
    assert sum("1:0.1 from calibrated" in line for line in lines) == 1
    assert "early" not in spark_cli("simulate", folder, "--policy", "scored", "--residency", 0.4).out


def test_tuned_slots_fetch_early_too(spark_cli, folder) -> None:
    arguments = (*SCORED, "--profile", "mixed", "--early", "2:0.1", "--tune", "--json")
    report = spark_cli("simulate", folder, *arguments).json
    [tuned] = report["tuned"]
    off, row = (row_of([row for row in report["rows"] if row["policy"] == "scored_tuned"], way)
                for way in (None, EarlyFetch(2, 0.1)))  # fmt: skip
    assert off["decay"] == row["decay"] == tuned["decay"]
    assert row["early_guesses"] == "calibrated"
    assert row["cold_hit_rate"] < off["cold_hit_rate"]
    assert tuned["early_experts"] is None


@pytest.mark.parametrize(("copy_us", "experts"), [(1, {2, 3, 4}), (500, {0})])
def test_the_fastest_way_is_found_for_a_machine(spark_cli, folder, shape, tmp_path, copy_us, experts) -> None:
    """Beside a layer of 10 us fit all copies, or next to nothing of one, and then fetching early only loses."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"token_s": len(shape.layers) * 1e-5, "miss_s": copy_us * 1e-6}))
    arguments = (*SCORED, "--profile", "mixed", "--early", "1", "--tune", "--machine", path)
    report = spark_cli("simulate", folder, *arguments, "--json").json
    [tuned] = report["tuned"]
    found_experts = tuned["early_experts"]
    assert found_experts in experts
    assert tuned["predicted_tok_s"] >= tuned["default_predicted_tok_s"]
    found = [row for row in report["rows"] if row["policy"] == "scored_tuned"]
    ways = {(row["early_experts"], row["early_threshold"]) for row in found}
    assert {(None, None), (1, 0.3), (found_experts or None, tuned["early_threshold"])} == ways
    told = spark_cli("simulate", folder, *arguments).err
    way = f"--early {found_experts}:" if found_experts else "nothing early"
    assert f"fastest there with {way}" in told


def test_a_picture_tells_the_ways_apart(spark_cli, folder, tmp_path) -> None:
    picture = tmp_path / "early.svg"
    ways = [part for number in range(1, 8) for part in ("--early", f"{number}:0.1")]
    spark_cli("simulate", folder, *SCORED, "--residency", 0.6, "--profile", "own", *ways, "--plot", picture)
    assert picture.read_text().count("<!-- scored, ") == 7


@pytest.mark.parametrize("wrong", ["0", "17:0.3", "x", "1:x", "1:nan", "1:inf", "-1:0.3", ":0.3"])
def test_what_is_no_way_to_fetch_is_refused(spark_cli, folder, wrong) -> None:
    spark_cli("simulate", folder, *SCORED, f"--early={wrong}").failed(2, f"--early: found '{wrong}'")


def test_what_nothing_fetches_early_is_refused(spark_cli, folder) -> None:
    spark_cli("simulate", folder, "--guesses", "none").failed(2, "--guesses says")
    spark_cli("simulate", folder, "--policy", "lru", "--early", "1").failed(2, "scored policy in one pool")
    spark_cli("simulate", folder, "--sharing", "layer", "--early", "1").failed(2, "scored policy in one pool")


def test_guesses_of_something_else_are_refused(spark_cli, tmp_path, folder, shape) -> None:
    early = (*SCORED, "--early", "1", "--guesses")
    spark_cli("simulate", folder, *early, tmp_path / "missing.guesses").failed(1, "no guesses in")
    spark_cli("simulate", folder, *early, "kept").failed(1, "no guesses in")
    damaged = tmp_path / "damaged.guesses"
    damaged.write_bytes(b"{}\n")
    spark_cli("simulate", folder, *early, damaged).failed(1, "no guesses of this model")
    other = tmp_path / "other.guesses"
    blocks = [layer.block for layer in shape.layers]
    weights = np.zeros((N_EXPERTS + 1, N_EXPERTS), np.int16)
    write_guesses(other, shape.fingerprint, {blocks[1]: LayerGuesses((blocks[2],), weights)})
    spark_cli("simulate", folder, *early, other).failed(1, f"guesses block {blocks[1]} by", f"from [{blocks[0]}]")
    write_guesses(other, shape.fingerprint, {blocks[1]: LayerGuesses((blocks[0],), weights)})
    spark_cli("simulate", folder, *early, other).failed(1, f"guesses block {blocks[2]} by nothing")


def test_counts_have_no_order_to_guess_by(spark_cli, tmp_path, shape, sessions) -> None:
    item = sessions[0]
    counted = SessionCounts(shape)
    counted.add("decode", 100, [ids[item.decode] for ids in item.ids])
    histogram = counted.to_histogram(item.session_hash, item.workload)
    path = tmp_path / "shown.json"
    path.write_text(HistogramUpload(agent_version="1", model=shape, sessions=(histogram,)).model_dump_json() + "\n")
    spark_cli("simulate", path, "--early", "1").failed(1, "needs the order of selections")


def test_batches_and_prompts_fetch_nothing_early(spark_cli, folder) -> None:
    arguments = (*SCORED, "--profile", "none", "--early", "2:0", "--json")
    asked = spark_cli("simulate", folder, *arguments, "--batch", 3)
    assert any("only single tokens" in note for note in asked.json["notes"])
    # Of a session of 100 tokens, in calls of three, the last is one of its own.
    rows = asked.json["rows"]
    assert row_of(rows, EarlyFetch(2, 0.0))["cold_hits_per_token"] <= row_of(rows, None)["cold_hits_per_token"]
    prompts = spark_cli("simulate", folder, *arguments, "--phase", "prefill", "--ubatch", 20).json["rows"]
    assert row_of(prompts, EarlyFetch(2, 0.0))["early_per_selection"] == 0.0
