"""Every environment variable the agent reads: one table, read once, typed.

An empty variable counts as unset (compose files and shells produce them). A value that cannot be understood is a
:class:`ConfigError` and never silently a default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from spark_agent.errors import ConfigError
from spark_agent.service_url import normalise_service_url
from spark_agent.signatures import parse_public_key

__all__ = ["REPLACEMENTS", "VARIABLES", "Environment", "Replacement", "Variable", "parse_team_key", "parse_token"]

Replacement = Literal["auto", "on", "watch", "off"]
"""When recent traffic moves the slots' priors: ``auto``, where no manifest of a team is in force, whose promise is
measured under one placement alone; ``on``, under one too; ``watch``, never, but what would have been done is told;
``off`` does not look."""
REPLACEMENTS: tuple[Replacement, ...] = get_args(Replacement)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_MIN_KEY_BYTES = 16


def _text(value: str) -> str:
    return value


def _port(value: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) > 65535:
        raise ValueError("expected a port: 0 (any free one) to 65535")
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ValueError("expected 1, true, yes, on or 0, false, no, off")


def _do_not_track(value: str) -> bool:
    # A wish for privacy in words we do not know is still that wish.
    return value.lower() not in _FALSE


def _present(value: str) -> bool:
    # https://no-color.org: any value that is not empty counts.
    return value != ""


def parse_token(value: str) -> str:
    """Return a token as it was given; raise :class:`ValueError` for what no header can carry."""
    if any(not 33 <= ord(letter) < 127 for letter in value):
        raise ValueError("expected printable ASCII without spaces")
    return value


def _replacement(value: str) -> Replacement:
    for known in REPLACEMENTS:
        if value == known:
            return known
    raise ValueError(f"expected {', '.join(REPLACEMENTS[:-1])} or {REPLACEMENTS[-1]}")


def parse_team_key(value: str) -> bytes:
    """Return the key's bytes from at least 32 hex digits (16 bytes); raise :class:`ValueError` otherwise.

    Passphrases are not accepted: session lineages are guessable, so a guessable key would hide nothing.
    """
    try:
        key = bytes.fromhex(value)
    except ValueError:
        raise ValueError(f"expected an even number of hex digits, at least {2 * _MIN_KEY_BYTES}") from None
    if len(key) < _MIN_KEY_BYTES:
        raise ValueError(f"expected at least {2 * _MIN_KEY_BYTES} hex digits")
    return key


@dataclass(frozen=True)
class Variable:
    """One row of the table: how the variable is spelled, what it holds, what it is when unset, what it means."""

    name: str
    kind: str
    default: object
    meaning: str
    parse: Callable[[str], object]
    secret: bool = False
    """Secret values are never repeated in messages."""

    def read(self, mapping: Mapping[str, str]) -> Any:
        """Return the typed value, or the default when unset or empty."""
        text = mapping.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            found = f"{len(text)} characters (not shown)" if self.secret else repr(text)
            raise ConfigError(
                f"{self.name}: found {found}, {error}", hint=f"correct it, or `unset {self.name}`"
            ) from error


HOST = Variable("SPARKMOE_HOST", "text", "127.0.0.1", "Address the agent's own server listens on.", _text)
PORT = Variable("SPARKMOE_PORT", "port", 11711, "Port the agent's own server listens on; 0 picks a free one.", _port)
SERVICE_URL = Variable(
    "SPARKMOE_SERVICE_URL",
    "url",
    None,
    "Calibration service to use instead of the configured one.",
    normalise_service_url,
)
SERVICE_TOKEN = Variable(
    "SPARKMOE_SERVICE_TOKEN", "token", None, "Token for the calibration service.", parse_token, secret=True
)
OFFLINE = Variable("SPARKMOE_OFFLINE", "flag", False, "Never contact a service.", _flag)
NO_PROGRESS = Variable("SPARKMOE_NO_PROGRESS", "flag", False, "Never draw progress bars.", _flag)
TEAM_KEY = Variable(
    "SPARKMOE_TEAM_KEY",
    "hex key",
    None,
    "Key of the session hashes, at least 32 hex digits, the same for the whole team.",
    parse_team_key,
    secret=True,
)
MODEL = Variable("SPARKMOE_MODEL", "path", None, "GGUF file to use when a command names none.", _text)
MODELS_DIR = Variable(
    "SPARKMOE_MODELS_DIR", "path", None, "Folder of GGUF files that `spark-agent models ls` lists first.", _text
)
WORKLOAD_RULES = Variable(
    "SPARKMOE_WORKLOAD_RULES",
    "path",
    None,
    "Rules that give served requests a workload; by default workloads.toml in the config folder, if it is there.",
    _text,
)
API_KEY = Variable(
    "SPARKMOE_API_KEY",
    "token",
    None,
    "Key that requests to the agent's own server must bear; beyond loopback one is made where none is named.",
    parse_token,
    secret=True,
)
API_KEY_FILE = Variable(
    "SPARKMOE_API_KEY_FILE", "path", None, "File that holds that key, readable by its owner only.", _text
)
TLS_CERT_FILE = Variable(
    "SPARKMOE_TLS_CERT_FILE", "path", None, "Certificate (PEM) by which the agent's own server speaks TLS.", _text
)
TLS_KEY_FILE = Variable("SPARKMOE_TLS_KEY_FILE", "path", None, "Key of that certificate (PEM).", _text)
REPLACEMENT = Variable(
    "SPARKMOE_REPLACEMENT",
    "auto, on, watch or off",
    "auto",
    "Whether a running agent moves the slots' priors after recent traffic; see `spark-agent run --replacement`.",
    _replacement,
)
DO_NOT_TRACK = Variable("DO_NOT_TRACK", "any but 0, false, no, off", False, "Upload nothing.", _do_not_track)
NO_COLOR = Variable("NO_COLOR", "any", False, "Write without colour.", _present)
SIGNING_KEY = Variable(
    "SPARKMOE_SIGNING_KEY",
    "base64 key",
    None,
    "Public key that signs every service's manifests; nothing is trusted on first use then.",
    parse_public_key,
)

VARIABLES: tuple[Variable, ...] = (
    HOST,
    PORT,
    SERVICE_URL,
    SERVICE_TOKEN,
    OFFLINE,
    NO_PROGRESS,
    TEAM_KEY,
    MODEL,
    MODELS_DIR,
    WORKLOAD_RULES,
    DO_NOT_TRACK,
    NO_COLOR,
    SIGNING_KEY,
    API_KEY,
    API_KEY_FILE,
    TLS_CERT_FILE,
    TLS_KEY_FILE,
    REPLACEMENT,
)


@dataclass(frozen=True)
class Environment:
    """The variables' values, typed. Read once at start and handed on, so no later change can surprise anyone."""

    host: str = "127.0.0.1"
    port: int = 11711
    service_url: str | None = None
    service_token: str | None = field(default=None, repr=False)
    offline: bool = False
    no_progress: bool = False
    team_key: bytes | None = field(default=None, repr=False)
    model: str | None = None
    models_dir: str | None = None
    workload_rules: str | None = None
    do_not_track: bool = False
    no_color: bool = False
    signing_key: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    replacement: Replacement = "auto"

    @classmethod
    def read(cls, mapping: Mapping[str, str] | None = None) -> Environment:
        """Read all variables, by default the process's own; raise :class:`ConfigError` at the first bad value."""
        source = os.environ if mapping is None else mapping
        return cls(
            host=HOST.read(source),
            port=PORT.read(source),
            service_url=SERVICE_URL.read(source),
            service_token=SERVICE_TOKEN.read(source),
            offline=OFFLINE.read(source),
            no_progress=NO_PROGRESS.read(source),
            team_key=TEAM_KEY.read(source),
            model=MODEL.read(source),
            models_dir=MODELS_DIR.read(source),
            workload_rules=WORKLOAD_RULES.read(source),
            api_key=API_KEY.read(source),
            api_key_file=API_KEY_FILE.read(source),
            tls_cert_file=TLS_CERT_FILE.read(source),
            tls_key_file=TLS_KEY_FILE.read(source),
            replacement=REPLACEMENT.read(source),
            do_not_track=DO_NOT_TRACK.read(source),
            no_color=NO_COLOR.read(source),
            signing_key=SIGNING_KEY.read(source),
        )
