from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import signal
import socket
import time
from urllib.parse import urlsplit

import agent_process
import httpx
import pytest
from agent_process import END_S, KEY, chat, running

from spark_agent.config import Config, Consent, save_config
from spark_agent.dialogue.messages import Message
from spark_agent.formats.hints import Hints
from spark_agent.formats.profile import save_profile
from spark_agent.formats.registry import import_file
from spark_agent.identity import session_hash
from spark_agent.manifests import ManifestStore, PullKey
from spark_agent.paths import (
    config_path,
    guesses_dir,
    local_key_path,
    manifests_dir,
    prefetch_trials_dir,
    spool_path,
    state_dir,
)
from spark_agent.server.serve import bind
from spark_agent.server.sessions import lineage_of
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.histogram import HistogramUpload
from spark_schemas.invariants import check_session


@pytest.fixture
def manifest(make_manifest):
    return make_manifest(read_model_shape(demo_model_path()))


def test_the_start_up_object_and_a_manifest(manifest, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(manifest.model_copy(update={"n_ctx": 512}).model_dump_json())
    with running("--manifest", path) as (process, start):
        assert start["n_ctx"] == 512, "the context that the manifest was planned for"
        fixed = ["base_url", "model", "fingerprint", "n_ctx", "parallel", "tiers", "manifest", "placement", "upload"]
        assert list(start) == [*fixed, "choices", "bands", "expected", "llama_cpp", "access"]
        assert start["fingerprint"] == manifest.fingerprint
        assert start["tiers"]["expert_bytes"] > 0
        assert start["tiers"]["tiered"] is False, "the manifest holds every expert"
        assert start["manifest"]["workload"] == "chat"
        assert start["manifest"]["slots"] == sum(layer.slots for layer in manifest.layers)
        assert start["upload"] == {"allowed": False, "pending": 0, "service_url": "http://127.0.0.1:8710"}
        health = httpx.get(f"{start['base_url']}/health", timeout=END_S, trust_env=False).json()
        assert (health["status"], health["fingerprint"]) == ("ok", manifest.fingerprint)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0


def test_a_manifest_is_placed(manifest, tmp_path, kept):
    text, path = "How are you today?", tmp_path / "manifest.json"
    layers = tuple(layer.model_copy(update={"slots": 20}) for layer in manifest.layers)
    slot_bytes = sum(layer.slots * layer.expert_bytes for layer in layers)
    sizes = manifest.bytes.model_copy(
        update={
            "vram_slots": slot_bytes,
            "vram_total": manifest.bytes.vram_total - manifest.bytes.vram_slots + slot_bytes,
        }
    )
    path.write_text(manifest.model_copy(update={"layers": layers, "bytes": sizes}).model_dump_json())
    # The weights of a model that is not tiered are repacked for the CPU, which rounds otherwise.
    with running("--residency", "1", "--workload", "chat") as (process, start):
        all_in_slots = chat(start, text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    with running("--manifest", path, "--pinned-share", "0.1") as (process, start):
        tiers = start["tiers"]
        assert (tiers["tiered"], tiers["backend"], tiers["slots"]) == (True, "spark", 80)
        assert tiers["engine"] in {"cuda", "host"}
        assert tiers["residency"] == pytest.approx(80 / 256)
        assert tiers["slot_bytes"] >= slot_bytes
        assert tiers["host_bytes"] == tiers["expert_bytes"]
        assert chat(start, text) == all_in_slots
        stats = httpx.get(f"{start['base_url']}/spark/stats", timeout=END_S, trust_env=False).json()
        assert stats["resident_share"] == tiers["residency"]
        assert stats["phases"]["decode"]["cold_hit_rate"] > 0
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=END_S)
        assert process.returncode == 0
    assert "80 of 256 experts in slots (31.2%)" in err, "the plan"
    assert "it takes" in err, "compute buffers are beyond what the manifest counted"
    assert len(kept()) == 1, "both counted the same, which is one histogram"


def test_a_dry_run_shows_the_plan_and_loads_nothing(agent_cli):
    tiers = agent_cli("run", "--dry-run", "--json", "--residency", "0.5").json["tiers"]
    assert (tiers["tiered"], tiers["engine"], tiers["residency"]) == (True, None, 0.5)
    assert {"tier", "what", "bytes"} == set(tiers["plan"][0])
    shown = agent_cli("run", "--dry-run", "--vram", "17M")
    assert (shown.code, "experts in slots" in shown.out) == (0, True)
    assert "every expert is resident" in agent_cli("run", "--dry-run", "--no-tier").out
    for word in ("context  ", "hot set  ", "ring  ", "cold hits  ", "decode  ", "spark-agent bench"):
        assert word in shown.out
    assert not state_dir().exists()


def test_what_does_not_fit_is_refused_before_loading(agent_cli):
    agent_cli("run", "-p", 0, "--vram", "8M", "--devices", "1").failed(1, "needs", "expected at most 8 MiB", "--ubatch")
    agent_cli("run", "-p", 0, "--vram", "4M", "--no-tier", "--dry-run").failed(1, "every expert resident", "--vram")
    agent_cli("run", "-p", 0, "--residency", "0.5", "--devices", "99").failed(1, "99 devices", "use at most")


def test_a_session_says_which_manifest_it_ran_with(manifest, tmp_path, agent_cli):
    path = tmp_path / "manifest.json"
    path.write_text(manifest.model_dump_json())
    for arguments in (["--manifest", path], []):
        with running("--residency", "0.4", *arguments) as (process, start):
            chat(start, "How are you today?")
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_S) == 0
    shown = agent_cli("upload", "show", "--minimum-tokens", "1")
    assert shown.code == 0, shown.err
    upload = HistogramUpload.model_validate_json(shown.out)
    with_profile, without = sorted(upload.sessions, key=lambda session: session.workload)
    assert (with_profile.workload, without.workload) == ("chat", "unlabelled"), "the manifest's, where nobody says"
    for session in upload.sessions:
        check_session(session, upload.model)
        assert session.live is not None
        assert 0 < session.live.cold_hits <= session.live.selections
        assert session.live.resident_bytes == pytest.approx(0.4 * upload.model.expert_bytes_total, rel=0.05)
    assert without.live.profile is None
    profile = with_profile.live.profile
    assert (profile.workload, profile.revision) == ("chat", manifest.profile_revision)
    assert profile.vram_budget_bytes == manifest.vram_budget_bytes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_keeps_the_counts(number, kept):
    text = f"How are you on {number.name}?"
    with running("--workload", "review") as (process, start):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        reply = httpx.post(f"{start['base_url']}/v1/chat/completions", json=body, timeout=END_S, trust_env=False)
        assert reply.status_code == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=END_S)
    assert (process.returncode, out) == (0, "")
    first, *plan = err.splitlines()
    assert first == "no model named: using the bundled demo model"
    assert {line.split("  ")[0] for line in plan} <= {
        "context",
        "parallel",
        "experts",
        "decode",
    }, "the plan, and nothing else"
    (row,) = kept()
    assert row.workload == "review"
    assert row.tokens >= reply.json()["usage"]["prompt_tokens"]
    assert row.session_hash == session_hash(KEY, lineage_of([Message("user", text)]))


