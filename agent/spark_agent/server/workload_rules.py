"""Rules that give requests a workload, from a file that a person writes. Pure but for what takes a path.

::

    [[rule]]
    workload = "review"
    user_agent = "aider"                      # part of it, upper or lower case
    system = ["/src/api", "code reviewer"]   # part of the system prompt: any of these

    [[rule]]
    workload = "chat"
    model = "gpt-4*"                          # the model that the request names; * for anything

    [[rule]]
    workload = "batch"
    header = { x-job = "nightly-*" }          # every named header

The first rule whose every condition holds decides.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from spark_agent.env import Environment
from spark_agent.errors import ConfigError
from spark_agent.paths import workload_rules_path
from spark_schemas.ids import WORKLOAD_PATTERN

__all__ = ["WorkloadRule", "find_workload", "load_rules", "parse_rules", "rules_path"]

MAX_BYTES = 1024 * 1024
MAX_RULES = 1000
_CONDITIONS = ("header", "model", "system", "user_agent")
_TABLE = re.compile(r"[ \t]*\[\[[ \t]*rule[ \t]*\]\]")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")


@dataclass(frozen=True, slots=True)
class WorkloadRule:
    """One rule; a condition that is empty is none."""

    workload: str
    user_agent: tuple[str, ...] = ()
    """Lower case: any of them is part of the ``User-Agent``."""
    system: tuple[str, ...] = ()
    """Lower case: any of them is part of the system prompt."""
    model: tuple[str, ...] = ()
    """Patterns, any of which is the requested model's name."""
    headers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns by name in lower case: each header matches any of its own."""

    def matches(self, headers: Mapping[str, str], system: str, model: str | None) -> bool:
        """Whether every condition holds; ``headers`` by name in lower case, ``system`` in lower case."""
        agent = headers.get("user-agent", "").lower()
        return (
            _holds(self.user_agent, lambda part: part in agent)
            and _holds(self.system, lambda part: part in system)
            and _holds(self.model, lambda pattern: model is not None and fnmatchcase(model, pattern))
            and all(
                name in headers and any(fnmatchcase(headers[name], pattern) for pattern in patterns)
                for name, patterns in self.headers.items()
            )
        )


def find_workload(
    rules: Sequence[WorkloadRule], headers: Mapping[str, str], system: str, model: str | None = None
) -> str | None:
    """The workload of the first rule that matches; ``system`` is the system prompt as it is."""
    lowered = system.lower() if any(rule.system for rule in rules) else ""
    return next((rule.workload for rule in rules if rule.matches(headers, lowered, model)), None)


def rules_path(named: Path | None, environment: Environment) -> Path:
    """The file of rules: an option's, else the variable's, else the config folder's, which need not be there.

    Raises :class:`ConfigError` for a file that was named and is not there, and for rules that are wrong: before a model
    is loaded for them.
    """
    option = "--workload-rules"
    if named is None and environment.workload_rules is not None:
        named, option = Path(environment.workload_rules), "SPARKMOE_WORKLOAD_RULES"
    path = workload_rules_path() if named is None else named
    if path.exists():
        load_rules(path)
    elif named is not None:
        raise ConfigError(f"{option}: found {str(named)!r}, where there is no file", "correct it, or leave it out")
    return path


def load_rules(path: Path) -> tuple[WorkloadRule, ...]:
    """Read a file of rules; raise :class:`ConfigError` naming the line and the key, also when there is no file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the workload rules {path}: {error.strerror}", "check the path and its permissions"
        ) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: found more than {MAX_BYTES} bytes, expected workload rules", "check the path")
    try:
        return parse_rules(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}", "save it as UTF-8") from error


