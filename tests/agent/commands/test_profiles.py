from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from spark_agent.commands.pull_budget import DEFAULT_RESIDENCY
from spark_agent.manifests import ManifestStore, find_manifest, load_manifest
from spark_agent.paths import data_dir, manifests_dir
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.placement import LayerSizes, residency_budget
from spark_schemas.api import ProfileList
from spark_schemas.drift import Drift, RateInterval
from spark_schemas.profile import (
    CurvePoint,
    LayerFrequencies,
    LiveComparison,
    LivePoint,
    Mismatch,
    Profile,
    ProfileSummary,
)

PULLED = [
    "manifest",
    "expected_cold_hit_rate",
    "interval",
    "verdict",
    "bytes",
    "source",
    "from_cache",
    "age_s",
    "signed_by",
    "window_days",
    "half_life_days",
]
MIX, MIX_IN_URLS = "chat:3+code:7", "chat%3A3%2Bcode%3A7"


@pytest.fixture
def shape():
    return read_model_shape(demo_model_path())


@pytest.fixture
def manifest(shape, make_manifest):
    return make_manifest(shape)


@pytest.fixture
def path(shape) -> str:
    return f"/api/v1/manifests/{shape.fingerprint}/chat"


@pytest.fixture(autouse=True)
def address(service, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", service.url)
    return service.url


@pytest.fixture
def answer(service, make_reply, path, manifest):
    def say(found=manifest, etag: str | None = '"1"') -> None:
        headers = {"Content-Type": "application/json"} | ({"ETag": etag} if etag is not None else {})
        service.answers[path] = make_reply(200, found.model_dump_json().encode(), headers)

    say()
    return say


@pytest.fixture
def pull(spark_cli, manifest):
    return lambda *more: spark_cli("pull-profile", "chat", "--vram", manifest.vram_budget_bytes, *more)


def test_pull(pull, answer, manifest, service, shape):
    result = pull("--json")
    found = result.json
    assert list(found) == PULLED
    assert found["manifest"] == manifest.model_dump(mode="json")
    assert (found["expected_cold_hit_rate"], found["interval"], found["verdict"]) == (0.25, [0.2, 0.3], "profile")
    assert found["bytes"]["vram_slots"] == shape.expert_bytes_total
    assert found["source"] == service.url
    assert ManifestStore(manifests_dir()).get(shape.fingerprint, "chat") == manifest
    stored = result.err.split("stored: ")[1].strip()
    assert load_manifest(stored_path := manifests_dir() / shape.fingerprint / "chat.json") == manifest
    assert str(stored_path) == stored
    query = parse_qs(urlsplit(service.requests[0].path).query)
    assert query == {
        "vram_bytes": [str(manifest.vram_budget_bytes)],
        "n_ctx": [str(manifest.n_ctx)],
        "reserve_bytes": ["0"],
        "phase": ["decode"],
        "sibling": [shape.sibling],
    }


def test_people_get_a_table(pull, answer):
    result = pull()
    assert "256 of 256 experts" in result.out
    assert "expected cold-hit rate if never adapted: 25.0% (20.0% to 30.0%)" in result.err
    assert "verdict: profile: better on all sessions" in result.err


def test_a_dry_run_stores_nothing(pull, answer, tmp_path):
    assert pull("--dry-run", "--json", "--output", tmp_path / "m.json").code == 0
    assert not data_dir().exists()
    assert not (tmp_path / "m.json").exists()


def test_output_is_a_manifest_file(pull, answer, manifest, tmp_path):
    assert pull("--output", tmp_path / "new" / "m.json").code == 0
    assert load_manifest(tmp_path / "new" / "m.json") == manifest
    pull("--output", tmp_path).failed(1, "cannot write")


def test_an_unchanged_manifest_is_not_sent_again(pull, answer, service, make_reply, path):
    first = pull("--json").json
    service.answers[path] = make_reply(304)
    again = pull("--json")
    assert again.json == first
    assert "unchanged" in again.err
    assert service.requests[-1].headers["if-none-match"] == '"1"'
    # Another question is asked afresh.
    answer()
    pull("--reserve", "1k")
    assert "if-none-match" not in service.requests[-1].headers


@pytest.mark.parametrize("etag", [None, '"\xff"'])
def test_an_etag_that_cannot_be_sent_back_is_not(pull, answer, service, etag):
    answer(etag=etag)
    assert pull().code == 0
    assert pull().code == 0
    assert "if-none-match" not in service.requests[-1].headers


def test_without_a_budget_it_plans_for_a_share_of_the_experts(spark_cli, service, shape, path):
    spark_cli("pull-profile", "chat", "--ctx", 512, "--reserve", "1MiB").failed(
        1, "no --vram: planning for 60%", hint=False
    )
    (request,) = service.requests
    layers = [LayerSizes(layer.n_experts, layer.top_k, layer.expert_bytes) for layer in shape.layers]
    experts = residency_budget(layers, DEFAULT_RESIDENCY)
    budget = shape.core_bytes + 512 * shape.kv_bytes_per_token + 2**20 + experts
    assert parse_qs(urlsplit(request.path).query)["vram_bytes"] == [str(budget)]


def test_a_problem_is_shown_with_the_services_hint(pull, service, make_problem, path):
    service.answers[path] = make_problem(404, "No such profile", hint="upload sessions first")
    result = pull("--json")
    result.failed(1, "No such profile", "hint: upload sessions first")
    service.answers[path] = make_problem(
        422, "Budget too small", field="vram_bytes", found="5", expected="at least 9", hint="raise --vram"
    )
    pull().failed(1, "vram_bytes: found 5, expected at least 9", "hint: raise --vram")
    assert not data_dir().exists()


def test_a_service_that_is_down(pull, monkeypatch):
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", "http://127.0.0.1:9")
    pull().failed(1, "no answer", "spark-service run")
    monkeypatch.setenv("SPARKMOE_OFFLINE", "1")
    pull().failed(3, "SPARKMOE_OFFLINE")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["pull-profile", "../../etc"], "NAME"),
        (["pull-profile", "Chat"], "NAME"),
        (["pull-profile", "chat:0+code"], "NAME: found 'chat:0'"),
        (["pull-profile", "chat+chat"], "NAME: found chat twice"),
        (["pull-profile", "chat+.."], "NAME: found '..'"),
        (["profiles", "show", "+".join("abcdefghi")], "NAME: found 9 workloads"),
        (["pull-profile", "chat", "--window-days", "-1"], "--window-days"),
        (["pull-profile", "chat", "--window-days", "7.5"], "--window-days"),
        (["profiles", "show", "chat", "--window-days", "9" * 30], "--window-days"),
        (["pull-profile", "chat", "--half-life-days", "nan"], "--half-life-days"),
        (["profiles", "show", "chat", "--half-life-days", "inf"], "--half-life-days"),
        (["pull-profile", "chat", "--vram", "much"], "--vram: found 'much'"),
        (["pull-profile", "chat", "--vram", "0"], "--vram: found 0 bytes"),
        (["pull-profile", "chat", "--reserve", "9999999T"], "--vram: found"),
        (["pull-profile", "chat", "--service", "nowhere"], "--service"),
        (["pull-profile", "chat", "--ctx", "-1"], "--ctx"),
        (["pull-profile"], "NAME"),
        (["profiles", "show", "chat", "--phase", "both"], "--phase"),
        (["profiles", "show", "No Good"], "NAME"),
    ],
)
def test_wrong_command_lines(spark_cli, service, arguments, word):
    spark_cli(*arguments).failed(2, word, hint=False)
    assert service.requests == []


