"""Messages as coding tools send them, for templates that take less."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import families
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.dialogue.arrangement import arranged
from spark_agent.dialogue.messages import Message, ToolCall
from spark_runtime.chat import TemplateSupport

BENCHMARK = Path(__file__).resolve().parents[3] / "infra/benchmarks/chat_templates.py"
ALL = TemplateSupport(tools=True, object_arguments=True, results=True)


def limited(**lacking: bool) -> TemplateSupport:
    return TemplateSupport(**{"tools": True, "object_arguments": True, "results": True, **lacking})


CALL = Message("assistant", "", calls=(ToolCall("c1", "find", "{}"),))
RESULT = Message("tool", "found", call_id="c1", name="find")


def test_what_a_template_takes_is_left_as_it_is():
    messages = [Message("system", "a"), Message("user", "b"), Message("system", "c"), CALL, RESULT]
    assert arranged(messages, ALL) == messages


def test_later_system_messages_are_told_by_the_user():
    messages = [Message("system", "a"), Message("system", "b"), Message("user", "c"), Message("system", "d")]
    assert arranged(messages, limited(late_system=False)) == [
        Message("system", "a\n\nb"),
        Message("user", "c"),
        Message("user", "<system-reminder>\nd\n</system-reminder>"),
    ]
    assert arranged(messages, limited(late_system=False, repeated_roles=False)) == [
        Message("system", "a\n\nb"),
        Message("user", "c\n\n<system-reminder>\nd\n</system-reminder>"),
    ]


def test_a_template_without_system_messages():
    messages = [Message("system", "a"), Message("user", "b")]
    assert arranged(messages, limited(system=False)) == [Message("user", "a\n\nb")]
    assert arranged([Message("system", "a"), CALL], limited(system=False)) == [Message("user", "a"), CALL]


def test_what_follows_a_result_is_part_of_it():
    messages = [Message("user", "a"), CALL, RESULT, Message("user", "b"), Message("assistant", "c")]
    assert [each.text for each in arranged(messages, limited(user_after_result=False))] == ["a", "", "found\n\nb", "c"]


def test_results_that_a_template_does_not_show():
    found = arranged([Message("user", "a"), CALL, RESULT], limited(results=False))
    assert found[-1] == Message("user", "<tool_response>\nfound\n</tool_response>")


_FLAGS = ("results", "system", "late_system", "repeated_roles", "user_after_result")
_MESSAGES = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.booleans()), max_size=8)


@given(_MESSAGES, st.fixed_dictionaries({name: st.booleans() for name in _FLAGS}))
def test_nothing_is_lost_and_nothing_is_left_that_is_refused(shape, flags):
    messages = [
        Message(role, f"<{at}>", calls=(ToolCall(f"c{at}", "f", "{}"),) if called and role == "assistant" else ())
        for at, (role, called) in enumerate(shape)
    ]
    support = limited(**flags)
    found = arranged(messages, support)
    told = "".join(each.text for each in found)
    places = [told.index(each.text) for each in messages]
    assert places == sorted(places), "in the order in which they were said"
    assert [call for each in found for call in each.calls] == [call for each in messages for call in each.calls]
    roles = [each.role for each in found]
    if not support.system:
        assert "system" not in roles
    if not support.late_system:
        assert "system" not in roles[1:]
    if not support.results:
        assert "tool" not in roles
    for before, after in pairwise(roles):
        assert support.repeated_roles or before != after or after not in ("user", "assistant")
        assert support.user_after_result or (before, after) != ("tool", "user")


def test_templates_are_counted_by_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "free.jinja").write_text(families.QWEN3)
    (tmp_path / "strict.jinja").write_text(families.MISTRAL_NEMO)
    command = [sys.executable, str(BENCHMARK), str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "2 templates: " in told
    assert "2 after arrangement" in told
