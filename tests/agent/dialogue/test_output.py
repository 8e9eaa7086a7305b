"""Reasoning and calls in every format, whole, cut, broken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_calls import FORMATS, FRAGMENTS, LOOK, LOOK_JSON, STOP, WHOLE, parser_of

from spark_agent.dialogue.events import (
    Call,
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
    certain,
    joined,
    merged,
)
from spark_agent.dialogue.output_parser import OutputParser


def read(name: str, *pieces: str, **options: bool) -> list[object]:
    parser = parser_of(name, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.end())


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
        ("mistral", '[TOOL_CALLS][5, {"name": "look", "arguments": {}}]'),
        ("mistral-named", "[TOOL_CALLS]" + "x" * 1000),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": 1,}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": 1}, "name": "stop"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"at": "\\d"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>"),
        ("kimi", "<|tool_call_begin|>look: {}"),
        ("minimax", '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">x'),
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
    assert read("mistral-named", '[TOOL_CALLS]look[CALL_ID]a1[ARGS]{"at": "x y", "n": 3}') == [LOOK]
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


BARE = {
    '{"a": "</parameter>"}': {"a": "</parameter>"},
    ' ["</parameter></function>", {"b": "\\"</parameter>"}]\n\n': ["</parameter></function>", {"b": '"</parameter>'}],
    '"</parameter>"': "</parameter>",
    '{"a": "one\\n</parameter>"}': {"a": "one\n</parameter>"},
    '{"a": "one\ntwo"}': {"a": "one\ntwo"},
    # No JSON, or more than that: all of it is text, to the first tag.
    '{"a": "b}': '{"a": "b}',
    '{"a": 1} and more': '{"a": 1} and more',
    '"a" </param': '"a" </param',
    "{'a': 1}": "{'a': 1}",
    "[1, 2": "[1, 2",
    "NaN": "NaN",
    "[NaN]": "[NaN]",
    "1e999": "1e999",
    "": "",
    "[" * 150 + "]" * 150: "[" * 150 + "]" * 150,
}


@pytest.mark.parametrize(("value", "expected"), BARE.items(), ids=[text[:20] for text in BARE])
@pytest.mark.parametrize("whole", [True, False])
def test_a_bare_value_ends_where_its_json_does(value: str, expected: object, whole: bool) -> None:
    if value.startswith("[[["):
        expected = json.loads(value)
    rest = "<parameter=n>\n1\n</parameter>\n</function>"
    text = f"<function=look>\n<parameter=other>\n{value}\n</parameter>\n{rest}\nSo much."
    call, after = read("qwen-coder", *([text] if whole else text))
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {"other": expected, "n": 1}
    assert after == Text("So much.")


@pytest.mark.parametrize("name", ["qwen-coder", "seed", "glm", "minimax"])
def test_a_forgotten_quote_holds_nothing_up(name: str) -> None:
    text = WHOLE[name].replace("\n3\n", '\n{"a": "b}\n').replace(">3<", '>{"a": "b}<')
    assert text != WHOLE[name]
    parser = parser_of(name)
    come: list[Event] = []
    for piece in text.partition("stop")[0]:
        come += parser.push(piece)
    assert CallEnd() in come
    (call, stop) = read(name, text)
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {"at": "x y", "n": '{"a": "b}'}
    assert stop == STOP


def streamed(parser: OutputParser, pieces: list[str]) -> list[Event]:
    """All events as they come, with neighbouring texts as one."""
    return joined([*(event for piece in pieces for event in parser.push(piece)), *parser.end()])


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=8), data=st.data(), in_thought=st.booleans())
def test_no_cut_changes_what_comes_out(name: str, parts: list[str], data: st.DataObject, in_thought: bool) -> None:
    text = "".join(parts)
    options = {} if name == "harmony" else {"in_thought": in_thought}
    whole = streamed(parser_of(name, **options), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    # Breaks and all: a client that streams hears the same however the tokens came.
    assert streamed(parser_of(name, **options), pieces) == whole
    assert streamed(parser_of(name, **options), list(text)) == whole
    check_calls(whole)
    told, begun = certain(whole)
    assert begun == []
    assert CallBroken() not in told
    assert merged(told) == merged(whole)
    # However the events came: what is held back is taken up where it was left.
    one_by_one: list[Event] = []
    for event in whole:
        more, begun = certain([*begun, event])
        one_by_one += more
    assert (joined(one_by_one), begun) == (told, [])
    for event in merged(whole):
        if isinstance(event, Call):
            assert isinstance(json.loads(event.arguments), dict)


def check_calls(events: list[Event]) -> None:
    """Starts and ends come in pairs, and what has come of a call is no JSON before its end."""
    begun: str | None = None
    for event in events:
        if isinstance(event, CallStart):
            assert begun is None
            begun = ""
        elif isinstance(event, CallArguments):
            assert begun is not None
            begun += event.text
        elif isinstance(event, CallEnd | CallBroken):
            assert begun is not None
            if isinstance(event, CallBroken):
                with pytest.raises(ValueError, match="line"):
                    json.loads(begun)
            begun = None
        else:
            assert begun is None
    assert begun is None


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_stream_as_they_come(name: str) -> None:
    """A long text within arguments never waits for its end, and nothing of a cut call could be run."""
    long = 'line "one"\n\tline two \\ é🦀 ' * 4
    marker = "x y"
    spelled = long if name in {"qwen-coder", "seed", "minimax", "glm"} else json.dumps(long, ensure_ascii=False)[1:-1]
    text = WHOLE[name].replace(marker, spelled)
    parser = parser_of(name)
    heard, behind = "", []
    for at, letter in enumerate(text):
        for event in parser.push(letter):
            heard += event.text if isinstance(event, CallArguments) else ""
        if text.index(spelled) < at < text.index(spelled) + len(spelled):
            behind.append(at - text.index(spelled) - len(heard))
    assert max(behind) < 8, "it lags behind by no more than a marker that may begin"
    assert heard.startswith(json.dumps({"at": long}, ensure_ascii=False)[:-1]), heard[:100]
    for length in range(0, len(text), 3):
        cut = parser_of(name)
        events = joined([*cut.push(text[:length]), *cut.end(cut=True)])
        check_calls(events)
        assert all(call in (Call("look", json.dumps({"at": long, "n": 3}, ensure_ascii=False)), STOP)
                   for call in merged(events) if isinstance(call, Call))  # fmt: skip


def test_a_good_call_in_a_list_stays_one_whatever_follows() -> None:
    assert read("mistral", f"[TOOL_CALLS][{LOOK_JSON}, 5]") == [LOOK, Text(", 5]")]
    assert read("nemotron", f'<TOOLCALL>[{LOOK_JSON}, {{"name": 3') == [LOOK, Text(', {"name": 3')]


def test_a_call_that_broke_is_text_as_if_it_had_never_begun() -> None:
    parser = parser_of("hermes")
    events = [*parser.push('Well.\n<tool_call>{"name": "look", "arguments": {"at": oops}}'), *parser.end()]
    assert joined(events)[1:4] == [CallStart("look"), CallArguments('{"at": '), CallBroken()]
    assert merged(events) == [Text('Well.\n<tool_call>{"name": "look", "arguments": {"at": oops}}')]


def test_what_json_lets_pass_is_passed_on_as_it_is() -> None:
    spelled = '{ "at" :"\\u00e9\\ud83e\\udd80\\n", "n": 1.50E+2, "deep": [ [], {"a": null} ] }'
    (call,) = read("hermes", *f'<tool_call>{{"name": "look", "arguments": {spelled}}}</tool_call>')
    assert call.arguments == spelled
    (call,) = read("hermes", '<tool_call>{"name": "look", "arguments": {"at": "two\nlines"}}</tool_call>')
    assert call.arguments == '{"at": "two\\nlines"}'


def test_calls_that_cannot_stream_come_whole() -> None:
    for text in (
        '{"arguments": {"at": "x y", "n": 3}, "name": "look"}',
        '{"name": "look", "arguments": "{\\"at\\": \\"x y\\", \\"n\\": 3}"}',
        '{"type": "function", "function": {"name": "look", "arguments": {"at": "x y", "n": 3}}}',
    ):
        parser = parser_of("hermes")
        whole = f"<tool_call>{text}</tool_call>"
        assert parser.push(whole[:-13]) == []
        assert read("hermes", *whole) == [LOOK]


def test_a_message_to_a_function_that_was_cut_before_its_arguments_is_no_call() -> None:
    text = "<|channel|>commentary to=functions.stop<|message|>"
    assert read("harmony", text) == [STOP]
    parser = parser_of("harmony")
    assert merged([*parser.push(text), *parser.end(cut=True)]) == []


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
@given(text=st.text())
def test_text_without_markup_is_not_touched(name: str, text: str) -> None:
    said = "".join(event.text for event in read(name, f"a{text}".replace("<think>", "")))
    assert said == f"a{text}".replace("<think>", "")
