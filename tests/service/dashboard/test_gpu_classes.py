from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_schemas.model import ExpertLayer
from spark_service.dashboard import gpu_classes
from spark_service.dashboard.gpu_classes import GPU_CLASSES, read_bytes, speed


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the benchmark's script makes of the results in the repository."""
    folder = Path(__file__).resolve().parents[3] / "infra/benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("benchmark_gpu_classes", folder / "gpu_classes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    spec.loader.exec_module(module)
    found = module.figures()
    for name in set(sys.modules) - before:
        if name in {"report", "big_model"}:
            del sys.modules[name]
    return dict(found)


def test_the_figures_are_those_that_the_results_give(figures: dict[str, float]) -> None:
    assert pytest.approx(figures, rel=0.002) == {
        "h200_block_us": 1e6 * gpu_classes.H200_BLOCK_S,
        "h200_miss_us": 1e6 * gpu_classes.MISS_S,
        "h200_link_gb_s": gpu_classes.H200_LINK / 1e9,
        "rtx_3090_block_us": 1e6 * gpu_classes.RTX_3090_BLOCK_S,
    }


def shape_of(make: Any, blocks: int, experts: int, top_k: int, expert_bytes: int, core_bytes: int) -> Any:
    layers = tuple(
        ExpertLayer(block=block, n_experts=experts, top_k=top_k, expert_bytes=expert_bytes, tensor_types={})
        for block in range(blocks)
    )
    return make.shape(layers=((2, 1, 1),)).model_copy(
        update={"n_blocks": blocks, "core_bytes": core_bytes, "layers": layers}
    )


def test_the_h200_gives_what_was_measured_on_it(make: Any) -> None:
    """The all-resident rate to 1%, and those at 60 and 31% with their measured misses within 5%."""
    shape = shape_of(make, 48, 128, 8, 2_856_959, 756_539_392)
    card = GPU_CLASSES["h200"]
    measured = {0.0: 286.66, 2.672 / 384: 268.95, 5.938 / 384: 286.66 * 0.9057}
    for rate, tok_s in measured.items():
        found = speed(shape, card, rate)
        assert found.low == found.high == pytest.approx(tok_s, rel=0.01 if rate == 0 else 0.05)


def test_the_published_rate_of_the_3090_comes_back(make: Any) -> None:
    expert_bytes = round(10.61 * 2**30 / 0.6 / 40 / 256)
    shape = shape_of(make, 40, 256, 8, expert_bytes, round(1.35 * 2**30))
    assert speed(shape, GPU_CLASSES["rtx-3090"], 0.0).high == pytest.approx(111, rel=0.01)


def test_a_card_that_nobody_measured_has_a_range(make: Any) -> None:
    shape = make.shape()
    for card in GPU_CLASSES.values():
        found = speed(shape, card, 0.1)
        assert (found.low == found.high) == (card.basis != "estimated")
        assert 0 < found.low <= found.high <= found.resident_high
        assert 0 < found.kept < 1


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(sorted(GPU_CLASSES)))
def test_more_misses_are_never_faster(make: Any, one: float, other: float, key: str) -> None:
    shape, few, many = make.shape(), min(one, other), max(one, other)
    assert speed(shape, GPU_CLASSES[key], few).low >= speed(shape, GPU_CLASSES[key], many).low


def test_what_a_token_reads(make: Any) -> None:
    assert read_bytes(make.shape()) == 1000 + 2 * 100 + 2 * 100 + 1 * 50


def test_classes_are_in_order_and_named_by_their_key() -> None:
    sizes = [card.memory_bytes for card in GPU_CLASSES.values()]
    assert sizes == sorted(sizes)
    assert all(key == card.key for key, card in GPU_CLASSES.items())
