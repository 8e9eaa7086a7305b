"""Other tools' counts in the place of a manifest: what they start, what they leave open, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spark_agent.errors import RefusedError, SparkError
from spark_agent.formats.hints import Hints
from spark_agent.formats.profile import ImportedLayer, ImportedProfile, bind, save_profile
from spark_agent.formats.registry import import_file
from spark_agent.imported_start import ImportedStart, find_start
from spark_agent.tiering import TierOptions
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.placement import greedy_slots, layer_sizes, residency_budget
from spark_runtime.tier_start import profile_start
from spark_schemas.model import ModelShape


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_model_shape(demo_model_path())


def counted(shape: ModelShape) -> ImportedProfile:
    layers = tuple(
        ImportedLayer(block=layer.block, n_experts=layer.n_experts, counts=tuple(range(layer.n_experts)))
        for layer in shape.layers
    )
    return ImportedProfile(format="imatrix", workload="docs", phase="prefill", histograms=layers)


def ranked(shape: ModelShape, *rankings: tuple[int, ...]) -> ImportedProfile:
    layers = tuple(
        ImportedLayer(block=layer.block, n_experts=layer.n_experts, ranking=ranking)
        for layer, ranking in zip(shape.layers, rankings, strict=True)
    )
    return ImportedProfile(format="fitz", workload="docs", histograms=layers)


def test_counts_decide_slots_and_order(tmp_path: Path, shape: ModelShape) -> None:
    save_profile(tmp_path / "p.json", bind(counted(shape), shape))
    manifest, imported = find_start(str(tmp_path / "p.json"), shape)
    assert manifest is None
    assert imported is not None
    frequency = imported.frequency()
    assert [float(layer.sum()) for layer in frequency] == pytest.approx([1.0] * len(shape.layers))
    sizes = layer_sizes(shape)
    start = profile_start(shape, frequency, greedy_slots(frequency, sizes, residency_budget(sizes, 0.5)))
    assert all(layer.order[0] == shape.layers[0].n_experts - 1 for layer in start.layers)
    told = imported.told(None)
    assert (told["source"], told["format"], told["phase"], told["has_counts"]) == (
        "imported",
        "imatrix",
        "prefill",
        True,
    )
    assert told["expected_cold_hit_rate"] is None
    assert "no cold-hit rate" in told["warnings"][0]
    TierOptions(pinned_share=0.2).check(imported)


def test_an_order_shares_slots_out_evenly(shape: ModelShape) -> None:
    """However long the lists are: a layer that lists few experts is not hotter for it."""
    rankings = [(9, 3), tuple(range(20)), (5,), tuple(range(63, -1, -1))]
    imported = ImportedStart(bind(ranked(shape, *rankings), shape))
    frequency = imported.frequency()
    assert all(np.array_equal(np.sort(layer), np.sort(frequency[0])) for layer in frequency)
    assert [np.argsort(-layer, kind="stable")[: len(ranking)].tolist() for layer, ranking in
            zip(frequency, rankings, strict=True)] == [list(ranking) for ranking in rankings]  # fmt: skip
    sizes = layer_sizes(shape)
    slots = greedy_slots(frequency, sizes, residency_budget(sizes, 0.5))
    assert max(slots) - min(slots) <= 1
    assert any("an order and no counts: it names 87 of 256" in said for said in imported.cannot_say())


def test_what_was_imported_without_a_model_is_compared_and_says_so(tmp_path: Path, shape: ModelShape) -> None:
    path = tmp_path / "p.json"
    save_profile(path, counted(shape))
    _, imported = find_start(str(path), shape)
    assert imported is not None
    assert imported.profile.fingerprint == shape.fingerprint
    assert any("imported without --model" in warning for warning in imported.profile.warnings)


def test_another_models_profile_is_refused_however_alike(tmp_path: Path, shape: ModelShape) -> None:
    path = tmp_path / "p.json"
    save_profile(path, bind(counted(shape), shape).model_copy(update={"fingerprint": "mf1-" + "0" * 32}))
    with pytest.raises(RefusedError, match="imported for another model") as caught:
        find_start(str(path), shape)
    assert "import it again" in (caught.value.hint or "")
    fewer = counted(shape)
    save_profile(path, fewer.model_copy(update={"histograms": fewer.histograms[:-1]}))
    with pytest.raises(SparkError, match="the profile has layers 0 to 2"):
        find_start(str(path), shape)


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"GGUF\x03\0\0\0", "imatrix"),
        (b"# EXPERT_CACHE_PIN_LIST v1\n", "fitz"),
        (b"# hotness table: n_layer=1 n_expert=2 n_expert_used=1\n1,2\n", "lucebox-csv"),
        (json.dumps({"arch": "x", "hot_expert_ids": [[1]]}).encode(), "lucebox-placement"),
        (json.dumps({"expert_counts": [[1]]}).encode(), "freetoken"),
        (b"PK\x03\x04", "sglang"),
    ],
)
def test_another_tools_file_says_how_to_import_it(tmp_path: Path, shape: ModelShape, content: bytes, form: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SparkError, match="another tool's file") as caught:
        find_start(str(path), shape)
    assert f"spark import {form} " in (caught.value.hint or "")


@pytest.mark.parametrize("content", [b'{"imported": true}', b'{"imported": false, "histograms": []}', b"{}", b""])
def test_files_that_are_neither(tmp_path: Path, shape: ModelShape, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(SparkError):
        find_start(str(path), shape)


def test_every_tools_order_can_start(tmp_path: Path, shape: ModelShape) -> None:
    pins = "# EXPERT_CACHE_PIN_LIST v1\nn_layer 4\nn_expert 64\n" + "".join(f"layer {n}: 3 1\n" for n in range(4))
    (tmp_path / "pins.txt").write_text(pins)
    profile = import_file("fitz", tmp_path / "pins.txt", "docs", Hints(), shape)
    assert [int(np.argmax(layer)) for layer in ImportedStart(profile).frequency()] == [3] * 4