def test_a_context_longer_than_trained(spark_cli, service, shape):
    spark_cli("pull-profile", "chat", "--ctx", shape.context_length + 1).failed(1, "was trained for", "pass --ctx")
    assert service.requests == []


def test_another_models_manifest_is_not_stored(pull, answer, manifest):
    wrong = manifest.layers[0].model_copy(update={"block": 7})
    answer(manifest.model_copy(update={"layers": (wrong, *manifest.layers[1:])}))
    pull().failed(3, "altered or damaged")
    answer(manifest.model_copy(update={"fingerprint": "mf1-" + "0" * 32}))
    pull().failed(1, "expected one for")
    assert not data_dir().exists()


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (200, b"<html>", {"Content-Type": "text/html"}),
        (200, b"{", {"Content-Type": "application/json"}),
        (200, b"[" * 100_000, {"Content-Type": "application/json"}),
        (304, b"", {}),
        (302, b"", {"Location": "http://127.0.0.1:9/"}),
        (500, b"", {}),
        (None, b"", {}),
    ],
)
def test_hostile_answers(pull, service, make_reply, path, status, body, headers):
    service.answers[path] = make_reply(status, body, headers)
    pull().failed(1)
    assert not data_dir().exists()


def test_a_peers_words_do_not_drive_the_terminal(pull, answer, manifest):
    answer(manifest.model_copy(update={"verdict_reason": "\x1b[2J"}))
    result = pull()
    assert result.code == 0
    assert "\x1b" not in result.out + result.err


