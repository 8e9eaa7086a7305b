"""JSON schemas as grammars that llama.cpp's sampler follows.

Schemas come from clients, so they are hostile: size, depth and repetition are bounded, every reference must lead
somewhere inside, and every literal is escaped. What a grammar cannot hold (patterns, number ranges, ``not``) is refused
by name where the schema is to be followed strictly, and otherwise left to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from spark_agent.dialogue.text_grammar import text_rules

__all__ = ["JsonGrammar", "SchemaError", "literal"]

MAX_RULES = 5_000
MAX_DEPTH = 64
MAX_REPEAT = 500

_PRIMITIVES = {
    "ws": '| " " | "\\n" [ \\t]{0,20}',
    "char": '[^"\\\\\\x00-\\x1f\\x7f] | "\\\\" (["\\\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": '"\\"" char* "\\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,15})',
    "number": 'integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "pair": 'string ws ":" ws value',
    "object": '"{" ws (pair (ws "," ws pair)*)? ws "}"',
    "array": '"[" ws (value (ws "," ws value)*)? ws "]"',
}
_NOTES = frozenset(
    {
        "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "definitions",
        "deprecated", "description", "example", "examples", "nullable", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
_KEPT = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


class SchemaError(ValueError):
    """A schema that cannot be understood or followed; the message says where and why."""


def literal(text: str) -> str:
    """A text as a grammar spells it."""
    escaped = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    letters = (escaped.get(letter) or (letter if letter >= " " else f"\\x{ord(letter):02x}") for letter in text)
    return '"' + "".join(letters) + '"'


class JsonGrammar:
    """Rules of one grammar; several schemas may be added to it."""

    def __init__(self) -> None:
        self._rules = dict(_PRIMITIVES)
        self._references: dict[tuple[int, str], str] = {}
        self._texts: dict[tuple[str, str], str] = {}

    def add(self, body: str) -> str:
        """Add a rule, return its name."""
        name = f"r{len(self._rules)}"
        self._include({name: body})
        return name

    def text_through(self, end: str, before: str = "") -> str:
        """The name of a rule for a text with its end, which stands in it once, right after ``before``."""
        key = (end, before)
        if key not in self._texts:
            rules = text_rules(f"t{len(self._texts)}-", end, before)
            self._include(rules)
            self._texts[key] = next(iter(rules))
        return self._texts[key]

    def _include(self, rules: Mapping[str, str]) -> None:
        if len(self._rules) + len(rules) > MAX_RULES:
            raise SchemaError(f"the schema needs more than {MAX_RULES} rules")
        self._rules |= rules

    def text(self, root: str) -> str:
        """The grammar, with this as its root."""
        rules = {"root": root, **self._rules}
        return "\n".join(f"{name} ::= {body}" for name, body in rules.items()) + "\n"

    def schema(self, schema: object, *, strict: bool = False) -> str:
        """The name of a rule for values of the schema; raise :class:`SchemaError`."""
        return _Converter(self, schema, strict=strict).rule(schema, "", 0)

    def reference(self, document: object, pointer: str, make: Any) -> str:
        """The rule of a part of a document, made once: schemas may contain themselves."""
        key = (id(document), pointer)
        if key not in self._references:
            name = self._references[key] = self.add("null")
            self._rules[name] = make()
        return self._references[key]


class _Converter:
    def __init__(self, grammar: JsonGrammar, document: object, *, strict: bool) -> None:
        self._grammar = grammar
        self._document = document
        self._strict = strict

    def rule(self, schema: object, where: str, depth: int) -> str:
        """The name of a rule that holds for the schema."""
        if depth > MAX_DEPTH:
            raise SchemaError(f"{_shown(where)}: nested more than {MAX_DEPTH} deep")
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise SchemaError(f"{_shown(where)}: expected a schema, an object")
        if "$ref" in schema:
            return self._referred(schema["$ref"], where, depth)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                self._no_more(schema, {word, "type"}, where)
                options = _list(schema[word], f"{where}/{word}")
                names = [self.rule(each, f"{where}/{word}/{at}", depth + 1) for at, each in enumerate(options)]
                return self._grammar.add(" | ".join(names))
        if "allOf" in schema:
            return self.rule(self._all_of(schema, where), where, depth + 1)
        if "const" in schema:
            return self._grammar.add(_constant(schema["const"]))
        if "enum" in schema:
            values = _list(schema["enum"], f"{where}/enum")
            return self._grammar.add(" | ".join(_constant(value) for value in values))
        return self._typed(schema, where, depth)

    def _typed(self, schema: dict[str, Any], where: str, depth: int) -> str:
        kind = schema.get("type", _implied(schema))
        if isinstance(kind, list):
            names = [
                self._typed({**_only(schema, each), "type": each}, where, depth + 1)
                for each in _list(kind, f"{where}/type")
            ]
            return self._grammar.add(" | ".join(names))
        if kind is None:
            self._no_more(schema, set(), where)
            return "value"
        if kind not in _TYPES:
            raise SchemaError(f"{_shown(where)}/type: found {kind!r}, expected one of {', '.join(_TYPES)}")
        self._no_more(schema, {"type", *_KEPT.get(kind, ())}, where)
        if kind == "object":
            return self._object(schema, where, depth)
        if kind == "array":
            return self._array(schema, where, depth)
        if kind == "string" and ("minLength" in schema or "maxLength" in schema):
            return self._grammar.add('"\\"" ' + self._repeated("char", schema, "Length", where) + ' "\\""')
        return str(kind)

    def _object(self, schema: dict[str, Any], where: str, depth: int) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaError(f"{_shown(where)}/properties: expected an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{_shown(where)}/required: expected a list of names")
        if not properties and schema.get("additionalProperties") is not False and not required:
            more = schema.get("additionalProperties")
            if not isinstance(more, dict):
                return "object"
            value = self.rule(more, f"{where}/additionalProperties", depth + 1)
            pair = self._grammar.add(f'string ws ":" ws {value}')
            return self._grammar.add(f'"{{" ws ({pair} (ws "," ws {pair})*)? ws "}}"')
        pairs = [
            (
                self._grammar.add(
                    f'{_constant(name)} ws ":" ws {self.rule(each, f"{where}/properties/{name}", depth + 1)}'
                ),
                name in required,
            )
            for name, each in properties.items()
        ]
        pairs += [
            (self._grammar.add(f'{_constant(name)} ws ":" ws value'), True)
            for name in required
            if name not in properties
        ]
        # From the last to the first: what may follow when a pair was written before, and when none was.
        after, first = '""', '""'
        for pair, needed in reversed(pairs):
            followed, alone = self._grammar.add(f'ws "," ws {pair} {after}'), self._grammar.add(f"{pair} {after}")
            first = alone if needed else self._grammar.add(f"{alone} | {first}")
            after = followed if needed else self._grammar.add(f"{followed} | {after}")
        return self._grammar.add(f'"{{" ws {first} ws "}}"')

    def _array(self, schema: dict[str, Any], where: str, depth: int) -> str:
        fixed = schema.get("prefixItems", schema["items"] if isinstance(schema.get("items"), list) else None)
        if fixed is not None:
            names = [
                self.rule(each, f"{where}/prefixItems/{at}", depth + 1)
                for at, each in enumerate(_list(fixed, f"{where}/prefixItems"))
            ]
            return self._grammar.add('"[" ws ' + ' ws "," ws '.join(names) + ' ws "]"')
        item = self.rule(schema.get("items", True), f"{where}/items", depth + 1)
        least, most = self._bounds(schema, "Items", where)
        if most == 0:
            return self._grammar.add('"[" ws "]"')
        rest = f'(ws "," ws {item}){_times(max(least - 1, 0), None if most is None else most - 1)}'
        inside = f"{item} {rest}" if least else f"({item} {rest})?"
        return self._grammar.add(f'"[" ws {inside} ws "]"')

    def _repeated(self, rule: str, schema: dict[str, Any], what: str, where: str) -> str:
        return f"{rule}{_times(*self._bounds(schema, what, where))}"

    def _bounds(self, schema: dict[str, Any], what: str, where: str) -> tuple[int, int | None]:
        least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
        for name, bound in ((f"min{what}", least), (f"max{what}", most)):
            if bound is not None and (type(bound) is not int or bound < 0):
                raise SchemaError(f"{_shown(where)}/{name}: expected a whole number, 0 or more")
            if bound is not None and bound > MAX_REPEAT and self._strict:
                raise SchemaError(f"{_shown(where)}/{name}: more than {MAX_REPEAT} is not supported")
        least = least or 0  # null says nothing, as where it is not there
        if most is not None and most < least:
            raise SchemaError(f"{_shown(where)}: min{what} is more than max{what}")
        return min(least, MAX_REPEAT), most if most is None or most <= MAX_REPEAT else None

    def _referred(self, pointer: object, where: str, depth: int) -> str:
        if not isinstance(pointer, str) or not pointer:
            raise SchemaError(f"{_shown(where)}/$ref: found {pointer!r}, expected a place in this schema, '#/...'")
        if not (pointer == "#" or pointer.startswith("#/")):
            # Another document, or an anchor: valid, and nothing that a grammar can hold.
            if self._strict:
                raise SchemaError(f"{_shown(where)}/$ref: {pointer!r} is not supported in a strict schema")
            return "value"
        if "%" in pointer and _find(self._document, pointer) is None:
            # As a fragment of an address, which is what it is, and how TypeScript's generators write it.
            pointer = unquote(pointer)
        target: Any = self._document
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isascii() and step.isdigit() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                raise SchemaError(f"{_shown(where)}/$ref: nothing is at {pointer!r}")
        if isinstance(target, dict) and "$ref" in target and self._circular(target):
            raise SchemaError(f"{_shown(where)}/$ref: {pointer!r} refers to itself")
        return self._grammar.reference(self._document, pointer, lambda: self.rule(target, pointer, depth + 1))

    def _circular(self, target: Any) -> bool:
        seen = set()
        while isinstance(target, dict) and isinstance(target.get("$ref"), str):
            pointer = target["$ref"]
            if pointer in seen:
                return True
            seen.add(pointer)
            target = _find(self._document, pointer)
        return False

    def _all_of(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """The parts' objects as one."""
        merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        for at, part in enumerate(_list(schema["allOf"], f"{where}/allOf")):
            if isinstance(part, dict) and isinstance(part.get("$ref"), str):
                part = _find(self._document, part["$ref"])
            if not isinstance(part, dict):
                raise SchemaError(f"{_shown(where)}/allOf/{at}: expected a schema, an object")
            for key, value in part.items():
                if key == "properties" and isinstance(value, dict):
                    merged[key] = {**merged.get(key, {}), **value}
                elif key == "required" and isinstance(value, list):
                    merged[key] = [*merged.get(key, []), *value]
                elif merged.setdefault(key, value) != value and key not in _NOTES and self._strict:
                    raise SchemaError(f"{_shown(where)}/allOf/{at}/{key}: differs from the other parts'")
        return merged

    def _no_more(self, schema: dict[str, Any], known: set[str], where: str) -> None:
        unknown = [key for key in schema if key not in known and key not in _NOTES]
        if unknown and self._strict:
            raise SchemaError(f"{_shown(where)}/{unknown[0]}: not supported in a strict schema")


def _find(document: object, pointer: str) -> Any:
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        document = document.get(step) if isinstance(document, dict) else None
    return document


def _implied(schema: dict[str, Any]) -> str | None:
    for kind, words in _KEPT.items():
        if words & schema.keys():
            return kind
    return None


def _only(schema: dict[str, Any], kind: object) -> dict[str, Any]:
    """The schema without what concerns other types."""
    others = frozenset().union(*(words for each, words in _KEPT.items() if each != kind))
    return {key: value for key, value in schema.items() if key not in others}


def _times(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return f"{{{least},{most}}}"


def _list(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise SchemaError(f"{_shown(where)}: expected a list of at least one")
    return value


def _constant(value: object) -> str:
    return literal(json.dumps(value, ensure_ascii=False))


def _shown(where: str) -> str:
    return where or "schema"
