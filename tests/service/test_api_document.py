"""The document alone must be enough to write a client: it is compared with what the service does."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

import spark_service
from spark_schemas.histogram import HistogramUpload
from spark_schemas.invariants import check_upload
from spark_service.api_document import PROBLEM_CODES, example_upload

Post = Callable[..., httpx2.Response]


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/openapi.json").json()
    return found


def raised_codes() -> set[tuple[int, str]]:
    """Statuses and codes of every problem in the service's source."""
    found = set()
    for path in Path(spark_service.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id not in ("RequestError", "problem_response"):
                    continue
                status, code = node.args[:2]
                codes = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
                for constant in codes:
                    if isinstance(status, ast.Constant) and isinstance(constant, ast.Constant):
                        found.add((status.value, constant.value))
    return found


def test_every_code_is_documented() -> None:
    raised = raised_codes()
    assert len(raised) > 15
    assert raised <= {(status, code) for code, (status, _) in PROBLEM_CODES.items()}
    by_framework = {"not_found", "method_not_allowed"}
    assert {code for code in PROBLEM_CODES if (PROBLEM_CODES[code][0], code) not in raised} <= by_framework


def test_every_code_stands_with_an_operation_or_is_the_routers(document: dict[str, Any]) -> None:
    text = json.dumps(document["paths"])
    for code in PROBLEM_CODES:
        assert f"`{code}`" in document["info"]["description"]
        assert f"`{code}`" in text or code in ("not_found", "method_not_allowed")


def test_every_operation_lists_its_statuses(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            statuses = set(operation["responses"])
            assert {"500", "default"} <= statuses
            if path.startswith("/api/"):
                assert {"401", "503"} <= statuses
                assert operation["security"]
    upload = document["paths"]["/api/v1/histograms"]["post"]["responses"]
    assert set(upload) == {"202", "400", "401", "409", "413", "415", "422", "500", "503", "507", "default"}


def test_the_example_is_taken(document: dict[str, Any], post: Post) -> None:
    content = document["paths"]["/api/v1/histograms"]["post"]["requestBody"]["content"]["application/json"]
    assert content["example"] == example_upload()
    text = json.dumps(content["example"])
    check_upload(HistogramUpload.model_validate_json(text))
    assert post(text.encode()).json() == {"accepted": 1, "duplicates": 0}


def test_the_split_can_be_computed_from_the_description_alone(document: dict[str, Any]) -> None:
    vectors = re.findall(r"\| `([0-9a-f]{64})` \| `(\w+)` \|", document["info"]["description"])
    assert {split for _, split in vectors} == {"calibration", "held_out"}
    for session_hash, split in vectors:
        digest = hashlib.sha256(b"spark-split-v1" + bytes.fromhex(session_hash)).digest()
        assert split == ("held_out" if int.from_bytes(digest[:8], "big") * 5 < 2**64 else "calibration")


def test_every_field_of_an_upload_is_described_or_speaks_for_itself(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert "d-th most recently used" in schemas["LayerReuse"]["description"]
    assert schemas["PhaseHistogram"]["properties"]["tokens"]["maximum"] == 2**53
    assert "Exact bytes of one expert" in schemas["ExpertLayer"]["properties"]["expert_bytes"]["description"]
    assert schemas["HistogramUpload"]["additionalProperties"] is False
