"""What the slots run by, told and replaced over HTTP while requests are served."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
import pytest
from signing_keys import KEYS, sign
from starlette.applications import Starlette
from starlette.testclient import TestClient

from spark_agent.apply_placement import apply_to_running
from spark_agent.own_profile import own_profile
from spark_agent.server.api_error import ApiError
from spark_agent.server.placement_control import PlacementControl
from spark_agent.server.placement_routes import placement_routes
from spark_agent.service_keys import KeyRing, PinnedKey
from spark_agent.signatures import SignedBy
from spark_agent.trust import ManifestTrust
from spark_runtime.calibration.sessions import SessionPart
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.manifest_build import Basis, assemble_manifest, place_layers
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.replacement import Rules
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tier_start import keeping, profile_start, uniform_start

URL = "http://127.0.0.1:8710"
TEXT = "How are you today? And what is the weather like by the sea?"
RULES = Rules(window_tokens=16, fewest_windows=4, aside_every=2, every_tokens=64, least_saving=0.0)


def app_of(control):
    """The route as the agent's application answers it."""
    handlers = {ApiError: lambda request, error: error.response(request.scope)}
    return TestClient(
        Starlette(routes=placement_routes(control), exception_handlers=handlers), raise_server_exceptions=False
    )


class Now:
    """A worker whose thread is the caller's."""

    def call(self, function):
        future = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture(scope="module")
def shape():
    return read_model_shape(demo_model_path())


@pytest.fixture
def engine(shape):
    options = EngineOptions(n_ctx=256, n_threads=1, n_outputs_max=1, tier=uniform_start(shape, 0.3))
    with Engine.load(demo_model_path(), options) as opened:
        yield opened


@pytest.fixture
def trust(tmp_path):
    ring = KeyRing(tmp_path / "keys")
    ring.put(PinnedKey(service_url=URL, key=KEYS[0]))
    return ManifestTrust(ring)


@pytest.fixture
def control(engine, trust):
    def fail(error):
        raise error

    return PlacementControl(engine, Now(), trust, lambda _: None, fail, source="none", manifest=None, rules=RULES)


@pytest.fixture
def client(control):
    return app_of(control)


def manifest_for(shape, residency=0.3, **changes):
    rng = np.random.default_rng(5)
    frequency = [rng.dirichlet(np.full(layer.n_experts, 0.3)) + 1e-6 for layer in shape.layers]
    slots = [layer.slots for layer in uniform_start(shape, residency).layers]
    basis = Basis("chat", "decode", "c" * 64, 12, 4, "profile", "better")
    made = assemble_manifest(shape, basis, place_layers(shape, frequency, slots), None, n_ctx=256)
    return made.model_copy(update=changes)


def order(manifest, key=0, url=URL):
    content = manifest.model_dump_json()
    signed = SignedBy(service_url=url, key=KEYS[key], signature=sign(key, content.encode()).header())
    return {"content": content, "signed": signed.model_dump(mode="json")}


def test_a_signed_manifest_is_taken_over(client, engine, shape):
    before = client.get("/spark/placement").json()
    assert (before["source"], before["tiered"], before["expected_cold_hit_rate"]) == ("none", True, None)
    manifest, slots = manifest_for(shape), engine.tier.memory().slots
    reply = client.post("/spark/placement", json=order(manifest))
    assert reply.status_code == 200, reply.text
    assert (reply.json()["source"], reply.json()["profile_revision"]) == ("pulled", "c" * 64)
    assert engine.tier.memory().slots == slots, "no memory was asked for"
    for placed, layer, resident in zip(engine.tier.start.layers, manifest.layers, engine.tier.resident(), strict=True):
        expected = sorted(range(layer.n_experts), key=lambda expert, of=layer: (-of.prior[expert], expert))
        assert resident.tolist() == sorted(expected[: placed.slots])


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("other model", 409, "another model"),
        ("forged", 403, "altered after it was signed"),
        ("other key", 403, "signed by key"),
        ("unknown service", 403, "no key of http://127.0.0.1:9 is pinned"),
        ("unsigned", 403, "unsigned"),
        ("larger", 409, "expected at most"),
        ("no manifest", 409, "no placement manifest"),
        ("no object", 400, "body"),
        ("both", 400, "either content with signed, or local"),
        ("unknown workload", 409, "no session of chat"),
    ],
)
def test_what_must_not_be_placed_changes_nothing(client, engine, shape, fault, status, words):
    start = engine.tier.start
    body = order(manifest_for(shape))
    if fault == "other model":
        body = order(manifest_for(shape, fingerprint="mf1-" + "0" * 32, sibling="ms1-" + "0" * 32))
    elif fault == "forged":
        body["content"] = body["content"].replace("better", "bitter")
    elif fault == "other key":
        body = order(manifest_for(shape), key=1)
    elif fault == "unknown service":
        body = order(manifest_for(shape), url="http://127.0.0.1:9")
    elif fault == "unsigned":
        body["signed"] = None
    elif fault == "larger":
        body = order(manifest_for(shape, residency=0.9))
    elif fault == "no manifest":
        signed = SignedBy(service_url=URL, key=KEYS[0], signature=sign(0, b"{}").header())
        body = {"content": "{}", "signed": signed.model_dump(mode="json")}
    elif fault == "no object":
        body = []
    elif fault == "both":
        body["local"] = "chat"
    elif fault == "unknown workload":
        body = {"local": "chat"}
    reply = client.post("/spark/placement", json=body)
    assert reply.status_code == status, reply.text
    assert words in reply.json()["error"]["message"]
    assert engine.tier.start is start
    assert client.get("/spark/placement").json()["source"] == "none"


