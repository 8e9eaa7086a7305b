"""Messages, tools and what is asked for, as every dialect means them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Message", "Tool", "ToolCall", "ToolChoice"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made: ``arguments`` is JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message; ``call_id`` and ``name`` say which call a ``tool`` message answers."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    blocks: tuple[str, ...] = ()
    """The texts that it came in, where a client sent parts: tools put their own beside what the person wrote, and join
    questions in a row. What stands for a file is in none of them."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def declared(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def properties(self) -> dict[str, Any]:
        """Schemas of the arguments by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may or must be called; ``name`` is the one that must."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True
