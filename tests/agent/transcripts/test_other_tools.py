"""Conversations of Qwen Code, OpenCode and aider, as these tools leave them."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_agent.transcripts import Skipped, Transcript, Turn, read_transcripts


def only(path: Path) -> Transcript:
    (found,) = read_transcripts(path)
    assert isinstance(found, Transcript), found
    return found


def qwen_line(kind: str, *parts: object, **more: object) -> dict[str, object]:
    time = "2026-11-30T08:27:00.638Z"
    return {"sessionId": "s1", "timestamp": time, "type": kind, "message": {"role": "user", "parts": parts}, **more}


def system_line(subtype: str) -> dict[str, object]:
    return {"sessionId": "s1", "type": "system", "subtype": subtype, "systemPayload": {}}


CALL = {"functionCall": {"id": "c1", "name": "write_file", "args": {"file_path": "a.py"}}}
RESULT = {"functionResponse": {"id": "c1", "name": "write_file", "response": {"output": "Written."}}}


def test_qwen_code_session(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = [
        # A session that begins with bookkeeping looks like Claude Code's there.
        system_line("attribution_snapshot"),
        qwen_line("user", {"text": "Write the parser"}),
        system_line("ui_telemetry"),
        qwen_line("assistant", {"text": "I think."}, CALL),
        qwen_line("tool_result", RESULT),
        qwen_line("tool_result", {"functionResponse": {"response": {"error": "No room."}}}),
        qwen_line("assistant", {"text": "Done."}, {"inlineData": {}}),
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert only(path).turns == (
        Turn("user", "Write the parser"),
        Turn("assistant", 'I think.\n\nwrite_file {"file_path": "a.py"}'),
        Turn("tool", "Written.\n\nNo room."),
        Turn("assistant", "Done."),
    )


def test_what_is_wrong_in_a_qwen_code_session_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = [
        qwen_line("user", {"text": "Write it"}),
        qwen_line("assistant", 5, {"telepathy": 1}),
        qwen_line("dream"),
        {"type": "user", "message": {"parts": 5}},
        {"type": 5},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    found, skipped = read_transcripts(path)
    assert isinstance(found, Transcript)
    assert found.turns == (Turn("user", "Write it"),)
    assert isinstance(skipped, Skipped)
    assert "5 lines not used" in skipped.reason
    assert "telepathy" in skipped.reason


def opencode_message(role: str, *parts: object) -> dict[str, object]:
    return {"info": {"role": role, "time": {"created": 1796025234794}}, "parts": list(parts)}


def opencode_session(*messages: object) -> str:
    return json.dumps({"info": {"id": "ses_1", "title": "Notes"}, "messages": messages})


def test_opencode_export(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    state = {"status": "completed", "input": {"filePath": "a.txt"}, "output": "Wrote it."}
    failed = {"status": "error", "input": {}, "error": "No such tool."}
    path.write_text(
        opencode_session(
            opencode_message("user", {"type": "text", "text": "Make the note"}),
            opencode_message(
                "assistant",
                {"type": "step-start"},
                {"type": "reasoning", "text": "A note, then."},
                {"type": "tool", "tool": "write", "state": state},
                {"type": "step-finish"},
            ),
            opencode_message("assistant", {"type": "tool", "tool": "invalid", "state": failed}),
            opencode_message("user", {"type": "text", "text": "Go on where you were.", "synthetic": True}),
            opencode_message("assistant", {"type": "text", "text": "Done."}),
        ),
        encoding="utf-8",
    )
    assert only(path).turns == (
        Turn("user", "Make the note"),
        Turn("assistant", 'A note, then.\n\nwrite {"filePath": "a.txt"}'),
        Turn("tool", "Wrote it."),
        Turn("assistant", "invalid {}"),
        Turn("tool", "No such tool."),
        Turn("system", "Go on where you were."),
        Turn("assistant", "Done."),
    )


_PART = st.fixed_dictionaries(
    {}, optional={name: st.one_of(st.text(max_size=3), st.integers(), st.none()) for name in ("type", "text", "state")}
)
_MESSAGE = st.fixed_dictionaries(
    {"parts": st.lists(_PART | st.integers(), max_size=3)},
    optional={"info": st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", 5, None])})},
)


@given(st.lists(_MESSAGE, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_document_like_an_export_is_read_or_told_why_not(tmp_path: Path, messages: list[object]) -> None:
    path = tmp_path / "export.json"
    path.write_text(opencode_session(*messages), encoding="utf-8")
    for found in read_transcripts(path):
        assert isinstance(found, Transcript) or found.reason


HISTORY = """
# aider chat started at 2026-11-30 07:54:31

> Aider v0.86.2
> Added hello.py to the chat.

#### Change the greeting
####
#### to something shorter

I change it.

hello.py
```
> not aider's
print("hi")
```

> Tokens: 593 sent, 20 received.

# aider chat started at 2026-11-30 08:25:00

#### Say hello

Hello.
"""


def test_aider_history(tmp_path: Path) -> None:
    path = tmp_path / ".aider.chat.history.md"
    path.write_text(HISTORY, encoding="utf-8")
    assert only(path).turns == (
        Turn("user", "Change the greeting\n\nto something shorter"),
        Turn("assistant", 'I change it.\n\nhello.py\n```\n\nprint("hi")\n```'),
        Turn("user", "Say hello"),
        Turn("assistant", "Hello."),
    )
    once = only(path).lineage
    path.write_text(HISTORY + "\n#### And more\n\nMore.\n", encoding="utf-8")
    assert only(path).lineage == once, "a history that grows is the same conversation"


def test_an_aider_history_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.md"
    path.write_text("# aider chat started at 2026-11-30 07:54:31\n\n> Aider v0.86.2\n", encoding="utf-8")
    (found,) = read_transcripts(path)
    assert isinstance(found, Skipped)
    assert "aider" in found.reason