def test_a_signal_ends_it_in_the_middle_of_an_answer(kept, monkeypatch):
    with running() as (process, start):
        body = {"messages": [{"role": "user", "content": "How are you today?"}], "stream": True, "temperature": 0}
        url = f"{start['base_url']}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=END_S, trust_env=False) as reply:
            chunks = reply.iter_raw()
            assert next(chunks)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.TransportError):
                for _ in chunks:
                    pass
        assert process.wait(END_S) == 0
    assert len(kept()) == 1


def test_the_thread_that_loads_computes():
    before = """
import sys, threading
from spark_agent.server.worker import Worker
from spark_runtime.engine import Engine
def told(owner, name):
    usual = getattr(owner, name)
    def tell(*arguments, **options):
        print("on", threading.get_ident(), name, file=sys.stderr, flush=True)
        return usual(*arguments, **options)
    setattr(owner, name, tell)
told(Engine, "load")
told(Worker, "_work")
"""
    with running(before=before) as (process, _):
        said = [line.split() for line in agent_process.ended(process).splitlines() if line.startswith("on ")]
    assert [what for _, _, what in said] == ["load", "_work"]
    assert len({thread for _, thread, _ in said}) == 1


def test_a_connection_outlives_what_clients_keep():
    with running() as (process, start), contextlib.ExitStack() as opened:
        address = urlsplit(start["base_url"])
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=END_S)
        opened.callback(connection.close)
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        connection.auto_open = 0
        time.sleep(6)  # httpx keeps one for 5 s
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        # An idle one holds up nobody who ends the agent.
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0


@pytest.mark.parametrize("fault", ["missing", "folder", "not_gguf", "truncated", "dense", "unknown_architecture"])
def test_a_file_that_is_no_usable_model(agent_cli, broken_model, fault):
    agent_cli("run", broken_model(fault), "-p", 0).failed(1, fault)
    if fault != "unknown_architecture":  # only llama.cpp knows that one, when it loads the file
        assert not state_dir().exists()