def test_a_damaged_copy_is_pulled_anew(pull, answer, shape, service, manifest):
    store = ManifestStore(manifests_dir())
    stored = store.path(shape.fingerprint, "chat")
    pull()
    stored.write_bytes(b"{")
    assert pull().code == 0
    assert "if-none-match" not in service.requests[-1].headers
    assert store.get(shape.fingerprint, "chat") == manifest


@pytest.mark.parametrize("fault", ["missing", "not_gguf", "dense"])
def test_models_that_have_no_profile(spark_cli, service, broken_model, fault):
    spark_cli("pull-profile", "chat", "--model", broken_model(fault)).failed(1, fault)
    spark_cli("profiles", "show", "chat", "--model", broken_model(fault)).failed(1, fault)
    assert service.requests == []


@pytest.fixture
def profile(shape) -> Profile:
    shares = (1.0, *[0.0] * 63)
    points = [("uniform", 0.3, 0.7), ("own", 0.3, 0.4), ("own", 0.6, 0.1)]
    return Profile(
        fingerprint=shape.fingerprint,
        workload="chat",
        phase="decode",
        revision="c" * 64,
        n_calibration=12,
        n_held_out=4,
        tokens_calibration=100,
        tokens_held_out=30,
        layers=tuple(
            LayerFrequencies(block=layer.block, shares=shares, selections=(800, *[0] * 63)) for layer in shape.layers
        ),
        curves=tuple(
            CurvePoint(policy=policy, residency=residency, cold_hit_rate=rate, low=rate - 0.05, high=rate + 0.05)
            for policy, residency, rate in points
        ),
        verdict=None,
        verdict_reason="1 more held-out session needed",
    )


def test_show(spark_cli, service, make_reply, shape, profile):
    service.answers[f"/api/v1/profiles/{shape.fingerprint}/chat"] = make_reply(body=profile.model_dump_json().encode())
    found = spark_cli("profiles", "show", "chat", "--json").json
    assert {"curves", "n_calibration", "n_held_out", "verdict", "verdict_reason", "revision"} < set(found)
    assert (found["live"], found["live_comparisons"], found["drift"], found["warnings"]) == ([], [], None, [])
    assert (found["workload"], found["mismatch"], found["window_days"], found["half_life_days"]) == (
        "chat", [], None, None
    )  # fmt: skip
    assert set(found["curves"][0]) >= {"policy", "residency", "cold_hit_rate", "low", "high"}
    result = spark_cli("profiles", "show", "chat")
    assert result.out.splitlines()[0].split() == ["resident", "own", "uniform"]
    assert "0.400 (0.350-0.450)" in result.out
    assert "verdict: none yet" in result.err


