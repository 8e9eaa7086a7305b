"""Who is logged in: browsers that sent a token once, and since then a cookie that means nothing elsewhere."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from spark_service import tokens
from spark_service.credentials import Client, Credentials

__all__ = ["LIFETIME_SECONDS", "MAX_LOGINS", "Logins", "cookie_of", "drop_cookie", "holder_of", "set_cookie"]

LIFETIME_SECONDS = 12 * 3600.0
"""After that the token is asked for again."""
MAX_LOGINS = 4096
"""Beyond that the oldest ends."""
_COOKIE = "spark_login"
_SECURE_COOKIE = "__Host-spark_login"


@dataclass(frozen=True, slots=True)
class _Login:
    until_seconds: float
    proof: bytes
    client: Client


class Logins:
    """Logins of this process; a restart ends them. Of a cookie only its hash is kept."""

    def __init__(self, credentials: Credentials, clock: Callable[[], float] = time.monotonic) -> None:
        self._credentials = credentials
        self._clock = clock
        self._logins: OrderedDict[bytes, _Login] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Logins that are kept, those that have run out but were not asked for included."""
        return len(self._logins)

    def open(self, client: Client, text: str) -> str:
        """The cookie of a new login of ``client``, who sent the token ``text``."""
        cookie = secrets.token_urlsafe(32)
        login = _Login(self._clock() + LIFETIME_SECONDS, self._credentials.proof(client, text), client)
        with self._lock:
            self._logins[tokens.digest(cookie)] = login
            while len(self._logins) > MAX_LOGINS:
                self._logins.popitem(last=False)
        return cookie

    def find(self, cookie: str) -> Client | None:
        """Who a cookie is of: ``None`` after the lifetime, a logout, or when the token itself has ended."""
        key = tokens.digest(cookie)
        with self._lock:
            login = self._logins.get(key)
        if login is None:
            return None
        client = self._credentials.again(login.client, login.proof)
        if client is None or self._clock() >= login.until_seconds:
            self.close(cookie)
            return None
        return client

    def close(self, cookie: str) -> None:
        """Log out; one that is not known is logged out already."""
        with self._lock:
            self._logins.pop(tokens.digest(cookie), None)


def cookie_of(request: Request) -> str | None:
    """The cookie of a login that a browser sent."""
    return request.cookies.get(_name(request))


def set_cookie(request: Request, response: Response, cookie: str) -> None:
    """Give a browser the cookie: for this site alone, out of scripts' reach, and over TLS alone where it came so."""
    secure = request.url.scheme == "https"
    response.set_cookie(_name(request), cookie, path="/", secure=secure, httponly=True, samesite="strict")


def drop_cookie(request: Request, response: Response) -> None:
    """Take it back."""
    secure = request.url.scheme == "https"
    response.delete_cookie(_name(request), path="/", secure=secure, httponly=True, samesite="strict")


def _name(request: Request) -> str:
    # Browsers accept the prefix over TLS only, and then no subdomain can set the cookie.
    return _SECURE_COOKIE if request.url.scheme == "https" else _COOKIE


def holder_of(cookie: str | None) -> str:
    """Whom forms are bound to, without giving the cookie away."""
    return "" if cookie is None else hashlib.sha256(b"form\n" + cookie.encode()).hexdigest()