def test_a_port_in_use(agent_cli):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent_cli("run", "-p", port).failed(1, f"port {port}", "-p 0")
    assert not state_dir().exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--host", "example.com"], "--host"),
        (["--port", "99999"], "--port"),
        (["--bogus"], "--bogus"),
        (["--replacement", "sometimes"], "--replacement"),
        (["--workload", "Not Good"], "--workload"),
        (["--vram", "1G", "--residency", "0.5"], "--residency"),
        (["--residency", "7"], "--residency"),
        (["--pinned-share", "2"], "--pinned-share"),
        (["--pinned-share", "0.5"], "--manifest"),
        (["--no-tier", "--residency", "0.5"], "--no-tier"),
        (["a.gguf", "b.gguf"], "b.gguf"),
    ],
)
def test_wrong_command_lines(agent_cli, arguments, word):
    agent_cli("run", *arguments).failed(2, word)
    assert not state_dir().exists()


def test_a_context_longer_than_trained(agent_cli):
    agent_cli("run", "-p", 0, "--ctx", 4096).failed(1, "4096", "--ctx 1024")


def test_a_manifest_of_another_model(agent_cli, manifest, tmp_path):
    path = tmp_path / "manifest.json"
    other = "mf1-" + "0" * 32
    for changes, word in (
        ({"fingerprint": other, "sibling": "ms1-" + "0" * 32}, "another model"),
        ({"fingerprint": other}, "another quantisation"),
        ({"layers": manifest.layers[::-1]}, "layer"),
    ):
        path.write_text(manifest.model_copy(update=changes).model_dump_json())
        agent_cli("run", "-p", 0, "--manifest", path).failed(3, word)
    assert not state_dir().exists()


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff", b'{"schema_version": 2}'])
def test_a_manifest_that_is_none(agent_cli, tmp_path, content):
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    agent_cli("run", "-p", 0, "--manifest", path).failed(1, "manifest.json", "pull-profile")
    assert not state_dir().exists()


def test_manifests_that_are_not_there(agent_cli, tmp_path):
    agent_cli("run", "-p", 0, "--manifest", tmp_path / "absent.json").failed(1, "absent.json")
    agent_cli("run", "-p", 0, "--manifest", "review").failed(1, "'review'", "spark pull-profile review")
    agent_cli("run", "-p", 0, "--manifest", "Not A Name").failed(2, "--manifest")


