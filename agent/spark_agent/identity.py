"""Keyed session hashes: the service can tell two sessions apart and can name neither.

The key is the team's (``SPARKMOE_TEAM_KEY``, or ``key`` under ``[team]`` in the config file), so that a session
resumed on another machine keeps its hash; without one, a random key made once on this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from spark_agent.env import parse_team_key
from spark_agent.errors import ConfigError
from spark_agent.files import create_once
from spark_agent.paths import ensure_private_dir

__all__ = ["load_or_create_key", "session_hash", "session_key"]

_KEY_BYTES = 32


def session_hash(key: bytes, lineage: str) -> str:
    """Return the HMAC-SHA256 of a lineage under the key, as 64 hex digits.

    The lineage is that of the conversation: forks and resumed copies have their parent's, hence its hash.
    """
    return hmac.new(key, lineage.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def session_key(team_keys: tuple[bytes | None, ...], local_key_path: Path) -> bytes:
    """Return the first team key that is set (environment before config), else this machine's own key."""
    for key in team_keys:
        if key is not None:
            return key
    return load_or_create_key(local_key_path)


def load_or_create_key(path: Path) -> bytes:
    """Return the key kept in the file, making a random one the first time.

    Agents that start at once all return the same key. A damaged or exposed key file is a :class:`ConfigError`:
    a new key would give every known session a second identity.
    """
    if not path.exists():
        _create_key(path)
    try:
        text = path.read_text("ascii").strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the session key {path}: {error}", hint="restore the file") from error
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"the session key {path} is open to others (mode {stat.S_IMODE(mode):04o}, expected 0600)",
            hint=f"chmod 600 {path}",
        )
    try:
        return parse_team_key(text)
    except ValueError as error:
        raise ConfigError(
            f"the session key {path} is damaged: found {len(text)} characters, {error}",
            hint="restore it; or move it away for a new one: known sessions will then count as new ones",
        ) from error


def _create_key(path: Path) -> None:
    try:
        ensure_private_dir(path.parent)
        create_once(path, f"{secrets.token_hex(_KEY_BYTES)}\n".encode())
    except OSError as error:
        raise ConfigError(
            f"cannot create the session key {path}: {error}",
            hint="make the folder writable, or set SPARKMOE_TEAM_KEY (openssl rand -hex 32)",
        ) from error
