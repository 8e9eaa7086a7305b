from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spark_agent.demo import demo_session_hash, demo_sessions
from spark_agent.paths import local_key_path, spool_path
from spark_agent.spool import Spool
from spark_agent.traces import load_traces
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.histogram import SessionHistogram
from spark_schemas.invariants import check_session

CHAT = "_**User**_\n\nWhat is a hash table, {n}?\n\n---\n\n_**Agent**_\n\nA table of buckets.\n\n---\n"
TEXT = "def mean(values):\n    return sum(values) / len(values)\n"
KEYS = ["sessions", "tokens_prefill", "tokens_decode", "tokens_new", "known", "grown", "skipped", "workloads", "served"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two conversations, a text, a copy of it, and two files that are of no use."""
    path = tmp_path / "sessions"
    path.mkdir()
    for number in range(2):
        (path / f"chat{number}.md").write_text(CHAT.format(n=number))
    (path / "code.txt").write_text(TEXT)
    (path / "copy.txt").write_text(TEXT)
    (path / "image.png").write_bytes(b"\x89PNG\0\0")
    (path / "empty.txt").write_text("")
    return path


@pytest.fixture
def record(agent_cli):
    return lambda path, *more: agent_cli("record", "--sessions", path, "--workload", "chat", "--threads", 1, *more)


def histograms() -> list[SessionHistogram]:
    with Spool.open(spool_path()) as spool:
        bodies = spool.bodies([row.id for row in spool.pending()])
    return [SessionHistogram.model_validate_json(body) for body in bodies or []]


def test_a_folder_of_all_kinds(record, folder):
    report = record(folder, "--json").json
    assert list(report) == KEYS
    assert (report["sessions"], report["known"], report["workloads"]) == (4, 1, {"chat": 4})
    assert {Path(entry["source"]).name for entry in report["skipped"]} == {"image.png", "empty.txt"}
    assert all(entry["reason"] for entry in report["skipped"])
    found = histograms()
    assert len(found) == 3
    shape = read_model_shape(demo_model_path())
    for histogram in found:
        check_session(histogram, shape)
    copied = report["tokens_prefill"] + report["tokens_decode"] - sum(histogram.tokens for histogram in found)
    assert copied in {histogram.tokens for histogram in found}


def test_people_read_about_what_was_skipped(record, folder):
    result = record(folder)
    assert result.code == 0
    assert "recorded 4 sessions (4 chat)" in result.out
    assert result.err.count("warning: skipped") == 2


def test_recording_again_adds_nothing(record, folder, kept):
    record(folder)
    before = len(kept())
    assert record(folder, "--json").json["known"] == 4
    assert len(kept()) == before


def claude_session(exchanges: int, other: int = 0) -> str:
    """So many questions and answers; the last ``other`` of them are another branch's."""
    lines = []
    for number in range(exchanges):
        branch = "the other way" if number >= exchanges - other else "this way"
        for kind, text in (("user", f"Please explain step {number} of the parser, {branch}."), ("assistant", TEXT * 4)):
            stamp = f"2026-11-29T12:{number:02d}:00.000Z"
            lines.append({"type": kind, "timestamp": stamp, "message": {"role": kind, "content": text + str(number)}})
    return "".join(json.dumps(line) + "\n" for line in lines)


def total() -> dict[str, list[list[int]]]:
    """Selections of all kept histograms, by phase, layer and expert."""
    found = histograms()
    return {
        phase: np.sum(
            [[layer.counts for layer in getattr(one, phase).layers] for one in found if getattr(one, phase)], axis=0
        ).tolist()
        for phase in ("prefill", "decode")
    }


@pytest.mark.parametrize("ctx", [0, 512], ids=["one context", "many contexts"])
def test_a_session_that_grew_adds_only_what_is_new(record, tmp_path, kept, ctx):
    """Recorded in three sittings it has as many tokens as in one, and decode chose the same experts."""
    path = tmp_path / "session.jsonl"
    new = []
    for exchanges in (2, 4, 4, 7):
        path.write_text(claude_session(exchanges))
        report = record(path, "--json", "--ctx", ctx).json
        new.append(report["tokens_new"])
        assert (report["known"], report["grown"]) == (int(not new[-1]), int(len(new) in {2, 4}))
    assert new[2] == 0
    rows = kept()
    assert len(rows) == 3
    assert len({row.session_hash for row in rows}) == 1
    assert sum(row.tokens for row in rows) == report["tokens_prefill"] + report["tokens_decode"] == sum(new)
    in_sittings = total()
    with Spool.open(spool_path()) as spool:
        spool.purge()
    assert record(path, "--json", "--ctx", ctx).json["tokens_new"] == sum(new)
    at_once = total()
    difference = np.abs(np.array(in_sittings["decode"]) - at_once["decode"]).sum()
    # Batches begin elsewhere, which may tip a router that is undecided.
    assert difference <= 0.01 * np.sum(at_once["decode"])


def test_a_fork_counts_what_both_share_once(record, tmp_path, kept):
    folder = tmp_path / "forked"
    folder.mkdir()
    (folder / "one.jsonl").write_text(claude_session(6))
    whole = record(folder / "one.jsonl", "--json").json["tokens_new"]
    (folder / "fork.jsonl").write_text(claude_session(7, other=3))
    report = record(folder, "--json").json
    assert (report["sessions"], report["known"], report["grown"]) == (2, 1, 1)
    assert report["tokens_new"] < whole
    assert len({row.session_hash for row in kept()}) == 1


def test_a_purged_session_may_be_recorded_again(record, folder, kept):
    first = record(folder, "--json").json
    with Spool.open(spool_path()) as spool:
        spool.purge()
    again = record(folder, "--json").json
    assert again["tokens_new"] == first["tokens_new"] > 0
    assert len(kept()) == 3


def test_a_trace_is_private_whole_and_true(record, folder, tmp_path):
    trace = tmp_path / "new" / "traces"
    report = record(folder, "--trace", trace, "--json").json
    (path,) = trace.iterdir()
    assert (path.name, stat.S_IMODE(path.stat().st_mode)) == ("trace-000001.parquet", 0o600)
    traces = load_traces(trace)
    assert traces.shape == read_model_shape(demo_model_path())
    # A copy of a session is the same session.
    assert len(traces.sessions) == report["sessions"] - 1
    kept = {histogram.session_hash: histogram for histogram in histograms()}
    for session in traces.sessions:
        histogram = kept[session.session_hash]
        assert len(session.decode) == histogram.tokens
        for phase, wanted in (("decode", session.decode), ("prefill", ~session.decode)):
            for ids, layer in zip(session.ids, getattr(histogram, phase).layers, strict=True):
                # Of prompts the last block routes what needs an output.
                if layer.tokens == wanted.sum():
                    assert np.bincount(ids[wanted].ravel(), minlength=64).tolist() == list(layer.counts)
                else:
                    assert (phase, layer.block) == ("prefill", traces.shape.n_blocks - 1)


def test_hidden_states_beside_the_same_selections(record, folder, tmp_path, monkeypatch):
    """A session longer than a piece comes in several, and all of it comes back."""
    (folder / "long.txt").write_text(TEXT * 20)
    record(folder, "--trace", tmp_path / "plain")
    monkeypatch.setattr("spark_agent.recording.TRACE_PIECE_BYTES", 2**18)
    report = record(folder, "--trace", tmp_path / "traces", "--hidden", "--router-input", "--json").json
    assert report["known"] == report["sessions"] == 5
    # 4 layers of 8 selections and 2 * 256 values, 2 bytes each
    result = record(
        folder / "code.txt", "--trace", tmp_path / "more", "--hidden", "--router-input", "--trace-limit", "1M"
    )
    assert f"holds about {2**20 // (8 + 2 * 4 * (8 + 512))} (--trace-limit)" in result.err
    plain = load_traces(tmp_path / "plain")
    found = load_traces(tmp_path / "traces")
    assert found.hidden_kinds() == ["input", "router"]
    assert plain.hidden_kinds() == []
    for one, other in zip(plain.sessions, found.sessions, strict=True):
        assert (one.session_hash, one.decode.tolist()) == (other.session_hash, other.decode.tolist())
        assert all(np.array_equal(a, b) for a, b in zip(one.ids, other.ids, strict=True))
    n_tokens = sum(len(session.decode) for session in found.sessions)
    for layer in range(4):
        assert found.hidden("input", layer).shape == (n_tokens, 256)
        routed = np.concatenate([session.ids[layer][:, 0] for session in found.sessions]) >= 0
        assert np.array_equal(~np.isnan(found.hidden("router", layer)[:, 0]), routed)


def test_hidden_states_need_a_trace(record, folder):
    record(folder, "--hidden").failed(2, "say what a trace keeps")


def test_a_folder_of_traces_keeps_to_its_limit(record, folder, tmp_path):
    trace = tmp_path / "traces"
    for _ in range(3):
        record(folder, "--trace", trace)
    sizes = [path.stat().st_size for path in trace.iterdir()]
    assert len(sizes) == 3
    result = record(folder, "--trace", trace, "--trace-limit", str(2 * max(sizes)))
    assert "warning: 2 files of older traces left" in result.err
    assert sum(path.stat().st_size for path in trace.iterdir()) <= 2 * max(sizes)
    assert load_traces(trace).sessions


def test_no_more_tokens_than_wanted(record, tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 50)
    report = record(tmp_path / "long.txt", "--max-tokens", 100, "--json").json
    assert report["tokens_prefill"] + report["tokens_decode"] == 100


def test_a_conversation_longer_than_the_context_goes_on(record, tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 100)
    report = record(tmp_path / "long.txt", "--ctx", 256, "--json").json
    assert report["tokens_prefill"] + report["tokens_decode"] > 3 * 256
    (histogram,) = histograms()
    check_session(histogram, read_model_shape(demo_model_path()))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--sessions", ".", "--workload", "No Good"], "--workload"),
        (["--sessions", ".", "--workload", "a" * 64], "--workload"),
        (["--sessions", "."], "nothing to record"),
        (["--workload", "chat"], "nothing to record"),
        (["--demo", "--workload", "chat"], "--demo"),
        (["--sessions", ".", "--workload", "chat", "--max-tokens", "-1"], "--max-tokens"),
        (["--sessions", ".", "--workload", "chat", "--bogus"], "--bogus"),
    ],
)
def test_wrong_command_lines(agent_cli, arguments, word):
    agent_cli("record", *arguments).failed(2, word)
    assert not spool_path().exists()


