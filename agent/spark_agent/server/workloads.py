"""Which workload a request is counted under: what its header says, else the first rule that matches, else neither."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spark_agent.errors import ConfigError
from spark_agent.server.api_error import ApiError
from spark_agent.server.conversations import ChatTurn
from spark_agent.server.workload_rules import WorkloadRule, find_workload, load_rules
from spark_schemas.ids import WORKLOAD_PATTERN

__all__ = ["WORKLOAD_HEADER", "WorkloadNames", "Workloads"]

WORKLOAD_HEADER = "x-spark-workload"
_SYSTEM_ROLES = ("system", "developer")
_SYSTEM_CHARS = 256 * 1024
_SHOWN_CHARS = 80


class Workloads:
    """Gives requests their workload; reads the rules again when their file changes. Threads may share one.

    A changed file that cannot be understood is said once, and the rules before it stay.
    """

    def __init__(self, path: Path | None, warn: Callable[[str], None]) -> None:
        """``path`` may name a file that does not exist yet. Raises :class:`ConfigError` for one that is wrong."""
        self._path = path
        self._warn = warn
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._rules: tuple[WorkloadRule, ...] = () if path is None or self._stamp is None else load_rules(path)

    def __call__(
        self, headers: Mapping[str, str], messages: Sequence[ChatTurn], model: str | None = None
    ) -> str | None:
        """The workload; ``None`` is the agent's default. ``headers`` by name in lower case.

        Raises :class:`ApiError` (400) for a header that is no workload's name.
        """
        named = headers.get(WORKLOAD_HEADER)
        if named is not None:
            return _checked(named.strip())
        rules = self._current()
        if not rules:
            return None
        system = "\n".join(message.text for message in messages if message.role in _SYSTEM_ROLES)[:_SYSTEM_CHARS]
        return find_workload(rules, headers, system, model)

    def _current(self) -> tuple[WorkloadRule, ...]:
        if self._path is None:
            return ()
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._rules = () if stamp is None else load_rules(self._path)
                except ConfigError as error:
                    self._warn(f"{error}; the rules before this change stay")
            return self._rules

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class WorkloadNames:
    """Names of workloads as labels of metrics: a client that invents names must not make series without end."""

    OTHER = "other"

    def __init__(self, default: str, limit: int = 32) -> None:
        self.default = default
        self._limit = limit
        self._known = {default}
        self._lock = threading.Lock()

    def label(self, workload: str | None) -> str:
        """The name, or ``other`` beyond the first few."""
        if workload is None:
            return self.default
        with self._lock:
            if workload not in self._known and len(self._known) < self._limit:
                self._known.add(workload)
            return workload if workload in self._known else self.OTHER


def _checked(name: str) -> str:
    if not re.fullmatch(WORKLOAD_PATTERN, name):
        found = name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "…"
        raise ApiError(
            400,
            f"X-Spark-Workload: found {found!r}, expected 1 to 63 lower-case letters, digits and hyphens, "
            "e.g. code-heavy",
            "invalid_workload",
            param="X-Spark-Workload",
        )
    return name
