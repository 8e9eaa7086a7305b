"""What the tools' later and earlier versions write, and what none of them is known to."""

from __future__ import annotations

import json
from pathlib import Path

from spark_agent.transcripts import Skipped, Transcript, Turn, read_transcripts


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def both(path: Path) -> tuple[Transcript, Skipped]:
    found, skipped = read_transcripts(path)
    assert isinstance(found, Transcript)
    assert isinstance(skipped, Skipped)
    return found, skipped


def only(path: Path) -> Transcript:
    (found,) = read_transcripts(path)
    assert isinstance(found, Transcript), found
    return found


def claude_line(role: str, content: object, **more: object) -> dict[str, object]:
    return {"type": role, "sessionId": "s1", "message": {"role": role, "content": content}, **more}


def item(kind: str, **more: object) -> dict[str, object]:
    return {"timestamp": "2026-08-01T10:00:00.000Z", "type": "response_item", "payload": {"type": kind, **more}}


def test_claude_code_of_2026(tmp_path: Path) -> None:
    queued = {"type": "queued_command", "prompt": "And the tests", "commandMode": "prompt"}
    synthetic = {"role": "assistant", "model": "<synthetic>", "content": [{"type": "text", "text": "No response."}]}
    path = write(
        tmp_path / "session.jsonl",
        {"type": "mode", "mode": "normal", "sessionId": "s1"},
        {"type": "permission-mode", "permissionMode": "default", "sessionId": "s1"},
        {"type": "queue-operation", "operation": "enqueue", "content": "x", "sessionId": "s1"},
        claude_line("user", "Fix the parser"),
        {"type": "attachment", "attachment": {"type": "todo_reminder", "content": []}, "sessionId": "s1"},
        claude_line("assistant", [{"type": "server_tool_use", "name": "web_search", "input": {"query": "q"}}]),
        claude_line("assistant", [{"type": "web_search_tool_result", "content": [{"type": "text", "text": "A page"}]}]),
        claude_line("assistant", [{"type": "text", "text": "Found it."}]),
        {"type": "attachment", "attachment": queued, "sessionId": "s1"},
        claude_line("assistant", [{"type": "text", "text": "API Error: 529"}], isApiErrorMessage=True),
        {"type": "assistant", "sessionId": "s1", "message": synthetic},
        {"type": "system", "subtype": "compact_boundary", "content": "Conversation compacted", "sessionId": "s1"},
        claude_line("user", "The summary.", isCompactSummary=True, isVisibleInTranscriptOnly=True),
        claude_line("assistant", [{"type": "text", "text": "Going on."}]),
        {"type": "last-prompt", "lastPrompt": "And the tests", "sessionId": "s1"},
        {"type": "ai-title", "aiTitle": "Parser", "sessionId": "s1"},
    )
    assert only(path).turns == (
        Turn("user", "Fix the parser"),
        Turn("assistant", 'web_search {"query": "q"}'),
        Turn("tool", "A page"),
        Turn("assistant", "Found it."),
        Turn("user", "And the tests\n\nThe summary."),
        Turn("assistant", "Going on."),
    )


def test_claude_codes_printed_stream(tmp_path: Path) -> None:
    path = write(
        tmp_path / "stream.jsonl",
        {"type": "system", "subtype": "init", "session_id": "s1", "tools": []},
        {"type": "user", "session_id": "s1", "message": {"role": "user", "content": "Hello"}},
        {"type": "assistant", "session_id": "s1", "message": {"content": [{"type": "text", "text": "Hi."}]}},
        {
            "type": "assistant",
            "session_id": "s1",
            "parent_tool_use_id": "toolu_1",
            "message": {"content": [{"type": "text", "text": "A sub-agent's."}]},
        },
        {"type": "result", "subtype": "success", "result": "Hi.", "session_id": "s1"},
    )
    assert only(path).turns == (Turn("user", "Hello"), Turn("assistant", "Hi."))


def test_unknown_lines_and_blocks_are_counted_by_kind(tmp_path: Path) -> None:
    path = write(
        tmp_path / "session.jsonl",
        claude_line("user", "Fix the parser"),
        *[{"type": "telepathy", "sessionId": "s1"}] * 3,
        claude_line("assistant", [{"type": "hologram"}, {"type": "text", "text": "Done."}, {"type": 5}]),
        {"type": "\x1b[2J" * 1000, "sessionId": "s1"},
        [1],
    )
    found, skipped = both(path)
    assert found.turns == (Turn("user", "Fix the parser"), Turn("assistant", "Done."))
    assert skipped.reason.startswith("7 lines not used; the first is line 2: found a line of unknown type telepathy")
    assert "3 times a line of unknown type telepathy" in skipped.reason
    for kind in (
        "1 times a block of unknown type hologram",
        "1 times a number as type of a block",
        "with no plain name",
        "1 times a list",
    ):
        assert kind in skipped.reason
    assert "\x1b" not in skipped.reason


