"""Tokens in the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import date, datetime
from typing import Any

import duckdb

from spark_service.db.moments import from_utc, to_utc
from spark_service.tokens import Token

__all__ = ["all_tokens", "insert_token", "set_last_used", "update_token"]

_COLUMNS = tuple(field.name for field in fields(Token))


def all_tokens(cursor: duckdb.DuckDBPyConnection) -> list[Token]:
    """Every token, in order of creation."""
    # Column names are this module's own.
    query = f"SELECT {', '.join(_COLUMNS)} FROM tokens ORDER BY created_at, token_id"  # noqa: S608
    return [_token(row) for row in cursor.execute(query).fetchall()]


def insert_token(cursor: duckdb.DuckDBPyConnection, token: Token) -> None:
    """Add a token."""
    holes = ", ".join("?" for _ in _COLUMNS)
    cursor.execute(f"INSERT INTO tokens ({', '.join(_COLUMNS)}) VALUES ({holes})", _values(token))  # noqa: S608


def update_token(cursor: duckdb.DuckDBPyConnection, token: Token) -> None:
    """Store a token that was rotated or revoked."""
    cursor.execute(
        "UPDATE tokens SET secret_sha256 = ?, expires_at = ?, revoked_at = ?, rotated_at = ?, previous_sha256 = ?, "
        "previous_ends_at = ? WHERE token_id = ?",
        [
            _stored(value)
            for value in (
                token.secret_sha256,
                token.expires_at,
                token.revoked_at,
                token.rotated_at,
                token.previous_sha256,
                token.previous_ends_at,
                token.token_id,
            )
        ],
    )


def set_last_used(cursor: duckdb.DuckDBPyConnection, token_id: str, day: date) -> None:
    """Store the day of a token's last use."""
    cursor.execute("UPDATE tokens SET last_used_day = ? WHERE token_id = ?", [day, token_id])


def _values(token: Token) -> list[object]:
    return [_stored(getattr(token, name)) for name in _COLUMNS]


def _stored(value: object) -> object:
    return from_utc(value) if isinstance(value, datetime) else value


def _token(row: Sequence[Any]) -> Token:
    values: list[Any] = [to_utc(value) if isinstance(value, datetime) else value for value in row]
    return Token(*values)
