"""What is written for another tool is read back as it was."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.errors import SparkError, UsageError
from spark_agent.formats.exports import EXPORTERS, Wanted, export, profile_of_manifest
from spark_agent.formats.hints import Hints
from spark_agent.formats.profile import ImportedLayer, ImportedProfile, bind, load_profile, save_profile
from spark_agent.formats.registry import import_file
from spark_agent.formats.torch_archive import read_torch_archive
from spark_schemas.model import ExpertLayer, ModelShape


@st.composite
def profiles(draw: st.DrawFn) -> ImportedProfile:
    """Counts of a model with equally many experts in each layer, some of its first blocks without any."""
    n_layers, n_experts, dense = draw(st.integers(1, 4)), draw(st.integers(2, 9)), draw(st.integers(0, 2))
    top_k = draw(st.integers(1, n_experts))
    row = st.lists(st.integers(0, 2**53), min_size=n_experts, max_size=n_experts).filter(any)
    layers = tuple(
        ImportedLayer(block=dense + block, n_experts=n_experts, top_k=top_k, counts=tuple(draw(row)))
        for block in range(n_layers)
    )
    return ImportedProfile(format="test", workload="chat", histograms=layers)


def shape_of(profile: ImportedProfile, n_bytes: int = 10) -> ModelShape:
    layers = tuple(
        ExpertLayer(
            block=layer.block,
            n_experts=layer.n_experts,
            top_k=layer.top_k or 1,
            expert_bytes=n_bytes + layer.block,
            tensor_types={"up": "q4_K"},
        )
        for layer in profile.histograms
    )
    return ModelShape(
        fingerprint="mf1-" + "a" * 32,
        sibling="ms1-" + "a" * 32,
        architecture="qwen3moe",
        name="Tiny",
        n_blocks=layers[-1].block + 1,
        context_length=10,
        core_bytes=0,
        kv_bytes_per_token=0,
        layers=layers,
    )


def again(
    folder: Path, form: str, profile: ImportedProfile, shape: ModelShape | None, **options: Any
) -> ImportedProfile:
    exported = export(form, Wanted(profile, shape, **options))
    path = folder / f"exported{'.pt' if form == 'ktransformers' else ''}"
    path.write_bytes(exported.content)
    hints = Hints(n_experts=profile.histograms[0].n_experts, top_k=profile.histograms[0].top_k)
    return import_file("sglang" if form == "ktransformers" else form, path, "chat", hints, shape)


@pytest.mark.parametrize("form", ["lucebox-csv", "freetoken", "sglang-location", "ktransformers"])
@settings(deadline=None, max_examples=60)
@given(profile=profiles(), named=st.booleans())
def test_counts_come_back_as_they_were(tmp_path_factory, form: str, profile: ImportedProfile, named: bool) -> None:
    shape = shape_of(profile) if named else None
    found = again(tmp_path_factory.getbasetemp(), form, profile, shape)
    kept = [layer for layer in found.histograms if any(layer.counts or ())]
    assert [layer.counts for layer in kept] == [layer.counts for layer in profile.histograms]
    if named:
        assert [layer.block for layer in found.histograms] == [layer.block for layer in profile.histograms]
        assert found.fingerprint == "mf1-" + "a" * 32


@pytest.mark.parametrize("form", ["lucebox-placement", "fitz"])
def test_counts_that_are_one_share_keep_their_order(tmp_path, form: str) -> None:
    layer = ImportedLayer(block=0, n_experts=3, top_k=1, counts=(1, 2**53 - 2, 2**53 - 1))
    profile = ImportedProfile(format="lucebox-csv", workload="chat", histograms=(layer,))
    [found] = again(tmp_path, form, profile, None).histograms
    assert found.ranking == (2, 1, 0)


@pytest.mark.parametrize("form", ["lucebox-placement", "fitz"])
@settings(deadline=None, max_examples=60)
@given(profile=profiles(), residency=st.none() | st.floats(0.01, 1))
def test_orders_come_back_as_they_were(tmp_path_factory, form: str, profile: ImportedProfile, residency: Any) -> None:
    shape = shape_of(profile)
    found = again(tmp_path_factory.getbasetemp(), form, profile, shape, residency=residency)
    for layer, old in zip(found.histograms, profile.histograms, strict=True):
        counts = np.array(old.counts)
        ranked = np.argsort(-counts, kind="stable").tolist()
        used = [expert for expert in ranked if counts[expert]]
        ranking = list(layer.ranking or ())
        expected = ranked if form == "lucebox-placement" else used
        assert ranking == expected[: len(ranking)]
        if residency is None:
            assert ranking == expected
        elif form == "lucebox-placement":
            assert len(ranking) >= min(2 * (old.top_k or 1), old.n_experts)
    # An order exported again is the same order.
    assert again(tmp_path_factory.getbasetemp(), form, found, shape).histograms == found.histograms


@settings(deadline=None)
@given(profile=profiles(), residency=st.floats(0.01, 1))
def test_a_mask_marks_the_hot_experts(tmp_path_factory, profile: ImportedProfile, residency: float) -> None:
    shape = shape_of(profile)
    mask = np.load(io.BytesIO(export("ktransformers-mask", Wanted(profile, shape, residency)).content))
    placement = json.loads(export("lucebox-placement", Wanted(profile, shape, residency)).content)
    assert mask.dtype == np.bool_
    assert [np.flatnonzero(row).tolist() for row in mask] == [sorted(row) for row in placement["hot_expert_ids"]]
    path = tmp_path_factory.getbasetemp() / "mask.pt"
    path.write_bytes(export("ktransformers-mask-pt", Wanted(profile, shape, residency)).content)
    tensor = read_torch_archive(path)["gpu_experts_mask"]
    assert tensor.dtype == np.bool_
    assert tensor.tolist() == mask.tolist()
    again = import_file("ktransformers-mask", path, "chat", Hints(), shape)
    assert [list(layer.ranking or ()) for layer in again.histograms] == [
        np.flatnonzero(row).tolist() for row in mask if row.any()
    ]


COUNTED = ("lucebox-csv", "freetoken", "sglang-location", "ktransformers")


@settings(deadline=None, max_examples=25)
@given(profile=profiles())
def test_counts_go_through_any_two_formats(tmp_path_factory, profile: ImportedProfile) -> None:
    """And an order made of them is the same by whichever way they came."""
    shape, folder = shape_of(profile), tmp_path_factory.getbasetemp()
    order = again(folder, "fitz", profile, shape)
    for first, second in itertools.product(COUNTED, COUNTED):
        found = again(folder, second, again(folder, first, profile, shape), shape)
        assert [layer.counts for layer in found.histograms] == [layer.counts for layer in profile.histograms]
        assert again(folder, "fitz", found, shape).histograms == order.histograms
    for ordered in ("fitz", "lucebox-placement"):
        assert again(folder, ordered, order, shape).histograms == order.histograms


def test_exports_that_cannot_be(make_manifest) -> None:
    order = ImportedLayer(block=0, n_experts=4, top_k=1, ranking=(2, 1))
    ranked = ImportedProfile(format="test", workload="chat", histograms=(order,))
    for form in ("lucebox-csv", "freetoken", "sglang-location"):
        with pytest.raises(SparkError, match="an order and no counts"):
            export(form, Wanted(ranked))
    counted = ImportedLayer(block=0, n_experts=4, counts=(1, 2, 3, 4))
    bare = ImportedProfile(format="test", workload="chat", histograms=(counted,))
    with pytest.raises(SparkError, match="not known"):
        export("lucebox-csv", Wanted(bare))
    with pytest.raises(UsageError, match="needs the bytes"):
        export("fitz", Wanted(bare, budget_bytes=10))
    with pytest.raises(UsageError, match="need the bytes"):
        export("llama-cpp", Wanted(bare, residency=0.5))
    with pytest.raises(UsageError, match="expected one of"):
        export("gguf", Wanted(bare))
    mixed = ImportedProfile(
        format="test", workload="chat", histograms=(counted, ImportedLayer(block=1, n_experts=2, counts=(1, 2)))
    )
    for form in ("lucebox-csv", "ktransformers-mask", "fitz"):
        with pytest.raises(SparkError, match="2 to 4 experts"):
            export(form, Wanted(mixed))
    assert set(EXPORTERS) >= {"lucebox-csv", "fitz", "llama-cpp"}
    manifest = profile_of_manifest(make_manifest(((1, 9, 5, 2), 1, 2), ((9, 5, 5, 1), 1, 3)))
    assert "not counts" in manifest.warnings[0]
    assert json.loads(export("sglang-location", Wanted(manifest)).content) == {
        "logical_count": [list(layer.counts or ()) for layer in manifest.histograms]
    }


# ---- profiles of a model


@pytest.fixture
def counted() -> ImportedProfile:
    layers = tuple(ImportedLayer(block=b, n_experts=4, counts=(3, 1, 0, 2)) for b in range(3))
    return ImportedProfile(format="test", workload="chat", histograms=layers)


def model(*blocks: int, n_experts: int = 4, top_k: int = 2) -> ModelShape:
    layers = tuple(ImportedLayer(block=b, n_experts=n_experts, top_k=top_k, ranking=()) for b in blocks)
    return shape_of(ImportedProfile(format="test", workload="chat", histograms=layers))


def test_layers_find_their_blocks(counted: ImportedProfile) -> None:
    assert [layer.block for layer in bind(counted, model(0, 1, 2)).histograms] == [0, 1, 2]
    dense_first = bind(counted, model(1, 2, 3))
    assert [layer.block for layer in dense_first.histograms] == [1, 2, 3]
    assert any("numbered without" in warning for warning in dense_first.warnings)
    zeros = ImportedLayer(block=0, n_experts=4, counts=(0, 0, 0, 0))
    rows = tuple(layer.model_copy(update={"block": layer.block + 1}) for layer in counted.histograms)
    with_dense = counted.model_copy(update={"histograms": (zeros, *rows)})
    assert [layer.block for layer in bind(with_dense, model(1, 2, 3)).histograms] == [1, 2, 3]
    drafted = bind(counted, model(0, 1))
    assert len(drafted.histograms) == 2
    assert any("1 layers after" in warning for warning in drafted.warnings)


def test_another_models_profile_is_refused(counted: ImportedProfile) -> None:
    for other in (model(0, 1, 2, 3), model(0, 1, 2, n_experts=5)):
        with pytest.raises(SparkError, match="the profile") as caught:
            bind(counted, other)
        assert caught.value.hint == "it is of another model"
    layers = tuple(layer.model_copy(update={"top_k": 1}) for layer in counted.histograms)
    with pytest.raises(SparkError, match="selects 2 experts, the profile says 1"):
        bind(counted.model_copy(update={"histograms": layers}), model(0, 1, 2))
    odd = tuple(layer.model_copy(update={"counts": (1, 1, 1, 0)}) for layer in counted.histograms)
    assert any(
        "no multiple" in w for w in bind(counted.model_copy(update={"histograms": odd}), model(0, 1, 2)).warnings
    )


def test_profiles_are_kept_and_read_strictly(tmp_path: Path, counted: ImportedProfile) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, counted)
    assert load_profile(path) == counted
    value = json.loads(path.read_text())
    for changes in ({"imported": False}, {"imported": None}, {"histograms": []}, {"extra": 1}, {"tokens": -1}):
        path.write_text(json.dumps(value | changes))
        with pytest.raises(SparkError, match="is no profile"):
            load_profile(path)
    for layer in (
        {"counts": [1, 2]},
        {"counts": [-1, 1, 1, 1]},
        {"ranking": [4]},
        {"ranking": [1, 1]},
        {"counts": None},
    ):
        broken = {"block": 0, "n_experts": 4, "top_k": None, "counts": None, "ranking": None} | layer
        path.write_text(json.dumps(value | {"histograms": [broken]}))
        with pytest.raises(SparkError, match="is no profile"):
            load_profile(path)
