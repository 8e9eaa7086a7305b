"""Threads or a Ray cluster: the same results in the same order, and no more items ahead than workers can take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from spark_runtime.calibration.sessions import Sessions, merge_parts
from spark_schemas.mix import Mix
from spark_service.builders import Inputs, Member, build_profile, tally_batches
from spark_service.executors import Executor, LocalExecutor, RayExecutor, executor_for


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "local":
        found: Executor = LocalExecutor(2)
    else:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
        found = RayExecutor("auto")
    yield found
    found.close()
    if request.param == "ray":
        import ray

        ray.shutdown()


def double(array: np.ndarray) -> np.ndarray:
    return 2 * array


def fail(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


def test_results_come_in_order_and_lazily(executor: Executor) -> None:
    taken = []

    def items() -> Iterator[np.ndarray]:
        for number in range(40):
            taken.append(number)
            yield np.full(3, number)

    results = executor.map(double, items())
    first = next(results)
    assert first.tolist() == [0, 0, 0]
    assert len(taken) < 40
    assert [result[0] for result in results] == list(range(2, 80, 2))


def test_what_a_function_raises_is_raised_here(executor: Executor) -> None:
    with pytest.raises(ValueError, match="three"):
        list(executor.map(fail, range(6)))
    assert list(executor.map(fail, [1, 2])) == [1, 2]


def split(sessions: Sessions, size: int) -> list[Sessions]:
    indices = np.arange(len(sessions))
    return [sessions.where((indices >= start) & (indices < start + size)) for start in range(0, len(sessions), size)]


@pytest.mark.parametrize("workload", ["code", "chat:3+code:7"])
def test_profiles_have_the_same_bits_wherever_they_are_built(executor: Executor, make: Any, workload: str) -> None:
    shape = make.shape()
    parts = {
        "code": make.parts(shape, make.sessions(shape, 6, 5)),
        "chat": make.parts(shape, make.sessions(shape, taste=3)),
    }
    inputs = Inputs.of_parts(shape, workload, parts)
    expected = build_profile(shape, workload, "decode", "0" * 64, inputs)
    members = []
    for name, weight in Mix.parse(workload).members:
        sessions = merge_parts(parts[name])
        assert sessions is not None
        batches = split(sessions, 2)[::-1]
        tally = tally_batches([layer.n_experts for layer in shape.layers], batches, executor)
        judges = [batch.where(batch.held_out) for batch in batches]
        members.append(Member(name, weight, tally, partial(list, judges)))
    batched = Inputs(tuple(members), inputs.others)
    here = build_profile(shape, workload, "decode", "0" * 64, batched, executor)
    assert expected is not None
    assert here is not None
    assert here.profile.model_dump_json() == expected.profile.model_dump_json()


@pytest.mark.ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://127.0.0.1:1", "127.0.0.1:port"])
def test_a_cluster_that_does_not_answer_is_an_error(address: str) -> None:
    code = f"from spark_service.executors import RayExecutor; RayExecutor({address!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert found.returncode == 1
    assert f"ExecutorError: --ray {address}: " in found.stderr


def test_ray_is_used_only_when_asked_for() -> None:
    code = (
        "import sys, spark_service.catalog, spark_service.executors as e\n"
        "e.executor_for(None)\n"
        "print('ray' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert found.stdout.strip() == "False"
    assert isinstance(executor_for(None), LocalExecutor)
