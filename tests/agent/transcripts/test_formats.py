"""Each format as its tool writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spark_agent.transcripts import Skipped, Transcript, Turn, read_transcripts


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def only(path: Path) -> Transcript:
    (found,) = read_transcripts(path)
    assert isinstance(found, Transcript), found
    return found


def claude_line(role: str, content: object, **more: object) -> dict[str, object]:
    return {"type": role, "sessionId": "s1", "message": {"role": role, "content": content}, **more}


def test_claude_code_session(tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "é.py"}}
    path = write(
        tmp_path / "session.jsonl",
        {"type": "summary", "summary": "A title", "leafUuid": "u9"},
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
        claude_line("user", "Caveat about local commands", uuid="u0", isMeta=True),
        claude_line("user", "Fix the parser", uuid="u1"),
        claude_line("assistant", [{"type": "thinking", "thinking": "Look first.", "signature": "x"}], uuid="u2"),
        claude_line("assistant", [{"type": "text", "text": "I'll look."}], uuid="u3"),
        claude_line("assistant", [call], uuid="u4"),
        claude_line("assistant", [call], uuid="u4"),
        claude_line("user", "hidden", uuid="u5", isSidechain=True),
        claude_line("user", [{"type": "tool_result", "content": [{"type": "text", "text": "x = 1"}]}], uuid="u6"),
        claude_line("user", [{"type": "tool_result", "content": "y = 2"}, {"type": "image", "source": {}}], uuid="u7"),
        {"type": "system", "subtype": "turn_duration", "durationMs": 5, "sessionId": "s1"},
        claude_line("assistant", [{"type": "text", "text": "Done."}, {"type": "redacted_thinking"}], uuid="u8"),
    )
    assert only(path).turns == (
        Turn("system", "Caveat about local commands"),
        Turn("user", "Fix the parser"),
        Turn("assistant", 'Look first.\n\nI\'ll look.\n\nRead {"file_path": "é.py"}'),
        Turn("tool", "x = 1\n\ny = 2"),
        Turn("assistant", "Done."),
    )


def test_claude_subagent_file_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "agent-1.jsonl", claude_line("user", "Search", isSidechain=True))
    (found,) = read_transcripts(path)
    assert isinstance(found, Skipped)
    assert "sub-agent" in found.reason


def codex_line(kind: str, payload: object) -> dict[str, object]:
    return {"timestamp": "2026-07-13T16:41:30.145Z", "type": kind, "payload": payload}


def codex_message(role: str, text: str) -> dict[str, object]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX_ITEMS: list[dict[str, object]] = [
    codex_message("user", "<environment_context>\n  <cwd>/x</cwd>\n</environment_context>"),
    codex_message("user", "List the files"),
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Use ls."}], "encrypted_content": "zz"},
    {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
    codex_message("assistant", "One file."),
]
CODEX_TURNS = (
    Turn("system", "<environment_context>\n  <cwd>/x</cwd>\n</environment_context>"),
    Turn("user", "List the files"),
    Turn("assistant", 'Use ls.\n\nshell {"command":["ls"]}'),
    Turn("tool", "a.txt"),
    Turn("assistant", "One file."),
)


def test_codex_rollout(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rollout.jsonl",
        codex_line("session_meta", {"id": "child", "forked_from_id": "parent"}),
        codex_line("session_meta", {"id": "parent"}),
        *(codex_line("response_item", item) for item in CODEX_ITEMS),
        codex_line("event_msg", {"type": "agent_message", "message": "One file."}),
        codex_line("turn_context", {"model": "m"}),
    )
    assert only(path).turns == CODEX_TURNS


def test_older_codex_rollout(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rollout.jsonl",
        {"id": "a", "timestamp": "2025-08-18T01:16:13.522Z", "instructions": None},
        {"record_type": "state"},
        *CODEX_ITEMS,
    )
    assert only(path).turns == CODEX_TURNS


def test_codex_rollout_of_events_alone(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rollout.jsonl",
        codex_line("session_meta", {"id": "a"}),
        codex_line("event_msg", {"type": "user_message", "message": "Hello"}),
        codex_line("event_msg", {"type": "token_count", "info": None}),
        codex_line("event_msg", {"type": "agent_message", "message": "Hi"}),
    )
    assert only(path).turns == (Turn("user", "Hello"), Turn("assistant", "Hi"))


SPECSTORY = """<!-- Generated by SpecStory, Markdown v2.1.0 -->

