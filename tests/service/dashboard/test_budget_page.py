from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.sizes import parse_size
from spark_schemas.profile import LivePoint, Profile
from spark_service.dashboard.budget_page import Question, budget_page, budget_range, default_vram, pull_command
from spark_service.dashboard.gpu_classes import GPU_CLASSES
from spark_service.manifests import Budget, build_manifest

Build = Callable[..., Profile]
GPU = GPU_CLASSES["rtx-4090"]


@pytest.fixture(scope="module")
def profile(make: Any, built: Build) -> Profile:
    return built(make.sessions(make.shape(), 5, 5))


def ask(profile: Profile, shape: Any, vram: int, n_ctx: int = 100, reserve: int = 0) -> Any:
    return budget_page(profile, shape, Question(GPU, vram, n_ctx, reserve))


@given(part=st.floats(0, 1), n_ctx=st.integers(1, 4096), reserve=st.integers(0, 500))
def test_bytes_and_slots_are_those_of_the_manifest_that_would_be_pulled(
    make: Any, profile: Profile, part: float, n_ctx: int, reserve: int
) -> None:
    shape = make.shape()
    least, most, _ = budget_range(shape, n_ctx, reserve)
    vram = least + round(part * (most - least))
    page = ask(profile, shape, vram, n_ctx, reserve)
    manifest = build_manifest(profile, shape, Budget(vram, n_ctx, reserve), ())
    assert page.problem is None
    assert page.slots == sum(layer.slots for layer in manifest.layers)
    parts = manifest.bytes
    assert [tier.n_bytes for tier in page.tiers] == [
        parts.vram_core,
        parts.vram_kv,
        parts.vram_slots,
        parts.vram_reserve,
        parts.vram_total,
        parts.host_experts,
    ]
    assert page.residency == pytest.approx(parts.vram_slots / shape.expert_bytes_total)


@given(part=st.floats(0, 1))
def test_rates_lie_between_what_was_judged(make: Any, profile: Profile, part: float) -> None:
    shape = make.shape()
    least, most, _ = budget_range(shape, 100)
    page = ask(profile, shape, least + round(part * (most - least)))
    for rate in page.rates:
        curve = [one for one in profile.curves if one.policy == rate.policy]
        near = [one.cold_hit_rate for one in curve if abs(one.residency - page.residency) <= 0.1 + 1e-9] or [
            curve[0].cold_hit_rate
        ]
        assert min(near) - 1e-12 <= rate.cold_hit_rate <= max(near) + 1e-12
        assert rate.low <= rate.cold_hit_rate <= rate.high
    assert [one.policy for one in page.rates] == ["own", "lru", "uniform"]


def test_at_a_judged_size_the_rate_is_the_judged_one(make: Any, profile: Profile) -> None:
    shape = make.shape()
    page = ask(profile, shape, shape.core_bytes + shape.context_bytes(100) + shape.expert_bytes_total)
    assert page.residency == 1.0
    assert {one.cold_hit_rate for one in page.rates if one.policy != "lru"} == {0.0}
    assert page.speed.low == page.speed.resident_low
    assert page.speed.kept == 1.0


@pytest.mark.parametrize(("vram", "n_ctx", "words"), [(10, 100, "too little"), (10**6, 5000, "longer than the 4,096")])
def test_what_cannot_work_says_what_would(make: Any, profile: Profile, vram: int, n_ctx: int, words: str) -> None:
    page = ask(profile, make.shape(), vram, n_ctx)
    assert words in str(page.problem)
    assert page.tiers == ()
    assert page.rates == ()
    assert page.speed is None
    assert page.rows  # the other sizes still help


def test_the_least_budget_works_and_one_byte_less_does_not(make: Any, profile: Profile) -> None:
    shape = make.shape()
    least, _, _ = budget_range(shape, 100)
    assert ask(profile, shape, least).problem is None
    assert "(1 bytes more)" in str(ask(profile, shape, least - 1).problem)


def test_without_held_out_sessions_no_rate_and_no_speed(make: Any, built: Build) -> None:
    shape = make.shape()
    page = ask(built(make.sessions(shape, 4, 0)), shape, default_vram(shape, 100))
    assert page.rates == ()
    assert page.speed is None
    assert page.rows == ()
    assert "3 more held-out sessions needed" in str(page.rates_missing)


def test_what_agents_measured_nearby_stands_beside(make: Any, profile: Profile) -> None:
    shape = make.shape()
    points = tuple(
        LivePoint(policy="live_profile", residency=at, cold_hit_rate=0.02, low=0.01, high=0.03, n_sessions=n)
        for at, n in ((0.62, 5), (0.9, 50))
    )
    vram = default_vram(shape, 100)
    page = ask(profile.model_copy(update={"live": points}), shape, vram)
    [live] = [one for one in page.rates if one.policy == "live_profile"]
    assert live.basis == "measured at 62%, 5 other held-out sessions"


@given(part=st.floats(0, 1), n_ctx=st.sampled_from([1, 100, 4096]), reserve=st.sampled_from([0, 1, 512]))
def test_the_command_asks_for_exactly_this(make: Any, profile: Profile, part: float, n_ctx: int, reserve: int) -> None:
    shape = make.shape()
    least, most, _ = budget_range(shape, n_ctx, reserve)
    vram = least + round(part * (most - least))
    words = shlex.split(pull_command(profile, shape, Question(GPU, vram, n_ctx, reserve, "http://host:8710")))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[:3] == ["spark", "pull-profile", "code"]
    assert parse_size(options["--vram"], "--vram") == vram
    assert int(options.get("--ctx", 4096)) == n_ctx
    assert parse_size(options.get("--reserve", "0"), "--reserve") == reserve
    assert options["--service"] == "http://host:8710"


@given(
    layers=st.lists(st.tuples(st.integers(2, 512), st.just(2), st.integers(1, 10**7)), min_size=1, max_size=6),
    n_ctx=st.integers(1, 4096),
)
def test_the_slider_has_few_positions_and_its_start_works(make: Any, layers: Any, n_ctx: int) -> None:
    shape = make.shape(layers)
    least, most, step = budget_range(shape, n_ctx)
    assert 0 <= (most - least) / step <= 240
    assert least <= default_vram(shape, n_ctx) <= most


def test_a_card_that_is_too_small_is_said_to_be(make: Any, profile: Profile) -> None:
    shape = make.shape()
    page = ask(profile, shape, GPU.memory_bytes + 2**30)
    assert page.fits.startswith("Does not fit: 1.0 GiB more than the 24.0 GiB")
    assert ask(profile, shape, 2**31).fits.startswith("Leaves 22.0 GiB of the 24.0 GiB")


def test_at_the_least_budget_the_rate_is_that_of_the_floor(make: Any, profile: Profile) -> None:
    """Curves are level below the floor, which has more bytes than their first points say."""
    shape = make.shape()
    least, _, _ = budget_range(shape, 100)
    page = ask(profile, shape, least)
    floors = {one.policy: one.cold_hit_rate for one in profile.curves if one.residency == 0.1}
    assert {one.policy: one.cold_hit_rate for one in page.rates} == {
        policy: floors[policy] for policy in ("own", "lru", "uniform")
    }
    assert page.rows[0].vram_bytes == least
    assert len({row.vram_bytes for row in page.rows}) == len(page.rows) < 10
