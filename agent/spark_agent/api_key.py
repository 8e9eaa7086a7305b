"""The key that requests to the agent's own API must bear: one that a person named, or one made once on this machine.

On loopback none is needed. On any other address there always is one: where nobody named it, a random one is made, kept
readable by its owner only, and the same at every later start.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from spark_agent.env import Environment, parse_token
from spark_agent.errors import ConfigError
from spark_agent.files import create_once
from spark_agent.paths import api_key_path, ensure_private_dir

__all__ = ["ApiKey", "named_api_key", "own_api_key", "shown_api_key"]

_KEY_BYTES = 32
_MAX_FILE_BYTES = 4096
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and where it is from."""

    value: str = field(repr=False)
    file: Path | None
    """``None``: the environment."""
    is_new: bool = False
    """It was made just now."""


def named_api_key(environment: Environment, file: Path | None) -> ApiKey | None:
    """The key that a person named: the file of an option, else the variable, else the variable that names a file.

    Raises :class:`ConfigError` for a file that is none, holds none, or is open to others.
    """
    if file is None and environment.api_key is not None:
        return ApiKey(environment.api_key, None)
    if file is None and environment.api_key_file is not None:
        file = Path(environment.api_key_file)
    return None if file is None else ApiKey(_read(file), file)


def own_api_key() -> ApiKey:
    """The key of this machine's own, made the first time. Agents that start at once get the same one.

    Raises :class:`ConfigError` for one that is damaged or open to others, which is never replaced: tools know it.
    """
    path = api_key_path()
    is_new = not path.exists()
    if is_new:
        try:
            ensure_private_dir(path.parent)
            create_once(path, f"{secrets.token_urlsafe(_KEY_BYTES)}\n".encode())
        except OSError as error:
            raise ConfigError(
                f"cannot keep a key for the API in {path}: {error.strerror}",
                "make the folder writable, or set SPARKMOE_API_KEY",
            ) from error
    return ApiKey(_read(path), path, is_new)


def shown_api_key(key: str) -> str:
    """How a shell script gets at a key, so that no secret is printed."""
    path = api_key_path()
    try:
        is_own = path.exists() and _read(path) == key
    except ConfigError:
        is_own = False
    return f"$(cat '{path}')" if is_own and "'" not in str(path) else "$SPARKMOE_API_KEY"


def _read(path: Path) -> str:
    try:
        with open(os.open(path, _OPEN_FLAGS), "rb") as file:  # noqa: PTH123 - pathlib can not pass flags
            found = os.fstat(file.fileno())
            content = file.read(_MAX_FILE_BYTES + 1) if stat.S_ISREG(found.st_mode) else None
    except OSError as error:
        raise ConfigError(f"cannot read the API key file {path}: {error.strerror}", "check the path") from error
    if content is None:
        raise ConfigError(f"the API key file {path} is no regular file", "name a file that holds one key")
    # One that is somebody else's, as a mounted secret is, cannot be closed to others from here.
    if os.name == "posix" and found.st_uid == os.geteuid() and found.st_mode & 0o077:
        raise ConfigError(
            f"the API key file {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}, expected 0600)",
            f"chmod 600 {path}",
        )
    try:
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"expected at most {_MAX_FILE_BYTES} bytes")
        key = parse_token(content.decode("ascii").strip())
        if not key:
            raise ValueError("expected one key")
    except ValueError as error:
        reason = "expected printable ASCII without spaces" if isinstance(error, UnicodeDecodeError) else error
        raise ConfigError(
            f"the API key file {path}: found {len(content)} bytes (not shown), {reason}",
            "write one key into it: openssl rand -hex 32",
        ) from error
    return key
