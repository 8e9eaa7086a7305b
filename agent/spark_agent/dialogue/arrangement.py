"""Messages in an order that a model's chat template takes, with nothing lost. Pure.

Coding tools send several system messages, some late in a conversation, and several messages of the user in a row.
Many templates refuse that, and some say nothing and leave such messages out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spark_agent.dialogue.messages import Message
from spark_runtime.chat import TemplateSupport

__all__ = ["arranged"]


def arranged(messages: Sequence[Message], support: TemplateSupport) -> list[Message]:
    """The messages as a template takes them that supports this; as they are where it takes everything."""
    found = list(messages)
    if not support.results:
        found = [_as_user(each) if each.role == "tool" else each for each in found]
    if not (support.system and support.late_system):
        found = _one_system(found, shown=support.system)
    if not support.user_after_result:
        found = _joined(found, lambda before, after: (before.role, after.role) == ("tool", "user"))
    if not support.repeated_roles:
        found = _joined(found, lambda before, after: before.role == after.role and after.role in ("user", "assistant"))
    return found


def _as_user(result: Message) -> Message:
    return Message("user", f"<tool_response>\n{result.text}\n</tool_response>")


def _one_system(messages: list[Message], *, shown: bool) -> list[Message]:
    """With one system message at the start, or none; later ones are told by the user, in the tags that models know."""
    first = next((at for at, each in enumerate(messages) if each.role != "system"), len(messages))
    text = "\n\n".join(each.text for each in messages[:first] if each.text)
    later = [
        Message("user", f"<system-reminder>\n{each.text}\n</system-reminder>") if each.role == "system" else each
        for each in messages[first:]
    ]
    if not text:
        return later
    if shown:
        return [Message("system", text), *later]
    if later and later[0].role == "user":
        return [replace(later[0], text=f"{text}\n\n{later[0].text}"), *later[1:]]
    return [Message("user", text), *later]


def _joined(messages: list[Message], together: Callable[[Message, Message], bool]) -> list[Message]:
    """With each message made part of the one before it that it belongs together with."""
    found: list[Message] = []
    for each in messages:
        if found and together(found[-1], each):
            last = found[-1]
            text = "\n\n".join(part for part in (last.text, each.text) if part)
            reasoning = "\n\n".join(part for part in (last.reasoning, each.reasoning) if part)
            found[-1] = replace(last, text=text, reasoning=reasoning, calls=(*last.calls, *each.calls))
        else:
            found.append(each)
    return found
