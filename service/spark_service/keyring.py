"""The tokens of a running service: checked in memory, changed in the database first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from spark_service.db.audit import record
from spark_service.db.store import Store
from spark_service.db.tokens import all_tokens, insert_token, set_last_used, update_token
from spark_service.errors import RequestError
from spark_service.ingest import excerpt
from spark_service.tokens import Token, TokenRequest, TokenRotation, digest, new_id, new_secret, split_token

__all__ = ["Keyring"]

_NOBODY = Token(
    token_id="",
    name="",
    scope="read",
    secret_sha256=bytes(32),
    created_at=datetime.min.replace(tzinfo=UTC),
    revoked_at=datetime.min.replace(tzinfo=UTC),
)
"""Compared with where an id is unknown, so that an answer's time does not tell which ids exist."""


def _now() -> datetime:
    return datetime.now(UTC)


class Keyring:
    """All tokens of a store. The process that owns the database owns them, so memory never lags behind the table."""

    def __init__(self, store: Store, now: Callable[[], datetime] = _now) -> None:
        """Read the tokens. ``now`` gives aware moments."""
        self._store = store
        self._now = now
        # Held by whoever changes a token, from reading it to keeping it: two changes never start from the same state.
        self._changing = threading.Lock()
        self._noting = threading.Lock()
        self._used: dict[str, date] = {}
        with store.reading() as cursor:
            self._tokens = {token.token_id: token for token in all_tokens(cursor)}

    def authenticate(self, text: str) -> Token | None:
        """The usable token that a client sent, or None. No I/O: the day of use is stored by :meth:`flush_uses`."""
        parts = split_token(text)
        if parts is None:
            return None
        token_id, secret = parts
        return self.still(token_id, digest(secret))

    def still(self, token_id: str, secret_sha256: bytes) -> Token | None:
        """The token of an id if it is usable and a secret with this digest opens it. No I/O."""
        token = self._tokens.get(token_id)
        now = self._now()
        if not (token or _NOBODY).admits(secret_sha256, now) or token is None:
            return None
        day = now.date()
        if token.last_used_day != day and self._used.get(token_id) != day:
            with self._noting:
                self._used[token_id] = day
        return token

    def tokens(self) -> list[Token]:
        """Every token, those revoked or expired too, in order of creation."""
        return list(self._tokens.values())

    def any_usable(self) -> bool:
        """Whether anybody could authenticate."""
        now = self._now()
        return any(token.usable(now) for token in self._tokens.values())

    def create(self, request: TokenRequest, actor: str) -> tuple[Token, str]:
        """Make a token; return it with its secret, which is kept nowhere."""
        secret, now = new_secret(), self._moment()
        with self._changing:
            token = Token(
                token_id=next(fresh for fresh in iter(new_id, None) if fresh not in self._tokens),
                name=request.name,
                scope=request.scope,
                secret_sha256=digest(secret),
                created_at=now,
                expires_at=None if request.expires_days is None else now + timedelta(days=request.expires_days),
            )
            with self._store.writing(counted=False) as cursor:
                insert_token(cursor, token)
                detail = {"scope": token.scope, "name": token.name, "expires_at": _told(token.expires_at)}
                record(cursor, actor, "token.create", token.token_id, detail)
            self._keep(token)
        return token, secret

    def revoke(self, token_id: str, actor: str) -> Token:
        """End a token for good; a second time changes nothing. Raises :class:`RequestError` (404) for an unknown id."""
        with self._changing:
            token = self._require(token_id)
            if token.revoked_at is not None:
                return token
            token = replace(token, revoked_at=self._moment(), previous_sha256=None, previous_ends_at=None)
            with self._store.writing(counted=False) as cursor:
                update_token(cursor, token)
                record(cursor, actor, "token.revoke", token_id, {"scope": token.scope, "name": token.name})
            self._keep(token)
        return token

    def rotate(self, token_id: str, rotation: TokenRotation, actor: str) -> tuple[Token, str]:
        """Give a token a new secret; the old one ends after the grace, one before that at once.

        Raises :class:`RequestError`: 404 for an unknown id, 409 for a token that is revoked or expired.
        """
        secret, now, grace = new_secret(), self._moment(), rotation.grace_seconds
        with self._changing:
            old = self._require(token_id)
            _require_usable(old, now)
            token = replace(
                old,
                secret_sha256=digest(secret),
                rotated_at=now,
                expires_at=_next_expiry(old, rotation, now),
                previous_sha256=old.secret_sha256 if grace else None,
                previous_ends_at=now + timedelta(seconds=grace) if grace else None,
            )
            with self._store.writing(counted=False) as cursor:
                update_token(cursor, token)
                detail = {"grace_seconds": grace, "expires_at": _told(token.expires_at)}
                record(cursor, actor, "token.rotate", token_id, detail)
            self._keep(token)
        return token, secret

    def flush_uses(self) -> None:
        """Store which tokens were used and on what day; a first use is an entry of the audit log.

        Raises :class:`StorageError`; what could not be stored is tried again at the next call.
        """
        with self._noting:
            used = dict(self._used)
        if not used:
            return
        with self._changing:
            with self._store.writing(counted=False) as cursor:
                for token_id, day in used.items():
                    token = self._tokens[token_id]
                    set_last_used(cursor, token_id, day)
                    if token.last_used_day is None:
                        detail = {"scope": token.scope, "name": token.name}
                        record(cursor, token_id, "token.first_use", token_id, detail)
            for token_id, day in used.items():
                self._keep(replace(self._tokens[token_id], last_used_day=day))
        with self._noting:
            # What was noted in the meantime is of another day, and stays.
            self._used = {key: day for key, day in self._used.items() if used.get(key) != day}

    def _moment(self) -> datetime:
        return self._now().replace(microsecond=0)

    def _require(self, token_id: str) -> Token:
        token = self._tokens.get(token_id)
        if token is None:
            raise RequestError(
                404,
                "unknown_token",
                f"token: found no {excerpt(token_id)}, expected the id of one of this service",
                field="path.token_id",
                found=excerpt(token_id),
                hint="spark-service token list shows the ids",
            )
        return token

    def _keep(self, token: Token) -> None:
        # A new dictionary: a request in another thread sees the tokens before the change or after it.
        self._tokens = {**self._tokens, token.token_id: token}


def _require_usable(token: Token, now: datetime) -> None:
    if not token.usable(now):
        state = "expired" if token.revoked_at is None else "revoked"
        raise RequestError(
            409,
            "token_ended",
            f"token {token.token_id}: found it {state}, expected one that can be used",
            field="path.token_id",
            found=state,
            expected="a token that can be used",
            hint="make a new token instead",
        )


def _next_expiry(token: Token, rotation: TokenRotation, now: datetime) -> datetime | None:
    if rotation.expires_days == "unchanged":
        return token.expires_at
    if rotation.expires_days == "never":
        return None
    return now + timedelta(days=rotation.expires_days)


def _told(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
