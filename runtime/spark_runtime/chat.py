"""From chat messages to a prompt."""

from __future__ import annotations

from typing import Any

from spark_runtime.engine import Engine
from spark_runtime.errors import ChatTemplateError

__all__ = ["ChatFormat"]

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
