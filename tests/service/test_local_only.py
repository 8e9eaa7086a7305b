from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from spark_schemas.api import Problem
from spark_service.app import create_app
from spark_service.db.store import Store
from spark_service.local_only import LocalOnly


@pytest.fixture
def local(store: Store) -> Iterator[TestClient]:
    app = create_app(store, open_access=True)
    app.add_middleware(LocalOnly)
    with TestClient(app) as opened:
        yield opened


@pytest.mark.parametrize("host", ["127.0.0.1:8710", "127.0.0.2", "localhost", "LOCALHOST:1", "[::1]:8710", "[::1]"])
def test_this_machine_is_answered(local: TestClient, host: str) -> None:
    assert local.get("/version", headers={"Host": host}).status_code == 200
    assert local.get("/version", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.1.2", "0.0.0.0", "", "[::1", "a@::1"],
)
def test_rebound_names_are_not(local: TestClient, host: str) -> None:
    answer = local.delete(f"/api/v1/sessions/{'0' * 64}", headers={"Host": host})
    assert answer.status_code == 403
    found = Problem.model_validate_json(answer.content)
    assert (found.code, found.field) == ("not_local", "header.Host")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://a@127.0.0.1", "http://[::1"])
def test_foreign_pages_are_not(local: TestClient, origin: str) -> None:
    answer = local.post("/api/v1/histograms", headers={"Host": "localhost", "Origin": origin})
    assert answer.status_code == 403
    assert Problem.model_validate_json(answer.content).field == "header.Origin"
