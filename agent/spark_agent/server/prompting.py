"""From messages and tools to a prompt in the model's own words, and to what reads its output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spark_agent.dialogue.arrangement import arranged
from spark_agent.dialogue.call_grammar import answer_grammar, call_grammar, written_call
from spark_agent.dialogue.detection import OutputFormat, detect
from spark_agent.dialogue.harmony import HarmonyParser
from spark_agent.dialogue.json_calls import KIMI
from spark_agent.dialogue.json_grammar import SchemaError
from spark_agent.dialogue.json_text import load_json
from spark_agent.dialogue.messages import Message, Tool, ToolCall
from spark_agent.dialogue.output_parser import OutputParser, TaggedParser
from spark_agent.server.api_error import ApiError, ContextExceededError
from spark_agent.server.reasoning import efforts
from spark_agent.server.thought import ThoughtLimit
from spark_runtime.chat import ChatFormat
from spark_runtime.errors import ChatTemplateError

if TYPE_CHECKING:
    from spark_agent.server.exchange import Ask

__all__ = ["Prepared", "Prompting", "call_ids"]

_ASKED = {"role": "user", "content": "probe"}
_HARMONY_THOUGHT = ("<|channel|>analysis<|message|>", "<|end|>")
_INSTRUCTIONS = """You can call functions. Their JSON schemas:
<tools>
{tools}
</tools>
To call one, write its name and its arguments, a JSON object, like this:
{call}"""
"""What a model is told whose template knows no tools."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the engine takes it."""

    tokens: tuple[int, ...]
    grammar: str | None
    parser: OutputParser | None
    """``None``: all output is text."""
    thought_limit: ThoughtLimit | None = None


