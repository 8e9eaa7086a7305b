"""Profiles as the service builds them, services with their pages, and browsers without a screen."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from spark_schemas.profile import Profile
from spark_service.app import create_app
from spark_service.builders import Inputs, build_profile
from spark_service.db.store import Store
from spark_service.keyring import Keyring
from spark_service.rate_limit import Rate, Rates
from spark_service.tokens import Grant, TokenRequest, join_token

ORIGIN = "http://testserver"
ADMIN = "from-the-environment"


@pytest.fixture(scope="session")
def built(make: Any) -> Callable[..., Profile]:
    """Build the profile of a workload, or of a mix, of all of some sessions."""

    def build(sessions: list[Any], workload: str = "code", phase: str = "decode", shape: Any = None) -> Profile:
        shape = shape or make.shape()
        parts: dict[str, list[Any]] = {}
        for part in make.parts(shape, sessions, phase):
            parts.setdefault(part.workload, []).append(part)
        found = build_profile(shape, workload, phase, "0" * 64, Inputs.of_parts(shape, workload, parts))
        assert found is not None
        return found.profile

    return build


class Pages:
    """Asks a service for pages, and waits for what is being made."""

    def __init__(self, client: TestClient, store: Store, make: Any) -> None:
        self.client = client
        self.store = store
        self._make = make

    def add(self, sessions: list[Any], shape: Any = None, key: str = "key-1") -> None:
        self.store.add_upload(self._make.upload(shape or self._make.shape(), sessions), key, key)

    def json(self, path: str) -> Any:
        """A twin once its page is made."""
        deadline = time.monotonic() + 120
        while True:
            answer = self.client.get(path)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            if found.get("page") is not None or found.get("missing") or ("models" in found and not found["models"]):
                return found
            assert time.monotonic() < deadline, "never made"
            time.sleep(0.02)

    def html(self, path: str) -> str:
        """A page once it is made; its twin is waited for."""
        place, _, query = path.partition("?")
        self.json(f"{place}.json" + (f"?{query}" if query else ""))
        answer = self.client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        return answer.text


@pytest.fixture
def pages(store: Store, make: Any) -> Iterator[Pages]:
    app = create_app(store, open_access=True, min_sessions=3)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Pages(client, store, make)
    app.state.dashboard.close()


class Visitor:
    """A browser without a screen: keeps cookies, sends forms as browsers do."""

    def __init__(self, client: TestClient) -> None:
        self.client = client

    def get(self, path: str):  # type: ignore[no-untyped-def]
        return self.client.get(path, headers={"Accept": "text/html"}, follow_redirects=False)

    def form_token(self, path: str) -> str:
        found = re.search(r'name="form_token" value="([^"]+)"', self.get(path).text)
        assert found is not None
        return found[1]

    def post(self, path: str, fields: dict[str, str], *, on: str | None = None, origin: str | None = ORIGIN):  # type: ignore[no-untyped-def]
        """Send a form of the page ``on``."""
        if on is not None:
            fields = {"form_token": self.form_token(on), **fields}
        headers = {"Accept": "text/html", **({} if origin is None else {"Origin": origin})}
        return self.client.post(path, data=fields, headers=headers, follow_redirects=False)

    def log_in(self, token: str, next: str = "/"):  # type: ignore[no-untyped-def]  # noqa: A002
        return self.post("/login", {"token": token, "next": next}, on="/login")


@pytest.fixture
def keyring(store: Store) -> Keyring:
    return Keyring(store)


@pytest.fixture
def token(keyring: Keyring) -> Callable[[Grant], tuple[str, str]]:
    """Make a token: its id and its text."""

    def make(scope: Grant) -> tuple[str, str]:
        made, secret = keyring.create(TokenRequest(scope=scope), "cli")
        return made.token_id, join_token(made.token_id, secret)

    return make


@pytest.fixture
def visit(store: Store, keyring: Keyring) -> Iterator[Callable[..., Visitor]]:
    """Come with a new browser."""
    app = create_app(store, token=ADMIN, keyring=keyring, rates=Rates(failures=Rate(1, 5)))

    def come(base_url: str = ORIGIN) -> Visitor:
        return Visitor(TestClient(app, base_url=base_url, raise_server_exceptions=False))

    yield come
    app.state.dashboard.close()


@pytest.fixture
def admin(visit: Callable[..., Visitor]) -> Visitor:
    """An administrator, logged in."""
    visitor = visit()
    assert visitor.log_in(ADMIN).status_code == 303
    return visitor


@pytest.fixture
def reader(visit: Callable[..., Visitor], token: Callable[[Grant], tuple[str, str]]) -> Visitor:
    """Somebody who may look, logged in."""
    visitor = visit()
    assert visitor.log_in(token("read")[1]).status_code == 303
    return visitor
