"""Every environment variable that the service reads, once, typed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from spark_service.errors import EnvironmentVariableError

__all__ = [
    "DATA_DIR",
    "DB_MEMORY",
    "DB_THREADS",
    "FAILURE_BURST",
    "FAILURE_RATE",
    "HALF_LIFE_DAYS",
    "HISTORY_PER_KEY",
    "HOST",
    "MAX_BODY_BYTES",
    "MAX_INFLATED_BYTES",
    "MIN_SESSIONS",
    "PORT",
    "RAY",
    "READ_BURST",
    "READ_CACHE_BYTES",
    "READ_RATE",
    "RETENTION_DAYS",
    "SEGMENTS_DIR",
    "SEGMENT_AFTER_DAYS",
    "TOKEN",
    "UPLOAD_BURST",
    "UPLOAD_RATE",
    "VARIABLES",
    "WINDOW_DAYS",
    "Variable",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One variable: ``parse`` raises ``ValueError`` with what it expected. Unset and empty both mean the default."""

    name: str
    parse: Callable[[str], T]
    default: T
    help: str

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the parsed value, or raise :class:`EnvironmentVariableError` naming the variable."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            # A secret's value never reaches a terminal or a log.
            found = "a value" if self is TOKEN else repr(text)
            raise EnvironmentVariableError(
                f"{self.name}: found {found}, expected {error}", f"correct or unset {self.name}: {self.help}"
            ) from None


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def _rate(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,3})?", text):
        raise ValueError("a number from 0 to 999999 with at most 3 decimals")
    return float(text)


def _memory(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*(?:\.[0-9]+)? ?[KMGT]i?B", text):
        raise ValueError("a size such as 512MB or 2GB")
    return text


def _token(text: str) -> str:
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("visible ASCII characters without spaces")
    return text


def _path(text: str) -> Path:
    return Path(text)


HOST: Variable[str] = Variable("SPARKMOE_SERVICE_HOST", str, "127.0.0.1", "address to listen on")
PORT: Variable[int] = Variable("SPARKMOE_SERVICE_PORT", _integer(0, 65535), 8710, "port to listen on, 0 for a free one")
DATA_DIR: Variable[Path | None] = Variable(
    "SPARKMOE_SERVICE_DATA_DIR", _path, None, "folder of the database; the user's data folder when unset"
)
TOKEN: Variable[str | None] = Variable(
    "SPARKMOE_SERVICE_TOKEN", _token, None, "admin token of the service; commands given --service send it"
)
MAX_BODY_BYTES: Variable[int] = Variable(
    "SPARKMOE_SERVICE_MAX_BODY_BYTES", _integer(1, 2**40), 4 * 2**20, "most bytes of a request body as sent"
)
MAX_INFLATED_BYTES: Variable[int] = Variable(
    "SPARKMOE_SERVICE_MAX_INFLATED_BYTES", _integer(1, 2**40), 16 * 2**20, "most bytes of a request body once inflated"
)
DB_MEMORY: Variable[str] = Variable("SPARKMOE_SERVICE_DB_MEMORY", _memory, "1GB", "memory limit of the database")
DB_THREADS: Variable[int] = Variable("SPARKMOE_SERVICE_DB_THREADS", _integer(1, 256), 2, "threads of the database")
READ_RATE: Variable[float] = Variable(
    "SPARKMOE_SERVICE_READ_RATE", _rate, 5000.0, "requests a second that a token may make to read; 0 is no limit"
)
READ_BURST: Variable[int] = Variable(
    "SPARKMOE_SERVICE_READ_BURST", _integer(1, 10**6), 10_000, "reads that a token may make at once"
)
UPLOAD_RATE: Variable[float] = Variable(
    "SPARKMOE_SERVICE_UPLOAD_RATE", _rate, 2000.0, "requests a second that a token may make to write; 0 is no limit"
)
UPLOAD_BURST: Variable[int] = Variable(
    "SPARKMOE_SERVICE_UPLOAD_BURST", _integer(1, 10**6), 4000, "writes that a token may make at once"
)
FAILURE_RATE: Variable[float] = Variable(
    "SPARKMOE_SERVICE_FAILURE_RATE",
    _rate,
    1.0,
    "requests a second without a valid token that an address may make before it is put off; 0 is no limit",
)
FAILURE_BURST: Variable[int] = Variable(
    "SPARKMOE_SERVICE_FAILURE_BURST", _integer(1, 10**6), 60, "requests without a valid token at once"
)
RETENTION_DAYS: Variable[int] = Variable(
    "SPARKMOE_SERVICE_RETENTION_DAYS",
    _integer(0, 36_500),
    0,
    "days after which what was received is removed for good; 0 keeps it",
)
SEGMENT_AFTER_DAYS: Variable[int] = Variable(
    "SPARKMOE_SERVICE_SEGMENT_AFTER_DAYS",
    _integer(0, 36500),
    30,
    "days after which histograms move from the database into Parquet files, 0 for never",
)
SEGMENTS_DIR: Variable[Path | None] = Variable(
    "SPARKMOE_SERVICE_SEGMENTS_DIR", _path, None, "folder of those files; segments in the data folder when unset"
)
HISTORY_PER_KEY: Variable[int] = Variable(
    "SPARKMOE_SERVICE_HISTORY_PER_KEY",
    _integer(1, 10_000),
    20,
    "manifests kept for rollback per model, workload, phase and budget",
)
READ_CACHE_BYTES: Variable[int] = Variable(
    "SPARKMOE_SERVICE_READ_CACHE_BYTES", _integer(0, 2**40), 64 * 2**20, "most bytes of answers kept ready in memory"
)

MIN_SESSIONS: Variable[int] = Variable(
    "SPARKMOE_SERVICE_MIN_SESSIONS",
    _integer(1, 10**6),
    3,
    "calibration sessions that a profile needs to be given to anybody",
)
WINDOW_DAYS: Variable[int] = Variable(
    "SPARKMOE_SERVICE_WINDOW_DAYS",
    _integer(0, 36_500),
    0,
    "days whose sessions make and judge profiles unless a reader chooses another window; 0 is all that are stored",
)
HALF_LIFE_DAYS: Variable[int] = Variable(
    "SPARKMOE_SERVICE_HALF_LIFE_DAYS",
    _integer(0, 36_500),
    0,
    "days after which a session counts half in profiles unless a reader chooses; 0 is no fading",
)
RAY: Variable[str | None] = Variable(
    "SPARKMOE_SERVICE_RAY", str, None, "Ray cluster that builds profiles, HOST:PORT or auto; threads when unset"
)

VARIABLES: tuple[Variable[Any], ...] = (
    HOST,
    PORT,
    DATA_DIR,
    TOKEN,
    MAX_BODY_BYTES,
    MAX_INFLATED_BYTES,
    DB_MEMORY,
    DB_THREADS,
    READ_RATE,
    READ_BURST,
    UPLOAD_RATE,
    UPLOAD_BURST,
    FAILURE_RATE,
    FAILURE_BURST,
    RETENTION_DAYS,
    SEGMENT_AFTER_DAYS,
    SEGMENTS_DIR,
    HISTORY_PER_KEY,
    READ_CACHE_BYTES,
    MIN_SESSIONS,
    WINDOW_DAYS,
    HALF_LIFE_DAYS,
    RAY,
)
