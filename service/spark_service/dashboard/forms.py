"""Forms that only our own pages can send: where a request comes from, and a token that the page was given."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from spark_service.errors import FormError
from spark_service.inflate import read_body
from spark_service.ingest import excerpt

__all__ = ["FIELD", "FormGuard", "read_form", "require_same_origin"]

FIELD = "form_token"
MAX_FORM_BYTES = 8192
_MEDIA_TYPE = "application/x-www-form-urlencoded"
_NONCE_BYTES = 16
_REMEMBERED = 4096


class FormGuard:
    """Tokens of forms. Each is bound to who was given the page, and good for one change."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._spent: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def issue(self, holder: str) -> str:
        """A token for a form of a page that ``holder`` gets; another one at every call."""
        nonce = secrets.token_hex(_NONCE_BYTES)
        return f"{nonce}.{self._proof(nonce, holder)}"

    def require(self, token: str, holder: str) -> None:
        """Raise :class:`FormError`: 403 for a token that ``holder`` was not given, 409 for one that was spent."""
        nonce, _, proof = token.partition(".")
        if not hmac.compare_digest(proof.encode(), self._proof(nonce, holder).encode()):
            raise FormError(
                403,
                "form_not_ours",
                "form: found no valid token, expected that of a page of this service",
                field=f"form.{FIELD}",
                hint="open the page again and send its form; a restart of the service or a new login ends older forms",
            )
        with self._lock:
            spent = nonce in self._spent
        if spent:
            raise FormError(
                409,
                "form_sent_before",
                "form: found one that was sent and done before, expected a new one",
                field=f"form.{FIELD}",
                hint="open the page again: what it asked for is done",
            )

    def spend(self, token: str) -> None:
        """Remember that what a form asked for is done: sent once more, by reloading, it does nothing."""
        with self._lock:
            self._spent[token.partition(".")[0]] = None
            while len(self._spent) > _REMEMBERED:
                self._spent.popitem(last=False)

    def _proof(self, nonce: str, holder: str) -> str:
        return hmac.new(self._secret, f"{nonce}\n{holder}".encode(), hashlib.sha256).hexdigest()


def require_same_origin(headers: Headers) -> None:
    """Raise :class:`FormError` (403) for a form that a page of another site sent.

    Hosts and ports are compared, not schemes: behind a proxy that ends TLS the service is asked by plain HTTP.
    """
    host, origin, site = headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        ours = origin != "null" and bool(host) and _netloc(origin) == host.lower()
    else:
        # Browsers that matter send the one or the other; who sends neither is no browser, and has no cookie of one.
        ours = site in (None, "same-origin")
    if not ours:
        found = excerpt(origin if origin is not None else str(site))
        raise FormError(
            403,
            "foreign_origin",
            f"Origin: found {found}, expected a page of this service ({excerpt(host)})",
            field="header.Origin",
            found=found,
            expected=excerpt(host),
            hint="send the form from the service's own page; a proxy in front must pass the Host header on",
        )


async def read_form(request: Request) -> Mapping[str, str]:
    """Fields of a form by name. Raises :class:`FormError`; :class:`RequestError` (413) for one that is too large."""
    found = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != _MEDIA_TYPE:
        raise FormError(415, "unsupported_media_type", f"Content-Type: found {excerpt(found)}, expected {_MEDIA_TYPE}")
    try:
        raw = await read_body(request.stream(), request.headers.get("content-length"), MAX_FORM_BYTES)
    except ClientDisconnect as error:
        raise FormError(400, "body_incomplete", "body: the connection ended before the body did") from error
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, strict_parsing=bool(raw), errors="strict")
    except ValueError:
        raise FormError(400, "invalid_form", "body: found no form, expected fields as name=value&…") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise FormError(400, "duplicate_field", "form: found a field twice, expected every field once")
    return fields


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