# 2026-07-13 13:40:49Z

<!-- Claude Code Session 5c7d (2026-07-13 13:40:49Z) -->

_**User (2026-07-13 13:40:49Z)**_

fix the flaky test in app.py

---

_**Agent (claude-opus 2026-07-13 13:40:56Z)**_

<think><details><summary>Thought Process</summary>
Run it first.
</details></think>

I'll run it.

_**Agent (claude-opus 2026-07-13 13:41:01Z)**_

<tool-use data-tool-type="shell" data-tool-name="Bash"><details>
<summary>Tool use: **Bash**</summary>
```text
_**User**_
1 failed
```
</details></tool-use>

_**Agent - sidechain (claude-haiku 2026-07-13 13:41:02Z)**_

elsewhere

---

_**User (2026-07-13 13:42:00Z)**_

thanks
"""
SPECSTORY_TURNS = (
    Turn("user", "fix the flaky test in app.py"),
    Turn("assistant", "Thought Process\nRun it first.\n\n\nI'll run it."),
    Turn("tool", "Tool use: **Bash**\n```text\n_**User**_\n1 failed\n```"),
    Turn("user", "thanks"),
)


@pytest.mark.parametrize("name", ["export.md", "export.txt", "export"])
def test_specstory_export(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(SPECSTORY, encoding="utf-8")
    assert only(path).turns == SPECSTORY_TURNS


def test_specstory_older_layout_without_mark_and_with_open_fence(tmp_path: Path) -> None:
    path = tmp_path / "chat.md"
    path.write_text("# T\n\n_**User**_\n\nhi\n```py\nx\n\n---\n\n_**Assistant**_\n\nhello\n\n---\n", encoding="utf-8")
    assert only(path).turns == (Turn("user", "hi\n```py\nx"), Turn("assistant", "hello"))


def test_specstory_without_text(tmp_path: Path) -> None:
    path = tmp_path / "chat.md"
    path.write_text("<!-- Generated by SpecStory -->\n\n_**User**_\n\n---\n", encoding="utf-8")
    (found,) = read_transcripts(path)
    assert isinstance(found, Skipped)


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"\xef\xbb\xbfOne\r\ntwo\rthree\n")
    assert only(path).turns == (Turn("text", "One\ntwo\nthree"),)


def test_markdown_that_only_mentions_a_heading_is_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "about.md"
    path.write_text("SpecStory marks turns with\n\n_**User**_\n\nlines.\n", encoding="utf-8")
    assert only(path).turns[0].role == "text"


def test_json_that_is_no_conversation_is_plain_text_unless_named_as_lines(tmp_path: Path) -> None:
    text = '{"name": "x"}\n' * 60
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(text, encoding="utf-8")
    first, second = read_transcripts(tmp_path)
    assert isinstance(first, Transcript)
    assert first.turns[0].role == "text"
    assert isinstance(second, Skipped)
    assert "Claude Code, Codex or Qwen Code" in second.reason


def test_content_decides_before_the_ending(tmp_path: Path) -> None:
    path = write(tmp_path / "backup.txt", claude_line("user", "Hello"))
    assert only(path).turns == (Turn("user", "Hello"),)


def test_utf16_session(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(claude_line("user", "Grüße"), ensure_ascii=False), encoding="utf-16")
    assert only(path).turns == (Turn("user", "Grüße"),)