def test_a_body_that_is_too_large_is_not_read(client, monkeypatch):
    monkeypatch.setattr("spark_agent.server.placement_routes.MAX_BODY_BYTES", 100)
    assert client.post("/spark/placement", content=b"x" * 101).status_code == 413


def test_without_tiers_there_is_nothing_to_place(shape, trust):
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=64, n_threads=1)) as engine:
        control = PlacementControl(engine, Now(), trust, lambda _: None, pytest.fail, source="none", manifest=None)
        client = app_of(control)
        assert client.get("/spark/placement").json()["tiered"] is False
        reply = client.post("/spark/placement", json=order(manifest_for(shape)))
        assert (reply.status_code, "every expert is resident" in reply.text) == (409, True)


def generated(engine, n_tokens, between=lambda _: None):
    """Tokens and the bytes of every token's logits."""
    session, logits, tokens = SessionCounts(engine.shape), [], []
    with engine.counting(session):
        engine.prompt(engine.tokenize(TEXT))
        for token in engine.generate(Sampling(temperature=0.8, seed=3), n_tokens):
            logits.append(engine.logits().tobytes())
            tokens.append(token)
            between(len(tokens))
    return tokens, logits, session


def test_placing_anew_in_the_middle_changes_no_bit(engine, shape):
    plain_tokens, plain, counted = generated(engine, 60)
    engine.reset()
    rng = np.random.default_rng(2)

    def between(n_tokens):
        if n_tokens % 4:
            return
        frequency = [rng.dirichlet(np.full(layer.n_experts, 0.2)) + 1e-6 for layer in shape.layers]
        start = profile_start(shape, frequency, [layer.slots for layer in engine.tier.start.layers])
        engine.place(keeping(start, engine.tier.resident()) if n_tokens % 8 else start)

    tokens, moved, recounted = generated(engine, 60, between)
    assert len(tokens) > 20
    assert tokens == plain_tokens
    assert moved == plain
    for phase in ("prefill", "decode"):
        for mine, theirs in zip(recounted.counts[phase], counted.counts[phase], strict=True):
            assert np.array_equal(mine, theirs), "and no count is lost"
    assert recounted.misses is None, "what was missed under several placements is of none"


def test_keeping_copies_nothing(engine, shape):
    generated(engine, 20)
    resident = engine.tier.resident()
    start = profile_start(shape, [np.full(layer.n_experts, 1 / layer.n_experts) for layer in shape.layers], [19] * 4)
    engine.place(keeping(start, resident))
    for before, after in zip(resident, engine.tier.resident(), strict=True):
        assert np.array_equal(before, after)


def repeat_one_session(engine, times=12):
    """The same tokens each time, so that every stretch of traffic is like the others and no chance decides."""
    for _ in range(times):
        generated(engine, 24)
        engine.reset()


def test_traffic_that_differs_from_the_start_moves_the_priors_once_and_is_told(control, engine, client):
    start, resident = engine.tier.start, []
    move = engine.place
    engine.place = lambda to: (
        resident.append(engine.tier.resident()),
        move(to),
        resident.append(engine.tier.resident()),
    )
    repeat_one_session(engine)
    told = client.get("/spark/placement").json()
    outcomes = [one["outcome"] for one in told["decisions"][::-1]]
    assert outcomes == ["no_change", "changed", *["no_change"] * (len(outcomes) - 2)], "oldest first"
    too_little, changed, *after = told["decisions"][::-1]
    assert "too little traffic" in too_little["reason"]
    assert 0 < changed["predicted_saving_per_token"] <= changed["live_cold_hits_per_token"]
    assert (changed["cost_bytes"], changed["interval"][0] > 0) == (0, True)
    assert all(one["reason"] == "the gain cannot be told from none" for one in after), "the same traffic goes on"
    assert len(after) >= 2
    assert told["decisions_counted"] == {"changed": 1, "no_change": len(outcomes) - 1}
    assert (told["source"], told["live_cold_hit_rate"] > 0) == ("recent", True)
    assert not any(layer.prior.any() for layer in start.layers), "it began without a profile"
    assert all(layer.prior.any() for layer in engine.tier.start.layers)
    before, then = resident
    for one, other in zip(before, then, strict=True):
        assert np.array_equal(one, other), "and nothing was copied"