def test_kinds_are_bounded(tmp_path: Path) -> None:
    path = write(
        tmp_path / "session.jsonl",
        claude_line("user", "Hello"),
        *[{"type": f"kind{'abcdefghijklmnop'[n % 16]}{'abcdefghijklmnop'[n // 16]}"} for n in range(200)],
    )
    _, skipped = both(path)
    assert skipped.reason.startswith("200 lines not used")
    assert "188 times others" in skipped.reason
    assert len(skipped.reason) < 1500


def test_codex_of_2026(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rollout.jsonl",
        {"timestamp": "2026-08-01T10:00:00.000Z", "type": "session_meta", "payload": {"id": "x", "cwd": "/w"}},
        {"timestamp": "2026-08-01T10:00:00.000Z", "type": "turn_context", "payload": {"model": "m"}},
        item("message", role="developer", content=[{"type": "input_text", "text": "Be brief."}]),
        item("message", role="user", content=[{"type": "input_text", "text": "Fix the parser"}]),
        item("reasoning", summary=[{"type": "summary_text", "text": "Hm."}], content=None, encrypted_content="x"),
        item("web_search_call", status="completed", action={"type": "search", "query": "q"}),
        item("custom_tool_call", call_id="c", name="apply_patch", input="*** Begin Patch"),
        item("custom_tool_call_output", call_id="c", output=[{"type": "input_text", "text": "Success"}]),
        item("ghost_snapshot", ghost_commit={}),
        item("message", role="assistant", content=[{"type": "output_text", "text": "Done."}], phase="final_answer"),
        {"timestamp": "2026-08-01T10:00:00.000Z", "type": "compacted", "payload": {"message": "So far."}},
        item("context_compaction"),
        item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "All of it."}]),
        {"timestamp": "2026-08-01T10:00:00.000Z", "type": "event_msg", "payload": {"type": "token_count"}},
        item("teleport"),
        {"timestamp": "2026-08-01T10:00:00.000Z", "type": "premonition", "payload": {}},
    )
    found, skipped = both(path)
    assert found.turns == (
        Turn("system", "Be brief."),
        Turn("user", "Fix the parser"),
        Turn("assistant", 'Hm.\n\n{"type": "search", "query": "q"}\n\napply_patch *** Begin Patch'),
        Turn("tool", "Success"),
        Turn("assistant", "Done."),
        Turn("user", "So far."),
        Turn("assistant", "All of it."),
    )
    assert "2 lines not used" in skipped.reason
    assert "an item of unknown type teleport" in skipped.reason
    assert "an item of unknown type premonition" in skipped.reason


def test_the_first_codex_wrote_one_document(tmp_path: Path) -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        "what",
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
    ]
    path = tmp_path / "rollout.json"
    path.write_text(json.dumps({"session": {"id": "x"}, "items": items}, indent=1))
    assert only(path).turns == (Turn("user", "Hello"), Turn("assistant", "Hi."))
    path.write_text(json.dumps({"session": {"id": "x"}, "items": [1, {"a": 2}]}))
    assert only(path).turns[0].role == "text"


def test_what_lies_beside_sessions_is_no_session(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project / "4f1d.jsonl", claude_line("user", "Hello"), claude_line("assistant", "Hi."))
    write(project / "4f1d" / "subagents" / "agent-1.jsonl", claude_line("user", "Search", isSidechain=True))
    write(project / "4f1d" / "subagents" / "agent-1.meta.json", {"agentType": "Explore"})
    write(project / "4f1d" / "tool-results" / "out.txt", "ten thousand lines")
    write(project / "sessions-index.json", {"version": 1, "entries": []})
    write(project / "memory" / "MEMORY.md", "What a tool remembers.")
    write(project / "notes" / "tool-results" / "mine.txt", "A text of my own.")
    write(project / "notes" / "memory" / "mine.txt", "A text of my own.")
    write(project / ".aider.input.history", "# 2026-07-13 12:00:00\n+Hello")
    found = list(read_transcripts(project))
    assert [one.source.name for one in found if isinstance(one, Transcript)] == ["4f1d.jsonl", "mine.txt", "mine.txt"]
    assert sorted(one.source.name for one in found if isinstance(one, Skipped)) == [
        ".aider.input.history",
        "agent-1.jsonl",
        "agent-1.meta.json",
        "memory",
        "sessions-index.json",
        "tool-results",
    ]


def test_a_line_that_is_still_being_written_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "session.jsonl", claude_line("user", "Hello"), claude_line("assistant", "Hi."))
    with path.open("a") as file:
        file.write('{"type": "user", "message": {"role": "us')
    found, skipped = both(path)
    assert len(found.turns) == 2
    assert "line 3: found text that is not JSON" in skipped.reason