def test_show_what_was_measured_and_what_moved(spark_cli, service, make_reply, shape, profile):
    rates = {"cold_hit_rate": 0.1, "low": 0.08, "high": 0.12}
    points = [
        LivePoint(policy=policy, residency=0.6, n_sessions=count, **rates)
        for policy, count in (("live_profile", 4), ("live_unprofiled", 9))
    ]
    compared = [
        LiveComparison(residency=0.6, difference=difference, low=low, high=high, n_profile=4, n_unprofiled=9)
        for difference, low, high in ((-0.02, -0.03, -0.01), (0.0, -0.01, 0.01), (0.02, 0.01, 0.03))
    ]
    drift = Drift(
        state="moved",
        since="2026-11-20",
        rebuilt=False,
        n_sessions=12,
        promised=RateInterval(**rates),
        measured=RateInterval(cold_hit_rate=0.2, low=0.17, high=0.24),
    )
    told = profile.model_copy(
        update={"live": tuple(points), "live_comparisons": tuple(compared), "drift": drift, "warnings": ("mind this",)}
    )
    place = f"/api/v1/profiles/{shape.fingerprint}/chat"
    service.answers[place] = make_reply(body=told.model_dump_json().encode())
    found = spark_cli("profiles", "show", "chat", "--json").json
    assert found["live"] == [point.model_dump(mode="json") for point in points]
    assert found["live_comparisons"] == [one.model_dump(mode="json") for one in compared]
    assert found["drift"] == drift.model_dump(mode="json")
    assert found["warnings"] == ["mind this"]
    shown = spark_cli("profiles", "show", "chat").err
    for words in (
        "with this profile: 0.100 (0.080-0.120) on 4 held-out sessions",
        "without a profile: 0.100 (0.080-0.120) on 9 held-out sessions",
        "lower with this profile, -2.0 points (-3.0 to -1.0), though on other sessions",
        "no telling which is lower",
        "lower without it, +2.0 points",
        "promised 10.0% if never adapted (8.0% to 12.0%); on the last 12 sessions it was 20.0% (17.0% to 24.0%)",
        "traffic has moved since 2026-11-20: too few sessions since to rebuild",
        "warning: mind this",
    ):
        assert words in shown
    rebuilt = told.model_copy(update={"drift": drift.model_copy(update={"rebuilt": True})})
    service.answers[place] = make_reply(body=rebuilt.model_dump_json().encode())
    assert "the profile is rebuilt from what came since" in spark_cli("profiles", "show", "chat").err


@pytest.mark.parametrize("spelt", [MIX, "code:7+chat:3", "code:70+chat:30"])
def test_a_mix_is_pulled_shown_and_kept_under_one_name(
    spark_cli, service, make_reply, shape, manifest, profile, spelt, tmp_path
):
    mix = manifest.model_copy(update={"workload": MIX})
    service.answers[f"/api/v1/manifests/{shape.fingerprint}/{MIX_IN_URLS}"] = make_reply(
        200, mix.model_dump_json().encode(), {"Content-Type": "application/json", "ETag": '"1"'}
    )
    result = spark_cli("pull-profile", spelt, "--vram", mix.vram_budget_bytes, "--json")
    assert result.json["manifest"]["workload"] == MIX
    (kept,) = (manifests_dir() / shape.fingerprint).iterdir()
    assert kept.name == "chat_3+code_7.json"
    assert find_manifest("code:14+chat:6", shape.fingerprint) == mix
    spark_cli("pull-profile", "code:7+chat:3", "--vram", mix.vram_budget_bytes)
    assert service.requests[-1].headers["if-none-match"] == '"1"'
    compared = spark_cli("profiles", "diff", spelt, MIX, "--json").json
    assert (compared["before"]["workload"], compared["experts_entering"]) == (MIX, 0)

    rows = [Mismatch(workload=name, residency=0.6, cold_hit_rate=0.2, low=0.1, high=0.3) for name in ("chat", "code")]
    other = Mismatch(workload="docs", residency=0.6, cold_hit_rate=0.4, low=0.3, high=0.5)
    shown = profile.model_copy(update={"workload": MIX, "mismatch": (*rows, other)})
    service.answers[f"/api/v1/profiles/{shape.fingerprint}/{MIX_IN_URLS}"] = make_reply(
        body=shown.model_dump_json().encode()
    )
    result = spark_cli("profiles", "show", spelt, "--json")
    assert (result.json["workload"], len(result.json["mismatch"])) == (MIX, 3)
    assert "cold-hit rate on the mix with 60% resident: mixed 10.0%, chat alone 20.0%, code alone 20.0%\n" in result.err