def parse_rules(text: str, source: str) -> tuple[WorkloadRule, ...]:
    """Rules from TOML; raise :class:`ConfigError` naming the line and the key. ``source`` is for messages."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not TOML: {error}", "correct that line") from error
    lines = text.splitlines()
    unknown = sorted(document.keys() - {"rule"})
    if unknown:
        where = _at(source, _line_of(lines, unknown[0]))
        raise ConfigError(f"{where}: unknown {unknown[0]!r}, expected only [[rule]] tables", "remove or correct it")
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        where = _at(source, _line_of(lines, "rule"))
        raise ConfigError(f"{where}: found rule as something else, expected [[rule]] tables", "write [[rule]]")
    if len(tables) > MAX_RULES:
        raise ConfigError(f"{source}: found {len(tables)} rules, expected at most {MAX_RULES}", "remove some")
    begins = [number for number, line in enumerate(lines, start=1) if _TABLE.match(line)]
    if len(begins) != len(tables):
        begins = []  # written in another way; then the rule's number has to do
    return tuple(_rule(table, _Place(source, lines, number, begins)) for number, table in enumerate(tables, start=1))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rule stands in its file, for messages: TOML's reader does not tell."""

    source: str
    lines: Sequence[str]
    number: int
    """Of the rule, from 1."""
    begins: Sequence[int]
    """Lines at which the rules begin, from 1; empty where they are not told apart."""

    def of(self, key: str | None = None, workload: str | None = None) -> str:
        """The place of a key of the rule, or of the rule itself."""
        named = f"rule {self.number}" if workload is None else f"rule {self.number} ({workload})"
        if not self.begins:
            return f"{self.source}: {named}"
        begin = self.begins[self.number - 1]
        end = self.begins[self.number] - 1 if self.number < len(self.begins) else len(self.lines)
        line = None if key is None else _line_of(self.lines[begin:end], key)
        return f"{_at(self.source, begin if line is None else begin + line)}: {named}"


def _line_of(lines: Sequence[str], key: str) -> int | None:
    """The first line, from 1, that sets a key or opens its table."""
    name = rf"[\"']?{re.escape(key)}[\"']?"
    sets = re.compile(rf"[ \t]*(?:{name}[ \t]*[=.]|\[\[?(?:[ \t]*rule[ \t]*\.)?[ \t]*{name}[ \t]*[\].])")
    return next((number for number, line in enumerate(lines, start=1) if sets.match(line)), None)


def _at(source: str, line: int | None) -> str:
    return source if line is None else f"{source}, line {line}"


def _rule(table: Mapping[str, object], place: _Place) -> WorkloadRule:
    workload = table.get("workload")
    if not isinstance(workload, str) or not re.fullmatch(WORKLOAD_PATTERN, workload):
        raise ConfigError(
            f"{place.of('workload')}: workload: found {workload!r}, expected 1 to 63 lower-case letters, digits and "
            "hyphens",
            'e.g. workload = "code-heavy"',
        )
    unknown = sorted(table.keys() - {"workload", *_CONDITIONS})
    if unknown:
        raise ConfigError(
            f"{place.of(unknown[0], workload)}: unknown {unknown[0]!r}, expected {', '.join(_CONDITIONS)}",
            "remove or correct it",
        )
    if not table.keys() & set(_CONDITIONS):
        raise ConfigError(
            f"{place.of(None, workload)}: no condition, expected at least one of {', '.join(_CONDITIONS)}",
            f"for all requests use --workload {workload}",
        )

    def texts(key: str) -> tuple[str, ...]:
        return _texts(table, key, place.of(key, workload))

    return WorkloadRule(
        workload,
        user_agent=tuple(text.lower() for text in texts("user_agent")),
        system=tuple(text.lower() for text in texts("system")),
        model=texts("model"),
        headers=_headers(table.get("header", {}), place, workload),
    )


def _headers(value: object, place: _Place, workload: str) -> dict[str, tuple[str, ...]]:
    where = place.of("header", workload)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: header: found {value!r}, expected a table", 'e.g. header = { x-job = "nightly" }')
    found: dict[str, tuple[str, ...]] = {}
    for name in value:
        if not _HEADER_NAME.fullmatch(name.lower()) or name.lower() in found:
            raise ConfigError(
                f"{where}: header: found {name!r}, expected the name of a header, once", "correct the name"
            )
        found[name.lower()] = _texts(value, name, f"{where}: header")
    return found


def _texts(table: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    if key not in table:
        return ()
    value = table[key]
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"{where}: {key}: found {value!r}, expected text that is not empty, or a list of such", "correct the value"
        )
    return tuple(texts)


def _holds(wanted: tuple[str, ...], holds: Callable[[str], bool]) -> bool:
    return not wanted or any(holds(one) for one in wanted)
