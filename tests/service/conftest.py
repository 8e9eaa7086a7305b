"""A service to talk to, and its database, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from spark_service.app import create_app
from spark_service.db.store import Store

UPLOADS = "/api/v1/histograms"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no build takes so long that what came since has to wait."""
    monkeypatch.setattr("spark_service.catalog.QUICK_SECONDS", 3600.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "service.duckdb", memory="256MB", threads=1)
    yield opened
    opened.close()


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, open_access=True), raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture
def post(client: TestClient) -> Callable[..., httpx2.Response]:
    """Upload a body under a key."""

    def send(body: bytes, key: str = "key-1", **headers: str) -> httpx2.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.post(UPLOADS, content=body, headers={**JSON, "Idempotency-Key": key, **named})

    return send
