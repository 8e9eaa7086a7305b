"""The config file: what a person decided, above all whether counts may leave this machine.

The agent writes its few keys itself and refuses keys it does not know, so a rewrite can lose nothing but comments.
A file that cannot be understood is a :class:`ConfigError` and stays as it is.
"""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from spark_agent.env import Environment, parse_team_key
from spark_agent.errors import ConfigError
from spark_agent.files import replacing
from spark_agent.paths import ensure_private_dir
from spark_agent.service_url import DEFAULT_SERVICE_URL, normalise_service_url

__all__ = ["Config", "Consent", "load_config", "save_config"]

_KNOWN: Mapping[str, frozenset[str]] = {
    "upload": frozenset({"consent", "consent_at", "consent_for", "paused", "service_url", "token"}),
    "team": frozenset({"key"}),
}
_HEADER = "# Written by spark-agent. Values may be edited; comments are not kept.\n"
_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class Consent:
    """A person's answer to "may routing counts leave this machine?", for one service only."""

    granted: bool
    at: dt.datetime
    """When it was given; always with a time zone."""
    service_url: str


@dataclass(frozen=True)
class Config:
    """Typed contents of the config file; everything has a default, so no file is a valid one."""

    consent: Consent | None = None
    """``None``: never asked, which is a no."""
    paused: bool = False
    """Uploads wait, consent stays."""
    service_url: str | None = None
    token: str | None = field(default=None, repr=False)
    team_key: bytes | None = field(default=None, repr=False)

    def effective_service_url(self, environment: Environment) -> str:
        """Return the service to use: the environment's, else the configured one, else the default on loopback."""
        return environment.service_url or self.service_url or DEFAULT_SERVICE_URL

    def with_consent(self, granted: bool, service_url: str, at: dt.datetime | None = None) -> Config:
        """Return a copy that records an answer, by default as given now."""
        moment = dt.datetime.now(dt.UTC).replace(microsecond=0) if at is None else at
        return replace(self, consent=Consent(granted, moment, normalise_service_url(service_url)))


def load_config(path: Path) -> Config:
    """Read the file; no file gives the defaults. Raise :class:`ConfigError` with the line or key at fault."""
    try:
        text = path.read_bytes().decode("utf-8")
        document = tomllib.loads(text)
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="check its permissions") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", hint="correct that line; the file was left as it is"
        ) from error
    _refuse_unknown(document, path)
    take = _Reader(document, path)
    granted = take("upload", "consent", bool, lambda value: value)
    at = take("upload", "consent_at", dt.datetime, _zoned)
    consent_for = take("upload", "consent_for", str, normalise_service_url)
    consent = None
    if granted is not None:
        if at is None or consent_for is None:
            raise ConfigError(
                f"{path}: upload.consent needs upload.consent_at and upload.consent_for beside it",
                hint="remove the line and run `spark-agent upload consent`",
            )
        consent = Consent(granted, at, consent_for)
    return Config(
        consent=consent,
        paused=take("upload", "paused", bool, lambda value: value) or False,
        service_url=take("upload", "service_url", str, normalise_service_url),
        token=take("upload", "token", str, lambda value: value, secret=True),
        team_key=take("team", "key", str, parse_team_key, secret=True),
    )


def save_config(path: Path, config: Config) -> None:
    """Replace the file at once, readable by its owner only; a crash leaves the old or the new one, never half.

    Raises :class:`ConfigError` when the present file cannot be understood or the new one cannot be written.
    """
    load_config(path)
    target = path.resolve()  # Keeps a link into someone's dotfiles a link.
    try:
        ensure_private_dir(target.parent)
        with replacing(target) as file:
            file.write(_render(config).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", hint="check the folder's permissions and space") from error


class _Reader:
    """Takes typed values out of a parsed document, naming the key when one is wrong."""

    def __init__(self, document: Mapping[str, Mapping[str, object]], path: Path) -> None:
        self._document = document
        self._path = path

    def __call__(
        self, section: str, key: str, kind: type[_T], check: Callable[[_T], _U], *, secret: bool = False
    ) -> _U | None:
        value = self._document.get(section, {}).get(key)
        if value is None:
            return None
        found = "a value that is not shown" if secret else repr(value)
        where = f"{self._path}: {section}.{key}"
        if not isinstance(value, kind):
            raise ConfigError(f"{where}: found {found}, expected {kind.__name__}", hint="correct the line")
        try:
            return check(value)
        except ValueError as error:
            raise ConfigError(f"{where}: found {found}, {error}", hint="correct the line") from error


def _zoned(value: dt.datetime) -> dt.datetime:
    if value.tzinfo is None:
        raise ValueError("expected a time zone, for example 2026-11-29T12:00:00Z")
    return value


def _refuse_unknown(document: Mapping[str, object], path: Path) -> None:
    for section, content in document.items():
        known = _KNOWN.get(section)
        if known is None or not isinstance(content, dict):
            raise ConfigError(
                f"{path}: unknown {section!r}, expected the sections {', '.join(f'[{name}]' for name in _KNOWN)}",
                hint="remove or correct it",
            )
        for key in content:
            if key not in known:
                raise ConfigError(
                    f"{path}: unknown key {section}.{key}, expected one of {', '.join(sorted(known))}",
                    hint="remove or correct it",
                )


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string, except that TOML wants DEL escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _render(config: Config) -> str:
    upload: list[str] = []
    if config.consent is not None:
        at = config.consent.at.astimezone(dt.UTC)
        upload.append(f"consent = {str(config.consent.granted).lower()}")
        upload.append(f"consent_at = {at.isoformat()}")
        upload.append(f"consent_for = {_quoted(config.consent.service_url)}")
    if config.paused:
        upload.append("paused = true")
    if config.service_url is not None:
        upload.append(f"service_url = {_quoted(config.service_url)}")
    if config.token is not None:
        upload.append(f"token = {_quoted(config.token)}")
    team = [] if config.team_key is None else [f"key = {_quoted(config.team_key.hex())}"]
    sections = ["\n".join((f"[{name}]", *lines, "")) for name, lines in (("upload", upload), ("team", team)) if lines]
    return "\n".join((_HEADER, *sections))
