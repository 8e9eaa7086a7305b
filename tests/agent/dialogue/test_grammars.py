"""Grammars from schemas and for calls: what llama.cpp makes of them, and what they let through."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.dialogue.call_grammar import answer_grammar, call_grammar, check_tool
from spark_agent.dialogue.detection import CALL_FORMATS
from spark_agent.dialogue.events import Call, Reasoning, Text, merged
from spark_agent.dialogue.harmony import HarmonyParser
from spark_agent.dialogue.json_calls import HERMES
from spark_agent.dialogue.json_grammar import MAX_DEPTH, JsonGrammar, SchemaError
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.output_parser import TaggedParser
from spark_agent.dialogue.xml_calls import TaggedCalls
from spark_runtime.llama import bindings
from spark_runtime.models import demo_model_path


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    bindings()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(demo_model_path()).encode(), params)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


@pytest.fixture(scope="module")
def follows(vocabulary: Any) -> Any:
    """Whether llama.cpp lets a text through a grammar, token by token, and lets it end there."""

    def check(grammar: str, text: str) -> bool:
        raw = text.encode()
        tokens = (ctypes.c_int32 * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), tokens, len(tokens), False, False)
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
        assert sampler, grammar
        try:
            end = llama_cpp.llama_vocab_eot(vocabulary)
            for token in [*tokens[:count], end if end >= 0 else llama_cpp.llama_vocab_eos(vocabulary)]:
                data = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 1.0, 0.0))
                array = llama_cpp.llama_token_data_array(data, 1, -1, False)
                llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
                if data[0].logit == float("-inf"):
                    return False
                if token not in {end, llama_cpp.llama_vocab_eos(vocabulary)}:
                    llama_cpp.llama_sampler_accept(sampler, token)
            return True
        finally:
            llama_cpp.llama_sampler_free(sampler)

    return check


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 'quote " and \\', "c"]}, "maxItems": 2},
        "friend": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            PERSON,
            [
                {"name": "x"},
                {"name": "x", "age": -3},
                {"name": "x", "friend": {"name": "y", "friend": None}},
                {"name": "x", "tags": []},
                {"name": "x", "age": 1, "tags": ["a", 'quote " and \\'], "friend": None},
            ],
            [{}, {"age": 3}, {"name": ""}, {"name": "x", "more": 1}, {"name": "x", "tags": ["a", "a", "a"]}, []],
        ),
        ({"type": ["string", "null"]}, ["x", None, 'é🦀"\\\n'], [1, True, []]),
        ({"type": "array", "minItems": None, "maxItems": None}, [[], [1], [1, "a", None]], [{}, "1"]),
        ({"type": "string", "minLength": None, "maxLength": None}, ["", "abc"], [1]),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2}, [[1, 2.5], [1e3, 0, -1]], [[], [1], ["1"]]),
        ({"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}]}, [[1, True]], [[1], [2, True]]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, [{}, {"a": True}], [{"a": 1}]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"type": "object"}, [{}, {"a": [{"b": None}]}], [[], "x"]),
        ({}, [{}, [], "x", 1, None], []),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}],
          "$defs": {"a": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
         [{"a": 1, "b": None}, {"b": None}], [{"a": 1}]),
        ({"type": "object", "required": ["x"]}, [{"x": 1}], [{}]),
        ({"$ref": "#/definitions/Of%3Cint%3E", "definitions": {"Of<int>": {"type": "integer"}}}, [1], ["1"]),
        ({"$ref": "#/definitions/a%25b", "definitions": {"a%25b": {"type": "integer"}}}, [1], ["1"]),
    ],
)  # fmt: skip
def test_what_a_schema_lets_through(follows: Any, schema: object, good: list[object], bad: list[object]) -> None:
    grammar = answer_grammar(schema, strict=True)
    for value in good:
        for spelled in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            assert follows(grammar, spelled), spelled
    for value in bad:
        assert not follows(grammar, json.dumps(value)), value


DEEP: dict[str, Any] = {}
for _ in range(MAX_DEPTH + 2):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strnig"}, "schema/type"),
        ({"type": 5}, "schema/type"),
        ({"type": []}, "at least one"),
        (5, "expected a schema"),
        ({"properties": []}, "properties: expected an object"),
        ({"properties": {"a": 5}}, "/properties/a"),
        ({"properties": {}, "required": "a"}, "required"),
        ({"$ref": 5}, "in this schema"),
        ({"$ref": ""}, "in this schema"),
        ({"$ref": "#/$defs/none"}, "nothing is at"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to itself"),
        ({"$ref": "#"}, "refers to itself"),
        ({"enum": []}, "at least one"),
        ({"anyOf": {}}, "at least one"),
        ({"type": "array", "minItems": -1}, "minItems"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "more than"),
        ({"type": "string", "maxLength": True}, "maxLength"),
        (DEEP, "deep"),
        ({"anyOf": [{"enum": [number]} for number in range(6000)]}, "more than"),
    ],
)
def test_schemas_that_make_no_sense(schema: Any, message: str) -> None:
    for strict in (False, True):
        with pytest.raises(SchemaError, match="(?i)" + message.replace("$", r"\$")):
            JsonGrammar().schema(schema, strict=strict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a+)+$"},
        {"type": "integer", "minimum": 3},
        {"not": {}},
        {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}},
        {"type": "array", "maxItems": 10**9},
        {"$ref": "https://example.com/x"},
        {"type": "object", "properties": {"a": {"$ref": "#anchor"}}},
    ],
)
def test_what_a_grammar_cannot_hold_is_refused_only_when_strict(schema: Any, follows: Any) -> None:
    JsonGrammar().schema(schema)
    with pytest.raises(SchemaError, match="not supported"):
        JsonGrammar().schema(schema, strict=True)


@given(
    schema=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.just("#")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    ["type", "properties", "items", "anyOf", "allOf", "$ref", "enum", "required", "const", "minItems"]
                ),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=20,
    )
)
def test_no_schema_does_worse_than_be_refused(schema: Any) -> None:
    try:
        JsonGrammar().schema(schema)
    except SchemaError as error:
        assert str(error)  # noqa: PT017


@given(text=st.text(max_size=20))
def test_any_text_can_be_a_constant(follows: Any, text: str) -> None:
    grammar = answer_grammar({"const": text, "type": "string"}, strict=True)
    assert follows(grammar, json.dumps(text, ensure_ascii=False))
    assert not follows(grammar, json.dumps(text + "x", ensure_ascii=False))


TOOLS = {
    "look": Tool(
        "look",
        parameters={
            "type": "object",
            "properties": {"at": {"type": "string"}, "n": {"enum": [1, 2]}, "who": {"$ref": "#/$defs/p"}},
            "required": ["at", "n"],
            "$defs": {"p": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
        },
    ),
    'odd "name"': Tool('odd "name"'),
}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": 1}}\n</tool_call>',
    "llama3": '{"name": "look", "parameters": {"at": "x", "n": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x", "n": 1}}]',
    "mistral-named": '[TOOL_CALLS]look[ARGS]{"at": "x", "n": 1}',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"at": "x", "n": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        '{"at": "x", "n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "qwen-coder": (
        "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"at": "x", "n": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "nemotron": '<TOOLCALL>[{"name": "look", "arguments": {"at": "x", "n": 1}}]</TOOLCALL>',
    "granite3": '<|tool_call|>[{"name": "look", "arguments": {"at": "x", "n": 1}}]',
    "phi4": '<|tool_call|>{"name": "look", "arguments": {"at": "x", "n": 1}}<|/tool_call|>',
    "minimax-m1": '<tool_calls>\n{"name": "look", "arguments": {"at": "x", "n": 1}}\n</tool_calls>',
    "tool_calls": '<tool_calls>[{"name": "look", "arguments": {"at": "x", "n": 1}}]</tool_calls>',
    "seed": (
        "<seed:tool_call>\n<function=look>\n<parameter=at>x</parameter>\n<parameter=n>1</parameter>\n"
        "</function>\n</seed:tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">x</parameter>\n'
        '<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "harmony": '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x", "n": 1}',
}
FORMATS = {**{calls.name: calls for calls in CALL_FORMATS}, "harmony": None}


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_is_one_that_is_read(name: str, follows: Any) -> None:
    calls = FORMATS[name]
    text = WRITTEN[name]
    grammar = call_grammar(calls, list(TOOLS.values()), parallel=False)
    assert follows(grammar, text)
    assert not follows(grammar, f"Well, {text}")
    assert not follows(grammar, text.replace("look", "loot"))
    assert not follows(grammar, text.replace("1", "3"))
    parser = HarmonyParser(TOOLS) if calls is None else TaggedParser(calls, TOOLS)
    assert merged(parser.push(text) + parser.end()) == [Call("look", '{"at": "x", "n": 1}')]


def test_markup_that_only_looks_like_an_end_is_part_of_a_text(follows: Any) -> None:
    text = "cout << x; <p>1</p> a < b </parameters> </para x"
    tool = Tool("note", parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    grammar = call_grammar(FORMATS["qwen-coder"], [tool], parallel=False)
    written = f"<tool_call>\n<function=note>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert follows(grammar, written)
    parser = TaggedParser(FORMATS["qwen-coder"], {"note": tool})
    assert merged(parser.push(written) + parser.end()) == [Call("note", json.dumps({"text": text}))]
    thought = f"{text} </thinking></think>\n\nnull"
    assert follows(answer_grammar({"type": "null"}, strict=True, thought_end="</think>"), thought)


MARKERS = [("", "<|end|>"), ("", "</think>"), ("\n", "</parameter>"), ("", "</arg_value>"), ("", "abab"), ("a", "aab")]
MARKERS += [("", "＜｜end｜＞"), ("", "]")]


@pytest.mark.parametrize(("before", "end"), MARKERS)
@given(data=st.data())
def test_a_text_goes_on_to_its_first_marker(follows: Any, before: str, end: str, data: st.DataObject) -> None:
    parts = st.sampled_from([*end, *before, end[:-1], end[:2], "x", "\n", "é"])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    grammar = JsonGrammar()
    rules = grammar.text(f'{grammar.text_through(end, before)} "!"')
    for tried in (text, f"{text}{end}", f"{text}{before}{end}"):
        once = tried.endswith(before + end) and tried.index(end) == len(tried) - len(end)
        assert follows(rules, f"{tried}!") == once


TAGGED = sorted(name for name, calls in FORMATS.items() if isinstance(calls, TaggedCalls))


@pytest.mark.parametrize("name", TAGGED)
@given(data=st.data())
def test_any_text_can_be_written_in_a_forced_call(follows: Any, name: str, data: st.DataObject) -> None:
    calls = FORMATS[name]
    assert isinstance(calls, TaggedCalls)
    tag = calls.value[1]
    parts = st.sampled_from([*tag[:4], tag[:-1], "\n", "\n\n", "<", "<<", "def f():", "\n</", "</", "é"])
    text = "".join(data.draw(st.lists(parts, max_size=10)))
    # Where the format itself breaks no line around a value, its readers take one away all the same.
    bare = calls.written[2].startswith(tag)
    read = text.removeprefix("\n").removesuffix("\n") if bare else text
    tool = Tool("note", parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    head, key, value_end, tail = calls.written
    written = f"{head.replace('NAME', 'note')}{key.replace('KEY', 'text')}{text}{value_end}{tail}"
    assert follows(call_grammar(calls, [tool], parallel=False), written)
    parser = TaggedParser(calls, {"note": tool})
    (call,) = merged(parser.push(written) + parser.end())
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {"text": read}


@pytest.mark.parametrize("name", TAGGED)
@given(data=st.data())
def test_what_strings_of_a_value_hold_ends_nothing(follows: Any, name: str, data: st.DataObject) -> None:
    calls = FORMATS[name]
    assert isinstance(calls, TaggedCalls)
    tags = [*calls.value, *calls.key, *calls.call, *calls.outer]
    parts = st.sampled_from([*filter(None, tags), calls.value[1][:-1], '"', "\\", "{", "}", "\n", "é"])
    text = "".join(data.draw(st.lists(parts, max_size=10)))
    edit = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
    schema = {"type": "object", "properties": {"edits": {"type": "array", "items": edit}}, "required": ["edits"]}
    tool = Tool("change", parameters=schema)
    head, key, value_end, tail = calls.written
    arguments = {"edits": [{"to": text}] * data.draw(st.integers(0, 2))}
    value = json.dumps(arguments["edits"], ensure_ascii=False)
    written = f"{head.replace('NAME', 'change')}{key.replace('KEY', 'edits')}{value}{value_end}{tail}"
    assert follows(call_grammar(calls, [tool], parallel=False), written)
    for pieces in ([written], list(written)):
        parser = TaggedParser(calls, {"change": tool})
        (call,) = merged([*(event for piece in pieces for event in parser.push(piece)), *parser.end()])
        assert isinstance(call, Call)
        assert json.loads(call.arguments) == arguments


def test_many_texts_share_one_automaton() -> None:
    names = [f"p{number}" for number in range(1000)]
    tool = Tool("note", parameters={"type": "object", "properties": {name: {"type": "string"} for name in names}})
    assert call_grammar(FORMATS["qwen-coder"], [tool], parallel=False).count("\nt0-") < 30


def test_an_answer_on_its_channel(follows: Any) -> None:
    grammar = answer_grammar({"type": "null"}, strict=True, harmony=True)
    thought = "<|channel|>analysis<|message|>a <b> << c<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>null"
    assert follows(grammar, answer)
    assert follows(grammar, thought + answer)
    assert not follows(grammar, "null")
    parser = HarmonyParser({})
    assert merged(parser.push(thought + answer) + parser.end()) == [Reasoning("a <b> << c"), Text("null")]


def test_several_calls_where_parallel(follows: Any) -> None:
    text = WRITTEN["hermes"]
    tools = list(TOOLS.values())
    assert follows(call_grammar(HERMES, tools, parallel=True), f"{text}\n{text}")
    assert not follows(call_grammar(HERMES, tools, parallel=False), f"{text}\n{text}")


def test_reasoning_comes_before_what_is_forced(follows: Any) -> None:
    text = f"hm, a < b\n</think>\n\n{WRITTEN['hermes']}"
    assert follows(call_grammar(HERMES, [*TOOLS.values()], parallel=True, thought_end="</think>"), text)
    parser = TaggedParser(HERMES, TOOLS, thinking=("<think>", "</think>"), in_thought=True)
    assert merged(parser.push(text) + parser.end()) == [
        Reasoning("hm, a < b"),
        Call("look", '{"at": "x", "n": 1}'),
    ]
    assert follows(answer_grammar({"type": "null"}, strict=True, thought_end="</think>"), "hm</think>\nnull")


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"properties": 5}, {"required": 5}, {"type": None}])
def test_tools_with_broken_schemas(parameters: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        check_tool(Tool("x", parameters=parameters))
    check_tool(Tool("x", parameters={}))
