"""From chat messages to a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spark_runtime.engine import Engine
from spark_runtime.errors import ChatTemplateError
from spark_runtime.prompt_tokens import PromptTokenizer
from spark_runtime.templates import ChatTemplate

__all__ = ["ChatFormat", "TemplateSupport"]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What llama.cpp assumes, too, for a model without a template."""


_RESERVED = frozenset(
    {
        "add_generation_prompt", "bos_token", "eos_token", "function_call", "functions", "messages", "raise_exception",
        "strftime_now", "tool_choice", "tools",
    }
)  # fmt: skip
"""What a template is given by us, whatever options a client sends."""
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """What a chat template can say, found out by trying."""

    tools: bool
    """It describes tools and shows calls."""
    object_arguments: bool
    """A call's arguments are wanted as an object, not as JSON text."""
    results: bool
    """It shows messages of the role ``tool``."""
    system: bool = True
    """It shows a system message at the start."""
    late_system: bool = True
    """It shows every system message: several at the start, and later ones."""
    repeated_roles: bool = True
    """It shows two messages of the user in a row."""
    user_after_result: bool = True
    """It shows a message of the user right after what a tool returned."""
    system_with_tools: bool = True
    """It shows a system message at the start where there are tools."""
    bare_calls: bool = False
    """It shows calls only of messages whose content is ``None``."""


class ChatFormat:
    """A model's chat template, and what it can say."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer = PromptTokenizer(engine)
        self._bos = engine.special_text("bos")
        self.template = engine.chat_template or _CHATML
        """The template's own text."""
        self._format = self._template(self.template)
        for_tools = engine.tool_template
        self._tool_format = self._template(for_tools) if for_tools else self._format

    def _template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, {"bos_token": self._bos, "eos_token": self._engine.special_text("eos")})

    def prompt(
        self,
        messages: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> str:
        """The prompt that asks for the next assistant message; ``options`` are the template's own variables.

        ``meanwhile`` is called once while it is rendered (:meth:`spark_runtime.templates.ChatTemplate.render`).
        Raises :class:`ChatTemplateError` when the template refuses, for example two user messages in a row.
        """
        declared: Any = list(tools) or self._no_tools
        own = {name: value for name, value in (options or {}).items() if name not in _RESERVED}
        messages = list(messages)
        concerns_tools = bool(tools) or any("tool_calls" in each or each["role"] == "tool" for each in messages)
        return self._run(self._tool_format if concerns_tools else self._format, messages, declared, own, meanwhile)

    def _run(
        self,
        form: ChatTemplate,
        messages: list[Any],
        tools: Any,
        options: Mapping[str, Any],
        meanwhile: Callable[[], object] | None = None,
    ) -> str:
        given = dict.fromkeys(("functions", "function_call", "tool_choice"))
        variables = {**options, **given, "messages": messages, "tools": tools, "add_generation_prompt": True}
        return form.render(variables, meanwhile)

    @cached_property
    def _no_tools(self) -> list[Any] | None:
        """What says that there are no tools: nothing, but for a template that counts them all the same."""
        try:
            self._run(self._format, [_PROBE_ASKED], None, {})
        except ChatTemplateError:
            with contextlib.suppress(ChatTemplateError):
                self._run(self._format, [_PROBE_ASKED], [], {})
                return []
        return None

    @cached_property
    def support(self) -> TemplateSupport:
        """What the template can say."""
        described = self.tried([_PROBE_ASKED], tools=[_PROBE_TOOL])
        bare, as_object = self._shown({"probe_key": "probe_value"})
        bare_text, as_text = self._shown('{"probe_key": "probe_value"}')
        # A template that prints what it is given spells an object as Python does, and escapes a text within JSON.
        takes_object = "probe_value" in as_object and "'probe_key'" not in as_object
        takes_text = "probe_value" in as_text and '\\"probe_key' not in as_text
        shown = as_text if takes_text else as_object
        return TemplateSupport(
            tools="probe_tool" in described and (takes_object or takes_text),
            object_arguments=takes_object and not takes_text,
            results="probe_result" in shown,
            system="probe_system" in self.tried([_system("probe_system"), _PROBE_ASKED]),
            late_system=self._shows(
                [_system("probe_system"), _system("probe_second"), _PROBE_ASKED, _system("probe_late")],
                "system second late",
            )
            and self._shows([_PROBE_ASKED, _PROBE_SAID, _system("probe_late"), _PROBE_ASKED], "late"),
            repeated_roles=self._shows([{"role": "user", "content": "probe_first"}, _PROBE_LATER], "first later"),
            user_after_result="probe_later" in as_object or "probe_later" in as_text,
            system_with_tools="probe_system"
            in self.tried([_system("probe_system"), _PROBE_ASKED], tools=[_PROBE_TOOL]),
            bare_calls=bare_text if takes_text else bare,
        )

    def _shows(self, messages: list[dict[str, Any]], words: str) -> bool:
        shown = self.tried(messages)
        return all(f"probe_{word}" in shown for word in words.split())

    def _shown(self, arguments: object) -> tuple[bool, str]:
        """A call and its result, and whether its message had to be without content."""
        shown = ""
        for content in ("", None):
            turns = [_PROBE_ASKED, _probe_call(arguments, content), _PROBE_RESULT, _PROBE_LATER]
            # Some templates show a call only before what follows, others take nothing but an answer after a result.
            for so_many in (4, 3, 2):
                tried = self.tried(turns[:so_many], tools=[_PROBE_TOOL])
                if "probe_value" in tried:
                    return content is None, tried
                shown = shown or tried
        return False, shown

    def tried(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """What the template makes of messages; empty where it refuses them."""
        try:
            return self.prompt(messages, tools=tools, options=options)
        except ChatTemplateError:
            return ""

    def spell(self, markers: Iterable[str]) -> None:
        """Let control tokens among these markers be read as their text, which they otherwise do not have."""
        for marker in markers:
            tokens = self._engine.tokenize(marker, add_special=False, parse_special=True)
            if len(tokens) == 1 and not self._engine.is_end(tokens[0]):
                self._engine.spell(tokens[0], marker.encode())

    def piece(self, token: int) -> bytes:
        """Bytes of one token."""
        return self._engine.piece(token)

    @property
    def n_ctx(self) -> int:
        """Tokens that a conversation has room for."""
        return self._engine.n_ctx

    @property
    def n_vocab(self) -> int:
        """Tokens that there are."""
        return self._engine.n_vocab

    def tokenize(self, prompt: str, *, starts: bool = True) -> list[int]:
        """Token ids of a prompt, or of a later part of one; a start token is added once, never twice."""
        add_special = starts and not (self._bos and prompt.startswith(self._bos))
        return self._tokenizer.tokenize(prompt, add_special=add_special)

    def learn_markers(self) -> None:
        """Find out where prompts may be cut, so that later ones are tokenised only as far as they are new."""
        turns = [_PROBE_ASKED, _PROBE_SAID, _PROBE_LATER]
        samples = [[_system("probe"), *turns], turns]
        prompts = (self.tried(turns) for turns in samples)
        self._tokenizer.learn(next(filter(None, prompts), ""))


_PROBE_ASKED = {"role": "user", "content": "probe"}
_PROBE_SAID = {"role": "assistant", "content": "said"}
_PROBE_LATER = {"role": "user", "content": "probe_later"}
_PROBE_RESULT = {"role": "tool", "content": "probe_result", "tool_call_id": "probe0000", "name": "probe_tool"}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _probe_call(arguments: object, content: str | None) -> dict[str, Any]:
    call = {"id": "probe0000", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