def test_a_longer_context_than_the_manifest_was_planned_for(agent_cli, manifest, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(manifest.model_copy(update={"n_ctx": 512}).model_dump_json())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # 512 more tokens of 2,048 bytes each; the port ends it after the warning.
        agent_cli("run", "-p", port, "--manifest", path, "--ctx", 1024).failed(1, "512 tokens; 1024 need 1.0 MiB more")
        within = agent_cli("run", "-p", port, "--manifest", path, "--ctx", 256)
        assert "planned for" not in within.err


def test_a_manifest_that_is_not_used_is_said(agent_cli, manifest, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(manifest.model_dump_json())
    assert "not used" in agent_cli("run", "--dry-run", "--manifest", path, "--no-tier").err
    assert "not used" not in agent_cli("run", "--dry-run", "--manifest", path).err


def test_a_pulled_manifest_is_found_by_name(agent_cli, manifest, monkeypatch, tmp_path):
    ManifestStore(manifests_dir()).put(manifest, PullKey("http://x", 1, 1, 0), None)
    # A folder that happens to have the profile's name is not a manifest.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # It gets past the manifest, to the port.
        agent_cli("run", "-p", taken.getsockname()[1], "--manifest", "chat").failed(1, "cannot listen")


@pytest.mark.parametrize(
    ("variable", "service_url", "paused", "allowed"),
    [
        (None, "http://127.0.0.1:8710", False, True),
        (None, "http://127.0.0.1:8710", True, False),
        (None, "http://team:8710", False, False),
        ("DO_NOT_TRACK", "http://127.0.0.1:8710", False, False),
        ("SPARKMOE_OFFLINE", "http://127.0.0.1:8710", False, False),
    ],
)
def test_it_says_whether_uploads_are_allowed(monkeypatch, variable, service_url, paused, allowed):
    from spark_agent.commands.run import _may_upload
    from spark_agent.context import AgentContext

    consent = Consent(True, dt.datetime(2026, 11, 29, tzinfo=dt.UTC), service_url)
    save_config(config_path(), Config(consent=consent, paused=paused))
    if variable:
        monkeypatch.setenv(variable, "1")
    assert _may_upload(AgentContext.create()) is allowed


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_any_loopback_address_is_taken(host):
    with bind(host, 0) as listener:
        address = listener.getsockname()
        assert address[1] > 0
        with socket.create_connection(address, timeout=END_S):
            pass
    assert listener.fileno() == -1, "closed: the port is anybody's"


def test_a_session_key_that_is_open_to_others_is_known_before_loading(agent_cli):
    local_key_path().parent.mkdir(parents=True)
    local_key_path().write_text("ab" * 32)
    local_key_path().chmod(0o644)
    agent_cli("run", "-p", 0).failed(1, "session.key", "chmod 600")
    assert spool_path().exists()


def test_an_imported_profile_starts_the_slots_and_promises_nothing(agent_cli, tmp_path):
    shape = read_model_shape(demo_model_path())
    counted = {"expert_counts": [[expert * 8 for expert in range(layer.n_experts)] for layer in shape.layers]}
    (tmp_path / "pool.json").write_text(json.dumps(counted))
    path = tmp_path / "profile.json"
    with running("--residency", "1", "--workload", "chat") as (process, start):
        all_in_slots = chat(start, "How are you today?")
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    profile = import_file("freetoken", tmp_path / "pool.json", "docs", Hints(), shape)
    save_profile(path, profile)
    with running("--manifest", path, "--residency", "0.4") as (process, start):
        told = start["manifest"]
        assert (told["source"], told["format"], told["workload"]) == ("imported", "freetoken", "docs")
        assert told["expected_cold_hit_rate"] is None
        assert told["profile_revision"] is None
        assert told["slots"] == start["tiers"]["slots"]
        assert chat(start, "How are you today?") == all_in_slots
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=END_S)
        assert process.returncode == 0
    assert "no cold-hit rate is expected of it" in err
    shown = agent_cli("upload", "show", "--minimum-tokens", "1")
    upload = HistogramUpload.model_validate_json(shown.out)
    assert all(session.live is None or session.live.profile is None for session in upload.sessions)
    (docs,) = (session for session in upload.sessions if session.workload == "docs")
    assert docs.live is None, "what it missed is not mixed with what was missed without a profile"


def test_further_names_and_conversations_that_are_asked_for(tmp_path):
    with running("--parallel", 2, "--alias", "claude-*", "--alias", "gpt-local") as (_, start):
        assert start["parallel"] == 2
        assert start["tiers"]["kv_bytes"] == 2 * read_model_shape(demo_model_path()).context_bytes(start["n_ctx"])
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        url = f"{start['base_url']}/v1/chat/completions"
        for name, status in {"claude-sonnet-4": 200, "gpt-local": 200, "gpt-4": 404}.items():
            answer = httpx.post(url, json={**body, "model": name}, timeout=END_S)
            assert answer.status_code == status, answer.text
        stats = httpx.get(f"{start['base_url']}/spark/stats", timeout=END_S).json()
        assert stats["sequences"] == 2


def test_how_many_conversations_are_kept_is_said_with_the_reason(agent_cli):
    chosen = {choice["what"]: choice for choice in agent_cli("run", "--dry-run", "--json").json["choices"]}
    assert chosen["parallel"]["value"] == "4 conversations"
    one = agent_cli("run", "--dry-run", "--json", "--parallel", 1, "--residency", 0.5).json
    assert one["parallel"] == 1
    assert "asked for" in {choice["what"]: choice for choice in one["choices"]}["parallel"]["reason"]
    agent_cli("run", "--dry-run", "--parallel", 65).failed(2, "--parallel", hint=False)


def test_what_is_fetched_early_is_counted_and_what_was_learned_is_kept(kept):
    text, texts = "How are you today?", []
    for prefetch in ("off", "on", "on"):
        with running("--residency", "0.4", "--prefetch", prefetch, "--workload", "chat") as (process, start):
            texts.append(chat(start, text))
            stats = httpx.get(f"{start['base_url']}/spark/stats", timeout=END_S, trust_env=False).json()["phases"][
                "decode"
            ]
            metrics = httpx.get(f"{start['base_url']}/metrics", timeout=END_S, trust_env=False).text
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_S) == 0
            assert process.stderr is not None
            assert "learned anew" not in process.stderr.read()
        assert (start["tiers"]["prefetch"] is None) == (prefetch == "off")
        [choice] = [choice for choice in start["choices"] if choice["what"] == "prefetch"]
        assert choice["reason"] == f"--prefetch {prefetch}"
        assert stats["l1_hits"] + stats["l2_hits"] == stats["selections"]
        assert "spark_agent_prefetched_wasted_bytes_total" in metrics
        [file] = guesses_dir().glob("*") if prefetch == "on" else [None]
        assert file is None or file.stat().st_size > 1000
    assert len(set(texts)) == 1
    # Nothing of the file decides what is computed, and a broken one is told.
    [file] = guesses_dir().glob("*")
    file.write_bytes(b"broken")
    with running("--residency", "0.4", "--prefetch", "on", "--workload", "chat") as (process, start):
        assert chat(start, text) == texts[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert process.stderr is not None
        assert "learned anew" in process.stderr.read()
    assert file.stat().st_size > 1000


def test_a_plan_tells_how_sure_experts_are_to_be_used(agent_cli, manifest, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(manifest.model_dump_json())
    value = agent_cli("run", "--dry-run", "--manifest", path, "--coverage", "0.6", "--json").json
    shape = read_model_shape(demo_model_path())
    assert sum(band["experts"] for band in value["bands"]) == sum(layer.n_experts for layer in shape.layers)
    assert sum(band["in_slots"] for band in value["bands"]) == value["tiers"]["slots"]
    assert value["tiers"]["tiered"]
    shown = agent_cli("run", "--dry-run", "--manifest", path, "--coverage", "0.6").out
    assert "sure 0% to 50%" in shown
    assert "cover 60% of the selections" in shown
    assert agent_cli("run", "--dry-run", "--json", "--residency", "0.5").json["bands"] == []


@pytest.mark.parametrize(
    "arguments",
    [("--coverage", "0.9"), ("--coverage", "1.5"), ("--coverage", "0.9", "--residency", "0.5"),
     ("--coverage", "0.9", "--no-tier"), ("--prefetch", "maybe")],
    ids=" ".join,
)  # fmt: skip
def test_a_coverage_that_makes_no_sense_is_refused(agent_cli, arguments):
    assert agent_cli("run", "--dry-run", *arguments).code == 2


ANYWHERE = """
from spark_agent import prefetching
from spark_agent.server import prefetch_trial
prefetching._ruled_out = lambda: None  # as on a card: over the CPU nothing would be tried
prefetch_trial.TrialRules.__init__.__defaults__ = (8, 2, 1, 6, 1.0, (8, 12), 4000)
"""


def test_what_was_tried_is_told_everywhere_and_known_at_the_next_start(agent_cli, kept):
    """Times are this machine's own, so that either outcome may come."""
    asked, text = ("--residency", "0.4", "--workload", "chat"), "How are you today?"
    with running(*asked, "--prefetch", "off") as (_, start):
        expected = chat(start, text)
    with running(*asked, before=ANYWHERE) as (process, start):
        [choice] = [choice for choice in start["choices"] if choice["what"] == "prefetch"]
        assert choice["value"] == "1 expert a layer, on trial"
        assert choice["reason"].startswith("nothing was measured here; serving will tell")
        assert chat(start, text) == expected
        deadline = time.monotonic() + 120
        while (told := agent_process.asked(start, "/spark/stats")["prefetch"])["use"] == "trial":
            assert time.monotonic() < deadline
            assert told["trial"]["most_pairs"] == 12
            agent_process.chat(start, text, 60)
        assert told["use"] in {"on", "off"}
        assert told["reason"].startswith("tried with ")
        assert (told["trial"]["pairs"], told["experts"]) in {(8, told["use"] == "on"), (12, told["use"] == "on")}
        shown = agent_cli("ps")
        assert f" {told['use']} " in shown.out
        assert f"prefetch: {told['use']}; {told['reason']}" in shown.err
        assert chat(start, text) == expected
        assert f"prefetch: {told['use']}; {told['reason']}" in agent_process.ended(process)
    assert prefetch_trials_dir().is_dir()
    with running(*asked, before=ANYWHERE) as (process, start):
        [choice] = [choice for choice in start["choices"] if choice["what"] == "prefetch"]
        assert choice["reason"] == told["reason"]
        assert chat(start, text) == expected
        assert agent_process.asked(start, "/spark/stats")["prefetch"] == {**told, "trial": None}
        agent_process.ended(process)
    # Over the CPU without further ado what a card found is no reason.
    plain = {choice["what"]: choice for choice in agent_cli("run", "--dry-run", "--json", *asked).json["choices"]}
    assert plain["prefetch"]["value"] == "off"
    assert "no GPU" in plain["prefetch"]["reason"]
