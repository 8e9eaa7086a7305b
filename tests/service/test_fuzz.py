"""Requests made from the service's own document: whatever comes, the answer is one that the document promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from spark_service.app import create_app
from spark_service.db.store import Store

DOCUMENT = json.loads((Path(__file__).parents[2] / "schemas/openapi.json").read_text())
CASES = [
    (path, method.upper(), mode)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for mode in GenerationMode
    # Nothing can be wrong with a request that has no parameters.
    if mode is GenerationMode.POSITIVE or operation.get("parameters")
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = 40
SLOW = {"/api/v1/admin/backup": 2}
"""Examples of operations that take long: a backup is a process."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, make: Any) -> Iterator[Any]:
    """The document as served by an app that holds sessions."""
    store = Store.open(tmp_path_factory.mktemp("fuzz") / "service.duckdb", memory="256MB", threads=1)
    shape = make.shape()
    store.add_upload(make.upload(shape, make.sessions(shape)), "key", "sha")
    found = schemathesis.openapi.from_asgi("/api/openapi.json", create_app(store, open_access=True))
    # Open to everybody, so that whatever comes gets behind the gate, which has tests of its own.
    found.config.generation.with_security_parameters = False
    yield found
    store.close()


@pytest.mark.parametrize(
    ("path", "method", "mode"), CASES, ids=[f"{method} {path} {mode.value}" for path, method, mode in CASES]
)
def test_every_answer_is_one_of_the_document(fuzzed: Any, path: str, method: str, mode: GenerationMode) -> None:
    operation = fuzzed[path][method]

    attack(operation, mode, SLOW.get(path, EXAMPLES))


@pytest.mark.parametrize(
    "path", sorted({path for path, method, _ in CASES if method == "GET" and path.endswith("{fingerprint}/{workload}")})
)
def test_answers_about_what_is_stored_are_as_documented(fuzzed: Any, make: Any, path: str) -> None:
    known = {"fingerprint": make.fingerprint, "workload": "code"}
    statuses = attack(fuzzed[path]["GET"], GenerationMode.POSITIVE, EXAMPLES, **known)
    assert 200 in statuses


def attack(operation: Any, mode: GenerationMode, examples: int, **known: str) -> set[int]:
    """Send generated requests, with the ``known`` path parameters; return the statuses seen."""
    statuses = set()

    @settings(max_examples=examples, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        case.path_parameters.update(known)
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    run()
    return statuses


def test_the_kept_document_is_the_served_one(store: Store) -> None:
    with TestClient(create_app(store, open_access=True)) as client:
        assert client.get("/api/openapi.json").json() == DOCUMENT