def test_nothing_there(record, tmp_path):
    record(tmp_path / "absent").failed(1, "no such file or folder")
    assert not spool_path().exists()
    (tmp_path / "bare").mkdir()
    record(tmp_path / "bare").failed(1, "no session could be recorded", "found no files in")


@pytest.mark.parametrize("fault", ["missing", "folder", "not_gguf", "truncated", "dense", "unknown_architecture"])
def test_a_file_that_is_no_usable_model(record, folder, broken_model, fault):
    record(folder, broken_model(fault)).failed(1, fault)
    assert not spool_path().exists()
    assert not local_key_path().exists()


def test_a_context_longer_than_trained(record, folder):
    record(folder, "--ctx", 4096).failed(1, "--ctx 1024")


@pytest.mark.parametrize("name", ["sessions/code.txt", "sessions/code.txt/traces"])
def test_a_trace_that_cannot_be_written_is_known_before_the_work(record, folder, tmp_path, name):
    record(folder, "--trace", tmp_path / name).failed(1, "cannot write the trace")
    assert not spool_path().exists()


def test_demo_sessions_keep_their_own_key(agent_cli):
    report = agent_cli("record", "--demo", "--max-tokens", 3, "--threads", 1, "--json").json
    expected = {demo_session_hash(item) for items in demo_sessions().values() for item in items}
    found = histograms()
    assert {histogram.session_hash for histogram in found} <= expected
    assert report["sessions"] == len(expected)
    for workload in report["workloads"]:
        assert {item.split for item in found if item.workload == workload} == {"calibration", "held_out"}


