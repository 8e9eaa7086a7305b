"""Which formats a model writes, told from its chat template's text."""

from __future__ import annotations

from dataclasses import dataclass

from spark_agent.dialogue.call_format import CallFormat
from spark_agent.dialogue.harmony import HARMONY_TOKENS
from spark_agent.dialogue.json_calls import DeepSeek, Hermes, Llama3, Mistral
from spark_agent.dialogue.xml_calls import Glm, QwenCoder

__all__ = ["OutputFormat", "detect"]

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes what is not plain text."""

    name: str
    calls: CallFormat | None
    """``None`` is harmony, where calls are channels."""
    thinking: tuple[str, str] | None
    """The tags of reasoning."""

    @property
    def harmony(self) -> bool:
        """Whether all output is on channels."""
        return self.calls is None

    @property
    def special(self) -> tuple[str, ...]:
        """Markers that are needed as text even where they are control tokens, which have none."""
        if self.calls is None:
            return HARMONY_TOKENS
        words = [*self.calls.markers, *(self.thinking or ())]
        words += {
            Mistral: ("[ARGS]", "[CALL_ID]"),
            DeepSeek: ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            Hermes: ("</tool_call>",),
            QwenCoder: ("</tool_call>", "<parameter=", "</parameter>", "</function>"),
            Glm: ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        }.get(type(self.calls), ())
        return tuple(words)


def detect(template: str | None) -> OutputFormat:
    """The formats of a template; what it does not tell is Hermes' format, which the generic instructions ask for."""
    text = template or ""
    thinking = next((tags for tags in _THINKING if tags[1] in text), None)
    if "<|channel|>" in text and "<|message|>" in text:
        return OutputFormat("harmony", None, None)
    calls: CallFormat
    if "<function=" in text and "<parameter=" in text:
        name, calls = "qwen-coder", QwenCoder()
    elif "<arg_key>" in text:
        name, calls = "glm", Glm()
    elif "<tool_call>" in text:
        name, calls = "hermes", Hermes()
    elif "[TOOL_CALLS]" in text:
        name, calls = "mistral", Mistral(named="[ARGS]" in text)
    elif "<｜tool▁calls▁begin｜>" in text:
        name, calls = "deepseek", DeepSeek(fenced="```" in text)
    elif "<|python_tag|>" in text or "Environment: ipython" in text:
        name, calls = "llama3", Llama3()
    else:
        name, calls = "generic", Hermes()
    return OutputFormat(name, calls, thinking)
