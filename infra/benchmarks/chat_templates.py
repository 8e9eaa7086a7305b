"""How many chat templates take conversations as coding tools send them, as they come and rearranged, and their calls.

    python infra/benchmarks/chat_templates.py FOLDER

FOLDER holds ``*.jinja`` files, for example ``models/templates`` of llama.cpp's source archive. Needs no model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from spark_agent.dialogue.messages import Message, Tool, ToolCall
from spark_agent.server.api_error import ApiError
from spark_agent.server.exchange import Ask
from spark_agent.server.prompting import Prompting
from spark_runtime.chat import ChatFormat
from spark_runtime.errors import ChatTemplateError
from spark_runtime.sampling import Sampling

_SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
_TOOL = Tool("find_it", "Finds it.", _SCHEMA)
_CALL = Message("assistant", "", calls=(ToolCall("call00001", "find_it", '{"key": "ARGUMENT"}'),))
_RESULT = Message("tool", "RESULT", call_id="call00001", name="find_it")
_FIRST, _SECOND, _LATE = (Message("system", f"SYSTEM-{which}") for which in ("ONE", "TWO", "LATE"))
_ASKED, _MORE, _AFTER = (Message("user", f"USER-{which}") for which in ("ONE", "TWO", "AFTER"))
_SAID = Message("assistant", "SAID")
SHAPES = (
    # Codex: two of its own, where it runs, then what the person wrote.
    (_FIRST, _SECOND, _ASKED, _MORE),
    (_FIRST, _SECOND, _ASKED, _MORE, _CALL, _RESULT, _SAID, _LATE, _AFTER),
    # Claude Code: which agents there are comes after what the person wrote; reminders come with results.
    (_FIRST, _ASKED, _LATE),
    (_FIRST, _ASKED, _LATE, _CALL, _RESULT, _MORE, _SAID, _AFTER),
)


class _NoEngine:
    """All that a chat format asks of an engine, for a template without a model."""

    n_vocab, n_ctx = 8192, 1 << 30
    tool_template = None

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def special_text(self, which: str) -> str:
        return {"bos": "<s>", "eos": "</s>"}[which]

    def tokenize(self, text: str, **_: bool) -> list[int]:
        return list(text.encode())

    def is_end(self, _token: int) -> bool:
        return False

    def spell(self, _token: int, _text: bytes) -> None:
        """Nothing is spelled without a vocabulary."""


def _kept(chat: ChatFormat, shape: tuple[Message, ...], *, arranged: bool) -> bool:
    """Whether a template shows everything that is said in a conversation."""
    texts = [text for each in shape for text in (each.text, "ARGUMENT" if each.calls else "") if text]
    engine: Any = chat
    try:
        if arranged:
            ask = Ask(Sampling(), messages=shape, tools=(_TOOL,))
            prompt = bytes(Prompting(engine).prepare(ask).tokens).decode()
        else:
            prompt = chat.prompt([_plain(each, as_object=chat.support.object_arguments) for each in shape])
    except (ApiError, ChatTemplateError) as error:
        print(f"    {type(error).__name__}: {str(error)[:150]}", file=sys.stderr)
        return False
    return all(text in prompt for text in texts)


def _plain(message: Message, *, as_object: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.text}
    for call in message.calls:
        arguments: Any = {"key": "ARGUMENT"} if as_object else call.arguments
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
        ]
    return told | ({"tool_call_id": message.call_id, "name": message.name} if message.role == "tool" else {})


def main() -> None:
    """Read the templates and print one line each, then the sums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    found = sorted(parser.parse_args().folder.glob("*.jinja"))
    if not found:
        sys.exit("no *.jinja files there")
    as_sent = rearranged = native = 0
    for path in found:
        print(path.stem, file=sys.stderr)
        engine: Any = _NoEngine(path.read_text(encoding="utf-8"))
        chat = ChatFormat(engine)
        whole, mended = (all(_kept(chat, shape, arranged=how) for shape in SHAPES) for how in (False, True))
        as_sent += whole
        rearranged += mended
        form = Prompting(chat).output_format
        native += form.native
        taken = "as sent" if whole else "rearranged" if mended else "not at all"
        print(f"{path.stem:50} {taken:12} {form.name}")
    print(f"{len(found)} templates: {as_sent} take everything as it is sent, {rearranged} after arrangement;")
    print(f"calls of {native} are read as their templates show them")


if __name__ == "__main__":
    main()