class Prompting:
    """A model's way to be asked and to answer."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._format = detect(
            lambda messages, tools, options: chat.tried(
                messages, tools=[tool.declared() for tool in tools], options=options
            )
        )
        chat.spell(self._format.special)

    @property
    def output_format(self) -> OutputFormat:
        """How the model writes calls and reasoning."""
        return self._format

    def prepare(self, ask: Ask, meanwhile: Callable[[], object] = lambda: None) -> Prepared:
        """Render, tokenise and check; raise :class:`ApiError`. May take a while.

        ``meanwhile`` is called once, where there is time for it.
        """
        self._check_biases(ask)
        if ask.raw is not None:
            meanwhile()
            tokens = self._chat.tokenize(ask.raw) if isinstance(ask.raw, str) else list(ask.raw)
            return self._fitting(tokens, self._answer_grammar(ask, ""), None)
        tools = ask.tools if ask.choice.mode != "none" else ()
        prompt = self._rendered(ask, tools, meanwhile)
        tokens = self._chat.tokenize(prompt)
        grammar = self._grammar(ask, tools, prompt)
        limit = self._thought_limit(ask, prompt, demanded=grammar is not None)
        return self._fitting(tokens, grammar, self._parser(ask, tools, prompt), limit)

    def _thought_limit(self, ask: Ask, prompt: str, *, demanded: bool) -> ThoughtLimit | None:
        """What was asked for; where an answer of a form is demanded, reasoning leaves it half of the tokens."""
        most = ask.reasoning.tokens
        if demanded and ask.max_tokens is not None:
            half = max(ask.max_tokens // 2, 1)
            most = half if most is None else min(most, half)
        tags = _HARMONY_THOUGHT if self._format.harmony else self._format.thinking
        if most is None or tags is None:
            return None
        opening, closing = tags
        following = "<|start|>assistant" if self._format.harmony else "\n\n"
        ending = tuple(self._chat.tokenize(closing + following, starts=False))
        return ThoughtLimit(most, opening.encode(), closing.encode(), ending, self._in_thought(prompt))

    def _fitting(
        self,
        tokens: Sequence[int],
        grammar: str | None,
        parser: OutputParser | None,
        thought_limit: ThoughtLimit | None = None,
    ) -> Prepared:
        if len(tokens) >= self._chat.n_ctx:
            raise ContextExceededError(len(tokens), self._chat.n_ctx)
        if not tokens:
            raise ApiError(400, "the prompt is empty", "invalid_request", param="prompt")
        return Prepared(tuple(tokens), grammar, parser, thought_limit)

    def _check_biases(self, ask: Ask) -> None:
        most = self._chat.n_vocab
        for name, tokens in (
            ("logit_bias", [token for token, _ in ask.sampling.logit_bias]),
            ("prompt", ask.raw if isinstance(ask.raw, tuple) else ()),
        ):
            wrong = next((token for token in tokens if not 0 <= token < most), None)
            if wrong is not None:
                message = f"{name}: found token {wrong}, expected 0 to {most - 1}"
                raise ApiError(400, message, "invalid_request", param=name)

    def _rendered(self, ask: Ask, tools: Sequence[Tool], meanwhile: Callable[[], object]) -> str:
        try:
            prompt = self._chat.prompt(
                self._for_template(ask.messages, tools),
                tools=[tool.declared() for tool in tools] if self._format.described else (),
                options=self._options(ask),
                meanwhile=meanwhile,
            )
        except ChatTemplateError as error:
            raise ApiError(400, str(ApiError.of(error)), "chat_template", param="messages") from error
        return prompt + (ask.prefill or "")

    def _options(self, ask: Ask) -> dict[str, Any]:
        effort = None if ask.reasoning.effort is None else self._effort(ask.reasoning.effort)
        return ask.reasoning.options if effort is None else {"reasoning_effort": effort, **ask.reasoning.options}

    def _effort(self, asked: str) -> str | None:
        """An effort in a word that the template takes; ``None`` where it refuses them all."""
        words = efforts(asked, self._chat.template)
        return next((word for word in words if self._chat.tried([_ASKED], options={"reasoning_effort": word})), None)

    def _for_template(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
        support = self._chat.support
        if not self._format.native:
            messages = _in_words(messages)
        if not self._format.described:
            messages = _instructed(messages, tools, written_call(self._format.calls))
        concerns_tools = bool(tools) or any(message.calls or message.role == "tool" for message in messages)
        if concerns_tools and self._format.described:
            support = replace(support, system=support.system_with_tools)
        ids = call_ids(messages, named=self._format.calls is KIMI)
        rendered: list[dict[str, Any]] = []
        for message in arranged(messages, support):
            each: dict[str, Any] = {"role": message.role, "content": message.text}
            if message.reasoning:
                # Qwen and DeepSeek templates read the one, gpt-oss' the other.
                each["reasoning_content"] = each["thinking"] = message.reasoning
            if message.calls and support.bare_calls and not message.text:
                each["content"] = None
            if message.calls:
                each["tool_calls"] = [self._call(call, ids[call.id]) for call in message.calls]
            if message.role == "tool":
                each |= {"tool_call_id": ids[message.call_id or ""], "name": message.name or ""}
            rendered.append(each)
        return rendered

    def _call(self, call: ToolCall, identifier: str) -> dict[str, Any]:
        arguments: Any = call.arguments
        if self._chat.support.object_arguments:
            arguments = load_json(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": identifier, "type": "function", "function": function}

    def _in_thought(self, prompt: str) -> bool:
        return self._format.thinking is not None and prompt.rstrip().endswith(self._format.thinking[0])

    def _thought_end(self, prompt: str) -> str | None:
        return self._format.thinking[1] if self._format.thinking is not None and self._in_thought(prompt) else None

    def _grammar(self, ask: Ask, tools: Sequence[Tool], prompt: str) -> str | None:
        if ask.choice.mode != "required":
            return self._answer_grammar(ask, prompt)
        wanted = [tool for tool in tools if ask.choice.name in (None, tool.name)]
        if not wanted:
            named = f"no tool {ask.choice.name!r}" if ask.choice.name else "no tools"
            raise ApiError(400, f"tool_choice: there is {named} to call", "invalid_request", param="tool_choice")
        end = self._thought_end(prompt)
        return call_grammar(self._format.calls, wanted, parallel=ask.choice.parallel, thought_end=end)

    def _answer_grammar(self, ask: Ask, prompt: str) -> str | None:
        if ask.schema is None:
            return None
        try:
            return answer_grammar(
                ask.schema,
                strict=ask.schema_strict,
                thought_end=self._thought_end(prompt),
                harmony=self._format.harmony and ask.raw is None,
            )
        except SchemaError as error:
            raise ApiError(400, f"response_format: {error}", "invalid_json_schema", param="response_format") from error

    def _parser(self, ask: Ask, tools: Sequence[Tool], prompt: str) -> OutputParser | None:
        by_name = {tool.name: tool for tool in tools}
        if self._format.harmony:
            return HarmonyParser(by_name, calls=bool(tools))
        thinking = None if ask.reasoning_in_text else self._format.thinking
        if not tools and thinking is None:
            return None
        calls = self._format.calls if tools else None
        return TaggedParser(calls, by_name, thinking=thinking, in_thought=self._in_thought(prompt))


def call_ids(messages: Sequence[Message], *, named: bool) -> dict[str, str]:
    """Ids of calls as templates take them, by the clients' ids.

    Mistral's take nine letters and digits; Kimi's (``named``) show nothing of a call but an id that holds its name.
    """
    ids: dict[str, str] = {}
    for message in messages:
        for call in message.calls:
            ids.setdefault(call.id, f"functions.{call.name}:{len(ids)}" if named else _short_id(call.id))
        if message.role == "tool":
            # A result of a call that is not there: its template decides.
            ids.setdefault(message.call_id or "", _short_id(message.call_id or ""))
    return ids


def _short_id(identifier: str) -> str:
    return hashlib.sha256(identifier.encode()).hexdigest()[:9]


def _as_models_write(arguments: str) -> str:
    """Arguments spaced as models space them: what was generated is then found again, however a client spells it."""
    value = load_json(arguments)
    return arguments if value is None else json.dumps(value, ensure_ascii=False)


def _in_words(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls and results written out."""
    written = []
    for message in messages:
        text = message.text
        for call in message.calls:
            head = f'\n<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": '
            text += f"{head}{_as_models_write(call.arguments)}}}\n</tool_call>"
        if message.role == "tool":
            written.append(Message("user", f"<tool_response>\n{text}\n</tool_response>"))
        else:
            written.append(replace(message, text=text.lstrip("\n") if message.calls else text, calls=()))
    return written


def _instructed(messages: Sequence[Message], tools: Sequence[Tool], call: str) -> list[Message]:
    """The messages with a description of tools in the system message."""
    written = list(messages)
    if tools:
        listed = "\n".join(json.dumps(tool.declared()["function"], ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=listed, call=call)
        if written and written[0].role == "system":
            written[0] = replace(written[0], text=f"{written[0].text}\n\n{instructions}")
        else:
            written.insert(0, Message("system", instructions))
    return written
