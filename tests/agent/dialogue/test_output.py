"""Reasoning and calls in every format, whole, cut, broken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.dialogue.detection import detect
from spark_agent.dialogue.events import Call, Reasoning, Text, merged
from spark_agent.dialogue.harmony import HARMONY_TOKENS, HarmonyParser
from spark_agent.dialogue.json_calls import DeepSeek, Hermes, Llama3, Mistral
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.output_parser import OutputParser, TaggedParser
from spark_agent.dialogue.xml_calls import Glm, QwenCoder

TOOLS = {
    "look": Tool(
        "look", parameters={"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
    ),
    "stop": Tool("stop"),
}
THINK = ("<think>", "</think>")
FORMATS = {
    "hermes": Hermes(),
    "llama3": Llama3(),
    "mistral": Mistral(),
    "deepseek": DeepSeek(),
    "qwen-coder": QwenCoder(),
    "glm": Glm(),
    "harmony": None,
}


def parser_of(name: str, **options: bool) -> OutputParser:
    if FORMATS[name] is None:
        return HarmonyParser(TOOLS)
    return TaggedParser(FORMATS[name], TOOLS, thinking=THINK, **options)


def read(name: str, *pieces: str, **options: bool) -> list[object]:
    parser = parser_of(name, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.end())


LOOK = Call("look", '{"at": "x y", "n": 3}')
STOP = Call("stop", "{}")
LOOK_JSON = '{"name": "look", "arguments": {"at": "x y", "n": 3}}'
WHOLE = {
    "hermes": f'<tool_call>\n{LOOK_JSON}\n</tool_call>\n<tool_call>\n{{"name": "stop"}}\n</tool_call>',
    "llama3": '{"name": "look", "parameters": {"at": "x y", "n": 3}}; {"name": "stop", "parameters": {}}',
    "mistral": f'[TOOL_CALLS] [{LOOK_JSON}, {{"name": "stop", "arguments": {{}}, "id": "abc"}}]',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"at": "x y", "n": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "qwen-coder": (
        "<tool_call>\n<function=look>\n<parameter=at>\nx y\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>"
    ),
    "harmony": (
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x y", "n": 3}<|call|>'
        "<|start|>assistant to=functions.stop<|channel|>commentary<|message|>{}"
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_whole_calls(name: str) -> None:
    assert read(name, WHOLE[name]) == [LOOK, STOP]


@pytest.mark.parametrize("name", FORMATS)
def test_letter_by_letter(name: str) -> None:
    assert read(name, *WHOLE[name]) == [LOOK, STOP]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in {"llama3", "harmony"}])
def test_text_and_reasoning_around_calls(name: str) -> None:
    text = f"<think>\nhm, {{ }}\n</think>\n\nI will look.\n\n{WHOLE[name]}\n"
    assert read(name, text) == [Reasoning("hm, { }"), Text("I will look."), LOOK, STOP]
    inside = f"hm\n</think>\n{WHOLE[name]}"
    assert read(name, inside, in_thought=True) == [Reasoning("hm"), LOOK, STOP]
    assert read(name, f"{WHOLE[name]}\n\nDone.") == [LOOK, STOP, Text("Done.")]


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>Soon.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>The answer < 3."
    )
    assert read("harmony", *text) == [Reasoning("Think <b>."), Text("Soon.The answer < 3.")]
    assert read("harmony", "Just text") == [Text("Just text")]
    assert read("harmony", "<|channel|>analy") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call> is what I would write"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {oops}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "argu'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", '<tool_call>{"name": "look", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": NaN}}</tool_call>'),
        ("hermes", "a <tool_cal"),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"name": "nobody", "parameters": {}}'),
        ("llama3", "{"),
        ("llama3", 'see {"name": "look", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] no"),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {}}, 5]'),
        ("mistral", "[TOOL_CALLS]" + "x" * 1000),
        ("deepseek", "<｜tool▁call▁begin｜>look: {}"),
        ("qwen-coder", "<tool_call>\n<function=look>\n<parameter=at>\nx"),
        ("qwen-coder", "<function=look> calls look"),
        ("glm", "<tool_call>look</arg_key>"),
        ("glm", "<tool_call>look<arg_key>a</arg_key>b"),
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, text: str) -> None:
    assert read(name, text) == [Text(text)]
    if len(text) < 2000:
        assert read(name, *text) == [Text(text)]


def test_a_broken_call_does_not_hide_the_next() -> None:
    events = read("hermes", f"<tool_call>{{oops}}</tool_call>{WHOLE['hermes']}")
    assert events == [Text("<tool_call>{oops}</tool_call>"), LOOK, STOP]


def test_closers_inside_strings_end_nothing() -> None:
    arguments = {"at": '</tool_call> } ] " \\ {', "n": 1}
    text = f"<tool_call>{json.dumps({'name': 'look', 'arguments': arguments})}</tool_call>"
    (call,) = read("hermes", *text)
    assert json.loads(call.arguments) == arguments


def test_missing_closers_are_not_missed() -> None:
    assert read("hermes", f"<tool_call>{LOOK_JSON}") == [LOOK]
    assert read("mistral", '[TOOL_CALLS]look[CALL_ID]a1[ARGS]{"at": "x y", "n": 3}') == [LOOK]
    assert read("llama3", '<|python_tag|>{"name": "look", "parameters": {"at": "x y", "n": 3}}') == [LOOK]


def test_a_surrogate_from_a_model_can_be_sent() -> None:
    (call,) = read("hermes", r'<tool_call>{"name": "look", "arguments": {"at": "\ud800"}}</tool_call>')
    assert json.loads(call.arguments) == {"at": "�"}
    call.arguments.encode()


def test_bare_values_follow_the_schema() -> None:
    body = "<parameter=at>\n42\n</parameter><parameter=n>\n42\n</parameter><parameter=other>\n[1]\n</parameter>"
    (call,) = read("qwen-coder", f"<tool_call><function=look>{body}</function></tool_call>")
    assert json.loads(call.arguments) == {"at": "42", "n": 42, "other": [1]}
    (call,) = read("qwen-coder", "<function=look><parameter=at>\n\n  a\n\n</parameter></function>")
    assert json.loads(call.arguments) == {"at": "\n  a\n"}


FRAGMENTS = [
    *(text for whole in WHOLE.values() for text in (whole, whole[: len(whole) // 2], whole[len(whole) // 3 :])),
    *HARMONY_TOKENS, "<think>", "</think>", "<tool_call>", "</tool_call>", "{", "}", '"', "\\", "[", "]", " ", "\n",
    "<", "assistant", "analysis", "final", "word", "to=functions.look", LOOK_JSON, "[TOOL_CALLS]", "<function=",
    "<arg_key>", "é🦀",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=8), data=st.data(), in_thought=st.booleans())
def test_no_cut_changes_what_comes_out(name: str, parts: list[str], data: st.DataObject, in_thought: bool) -> None:
    text = "".join(parts)
    options = {} if name == "harmony" else {"in_thought": in_thought}
    whole = read(name, text, **options)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, *pieces, **options) == whole
    for event in whole:
        if isinstance(event, Call):
            assert isinstance(json.loads(event.arguments), dict)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
@given(text=st.text())
def test_text_without_markup_is_not_touched(name: str, text: str) -> None:
    said = "".join(event.text for event in read(name, f"a{text}".replace("<think>", "")))
    assert said == f"a{text}".replace("<think>", "")


@pytest.mark.parametrize(
    ("template", "name", "thinking"),
    [
        ("<tool_call>\n{'name'", "hermes", None),
        ("<think></think><tool_call>", "hermes", THINK),
        ("<tool_call><function=x><parameter=y>", "qwen-coder", None),
        ("<tool_call>{name}<arg_key>", "glm", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("<｜tool▁calls▁begin｜>", "deepseek", None),
        ("<|python_tag|>", "llama3", None),
        ("<|start|><|channel|><|message|>", "harmony", None),
        ("{{ messages }}", "generic", None),
        (None, "generic", None),
    ],
)
def test_formats_are_told_from_templates(template: str | None, name: str, thinking: object) -> None:
    found = detect(template)
    assert (found.name, found.thinking) == (name, thinking)
    assert found.special
