"""What unlabelled traffic looks like, measured."""

from __future__ import annotations

import numpy as np
import pytest

from spark_agent.manifests import ManifestStore, PullKey
from spark_agent.own_sessions import OwnSessions
from spark_agent.paths import manifests_dir, own_counts_path
from spark_agent.server.nearest import MINIMUM_DECODE_TOKENS, KnownWorkloads, WorkloadsHere
from spark_agent.workload_name import UNLABELLED
from spark_runtime.votes import FULL_WEIGHT_TOKENS
from spark_schemas.manifest import PRIOR_SCALE, LayerPlacement

N_EXPERTS = 10


@pytest.fixture
def shape(make_model):
    return make_model(n_experts=N_EXPERTS)


def hot(*experts: int) -> list[np.ndarray]:
    """Frequencies of both layers with most of the weight on some experts."""
    one = np.full(N_EXPERTS, 0.01)
    one[list(experts)] = 1.0
    return [one / one.sum()] * 2


PROFILES = {"code": hot(0, 1, 2, 3, 4, 5), "chat": hot(4, 5, 6, 7, 8, 9), "mixed": hot(0, 1, 2, 7, 8, 9)}
TOKENS = MINIMUM_DECODE_TOKENS


def counts(*experts: int) -> list[np.ndarray]:
    one = np.zeros(N_EXPERTS, dtype=np.int64)
    one[list(experts)] = TOKENS
    return [one, one.copy()]


def test_the_nearest_is_the_one_that_misses_least(shape):
    found = KnownWorkloads(shape, PROFILES).nearest(counts(0, 1, 2, 3), TOKENS)
    assert found is not None
    assert (found.workload, found.cold_hit_rate, found.best_cold_hit_rate) == ("code", 0.0, 0.0)
    assert found.others == (("mixed", 0.25), ("chat", 1.0))
    assert found.decode_tokens == TOKENS


def test_no_profile_does_better_than_the_best(shape):
    uniform = [np.full(N_EXPERTS, 7, dtype=np.int64)] * 2
    found = KnownWorkloads(shape, PROFILES).nearest(uniform, TOKENS)
    assert found is not None
    assert found.best_cold_hit_rate == pytest.approx(0.4)
    assert found.cold_hit_rate == pytest.approx(0.4)
    assert found.workload == "chat", "equal: by name"


def test_nothing_is_said_of_little(shape):
    known = KnownWorkloads(shape, PROFILES)
    assert known.nearest(counts(0), TOKENS - 1) is None
    assert known.nearest([np.zeros(N_EXPERTS, dtype=np.int64)] * 2, TOKENS) is None
    assert KnownWorkloads(shape, {}).nearest(counts(0), TOKENS) is None


def pull(shape, make_manifest, workload: str, experts: tuple[int, ...]) -> None:
    prior = tuple(PRIOR_SCALE if expert in experts else 1 for expert in range(N_EXPERTS))
    placed = tuple(
        LayerPlacement(
            block=layer.block, n_experts=N_EXPERTS, top_k=2, slots=6, expert_bytes=100, prior=prior,
            total_share=sum(prior) / PRIOR_SCALE,
        )
        for layer in shape.layers
    )  # fmt: skip
    manifest = make_manifest((prior, 2, 6), (prior, 2, 6))
    manifest = manifest.model_copy(update={"fingerprint": shape.fingerprint, "workload": workload, "layers": placed})
    data = manifest.model_copy(
        update={
            "vram_budget_bytes": 5000,
            "bytes": manifest.bytes.model_copy(update={"vram_slots": 1200, "vram_total": 1209}),
        }
    )
    ManifestStore(manifests_dir()).put(data, PullKey("http://x", 1, 1, 0), None)


def test_pulled_profiles_are_known_as_soon_as_they_are_there(shape, make_manifest):
    pulled = WorkloadsHere(shape)
    assert len(pulled()) == 0
    pull(shape, make_manifest, "code", (0, 1, 2, 3, 4, 5))
    assert len(pulled()) == 1
    assert pulled() is pulled(), "read once"
    pull(shape, make_manifest, "chat", (4, 5, 6, 7, 8, 9))
    pull(shape, make_manifest, "chat:1+code:1", (0, 1, 7, 8, 9, 5))
    (manifests_dir() / shape.fingerprint / "damaged.json").write_text("{")
    found = pulled().nearest(counts(6, 7), TOKENS)
    assert found is not None
    assert (found.workload, [name for name, _ in found.others]) == ("chat", ["code"])


def test_a_manifest_of_another_shape_is_left_out(make_model, make_manifest, shape):
    pull(shape, make_manifest, "code", (0, 1))
    other = make_model(n_experts=N_EXPERTS + 1).model_copy(update={"fingerprint": shape.fingerprint})
    assert len(WorkloadsHere(other)()) == 0


def test_own_sessions_and_pulled_profiles_are_compared_alike(shape):
    own = {"code": hot(0, 1, 2, 3, 8, 9), "notes": hot(4, 5, 6, 7, 8, 9)}
    known = KnownWorkloads(shape, PROFILES, own)
    assert len(known) == 4
    found = known.nearest(counts(0, 1, 8, 9), TOKENS)
    assert found is not None
    assert (found.workload, found.source, found.cold_hit_rate) == ("code", "local", 0.0)
    # Each other workload once, with the better of its two; the same workload's other profile is no alternative.
    assert found.others == (("mixed", 0.0), ("chat", 0.5), ("notes", 0.5))
    same = KnownWorkloads(shape, {"code": hot(0, 1)}, {"code": hot(0, 1)}).nearest(counts(0, 1), TOKENS)
    assert same is not None
    assert (same.source, same.others) == ("service", ())


def test_sessions_served_here_are_known_once_enough_was_decoded(shape, make_session):
    own = OwnSessions(shape, pytest.fail)
    known = WorkloadsHere(shape, own)
    assert len(known()) == 0
    for workload in ("notes", UNLABELLED):
        own.keep(calibrating(make_session, shape, workload, FULL_WEIGHT_TOKENS - 1))
    assert len(known()) == 0, "too little"
    own.keep(calibrating(make_session, shape, "notes", 1))
    assert known() is known(), "read once"
    found = known().nearest(counts(6, 7), TOKENS)
    assert found is not None
    assert (found.workload, found.source, found.others) == ("notes", "local", ()), "unlabelled is no workload"
    own.close()


def test_broken_counts_of_ones_own_cost_a_warning_and_nothing_else(shape, make_manifest, make_session):
    pull(shape, make_manifest, "code", (0, 1, 2, 3, 4, 5))
    said = []
    own = OwnSessions(shape, said.append)
    own_counts_path().parent.mkdir(parents=True, exist_ok=True)
    own_counts_path().write_bytes(b"no database, whatever it says" * 100)
    assert len(WorkloadsHere(shape, own)()) == 1
    assert "nothing is compared with this machine's own sessions" in said[-1]
    own.close()


def calibrating(make_session, shape, workload, decode):
    """A session of the side that makes profiles."""
    made = (make_session(shape, seed, decode=decode, workload=workload) for seed in range(50))
    return next(session for session in made if session.split == "calibration")
