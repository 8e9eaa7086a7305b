"""What models write, whole and in pieces, in every format of calls."""

from __future__ import annotations

from spark_agent.dialogue.detection import CALL_FORMATS
from spark_agent.dialogue.events import Call
from spark_agent.dialogue.harmony import HARMONY_TOKENS, HarmonyParser
from spark_agent.dialogue.messages import Tool
from spark_agent.dialogue.output_parser import OutputParser, TaggedParser

TOOLS = {
    "look": Tool(
        "look", parameters={"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
    ),
    "stop": Tool("stop"),
}
THINK = ("<think>", "</think>")
FORMATS = {**{calls.name: calls for calls in CALL_FORMATS}, "harmony": None}


def parser_of(name: str, **options: bool) -> OutputParser:
    if FORMATS[name] is None:
        return HarmonyParser(TOOLS)
    return TaggedParser(FORMATS[name], TOOLS, thinking=THINK, **options)


LOOK = Call("look", '{"at": "x y", "n": 3}')
STOP = Call("stop", "{}")
LOOK_JSON = '{"name": "look", "arguments": {"at": "x y", "n": 3}}'
STOP_JSON = '{"name": "stop", "arguments": {}}'
TAGGED = (
    "<function=look>\n<parameter=at>\nx y\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n",
    "<function=stop>\n</function>\n",
)
WHOLE = {
    "hermes": f'<tool_call>\n{LOOK_JSON}\n</tool_call>\n<tool_call>\n{{"name": "stop"}}\n</tool_call>',
    "llama3": '{"name": "look", "parameters": {"at": "x y", "n": 3}}; {"name": "stop", "parameters": {}}',
    "mistral": f'[TOOL_CALLS] [{LOOK_JSON}, {{"name": "stop", "arguments": {{}}, "id": "abc"}}]',
    "mistral-named": '[TOOL_CALLS]look[ARGS]{"at": "x y", "n": 3}[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{}',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"at": "x y", "n": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "x y", "n": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"at": "x y", "n": 3}<|tool_call_end|><|tool_call_begin|>stop:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "nemotron": f"<TOOLCALL>[{LOOK_JSON}, {STOP_JSON}]</TOOLCALL>",
    "granite3": f"<|tool_call|>[{LOOK_JSON}, {STOP_JSON}]",
    "phi4": f"<|tool_call|>{LOOK_JSON}<|/tool_call|><|tool_call|>{STOP_JSON}<|/tool_call|>",
    "minimax-m1": f"<tool_calls>\n{LOOK_JSON}\n{STOP_JSON}\n</tool_calls>",
    "tool_calls": f"<tool_calls>[{LOOK_JSON}, {STOP_JSON}]</tool_calls>",
    "qwen-coder": f"<tool_call>\n{TAGGED[0]}</tool_call>\n<tool_call>\n{TAGGED[1]}</tool_call>",
    "seed": f"<seed:tool_call>\n{TAGGED[0]}{TAGGED[1]}</seed:tool_call>",
    "minimax": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">x y</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>'
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

FRAGMENTS = [
    *(text for whole in WHOLE.values() for text in (whole, whole[: len(whole) // 2], whole[len(whole) // 3 :])),
    *HARMONY_TOKENS, "<think>", "</think>", "<tool_call>", "</tool_call>", "{", "}", '"', "\\", "[", "]", " ", "\n",
    "<", "assistant", "analysis", "final", "word", "to=functions.look", LOOK_JSON, "[TOOL_CALLS]", "<function=",
    "<arg_key>", "é🦀", "\\ud83e", "\\udd80", "</parameter>", '{"name": "look", "arguments": {"at": "',
    '<function=look><parameter=n>{"a": "', '"}</parameter>', "<function=look><parameter=at>",
    "\n</parameter></function>", "1e5", "-", ":", ",", "null",
]  # fmt: skip