def test_what_would_save_too_little_changes_nothing(engine, trust):
    demanding = replace(RULES, least_saving=1.0)
    control = PlacementControl(
        engine, Now(), trust, lambda _: None, pytest.fail, source="none", manifest=None, rules=demanding
    )
    start = engine.tier.start
    repeat_one_session(engine)
    told = control.describe()
    assert told["decisions_counted"] == {"changed": 0, "no_change": len(told["decisions"])}
    assert told["decisions"][0]["reason"] == "it would save less than 100% of the cold hits"
    assert (told["source"], engine.tier.start is start) == ("none", True)


def test_a_teams_manifest_is_only_watched(engine, trust, shape):
    control = PlacementControl(
        engine, Now(), trust, lambda _: None, pytest.fail, source="pulled", manifest=manifest_for(shape), rules=RULES
    )
    start = engine.tier.start
    repeat_one_session(engine)
    assert engine.tier.start is start
    told = control.describe()
    assert told["decisions_counted"]["changed"] == 0
    assert any(one["reason"].startswith("only watching: ") for one in told["decisions"]), "it would have"
    assert control.manifest_of(start) == (True, control.manifest)


@pytest.mark.parametrize("replacement", ["auto", "watch", "off"])
def test_a_pinned_share_stays_and_a_mode_is_kept(shape, trust, replacement):
    """Whatever is placed while it serves, the share of slots that a person wanted pinned is."""
    rng = np.random.default_rng(0)
    frequency = [rng.dirichlet(np.full(layer.n_experts, 0.3)) + 1e-6 for layer in shape.layers]
    slots = [layer.slots for layer in uniform_start(shape, 0.4).layers]
    start = profile_start(shape, frequency, slots, pinned_share=0.2)
    assert min(layer.pinned for layer in start.layers) > 0
    options = EngineOptions(n_ctx=256, n_threads=1, n_outputs_max=1, tier=start)
    with Engine.load(demo_model_path(), options) as engine:
        control = PlacementControl(
            engine,
            Now(),
            trust,
            lambda _: None,
            pytest.fail,
            source="none",
            manifest=None,
            rules=RULES,
            replacement=replacement,
            pinned_share=0.2,
        )
        repeat_one_session(engine)
        told = control.describe()
        assert told["replacement"] == replacement
        assert (told["decisions_counted"]["changed"] > 0) == (replacement == "auto")
        assert (told["decisions"] == []) == (replacement == "off")
        pinned = [layer.pinned for layer in engine.tier.start.layers]
        assert sum(pinned) == pytest.approx(0.2 * engine.tier.start.slots, abs=len(pinned))
        reply = app_of(control).post("/spark/placement", json=order(manifest_for(shape, residency=0.4)))
        assert reply.status_code == 200, reply.text
        pinned = [layer.pinned for layer in engine.tier.start.layers]
        assert sum(pinned) == pytest.approx(0.2 * engine.tier.start.slots, abs=len(pinned))
        held = [set(layer.order[: layer.pinned].tolist()) for layer in engine.tier.start.layers]
        repeat_one_session(engine, 4)
        for experts, resident in zip(held, engine.tier.resident(), strict=True):
            assert experts <= set(resident.tolist())


def test_own_sessions_are_nobodys_promise(engine, trust, shape, control):
    counts = generated(engine, 60)[2]
    digest = "ab" * 32
    part = SessionPart(digest, "chat", digest, 300, tuple(counts.counts["decode"]), None)
    profile = own_profile(shape, {"chat": [part]}, "chat", 0)
    assert profile is not None
    control._own = lambda _: profile
    control.place(control.own_order("chat")).result()
    assert control.describe()["source"] == "local"
    told, manifest = control.manifest_of(engine.tier.start)
    assert (told, manifest.workload) == (False, "chat")


class Agent:
    def __init__(self, base_url, fingerprint, token=None):
        self.base_url, self.fingerprint, self.token = base_url, fingerprint, token
        self.address, self.tls = urlsplit(base_url).hostname, None


def test_only_agents_of_the_model_are_asked_and_a_refusal_fails_nothing(shape):
    said = []
    agents = [
        Agent("http://127.0.0.1:9", shape.fingerprint),
        Agent("http://192.0.2.1:80", shape.fingerprint),
        Agent("http://127.0.0.1:9", "mf1-" + "0" * 32),
    ]
    results = apply_to_running(agents, shape.fingerprint, local="chat", say=said.append)
    assert [one.base_url for one in results] == ["http://127.0.0.1:9", "http://192.0.2.1:80"]
    assert "does not answer" in results[0].refusal
    assert "not an agent on this machine" in results[1].refusal
    assert len(said) == 2


def test_functions_run_between_steps(serve):
    with serve(n_ctx=128) as agent:
        threads = []

        def where():
            threads.append(threading.current_thread().name)
            return 7

        assert agent.worker.call(where).result(120) == 7
        failing = agent.worker.call(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failing.result(120)
        assert agent.answer()
    assert threads == ["spark-engine"]
    with pytest.raises(RuntimeError, match="stopped"):
        agent.worker.call(where)
