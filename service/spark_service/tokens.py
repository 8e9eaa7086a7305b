"""Bearer tokens: what they look like, what is kept of them, when they are valid. Pure.

A token reads ``spark_<id>_<secret>``. The secret is 256 random bits, so its plain SHA-256 is enough at rest: slow
hashes protect what people choose, and nobody finds a random secret of this length by trying.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = [
    "DEFAULT_EXPIRY_DAYS",
    "MAX_EXPIRY_DAYS",
    "MAX_GRACE_SECONDS",
    "Grant",
    "NewToken",
    "Scope",
    "Token",
    "TokenId",
    "TokenInfo",
    "TokenList",
    "TokenName",
    "TokenRequest",
    "TokenRotation",
    "digest",
    "grant_of",
    "holds",
    "join_token",
    "new_id",
    "new_secret",
    "split_token",
]

Scope = Literal["upload", "read", "admin"]
"""``upload`` sends what agents report, ``read`` gets, ``admin`` may do everything. The first two hold nothing of each
other.
"""
Grant = Literal["upload", "read", "upload read", "admin"]
"""What a token has: scopes separated by spaces, as OAuth writes them. A machine that uploads and pulls needs two."""
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
TokenName = Annotated[str, StringConstraints(max_length=64, pattern=r"^(?:[!-~](?:[ -~]*[!-~])?)?$")]
"""A label of visible ASCII, possibly empty."""

DEFAULT_EXPIRY_DAYS = 365
MAX_EXPIRY_DAYS = 3650
MAX_GRACE_SECONDS = 30 * 24 * 3600

_GRANTS: tuple[Grant, ...] = get_args(Grant)
_SECRET_BYTES = 32
_FORM = re.compile(r"spark_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_ExpiryDays = Annotated[int, Field(ge=1, le=MAX_EXPIRY_DAYS, strict=True)]


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of a token. Moments are aware, in UTC."""

    token_id: str
    name: str
    scope: Grant
    secret_sha256: bytes
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    rotated_at: datetime | None = None
    previous_sha256: bytes | None = None
    previous_ends_at: datetime | None = None
    last_used_day: date | None = None

    def usable(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def admits(self, secret_sha256: bytes, now: datetime) -> bool:
        """Whether a secret with this digest opens it. The time taken does not tell how much of a guess was right."""
        current = hmac.compare_digest(secret_sha256, self.secret_sha256)
        previous = hmac.compare_digest(secret_sha256, self.previous_sha256 or self.secret_sha256)
        in_grace = self.previous_ends_at is not None and now < self.previous_ends_at
        return self.usable(now) and (current or (previous and in_grace))


class TokenInfo(BaseModel):
    """A token without anything secret."""

    id: TokenId
    name: TokenName
    scope: Grant
    created_at: datetime
    expires_at: datetime | None
    """Null: never."""
    revoked_at: datetime | None
    rotated_at: datetime | None
    previous_ends_at: datetime | None
    """Until then the secret before the last rotation is valid too."""
    last_used_day: date | None

    @classmethod
    def of(cls, token: Token) -> TokenInfo:
        """What may be told of a token."""
        return cls(**_told(token))


class NewToken(TokenInfo):
    """A token with its secret, told this once."""

    token: str

    @classmethod
    def with_secret(cls, token: Token, secret: str) -> NewToken:
        """A token as its creator gets it."""
        return cls(token=join_token(token.token_id, secret), **_told(token))


class TokenList(BaseModel):
    """All tokens, those revoked or expired too, in order of creation."""

    tokens: list[TokenInfo]


class TokenRequest(BaseModel):
    """Body of a request for a new token."""

    model_config = ConfigDict(extra="forbid")

    scope: Grant
    name: TokenName = ""
    expires_days: _ExpiryDays | None = DEFAULT_EXPIRY_DAYS
    """Days until it expires; null: never."""


class TokenRotation(BaseModel):
    """Body of a request for a token's next secret."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: Annotated[int, Field(ge=0, le=MAX_GRACE_SECONDS, strict=True)] = 0
    """How long the old secret stays valid."""
    expires_days: _ExpiryDays | Literal["never", "unchanged"] = "unchanged"
    """Days until the token expires, counted from now."""


def _told(token: Token) -> dict[str, Any]:
    told = {name: getattr(token, name) for name in TokenInfo.model_fields if name != "id"}
    return {"id": token.token_id, **told}


def holds(grant: Grant, needed: Scope) -> bool:
    """Whether a token with this grant may do what needs a scope."""
    return grant == "admin" or needed in grant.split()


def grant_of(scopes: Iterable[str]) -> Grant | None:
    """The grant of some scopes, or None where there is none: unknown words, or admin beside what it holds anyway."""
    wanted = set(scopes)
    return next((grant for grant in _GRANTS if set(grant.split()) == wanted), None)


def new_id() -> str:
    """A fresh id; it is no secret."""
    return secrets.token_hex(6)


def new_secret() -> str:
    """A fresh secret of 256 random bits, safe in addresses and headers."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: str) -> bytes:
    """SHA-256 of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def join_token(token_id: str, secret: str) -> str:
    """The token as its holder sends it."""
    return f"spark_{token_id}_{secret}"


def split_token(text: str) -> tuple[str, str] | None:
    """Id and secret of a token, or None for what has not its form."""
    match = _FORM.fullmatch(text)
    return None if match is None else (match[1], match[2])
