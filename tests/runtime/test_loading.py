"""Loading that somebody no longer wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import GivenUpError
from spark_runtime.model_shape import read_model_shape
from spark_runtime.tier_start import uniform_start


@pytest.fixture(params=[1.0, 0.5], ids=["whole", "tiered"])
def options(request: pytest.FixtureRequest, demo_model: Path) -> EngineOptions:
    tier = uniform_start(read_model_shape(demo_model), request.param) if request.param < 1 else None
    return EngineOptions(n_ctx=64, n_threads=1, tier=tier)


@pytest.mark.parametrize("n_tensors", [0, 1, 5])
@pytest.mark.parametrize("fault", [None, KeyboardInterrupt(), RuntimeError("enough")], ids=repr)
def test_given_up_at_any_tensor(
    demo_model: Path, options: EngineOptions, n_tensors: int, fault: BaseException | None
) -> None:
    asked: list[None] = []

    def wanted() -> bool:
        asked.append(None)
        if fault is not None and len(asked) > n_tensors:
            raise fault
        return len(asked) <= n_tensors

    with pytest.raises(BaseException) as found:
        Engine.load(demo_model, options, wanted=wanted)
    if fault is None:
        assert isinstance(found.value, GivenUpError)
        assert demo_model.name in str(found.value)
    else:
        assert found.value is fault
    assert len(asked) == n_tensors + 1
    # Nothing of it is in the way of the next.
    with Engine.load(demo_model, options, wanted=lambda: True) as engine:
        assert engine.prompt(engine.tokenize("How are you?")) == 0