COMMAND = [sys.executable, "-c", "from spark_agent.cli import main; main()", "record", "--threads", "1", "--json"]


def test_a_full_disk_keeps_what_was_recorded(tmp_path, kept):
    path = tmp_path / "sessions"
    path.mkdir()
    for number in range(60):
        (path / f"{number:02}.txt").write_text(f"text {number}\n" + TEXT)
    trace = tmp_path / "traces"
    room = 400_000

    def limit() -> None:
        # Python ignores SIGXFSZ, so a write beyond it fails like one on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    done = subprocess.run(
        [*COMMAND, "--sessions", path, "--workload", "chat", "--trace", trace],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 1, done.stderr
    assert "error: no room to write the spool" in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    kept_before = kept()
    assert 0 < len(kept_before) < 60
    # What was recorded before is whole.
    assert len(load_traces(trace).sessions) >= len(kept_before)
    # With room again, the rest is added.
    again = subprocess.run(
        [*COMMAND, "--sessions", path, "--workload", "chat"], capture_output=True, timeout=240, check=True
    )
    assert json.loads(again.stdout)["sessions"] == 60
    assert len(kept()) == 60


def test_ctrl_c_keeps_what_was_recorded(tmp_path, kept, monkeypatch, until):
    path = tmp_path / "sessions"
    path.mkdir()
    (path / "0.txt").write_text(TEXT)
    # The second text never ends: a pipe nobody writes to would block the reading, so it is merely long.
    (path / "1.txt").write_text(TEXT * 20_000)
    process = subprocess.Popen(
        [*COMMAND, "--sessions", path, "--workload", "chat"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            until(lambda: kept() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-2:] == ["kept in the spool: 1 session", "interrupted"]
    assert "Exception ignored" not in err
    assert len(kept()) == 1
