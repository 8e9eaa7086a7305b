"""Which formats a model writes, told from what its chat template makes of calls and of reasoning."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_agent.dialogue.call_format import CallFormat
from spark_agent.dialogue.events import Call, merged
from spark_agent.dialogue.harmony import HARMONY_TOKENS, HarmonyParser
from spark_agent.dialogue.json_calls import (
    DEEPSEEK,
    DEEPSEEK_BARE,
    GRANITE,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX_M1,
    MISTRAL,
    MISTRAL_NAMED,
    NEMOTRON,
    PHI,
    TOOL_CALLS,
    NamedCalls,
    ObjectCalls,
)
from spark_agent.dialogue.json_text import load_json
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.output_parser import OutputParser, TaggedParser
from spark_agent.dialogue.xml_calls import GLM, MINIMAX, QWEN_CODER, SEED, TaggedCalls

__all__ = ["CALL_FORMATS", "GENERIC", "OutputFormat", "Render", "detect"]

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Tool], Mapping[str, Any]], str]
"""What a template makes of messages, tools and options; empty where it refuses them."""
CALL_FORMATS: tuple[CallFormat, ...] = (
    QWEN_CODER, SEED, GLM, MINIMAX, HERMES, MISTRAL, MISTRAL_NAMED, DEEPSEEK, DEEPSEEK_BARE, KIMI, NEMOTRON, PHI,
    GRANITE, TOOL_CALLS, MINIMAX_M1, LLAMA,
)  # fmt: skip
"""Those that only look like another one come before it."""
_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_NAME, _VALUE, _RESULT = "probe_tool", "probe value", "probe_result"
_ARGUMENTS = {"probe_key": _VALUE, "probe_number": 7}
_TOOL = Tool(
    _NAME,
    "probe",
    {"type": "object", "properties": {"probe_key": {"type": "string"}, "probe_number": {"type": "integer"}}},
)
_ASKED = {"role": "user", "content": "probe question"}
_FURTHER = {"role": "user", "content": "probe further"}
_THOUGHT, _ANSWER = "probe_thought", "probe_answer"
GENERIC = "generic"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes what is not plain text."""

    name: str
    calls: CallFormat | None
    """``None`` is harmony, where calls are channels."""
    thinking: tuple[str, str] | None
    """The tags of reasoning."""
    described: bool = True
    """The template tells the model of tools; otherwise they are described in words of ours."""

    @property
    def harmony(self) -> bool:
        """Whether all output is on channels."""
        return self.calls is None

    @property
    def native(self) -> bool:
        """Whether the template shows calls in this format."""
        return self.name != GENERIC

    @property
    def special(self) -> tuple[str, ...]:
        """Markers that are needed as text even where they are control tokens, which have none."""
        if self.calls is None:
            return HARMONY_TOKENS
        return (*self.calls.special, *(self.thinking or ()))


def detect(render: Render) -> OutputFormat:
    """The formats of a template: that of the calls it shows is the one by which they are read back.

    Where none reads them, calls are asked for in Hermes' words.
    """
    described = _NAME in render([_ASKED], [_TOOL], {})
    thinking = _thinking(render)
    # What stands between a question and the model's answer to it.
    before = render([_ASKED], [_TOOL], {}).partition(str(_ASKED["content"]))[2]
    for shown in _shown(render):
        if _reads(HarmonyParser({_NAME: _TOOL}), shown):
            return OutputFormat("harmony", None, None, described)
        for calls in CALL_FORMATS:
            if _writes(calls, shown, before) and _reads(
                TaggedParser(calls, {_NAME: _TOOL}), shown[_begin(calls, shown) :]
            ):
                return OutputFormat(calls.name, calls, thinking, described)
    return OutputFormat(GENERIC, HERMES, thinking, described=False)


def _shown(render: Render) -> Iterator[str]:
    """A call as the template shows it, for each way in which it may want arguments and ids."""
    ways = itertools.product(("probe0000", f"functions.{_NAME}:0"), ("", None), (_ARGUMENTS, json.dumps(_ARGUMENTS)))
    for identifier, content, arguments in ways:
        call = {"id": identifier, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        turns: list[Mapping[str, Any]] = [
            _ASKED,
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": _RESULT, "tool_call_id": identifier, "name": _NAME},
            _FURTHER,
        ]
        # Some templates want no question after a result, others one.
        for so_many in (4, 3, 2):
            _, _, after = render(turns[:so_many], [_TOOL], {}).partition(str(_ASKED["content"]))
            if _VALUE in after:
                yield after.partition(_RESULT)[0].partition(str(_FURTHER["content"]))[0]
                break


def _begin(calls: CallFormat, shown: str) -> int:
    """Where an answer may begin that is a call without a marker."""
    return max(0, min((shown.find(each) for each in calls.opening), default=0))


def _reads(parser: OutputParser, shown: str) -> bool:
    parts = merged([*parser.push(shown), *parser.end()])
    return any(isinstance(part, Call) and _is_probe(part) for part in parts)


def _is_probe(call: Call) -> bool:
    return call.name == _NAME and load_json(call.arguments) == _ARGUMENTS


def _writes(calls: CallFormat, shown: str, before: str) -> bool:
    """Whether it is this variant of a format; what is read is wider."""
    if isinstance(calls, NamedCalls):
        return calls.written.replace("NAME", _NAME).replace("INDEX", "0") in shown or (
            "[CALL_ID]" in calls.special and f"{calls.markers[0]}{_NAME}[CALL_ID]" in shown
        )
    if isinstance(calls, ObjectCalls) and not calls.opening:
        after = shown.partition(calls.markers[0])[2].lstrip()
        return after.startswith("[" if calls.listed else "{") and calls.closer in after
    if calls.opening:
        # Anything else before the call would be the model's to write, and nobody would read it.
        return shown[: _begin(calls, shown)].rstrip() == before.rstrip()
    return not isinstance(calls, TaggedCalls) or calls.outer[0] in shown


def _thinking(render: Render) -> tuple[str, str] | None:
    """The tags of reasoning that the template opens for the model, puts around what it is given, or takes away."""
    said = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    asked = [render([_ASKED], [], options) for options in ({}, {"enable_thinking": True}, {"thinking": True})]
    call = {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    result = {"role": "tool", "content": _RESULT, "tool_call_id": "probe0000", "name": _NAME}
    told = [render([_ASKED, said], [], {}), render([_ASKED, {**said, "tool_calls": [call]}, result], [_TOOL], {})]
    for opening, closing in _THINKING:
        tagged = {"role": "assistant", "content": f"{opening}{_THOUGHT}{closing}{_ANSWER}"}
        later = render([_ASKED, tagged, _FURTHER], [], {})
        if (
            any(prompt.rstrip().endswith(opening) for prompt in asked)
            or any(text.partition(_THOUGHT)[0].rstrip().endswith(opening) for text in told if _THOUGHT in text)
            or (_ANSWER in later and _THOUGHT not in later)
            or closing in asked[0]
        ):
            return opening, closing
    return None
