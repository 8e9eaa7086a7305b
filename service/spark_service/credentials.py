"""Which token a text is, and what it may do."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from spark_service import tokens
from spark_service.keyring import Keyring

__all__ = ["ENVIRONMENT_ACTOR", "OPEN_ACTOR", "Client", "Credentials"]

ENVIRONMENT_ACTOR = "environment"
OPEN_ACTOR = "open"


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request. ``key`` names its buckets, ``actor`` its entries in the audit log."""

    actor: str
    key: str
    grant: tokens.Grant


class Credentials:
    """The tokens of a store, and the one from outside of it."""

    def __init__(self, keyring: Keyring, token: str | None) -> None:
        """``token`` has admin scope."""
        self._keyring = keyring
        self._token = None if token is None else token.encode()

    def authenticate(self, text: str) -> Client | None:
        """Whose token a text is; ``None`` if it is no valid one."""
        token = self._keyring.authenticate(text)
        if token is not None:
            return Client(token.token_id, token.token_id, token.scope)
        # Bytes: compare_digest refuses non-ASCII text. Its time does not tell how much of a guess was right.
        if self._token is not None and hmac.compare_digest(text.encode(), self._token):
            return Client(ENVIRONMENT_ACTOR, ENVIRONMENT_ACTOR, "admin")
        return None

    def proof(self, client: Client, text: str) -> bytes:
        """What to keep of the valid token of a client to ask :meth:`again`; it opens nothing."""
        parts = None if client.actor == ENVIRONMENT_ACTOR else tokens.split_token(text)
        return tokens.digest(text if parts is None else parts[1])

    def again(self, client: Client, proof: bytes) -> Client | None:
        """Who a client is now: ``None`` once the token it came with is revoked, expired or renewed."""
        if client.actor == ENVIRONMENT_ACTOR:
            return client  # valid as long as the process
        token = self._keyring.still(client.actor, proof)
        return None if token is None else Client(token.token_id, token.token_id, token.scope)
