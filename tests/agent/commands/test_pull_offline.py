"""What was pulled goes on being of use while the service is away, with its age; and nothing older takes its place."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
import signing_keys

from spark_agent.manifests import ManifestStore
from spark_agent.paths import answers_dir, manifests_dir
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.profile import Profile
from spark_schemas.signature import PinSignature, pin_message

AWAY = ["down", "SPARKMOE_OFFLINE", 500, 502, 503, 429]


@pytest.fixture
def shape():
    return read_model_shape(demo_model_path())


@pytest.fixture
def manifest(shape, make_manifest):
    return make_manifest(shape)


@pytest.fixture(autouse=True)
def address(service, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", service.url)
    return service.url


@pytest.fixture
def path(shape) -> str:
    return f"/api/v1/manifests/{shape.fingerprint}/chat"


@pytest.fixture
def say(service, make_reply, path, manifest, shape):
    """Answer with the manifest of a revision, signed."""

    def answer(
        revision: str = "c" * 64,
        *,
        signed: bool = False,
        pinned: bool = False,
        pin_day: dt.date | None = None,
        pin_of: str | None = None,
        pin_key: int | None = 0,
    ) -> None:
        body = manifest.model_copy(update={"profile_revision": revision}).model_dump_json().encode()
        headers = {"Content-Type": "application/json", "ETag": f'"{revision}"'}
        if signed:
            headers["Spark-Signature"] = signing_keys.sign(0, body).header()
            key = signing_keys.info(0).model_dump_json().encode()
            service.answers["/api/v1/signing-key"] = make_reply(200, key)
        if pinned:
            headers["Spark-Pinned"] = revision
            day = pin_day or dt.datetime.now(dt.UTC).date()
            said = pin_message(shape.fingerprint, "chat", "decode", pin_of or revision, day)
            if pin_key is not None:
                found = signing_keys.sign(pin_key, said)
                headers["Spark-Pinned-Signature"] = PinSignature(found.key_id, day, found.value).header()
        service.answers[path] = make_reply(200, body, headers)

    answer()
    return answer


@pytest.fixture
def pull(spark_cli, manifest):
    return lambda *more: spark_cli("pull-profile", "chat", "--vram", manifest.vram_budget_bytes, *more)


@pytest.fixture
def go_away(service, make_problem, monkeypatch: pytest.MonkeyPatch):
    def leave(how: str | int) -> None:
        if how == "SPARKMOE_OFFLINE":
            monkeypatch.setenv("SPARKMOE_OFFLINE", "1")
        elif how == "down":
            service.script = [type(make_problem(500, ""))(None)] * 10
        else:
            service.script = [make_problem(int(how), "In trouble")] * 10

    return leave


@pytest.mark.parametrize("how", AWAY)
def test_what_was_pulled_before_is_used_and_its_age_shown(pull, say, go_away, manifest, service, how, monkeypatch):
    assert pull("--json").json["from_cache"] is False
    sent = len(service.requests)
    go_away(how)
    with monkeypatch.context() as later:
        now = __import__("time").time() + 3 * 86_400
        later.setattr("time.time", lambda: now)
        result = pull("--json")
    found = result.json
    assert found["manifest"] == manifest.model_dump(mode="json")
    assert found["from_cache"] is True
    assert 3 * 86_400 <= found["age_s"] < 3 * 86_400 + 3600
    assert "using what was pulled 3 days ago" in result.err
    assert len(service.requests) == sent + (how != "SPARKMOE_OFFLINE")


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_a_service_that_answers_is_heard(pull, say, go_away, status):
    pull()
    go_away(status)
    pull().failed(1, f"answered {status}", hint=False)


def test_another_question_is_not_answered_from_what_was_kept(pull, spark_cli, say, go_away, manifest):
    pull()
    go_away("down")
    pull("--reserve", "1k").failed(1, "no answer", "reserve_bytes 0, not 1024")
    spark_cli("pull-profile", "chat", "--vram", "1T").failed(1, "no answer", "vram_bytes")
    spark_cli("pull-profile", "other", "--vram", "1T").failed(1, "no answer")
    result = spark_cli("pull-profile", "chat", "--json")
    assert result.json["from_cache"] is True, "nobody named a budget: what there is will do"


def test_an_altered_copy_is_refused_offline_too(pull, say, go_away, shape):
    say(signed=True)
    assert pull("--json").json["signed_by"]
    go_away("SPARKMOE_OFFLINE")
    assert pull("--json").json["from_cache"] is True
    stored = ManifestStore(manifests_dir()).path(shape.fingerprint, "chat")
    kept = json.loads(stored.read_text())
    kept["content"] = kept["content"].replace('"n_calibration":12', '"n_calibration":13')
    stored.write_text(json.dumps(kept))
    pull().failed(3, "altered")
    kept["signed"] = None
    stored.write_text(json.dumps(kept))
    pull().failed(3, "no signature")


def test_a_clock_that_was_set_back_is_told(pull, say, go_away, monkeypatch):
    pull()
    go_away("down")
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert "was the clock set back?" in pull().err


def test_a_replayed_answer_is_refused(pull, say, shape):
    """With a good signature: it was good once."""
    old, new = "a" * 64, "b" * 64
    for revision in (old, new, new):
        say(revision, signed=True)
        assert pull().code == 0
    say(old, signed=True)
    pull().failed(3, "which bbbbbbbbbbbb had replaced", "--accept-older")
    store = ManifestStore(manifests_dir())
    assert store.get(shape.fingerprint, "chat").profile_revision == new
    pull("--dry-run").failed(3, "had replaced")
    assert pull("--accept-older").code == 0
    assert store.get(shape.fingerprint, "chat").profile_revision == old
    say(new, signed=True)
    assert pull().code == 0


def test_a_pin_and_its_end_are_followed(pull, say):
    old, new = "a" * 64, "b" * 64
    for revision, pinned in ((old, False), (new, False), (old, True), (old, True), (new, False), (old, True)):
        say(revision, signed=True, pinned=pinned)
        shown = pull()
        assert shown.code == 0
        assert ("pinned: there may be a newer one" in shown.err) == pinned
    say(old, signed=True)
    assert pull().code == 0, "it is the one that is kept"


TODAY = dt.datetime.now(dt.UTC).date()
PINS = {
    "of no signature": ({"pin_key": None}, "it does not sign that"),
    "of another key": ({"pin_key": 1}, "does not fit"),
    "of another revision": ({"pin_of": "d" * 64}, "does not fit"),
    "of a week ago": ({"pin_day": TODAY - dt.timedelta(7)}, "it was said on"),
    "of a day to come": ({"pin_day": TODAY + dt.timedelta(7)}, "it was said on"),
}


@pytest.mark.parametrize("name", PINS)
def test_a_replayed_answer_with_a_word_of_a_pin_is_refused(pull, say, shape, name):
    """Who replays an old answer may add whatever header, also one that was good once."""
    changes, reason = PINS[name]
    old, new = "a" * 64, "b" * 64
    for revision in (old, new):
        say(revision, signed=True)
        assert pull().code == 0
    say(old, signed=True, pinned=True, **changes)
    pull().failed(3, "which bbbbbbbbbbbb had replaced", "which is not proven: ", reason)
    assert ManifestStore(manifests_dir()).get(shape.fingerprint, "chat").profile_revision == new
    say(new, signed=True, pinned=True, **changes)
    shown = pull()
    assert (shown.code, "not proven" in shown.err) == (0, True), "what is no older needs no pin"


@pytest.mark.parametrize("header", ["", "x", "ed25519;keyid=0;day=2026-01-01;sig=", "ed25519;keyid=" + "0" * 32])
def test_a_pins_signature_that_is_none(pull, say, service, path, header):
    say("a" * 64, signed=True)
    assert pull().code == 0
    say("b" * 64, signed=True)
    assert pull().code == 0
    say("a" * 64, signed=True, pinned=True)
    service.answers[path].headers["Spark-Pinned-Signature"] = header
    pull().failed(3, "cannot be read")


def test_a_service_that_signs_nothing_proves_no_pin(pull, say):
    for revision in ("a" * 64, "b" * 64):
        say(revision)
        assert pull().code == 0
    say("a" * 64, pinned=True)
    pull().failed(3, "it signs nothing", "--accept-older")


def test_an_interrupted_pull_leaves_the_old_one(pull, say, shape, monkeypatch):
    pull()
    store = ManifestStore(manifests_dir())
    before = store.path(shape.fingerprint, "chat").read_bytes()
    say("d" * 64)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        assert pull().code == 130
    assert store.path(shape.fingerprint, "chat").read_bytes() == before
    assert [entry.name for entry in store.path(shape.fingerprint, "chat").parent.iterdir()] == ["chat.json"]


@pytest.fixture
def profiles(service, make_reply, shape) -> Profile:
    found = Profile(
        fingerprint=shape.fingerprint,
        workload="chat",
        phase="decode",
        revision="c" * 64,
        n_calibration=9,
        n_held_out=3,
        tokens_calibration=9,
        tokens_held_out=3,
        layers=(),
        curves=(),
        verdict=None,
        verdict_reason="too few",
    )
    headers = {"Content-Type": "application/json", "ETag": '"1"'}
    service.answers["/api/v1/profiles"] = make_reply(200, b'{"profiles": []}', headers)
    service.answers[f"/api/v1/profiles/{shape.fingerprint}/chat"] = make_reply(
        200, found.model_dump_json().encode(), headers
    )
    return found


LOOKS = [("profiles", "ls"), ("profiles", "show", "chat")]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("how", AWAY)
def test_profiles_are_looked_at_offline_too(spark_cli, profiles, go_away, look, how):
    first = spark_cli(*look, "--json").json
    assert first["age_s"] is None
    go_away(how)
    result = spark_cli(*look, "--json")
    found = result.json
    assert found.pop("age_s") >= 0
    assert first | found == first
    assert "this is what the service said less than a minute ago" in result.err


@pytest.mark.parametrize("look", LOOKS)
def test_profiles_are_asked_for_by_etag(spark_cli, profiles, service, make_reply, look):
    first = spark_cli(*look, "--json").json
    for name in service.answers:
        service.answers[name] = make_reply(304)
    assert spark_cli(*look, "--json").json == first
    assert service.requests[-1].headers["if-none-match"] == '"1"'


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b'{"url": "x", "at": 1, "etag": null, "content": "{}"}'])
def test_a_damaged_copy_of_an_answer_is_none(spark_cli, profiles, service, go_away, look, damage):
    spark_cli(*look)
    for kept in answers_dir().iterdir():
        kept.write_bytes(damage)
    assert spark_cli(*look).code == 0
    assert "if-none-match" not in service.requests[-1].headers
    for kept in answers_dir().iterdir():
        kept.write_bytes(damage)
    go_away("down")
    spark_cli(*look).failed(1, "no answer")


def test_only_so_many_answers_are_kept(spark_cli, profiles, service, make_reply, monkeypatch):
    monkeypatch.setattr("spark_agent.answer_cache.MOST_ANSWERS", 2)
    for days in (0, 7, 30, 90):
        spark_cli("profiles", "show", "chat", "--window-days", days)
    assert len(list(answers_dir().iterdir())) == 2


def test_on_a_gpu_it_plans_for_what_is_free(spark_cli, service, shape, monkeypatch):
    """The planning itself is the runtime's and tested there; here a card is made up, as this machine may have none."""
    from types import SimpleNamespace

    from spark_agent.commands import pull_budget
    from spark_runtime.placement import layer_sizes, residency_budget

    everything = shape.expert_bytes_total
    fixed = shape.core_bytes + 512 * shape.kv_bytes_per_token
    for experts, share in ((everything // 2, 0.4), (everything, 1.0), (0, 0.0)):
        plan = SimpleNamespace(memory=SimpleNamespace(devices=[SimpleNamespace(experts=experts)]))
        monkeypatch.setattr("spark_runtime.tier_plan.cards", lambda: ["a card"])
        monkeypatch.setattr("spark_agent.tiering.plan_for", lambda *_, plan=plan, **__: plan)
        monkeypatch.setattr(pull_budget, "GRAIN_BYTES", 4096)
        result = spark_cli("pull-profile", "chat", "--ctx", 512)
        assert "planning for what the GPU has free but a reserve" in result.err
        asked = int(service.requests[-1].path.partition("vram_bytes=")[2].partition("&")[0])
        least = residency_budget(layer_sizes(shape), 0.0)
        assert share * everything <= asked - fixed <= max(experts, least)


def test_a_gpu_into_which_nothing_fits_is_told(spark_cli, service, monkeypatch):
    from spark_agent.errors import SparkError

    def refuse(*_: object, **__: object) -> None:
        raise SparkError("1 GB free, 2 GB needed")

    monkeypatch.setattr("spark_runtime.tier_plan.cards", lambda: ["a card"])
    monkeypatch.setattr("spark_agent.tiering.plan_for", refuse)
    result = spark_cli("pull-profile", "chat")
    assert "nothing fits into the GPU as it is now: 1 GB free" in result.err
    assert "planning for 60% of the experts" in result.err
