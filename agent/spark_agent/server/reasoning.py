"""How much a model may think before it answers: the fields by which clients of many servers say so, and what they mean.

OpenAI says an effort, Anthropic and llama-server a budget, vLLM both and options of the template, OpenRouter an object.
All are taken wherever a chat is asked for, so that a client need not know which dialect this server likes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from spark_agent.server.requests import ApiModel

__all__ = ["Reasoned", "ReasoningAsk", "efforts"]

Budget = Annotated[int, Field(ge=-1)]
"""Tokens; -1 is no limit."""
_EFFORTS = {
    "minimal": ("minimal", "low"),
    "low": ("low",),
    "medium": ("medium", "high"),
    "high": ("high",),
    "xhigh": ("xhigh", "high"),
    "max": ("max", "xhigh", "high"),
}
"""What may be asked for, and the words that come nearest to it."""
_USUAL = frozenset({"low", "medium", "high"})
"""What templates know that let an effort be said at all; others they only know if they name them."""


@dataclass(frozen=True, slots=True)
class ReasoningAsk:
    """What is asked for, in no dialect."""

    tokens: int | None = None
    """Most tokens of reasoning; 0 is none at all, ``None`` no limit."""
    effort: str | None = None
    """In the client's word."""
    options: dict[str, Any] = field(default_factory=dict)
    """The template's variables, those that the client named itself among them."""


def efforts(asked: str, template: str) -> list[str]:
    """An effort in the words that a template may know, nearest first; a word of the template's own is left as it is."""
    words = _EFFORTS.get(asked.lower())
    if words is None:
        return [asked]
    return [word for word in words if word in _USUAL or f"'{word}'" in template or f'"{word}"' in template]


class _Thinking(ApiModel):
    """As Anthropic, Z.ai and DeepSeek say it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class _Reasoning(ApiModel):
    """As OpenAI's responses and OpenRouter say it."""

    effort: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    enabled: bool | None = None


class Reasoned(ApiModel):
    """A request that may say how much is to be thought."""

    reasoning_effort: str | None = None
    reasoning: _Reasoning | None = None
    thinking: _Thinking | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Budget | None = None
    """As vLLM calls it."""
    reasoning_budget_tokens: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    """As llama-server calls it, either way."""
    thinking_budget: Budget | None = None
    """As Qwen's own servers call it."""
    chat_template_kwargs: dict[str, Any] | None = None

    def thought(self) -> ReasoningAsk:
        """What is asked for: the smallest budget that is named; who asks for none gets none."""
        if self.model_fields_set.isdisjoint(Reasoned.model_fields):
            return ReasoningAsk()
        own = dict(self.chat_template_kwargs or {})
        asked = self.reasoning or _Reasoning()
        named = [
            self.thinking_token_budget,
            self.reasoning_budget_tokens,
            self.thinking_budget_tokens,
            self.thinking_budget,
            asked.max_tokens,
            self.thinking.budget_tokens if self.thinking is not None else None,
        ]
        budget = min((each for each in named if each is not None and each >= 0), default=None)
        effort = _first(self.reasoning_effort, asked.effort, _of_type(own.pop("reasoning_effort", None), str))
        wanted = self._wanted(own, asked, effort)
        tokens = 0 if wanted is False else budget
        told: dict[str, Any] = {}
        if wanted is not None:
            told = {"enable_thinking": wanted, "thinking": wanted, "thinking_mode": _MODES[wanted]}
        if tokens is not None:
            # Seed-OSS tells the model.
            told["thinking_budget"] = tokens
        return ReasoningAsk(tokens, None if _is_none(effort) else effort, told | own)

    def _wanted(self, own: dict[str, Any], asked: _Reasoning, effort: str | None) -> bool | None:
        """Whether there is to be reasoning, if anything says so: what says it plainly before what implies it."""
        said: bool | None = _first(
            _of_type(own.get("enable_thinking"), bool),
            _of_type(own.get("thinking"), bool),
            self.enable_thinking,
            asked.enabled,
            self.thinking.type != "disabled" if self.thinking is not None else None,
        )
        if said is not None or effort is None:
            return said
        return not _is_none(effort)


_MODES = {True: "enabled", False: "disabled"}


def _is_none(effort: str | None) -> bool:
    return effort is not None and effort.lower() == "none"


def _first(*values: Any) -> Any:
    return next((each for each in values if each is not None), None)


def _of_type(value: Any, kind: type) -> Any:
    """The value, if a template would take it for what it is called."""
    return value if isinstance(value, kind) else None
