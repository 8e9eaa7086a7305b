"""The tools of ``POST /v1/responses``: functions, texts and groups become the functions that a model is told.

A call goes back as the kind of item that its tool asked for. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spark_agent.dialogue.events import Call
from spark_agent.dialogue.json_text import load_json
from spark_agent.dialogue.messages import Tool
from spark_agent.server.api_error import ApiError
from spark_agent.server.requests import tools_of

__all__ = ["ResponsesTools", "arguments_of"]

Kind = Literal["function", "custom", "tool_search"]
_HOSTED = ("web_search", "image_generation", "file_search", "code_interpreter", "computer_use", "mcp")
"""Tools that OpenAI's servers run; coding tools list some always, and a model that does not know them asks for none."""
_EXPECTED = "'function', 'custom', 'namespace', or 'tool_search' of the client"
_TEXT = "input"
"""The one argument of a tool that takes a text."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """One tool as the client knows it."""

    where: str
    kind: Kind
    namespace: str | None
    name: str
    value: Any
    """Name, description and parameters, unchecked."""


class ResponsesTools:
    """A request's tools, by the client's names and by those that the model is told.

    The model is told a tool's own name; where two namespaces have the same, both are told with their namespace before
    it, so that each name is one tool's.
    """

    def __init__(self, declared: Sequence[tuple[str, Any]], later: Sequence[tuple[str, Any]] = ()) -> None:
        """From ``(where, tool)`` as they came; raise :class:`ApiError` that names the one at fault.

        ``later`` came in the conversation, where the same tool may come again.
        """
        flat = [each for where, value in declared for each in _flattened(where, value)]
        known = {(each.namespace, each.name) for each in flat}
        for where, value in later:
            for each in _flattened(where, value):
                if (each.namespace, each.name) not in known:
                    known.add((each.namespace, each.name))
                    flat.append(each)
        names = [each.name for each in flat]
        self._told: dict[tuple[str | None, str], str] = {}
        self._by_told: dict[str, _Declared] = {}
        functions = []
        for each in flat:
            told = each.name if each.namespace is None or names.count(each.name) == 1 else _joined(each)
            self._told[each.namespace, each.name] = told
            self._by_told[told] = each
            value = {**each.value, "name": told} if isinstance(each.value, dict) else each.value
            functions.append((each.where, value))
        self.tools: tuple[Tool, ...] = tools_of(functions)

    def told(self, namespace: str | None, name: str) -> str:
        """What the model is told that a tool is called, also one that is not offered any more."""
        return self._told.get((namespace, name), name if namespace is None else _prefixed(namespace, name))

    def names(self) -> set[str]:
        """What the model is told that they are called."""
        return set(self._by_told)

    def streams(self, name: str) -> bool:
        """Whether the client takes the call's arguments as the model writes them."""
        found = self._by_told.get(name)
        return found is None or found.kind == "function"

    def item(self, call: Call, identifier: str, call_id: str) -> dict[str, Any]:
        """The finished item of a call; ``identifier`` has no prefix yet."""
        found = self._by_told.get(call.name)
        kind: Kind = "function" if found is None else found.kind
        item: dict[str, Any] = {"call_id": call_id, "status": "completed"}
        if kind == "tool_search":
            arguments = load_json(call.arguments)
            return {"type": "tool_search_call", "id": f"tsc_{identifier}", **item} | {
                "execution": "client",
                "arguments": arguments,
            }
        item["name"] = call.name if found is None else found.name
        if found is not None and found.namespace is not None:
            item["namespace"] = found.namespace
        if kind == "custom":
            return {"type": "custom_tool_call", "id": f"ctc_{identifier}", **item, "input": _text_of(call.arguments)}
        return {"type": "function_call", "id": f"fc_{identifier}", **item, "arguments": call.arguments}


def arguments_of(text: str) -> str:
    """The arguments with which a tool that takes a text was called."""
    return json.dumps({_TEXT: text}, ensure_ascii=False)


def _text_of(arguments: str) -> str:
    """The text in such arguments; a model that wrote others is handed on as it wrote."""
    value = load_json(arguments)
    text = value.get(_TEXT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _flattened(where: str, value: Any) -> Iterator[_Declared]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "namespace":
        yield from _single(where, value, None, "")
        return
    name, members = value.get("name"), value.get("tools")
    if not isinstance(name, str) or not name or not isinstance(members, list):
        raise _invalid(where, f"{where}: expected a name, and tools as a list")
    about = value.get("description")
    for at, member in enumerate(members):
        # What is said of all of them is said once, before the first.
        before = f"{name}: {about}\n\n" if isinstance(about, str) and about and at == 0 else ""
        yield from _single(f"{where}.tools[{at}]", member, name, before)


def _single(where: str, value: Any, namespace: str | None, before: str) -> Iterator[_Declared]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise _invalid(where, f"{where}.type: found {kind!r}, expected {_EXPECTED}")
    client_search = kind == "tool_search" and value.get("execution") == "client"
    if kind.startswith(_HOSTED) or (kind == "tool_search" and not client_search):
        return
    said = value.get("description")
    about = before + said if isinstance(said, str) else before or said
    if kind == "function":
        yield _Declared(where, "function", namespace, _name(where, value), {**value, "description": about})
    elif kind == "custom":
        yield _Declared(where, "custom", namespace, _name(where, value), _text_tool(where, value, about))
    elif client_search:
        parameters = value.get("parameters")
        yield _Declared(where, "tool_search", None, kind, {"description": about, "parameters": parameters})
    else:
        raise _invalid(where, f"{where}.type: found {kind!r}, expected {_EXPECTED}")


def _name(where: str, value: dict[str, Any]) -> str:
    name = value.get("name")
    if not isinstance(name, str):
        raise _invalid(where, f"{where}.name: expected a text")
    return name


def _text_tool(where: str, value: dict[str, Any], about: Any) -> dict[str, Any]:
    """A tool that takes a text, as a function of one: its grammar is told, as no model's call can be held to it."""
    form = value.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "grammar"):
        raise _invalid(where, f"{where}.format: expected the type text or grammar")
    meant = "The text."
    if kind == "grammar":
        meant = f"A text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
    text = {"type": "string", "description": meant}
    parameters = {"type": "object", "properties": {_TEXT: text}, "required": [_TEXT], "additionalProperties": False}
    return {"description": about, "parameters": parameters}


def _joined(each: _Declared) -> str:
    return each.name if each.namespace is None else _prefixed(each.namespace, each.name)


def _prefixed(namespace: str, name: str) -> str:
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def _invalid(where: str, message: str) -> ApiError:
    return ApiError(400, message, "invalid_tool", param=where)
