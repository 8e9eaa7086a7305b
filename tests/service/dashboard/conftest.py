"""Profiles as the service builds them, without a store; and a service with its pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from spark_schemas.profile import Profile
from spark_service.app import create_app
from spark_service.builders import Inputs, build_profile
from spark_service.db.store import Store


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
        deadline = time.monotonic() + 60
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
