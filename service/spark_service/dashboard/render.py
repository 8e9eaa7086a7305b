"""Templates to pages: escaped without exception, compressed, with what every page needs."""

from __future__ import annotations

import datetime as dt
import gzip
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from spark_service import version
from spark_service.credentials import OPEN_ACTOR, Client
from spark_service.dashboard import words
from spark_service.dashboard.assets import Asset, Assets
from spark_service.dashboard.forms import FIELD, FormGuard
from spark_service.dashboard.logins import cookie_of, holder_of
from spark_service.tokens import holds

__all__ = ["Renderer", "accepts_gzip", "day_text", "visible_text"]

_TEMPLATES = Path(__file__).with_name("templates")
_GZIP_LEVEL = 5
_SMALLEST_BYTES = 512
"""Less is not made smaller by compressing."""
_NAVIGATION = (
    ("/", "Team"),
    ("/profiles", "Profiles"),
    ("/compare", "Compare"),
    ("/budget", "Budget"),
    ("/privacy", "Privacy"),
)


class Renderer:
    """Makes responses from templates. Every template gets ``view``, whatever its page shows."""

    def __init__(self, assets: Assets, guard: FormGuard) -> None:
        self._assets = assets
        self._guard = guard
        self._environment = Environment(
            loader=FileSystemLoader(_TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters.update(
            number=lambda value: f"{value:,}",
            percent=lambda value, digits=1: f"{100 * value:.{digits}f}%",
            points=lambda value: f"{100 * value:+.1f}",
            size=lambda n_bytes: words.size(round(n_bytes)),
            short=_short,
            visible=visible_text,
            day=day_text,
            moment=lambda value: f"{value:%Y-%m-%d %H:%M:%S} UTC",
            plural=_plural,
        )
        self._environment.globals.update(
            script=self._script,
            style=self._style,
            has_asset=self._has,
            asset_url=lambda name: self._require(name).url,
            version=version(),
            words=words,
        )

    def page(
        self,
        request: Request,
        template: str,
        view: BaseModel | Mapping[str, Any],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """A page of HTML. ``view`` is all that its template may show of the service."""
        client: Client | None = getattr(request.state, "client", None)
        holder = holder_of(cookie_of(request))
        html = self._environment.get_template(template).render(
            view=view,
            path=request.url.path,
            query=request.url.query,
            client=client,
            is_open=client is not None and client.actor == OPEN_ACTOR,
            is_admin=client is not None and holds(client.grant, "admin"),
            navigation=_NAVIGATION,
            form_token=lambda: self._form_token(holder),
        )
        return _compressed(request, html.encode(), "text/html; charset=utf-8", status, headers)

    def twin(self, request: Request, view: BaseModel) -> Response:
        """The same as JSON."""
        return _compressed(request, view.model_dump_json().encode(), "application/json", 200, None)

    def _form_token(self, holder: str) -> Markup:
        # A hidden field; only its value varies, and that is hexadecimal.
        return Markup('<input type="hidden" name="{}" value="{}">').format(FIELD, self._guard.issue(holder))

    def _has(self, name: str) -> bool:
        return self._assets.get(name) is not None

    def _require(self, name: str) -> Asset:
        asset = self._assets.get(name)
        if asset is None:
            raise LookupError(f"{name}: found no such file, expected one of the dashboard's")
        return asset

    def _script(self, name: str, *, first: bool = False) -> Markup:
        """A script's element; ``first``: runs before the page is drawn."""
        asset = self._require(name)
        when = Markup("") if first else Markup(" defer")
        return Markup('<script src="{}" integrity="{}"{}></script>').format(asset.url, asset.integrity, when)

    def _style(self, name: str) -> Markup:
        asset = self._require(name)
        return Markup('<link rel="stylesheet" href="{}" integrity="{}">').format(asset.url, asset.integrity)


def accepts_gzip(request: Request) -> bool:
    """Whether a browser takes gzip."""
    for part in request.headers.get("accept-encoding", "").lower().split(","):
        coding, _, parameters = part.strip().partition(";")
        if coding.strip() in ("gzip", "*"):
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def day_text(day: int | dt.date) -> str:
    """A date from itself or from days since 1970."""
    return (dt.date(1970, 1, 1) + dt.timedelta(days=day) if isinstance(day, int) else day).isoformat()


def _short(count: int) -> str:
    """A large count with three digits: 1.23 M."""
    value, unit = float(count), 0
    while abs(value) >= 999.5 and unit < 4:
        value /= 1000
        unit += 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {('', 'k', 'M', 'G', 'T')[unit]}".rstrip()


def visible_text(text: str) -> str:
    """Characters that show nothing and change how others are shown, as their numbers: no name may pass for another."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return "".join(f"⟨U+{ord(one):04X}⟩" if unicodedata.category(one) in hidden else one for one in text)


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _compressed(
    request: Request, body: bytes, media_type: str, status: int, headers: Mapping[str, str] | None
) -> Response:
    sent = {"Vary": "Accept-Encoding, Cookie", **(headers or {})}
    if accepts_gzip(request) and len(body) >= _SMALLEST_BYTES:
        body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
        sent["Content-Encoding"] = "gzip"
    return Response(body, status, sent, media_type)
