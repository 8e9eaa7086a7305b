"""What keeps a lineage when real coding tools write around a conversation, and what tells conversations apart."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.server.anthropic_requests import CountRequest
from spark_agent.server.conversations import (
    MAX_REMEMBERED,
    MAX_ROOTS,
    SUMMARY_TIMEOUT_S,
    Conversations,
    lineage_of,
)
from spark_agent.server.openai_requests import ChatRequest
from spark_agent.server.responses_requests import messages_of
from spark_agent.server.responses_tools import ResponsesTools
from spark_agent.transcripts.claude import read_claude
from spark_agent.transcripts.codex import read_codex
from spark_agent.transcripts.lineage import as_typed, conversation_lineage
from spark_agent.transcripts.model import Problems

PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)
TASK = "Please write a function that reads a file of timestamps and returns the mean pause between them."
OTHER = "Explain why the build of the second target fails when the first one was made by another user."


@dataclass(frozen=True)
class Turn:
    role: str
    text: str
    blocks: tuple[str, ...] = ()


def turns(*parts: tuple[str, str]) -> list[Turn]:
    return [Turn(role, text) for role, text in parts]


def reminder(day: int) -> str:
    said = f"As you answer, you can use this.\n# currentDate\nToday is 2026-11-{day}."
    return f"<system-reminder>\n{said}\n</system-reminder>\n"


def claude_code(day: int, *rest: tuple[str, str], task: str = TASK) -> list[Turn]:
    system = f"You are a coding assistant.\n<env>\nWorking directory: somewhere\nToday's date: 2026-11-{day}\n</env>"
    return turns(("system", system), ("user", reminder(day) + task + reminder(day)), *rest)


def gemini(day: int, *rest: tuple[str, str]) -> list[Turn]:
    setting = f"This is the Gemini CLI. We are setting up the context for our chat.\nToday's date is day {day}"
    return turns(("user", setting), ("assistant", "Got it."), ("user", TASK), *rest)


def aider(day: int, *rest: tuple[str, str]) -> list[Turn]:
    return turns(
        ("system", "Act as an expert software developer."),
        ("user", "Change get_factorial() to use math.factorial"),
        ("assistant", "..."),
        (
            "user",
            "I switched to a new code base. Please don't consider the above files or try to edit them any longer.",
        ),
        ("assistant", "Ok."),
        ("user", f"I have *added these files to the chat* so you can go ahead and edit them.\n\na.py\n{day}"),
        ("assistant", "Ok, any changes I propose will be to those files."),
        ("user", TASK),
        *rest,
    )


def codex(day: int, *rest: tuple[str, str]) -> list[Turn]:
    return turns(
        ("user", f"# AGENTS.md instructions for /home/{day}\n\n<INSTRUCTIONS>\n{day}\n</INSTRUCTIONS>"),
        ("user", f"<environment_context>\n  <cwd>/home/{day}</cwd>\n</environment_context>"),
        ("user", TASK),
        *rest,
    )


def cline(day: int, *rest: tuple[str, str]) -> list[Turn]:
    detail = f"<environment_details>\n# Current Time\n{day}/11/2026\n</environment_details>"
    return turns(("system", f"It is {day}."), ("user", f"{TASK}\n\n{detail}"), *rest)


@pytest.mark.parametrize("tool", [claude_code, gemini, aider, codex, cline])
def test_a_session_is_the_same_whatever_its_tool_writes_around_it(tool):
    lineage = conversation_lineage(TASK)
    assert lineage_of(tool(1)) == lineage
    assert lineage_of(tool(2)) == lineage, "resumed on another day"
    assert lineage_of(tool(2, ("assistant", "Done."), ("tool", "3"), ("user", reminder(2)), ("user", OTHER))) == lineage


def test_a_served_session_is_the_one_of_its_transcript():
    line = {"type": "user", "uuid": "u", "sessionId": "s", "message": {"role": "user", "content": TASK}}
    blocks = [{"type": "text", "text": reminder(1)}, {"type": "text", "text": TASK}]
    other = {**line, "message": {"role": "user", "content": blocks}}
    for record in (line, other):
        recorded = read_claude([(1, json.loads(json.dumps(record)))], Problems())
        assert recorded.lineage == lineage_of(claude_code(3))


@pytest.mark.parametrize(
    "request_for_title",
    [
        turns(("system", "Analyze if this message indicates a new topic."), ("user", TASK)),
        turns(("system", "s"), ("user", f"Please write a 5-10 word title for this:\n\nUser: {TASK}\n\nClaude: Yes")),
        turns(("user", "Generate a title for this conversation:\n"), ("user", TASK)),
        turns(("user", f"<session>\n{TASK}\n</session>\n\nWrite the title in their language.")),
        turns(("user", f"Generate a concise, single-line title. Do not answer.\n\nUser prompt:\n{TASK}")),
        turns(
            ("user", "### Task:\nGenerate a concise, 3-5 word title.\n### Chat History:\n<chat_history>\n"
             f"USER: {TASK}\nASSISTANT: Yes.\n</chat_history>"),
        ),
        turns(
            ("user", f"Provide a concise, 5-word-or-less title for the conversation.\n\nUser: {TASK}\nAI: Yes"),
        ),
        turns(("system", "*Briefly* summarize this partial conversation"), ("user", f"# USER\n{TASK}\n# ASSISTANT\n")),
        claude_code(1, ("assistant", "Yes."), ("user", "Your task is to create a detailed summary of the chat")),
    ],
)  # fmt: skip
def test_what_a_tool_asks_of_a_conversation_belongs_to_it(request_for_title):
    assert lineage_of(request_for_title) == conversation_lineage(TASK)


def test_questions_that_a_tool_joins_have_the_root_of_the_first():
    # Where a question was refused, or interrupted before an answer, the next one comes in the same message.
    blocks = (reminder(1), TASK + "\n", "[Request interrupted by user]\n", OTHER)
    joined = [Turn("user", "".join(blocks), blocks)]
    assert lineage_of(joined) == lineage_of(turns(("user", reminder(1) + TASK))) == conversation_lineage(TASK)
    removed = ("[Image removed: it could not be processed.]\n", reminder(1), TASK)
    assert lineage_of([Turn("user", "".join(removed), removed)]) == conversation_lineage(TASK)


def test_a_shown_file_is_no_part_of_a_session_s_root():
    parts = [
        {"type": "input_text", "text": '<image name=[Image #1] path="a.png">'},
        {"type": "input_image", "image_url": "data:"},
        {"type": "input_text", "text": "</image>"},
        {"type": "input_text", "text": TASK},
    ]
    message = {"type": "message", "role": "user", "content": parts}
    later = {"role": "user", "content": OTHER}
    served = lineage_of(messages_of([message, later], ResponsesTools([])))
    recorded = read_codex([(1, {"type": "response_item", "payload": message})], Problems())
    assert served == recorded.lineage == conversation_lineage(TASK)
    odd = [{"type": "input_image", "text": 5}, {"type": "input_image", "text": "no text"}]
    told, _ = messages_of(
        [{"role": "user", "content": [*odd, {"type": "input_text", "text": TASK}]}, later], ResponsesTools([])
    )
    assert told.blocks == (TASK,), "what stands for a file is none"
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    content = [image, {"type": "text", "text": TASK}]
    body = {"messages": [{"role": "user", "content": content}, later]}
    assert lineage_of(ChatRequest.model_validate(body).ask().messages) == conversation_lineage(TASK)
    body["messages"][0]["content"] = [{"type": "image"}, {"type": "text", "text": TASK}]
    assert lineage_of(CountRequest.model_validate(body).ask().messages) == conversation_lineage(TASK)


@pytest.mark.parametrize(
    "rules",
    [
        "To suggest changes to a file you MUST return all of it.",
        "# *SEARCH/REPLACE block* Rules:\n\nEvery block begins so.",
        "# File editing rules:\n\nReturn edits so.",
    ],
)
def test_aider_s_rules_after_the_newest_question_are_no_part_of_it(rules):
    asked = [*aider(1)[:-1], Turn("user", f"{TASK}\n\n{rules}")]
    assert lineage_of(asked) == lineage_of(aider(1, ("assistant", "Done."), ("user", f"{OTHER}\n\n{rules}")))
    unshown = "Don't try and edit any existing code without asking me to add the files to the chat!\nTell me which."
    asked.insert(-1, Turn("user", unshown))
    assert lineage_of(asked) == conversation_lineage(TASK)


def test_different_conversations_stay_apart():
    assert lineage_of(claude_code(1)) != lineage_of(claude_code(1, task=OTHER))
    titles = {lineage_of(turns(("user", f"### Task:\nA title.\nUSER: {task}\nASSISTANT: x"))) for task in (TASK, OTHER)}
    assert len(titles) == 2
    # A person's own question about titles quotes nobody.
    asked = "Generate a title for my talk on rivers"
    assert lineage_of(turns(("user", asked))) == conversation_lineage(asked)


def test_only_what_tools_wrote_is_taken_away():
    assert as_typed(TASK) == TASK
    assert as_typed(f"What does <system-reminder> mean? {TASK}") == f"What does <system-reminder> mean? {TASK}"
    assert as_typed(reminder(1)) == as_typed("<command-name>/clear</command-name>") == ""
    assert as_typed("<system-reminder> never ends") == ""
    assert as_typed("if a < b and c > d: pass") == "if a < b and c > d: pass"


@PROPERTY
@given(st.text(max_size=60), st.lists(st.sampled_from(["system-reminder", "ide_selection", "environment_details"])))
def test_blocks_never_change_a_root(said: str, tags: list[str]) -> None:
    said = f"x{said.replace('<', '')}x"
    wrapped = "".join(f"<{tag}>{index}</{tag}>" for index, tag in enumerate(tags))
    assert conversation_lineage(as_typed(wrapped + said + wrapped)) == conversation_lineage(said)


@PROPERTY
@given(st.text("<>/system-reminder ide_x\n", max_size=300))
def test_no_text_is_too_odd(text: str) -> None:
    assert isinstance(as_typed(text), str)
    assert len(lineage_of(turns(("user", text)))) == 64


def test_a_hostile_message_takes_linear_time():
    # Quadratic work on these 4 MB would take hours.
    for text in ("<system-reminder>" * 250_000, "".join(f"<ide_{'x' * (n % 50)}>" for n in range(150_000))):
        assert as_typed(text) == ""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


SUMMARY = "This session is being continued from a previous conversation that ran out of context. We read files."
ASK = ("user", "Your task is to create a detailed summary of the conversation so far")


@pytest.mark.parametrize(
    "restarted",
    [
        turns(("user", f"{reminder(4)}{SUMMARY}")),
        turns(
            ("user", "I spoke to you previously about a number of things.\nI asked you to read files."), ("user", "x")
        ),
        turns(("user", "What did we do so far?"), ("assistant", "We read files."), ("user", "Continue")),
    ],
)
def test_a_compacted_conversation_goes_on_as_itself(restarted):
    conversations = Conversations()
    lineage = conversations.name_of(claude_code(1, ("assistant", "ok"), ASK))
    assert conversations.name_of(restarted) == lineage
    assert conversations.name_of([*restarted, Turn("assistant", "a"), Turn("user", "b")]) == lineage
    # Compacted once more.
    conversations.name_of([*restarted, Turn("assistant", "a"), Turn(*ASK)])
    assert conversations.name_of(turns(("user", f"{SUMMARY} And wrote one."))) == lineage


CODEX_SUMMARY = "Another language model started to solve this problem and produced a summary of its thinking process."
CODEX_ASK = ("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.")


def test_codex_keeps_the_latest_messages_and_not_always_the_first():
    conversations = Conversations()
    lineage = conversations.name_of(codex(1, ("user", OTHER), CODEX_ASK))
    assert conversations.name_of(codex(1, ("user", OTHER), ("user", CODEX_SUMMARY))) == lineage
    assert not conversations._asked, "it was restarted"
    conversations.name_of(codex(1, ("user", OTHER), CODEX_ASK))
    cut = turns(("user", OTHER), ("user", f"{CODEX_SUMMARY} More."), ("user", "Go on"))
    assert conversations.name_of(cut) == lineage
    assert conversations.name_of([*cut, Turn("assistant", "a")]) == lineage
    assert Conversations().name_of(cut) == conversation_lineage(OTHER)


def test_nothing_is_guessed_of_a_summary():
    clock = Clock()
    conversations = Conversations(clock)
    alone = lineage_of(turns(("user", SUMMARY)))
    assert conversations.name_of(turns(("user", SUMMARY))) == alone, "nobody was asked"
    conversations.name_of(claude_code(1, ASK))
    conversations.name_of(claude_code(1, ASK, task=OTHER))
    assert conversations.name_of(turns(("user", SUMMARY))) == alone, "two were asked"
    clock.now = SUMMARY_TIMEOUT_S + 1
    conversations.name_of(claude_code(1, ASK))
    clock.now *= 3
    assert conversations.name_of(turns(("user", SUMMARY))) == alone, "too long ago"


def test_what_is_remembered_is_bounded():
    conversations = Conversations()
    for number in range(MAX_REMEMBERED + 10):
        conversations.name_of(claude_code(1, ASK, task=f"{TASK} {number}"))
    assert len(conversations._asked) == MAX_REMEMBERED


def test_a_conversation_that_is_restarted_without_end_keeps_its_latest_roots():
    conversations = Conversations()
    lineage = conversations.name_of(claude_code(1, ASK))
    for number in range(MAX_ROOTS + 5):
        restarted = turns(("user", f"{SUMMARY} {number}"))
        assert conversations.name_of(restarted) == lineage
        roots, _ = conversations.began(lineage)
        assert lineage_of(restarted) in roots
        conversations.name_of(turns(("user", f"{SUMMARY} {number}"), ("assistant", "ok"), ASK))
    assert len(roots) == MAX_ROOTS


def test_no_messages():
    with pytest.raises(ValueError, match="no messages"):
        lineage_of([])
