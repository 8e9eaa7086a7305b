"""Grammars that force a tool call, in the words of each format."""

from __future__ import annotations

import json
from collections.abc import Sequence

from spark_agent.dialogue.call_format import CallFormat
from spark_agent.dialogue.json_calls import DeepSeek, Llama3, Mistral
from spark_agent.dialogue.json_grammar import JsonGrammar, SchemaError, literal
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.xml_calls import Glm, QwenCoder, is_text

__all__ = ["answer_grammar", "call_grammar", "check_tool"]

MAX_CALLS = 16
_UNTIL_TAG = '([^<] | "<" [^/<])*'
"""A text that no closing tag begins in."""


def check_tool(tool: Tool) -> None:
    """Raise :class:`SchemaError` when the tool's schema cannot be understood."""
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise SchemaError(f"schema/type: found {kind!r}, expected 'object'")
    JsonGrammar().schema(tool.parameters)


def answer_grammar(schema: object, *, strict: bool, thought_end: str | None = None) -> str:
    """A grammar for an answer that is JSON of a schema, after the reasoning that the prompt has opened, if any."""
    grammar = JsonGrammar()
    return grammar.text(_after_thought(thought_end) + grammar.schema(schema, strict=strict))


def call_grammar(
    calls: CallFormat | None, tools: Sequence[Tool], *, parallel: bool, thought_end: str | None = None
) -> str:
    """A grammar for one call of these tools, or for several where ``parallel``; ``None`` is harmony."""
    grammar = JsonGrammar()
    if calls is None:
        return grammar.text(_harmony(grammar, tools))
    if isinstance(calls, Mistral):
        body = _mistral(calls, grammar, tools, parallel=parallel)
    else:
        call = grammar.add(" | ".join(_call(calls, grammar, tool) for tool in tools))
        body = call
        if parallel and not isinstance(calls, Llama3):
            separator = "" if isinstance(calls, DeepSeek) else '"\\n" '
            body = f"{call} ({separator}{call}){{0,{MAX_CALLS - 1}}}"
        if isinstance(calls, DeepSeek):
            body = f"{literal(calls.markers[0])} {body} {literal(calls.markers[2])}"
    return grammar.text(_after_thought(thought_end) + body)


def _after_thought(end: str | None) -> str:
    return "" if end is None else f"{_UNTIL_TAG} {literal(end)} [ \\n]{{0,2}} "


def _named(grammar: JsonGrammar, tool: Tool, key: str) -> str:
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
    return f'{literal(head)} {_arguments(grammar, tool)} ws "}}"'


def _arguments(grammar: JsonGrammar, tool: Tool) -> str:
    return grammar.schema({"type": "object", **tool.parameters}, strict=False)


def _call(calls: CallFormat, grammar: JsonGrammar, tool: Tool) -> str:
    if isinstance(calls, Llama3):
        return _named(grammar, tool, "parameters")
    if isinstance(calls, DeepSeek):
        head, tail = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
        if calls.fenced:
            head, tail = f"{head}function<｜tool▁sep｜>{tool.name}\n```json\n", f"\n```{tail}"
        else:
            head = f"{head}{tool.name}<｜tool▁sep｜>"
        return _between(head, _arguments(grammar, tool), tail)
    if isinstance(calls, QwenCoder):
        values = _tagged(grammar, tool, "<parameter={}>\n", "\n</parameter>\n")
        return _between(f"<tool_call>\n<function={tool.name}>\n", values, "</function>\n</tool_call>")
    if isinstance(calls, Glm):
        values = _tagged(grammar, tool, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
        return _between(f"<tool_call>{tool.name}\n", values, "</tool_call>")
    return _between("<tool_call>\n", _named(grammar, tool, "arguments"), "\n</tool_call>")


def _between(head: str, inside: str, tail: str) -> str:
    return f"{literal(head)} {inside} {literal(tail)}"


def _tagged(grammar: JsonGrammar, tool: Tool, head: str, tail: str) -> str:
    """The arguments between tags, in the order of the schema."""
    required = tool.parameters.get("required", [])
    parts = []
    for name, schema in tool.properties.items():
        # Only the schema's own document can be referred to, so a value with a reference is any JSON.
        bare = schema if "$ref" not in json.dumps(schema) else True
        value = _UNTIL_TAG if is_text(schema) and "enum" not in schema else grammar.schema(bare)
        if is_text(schema) and "enum" in schema:
            value = grammar.add(" | ".join(literal(str(each)) for each in schema["enum"]))
        part = grammar.add(f"{literal(head.format(name))} {value} {literal(tail)}")
        parts.append(part if name in required else f"{part}?")
    return " ".join(parts)


def _mistral(calls: Mistral, grammar: JsonGrammar, tools: Sequence[Tool], *, parallel: bool) -> str:
    more = f"{{0,{MAX_CALLS - 1 if parallel else 0}}}"
    marker = calls.markers[0]
    if calls.named:
        heads = (f"{literal(f'{marker}{tool.name}[ARGS]')} {_arguments(grammar, tool)}" for tool in tools)
        call = grammar.add(" | ".join(heads))
        return f"{call} {call}{more}"
    call = grammar.add(" | ".join(_named(grammar, tool, "arguments") for tool in tools))
    return f'{literal(f"{marker}[")} {call} (", " {call}){more} "]"'


def _harmony(grammar: JsonGrammar, tools: Sequence[Tool]) -> str:
    calls = (
        f"{literal(f'<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>')} "
        f"{_arguments(grammar, tool)}"
        for tool in tools
    )
    thought = '("<|channel|>analysis<|message|>" [^<]* "<|end|><|start|>assistant")?'
    return f"{thought} {grammar.add(' | '.join(calls))}"