def test_another_mix_than_asked_for_is_refused(spark_cli, service, make_reply, shape, manifest):
    wrong = manifest.model_copy(update={"workload": "chat:1+code:1"})
    service.answers[f"/api/v1/manifests/{shape.fingerprint}/{MIX_IN_URLS}"] = make_reply(
        200, wrong.model_dump_json().encode(), {"Content-Type": "application/json"}
    )
    spark_cli("pull-profile", MIX, "--vram", manifest.vram_budget_bytes).failed(1, "expected one for")
    uncanonical = wrong.model_dump_json().replace("chat:1+code:1", "code:7+chat:3").encode()
    service.answers[f"/api/v1/manifests/{shape.fingerprint}/{MIX_IN_URLS}"] = make_reply(
        200, uncanonical, {"Content-Type": "application/json"}
    )
    spark_cli("pull-profile", MIX, "--vram", manifest.vram_budget_bytes).failed(1, "no valid PlacementManifest")
    assert not data_dir().exists()


def test_a_window_is_asked_for_and_is_another_question(pull, answer, spark_cli, service, make_reply, shape, profile):
    first = pull("--json")
    assert (first.json["window_days"], first.json["half_life_days"]) == (None, None)
    windows = [("--window-days", 30), ("--half-life-days", 14), ("--window-days", 0, "--half-life-days", "7.5")]
    asked = []
    for window in windows:
        found = pull(*window, "--json").json
        assert "if-none-match" not in service.requests[-1].headers
        query = parse_qs(urlsplit(service.requests[-1].path).query)
        asked.append({name: query[name] for name in ("window_days", "half_life_days") if name in query})
        assert (found["window_days"] is None, found["half_life_days"] is None) == (
            "window_days" not in query,
            "half_life_days" not in query,
        )
        pull(*window)
        assert service.requests[-1].headers["if-none-match"] == '"1"'
    meant = [{"window_days": ["30"]}, {"half_life_days": ["14"]}, {"window_days": ["0"], "half_life_days": ["7.5"]}]
    assert asked == meant
    service.answers[f"/api/v1/profiles/{shape.fingerprint}/chat"] = make_reply(body=profile.model_dump_json().encode())
    found = spark_cli("profiles", "show", "chat", "--window-days", 30, "--half-life-days", 14, "--json").json
    assert (found["window_days"], found["half_life_days"]) == (30, 14.0)
    query = parse_qs(urlsplit(service.requests[-1].path).query)
    assert query == {"phase": ["decode"], "window_days": ["30"], "half_life_days": ["14"]}


def test_list(spark_cli, agent_cli, service, make_reply, shape):
    summary = ProfileSummary(
        fingerprint=shape.fingerprint,
        model_name=None,
        workload="chat",
        phase="decode",
        revision="c" * 64,
        n_calibration=12,
        n_held_out=4,
        verdict=None,
    )
    body = ProfileList(profiles=(summary,)).model_dump_json().encode()
    service.answers["/api/v1/profiles"] = make_reply(body=body)
    assert spark_cli("profiles", "ls", "--json").json == json.loads(body) | {"age_s": None}
    assert "none yet" in agent_cli("profiles", "ls").out
    service.answers["/api/v1/profiles"] = make_reply(body=b'{"profiles": []}')
    assert "no profiles yet" in spark_cli("profiles", "list").err
