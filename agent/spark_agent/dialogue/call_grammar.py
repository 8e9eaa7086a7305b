"""Grammars that force a tool call, in the words of each format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from spark_agent.dialogue.call_format import CallFormat
from spark_agent.dialogue.json_calls import NamedCalls, ObjectCalls
from spark_agent.dialogue.json_grammar import JsonGrammar, SchemaError, literal
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.xml_calls import TaggedCalls, is_text

__all__ = ["answer_grammar", "call_grammar", "check_tool", "written_call"]

MAX_CALLS = 16


def check_tool(tool: Tool) -> None:
    """Raise :class:`SchemaError` when the tool's schema cannot be understood."""
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise SchemaError(f"schema/type: found {kind!r}, expected 'object'")
    JsonGrammar().schema(tool.parameters)


def answer_grammar(schema: object, *, strict: bool, thought_end: str | None = None, harmony: bool = False) -> str:
    """A grammar for an answer that is JSON of a schema, after the reasoning that the prompt has opened, if any."""
    grammar = JsonGrammar()
    if harmony:
        before = f'{_harmony_thought(grammar)} "<|channel|>final<|message|>" '
    else:
        before = _after_thought(grammar, thought_end)
    return grammar.text(before + grammar.schema(schema, strict=strict))


def call_grammar(
    calls: CallFormat | None, tools: Sequence[Tool], *, parallel: bool, thought_end: str | None = None
) -> str:
    """A grammar for one call of these tools, or for several where ``parallel``; ``None`` is harmony."""
    grammar = JsonGrammar()
    if calls is None:
        return grammar.text(_harmony(grammar, tools))
    more = MAX_CALLS - 1 if parallel else 0
    if isinstance(calls, ObjectCalls):
        body = _objects(calls, grammar, tools, more)
    elif isinstance(calls, NamedCalls):
        body = _named(calls, grammar, tools, more)
    elif isinstance(calls, TaggedCalls):
        body = _repeated(grammar, (_tagged(calls, grammar, tool) for tool in tools), '"\\n"', more)
    else:
        raise TypeError(f"no grammar for {calls.name}")
    return grammar.text(_after_thought(grammar, thought_end) + body)


def written_call(calls: CallFormat | None) -> str:
    """How a call is written, told to a model whose template does not say; arguments as JSON."""
    if isinstance(calls, NamedCalls):
        head, tail = calls.written.replace("INDEX", "0"), calls.tail
        return f"{calls.brackets[0]}{head}{{...}}{tail}{calls.brackets[1]}"
    if isinstance(calls, ObjectCalls):
        call = f'{{"name": "NAME", "{calls.key}": {{...}}}}'
        marker = "" if calls.opening else f"{calls.markers[0]}{calls.around}"
        inside = f"[{call}]" if calls.listed else call
        return f"{marker}{inside}{calls.around}{calls.closer if marker else ''}"
    if isinstance(calls, TaggedCalls):
        return "".join(calls.written[:2]) + "VALUE" + "".join(calls.written[2:])
    return "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>"


def _after_thought(grammar: JsonGrammar, end: str | None) -> str:
    return "" if end is None else f"{grammar.text_through(end)} [ \\n]{{0,2}} "


def _repeated(grammar: JsonGrammar, calls: Iterable[str], separator: str, more: int) -> str:
    call = grammar.add(" | ".join(calls))
    return f"{call} ({separator} {call}){{0,{more}}}" if more else call


def _arguments(grammar: JsonGrammar, tool: Tool) -> str:
    return grammar.schema({"type": "object", **tool.parameters}, strict=False)


def _objects(calls: ObjectCalls, grammar: JsonGrammar, tools: Sequence[Tool], more: int) -> str:
    objects = []
    for tool in tools:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{calls.key}": '
        objects.append(f'{literal(head)} {_arguments(grammar, tool)} ws "}}"')
    marker, around = calls.markers[0], calls.around
    if calls.opening:
        # Without a marker there is no telling a second call from text.
        return grammar.add(" | ".join(objects))
    if calls.listed:
        inside = _repeated(grammar, objects, '", "', more)
        return _between(f"{marker}[", inside, f"]{calls.closer}")
    call = grammar.add(" | ".join(objects))
    return _repeated(
        grammar, [_between(f"{marker}{around}", call, f"{around}{calls.closer}")], literal(around or " "), more
    )


def _named(calls: NamedCalls, grammar: JsonGrammar, tools: Sequence[Tool], more: int) -> str:
    heads = (_numbered(calls.written.replace("NAME", tool.name)) for tool in tools)
    arguments = (_arguments(grammar, tool) for tool in tools)
    tail = literal(calls.tail) if calls.tail else ""
    written = [f"{head} {value} {tail}" for head, value in zip(heads, arguments, strict=True)]
    body = _repeated(grammar, written, "", more)
    return " ".join([*_literals(calls.brackets[0]), body, *_literals(calls.brackets[1])])


def _numbered(head: str) -> str:
    before, number, after = head.partition("INDEX")
    return f"{literal(before)} [0-9]{{1,2}} {literal(after)}" if number else literal(head)


def _literals(text: str) -> list[str]:
    return [literal(text)] if text else []


def _between(head: str, inside: str, tail: str) -> str:
    return " ".join([*_literals(head), inside, *_literals(tail)])


def _tagged(calls: TaggedCalls, grammar: JsonGrammar, tool: Tool) -> str:
    """The arguments between tags, in the order of the schema."""
    head, key, value_end, tail = calls.written
    required = tool.parameters.get("required", [])
    parts = []
    before, tag, after = value_end.partition(calls.value[1])
    for name, schema in tool.properties.items():
        if not is_text(schema):
            # Only the schema's own document can be referred to, so a value with a reference is any JSON.
            bare = schema if "$ref" not in json.dumps(schema) else True
            value = f"{grammar.schema(bare)} {literal(value_end)}"
        elif "enum" in schema:
            value = f"{grammar.add(' | '.join(literal(str(each)) for each in schema['enum']))} {literal(value_end)}"
        else:
            value = " ".join([grammar.text_through(tag, before), *_literals(after)])
        part = grammar.add(f"{literal(key.replace('KEY', name))} {value}")
        parts.append(part if name in required else f"{part}?")
    return _between(head.replace("NAME", tool.name), " ".join(parts), tail)


def _harmony(grammar: JsonGrammar, tools: Sequence[Tool]) -> str:
    calls = (
        f"{literal(f'<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>')} "
        f"{_arguments(grammar, tool)}"
        for tool in tools
    )
    return f"{_harmony_thought(grammar)} {grammar.add(' | '.join(calls))}"


def _harmony_thought(grammar: JsonGrammar) -> str:
    return f'("<|channel|>analysis<|message|>" {grammar.text_through("<|end|>")} "<|start|>assistant")?'
