"""From chat messages to a prompt, and from tokens to text as it streams."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from spark_runtime.engine import Engine
from spark_runtime.errors import ChatTemplateError

__all__ = ["ChatFormat", "TextStream"]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What llama.cpp assumes, too, for a model without a template."""


class ChatFormat:
    """A model's chat template, run in a sandbox: templates come with model files, which are not trusted."""

    def __init__(self, engine: Engine) -> None:
        from jinja2 import TemplateError
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        self._template_error = TemplateError
        self._engine = engine
        self._bos = engine.special_text("bos")
        try:
            self._format = Jinja2ChatFormatter(
                template=engine.chat_template or _CHATML,
                eos_token=engine.special_text("eos"),
                bos_token=self._bos,
            )
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template cannot be read: {error}") from error

    def prompt(self, messages: Any) -> str:
        """The prompt that asks for the next assistant message.

        Raises :class:`ChatTemplateError` when the template refuses, for example two user messages in a row.
        """
        try:
            return str(self._format(messages=list(messages)).prompt)
        except (self._template_error, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ChatTemplateError(
                f"the model's chat template rejects these messages: {error}",
                "check the order of roles and that every content is text",
            ) from error

    def tokenize(self, prompt: str, *, starts: bool = True) -> list[int]:
        """Token ids of a prompt, or of a later part of one; a start token is added once, never twice."""
        add_special = starts and not (self._bos and prompt.startswith(self._bos))
        return self._engine.tokenize(prompt, add_special=add_special, parse_special=True)


class TextStream:
    """Turns token bytes into text that never ends inside a character or inside a possible stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string was met; nothing more comes out after it."""

    def push(self, piece: bytes, *, final: bool = False) -> str:
        """Take bytes, return the text that is certain by now; ``final`` releases what was held back."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(piece, final)
        # The stop that is complete first, so that the answer does not depend on how the text was cut into pieces.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._take(min(found)[1])
        return self._take(len(self._held) if final else len(self._held) - self._possible_stop())

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
