"""The document alone must be enough to write a client: it is compared with what the service does."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import spark_service
from spark_schemas.histogram import HistogramUpload
from spark_schemas.invariants import check_upload
from spark_service.api_document import PROBLEM_CODES, example_upload
from spark_service.errors import RequestError
from spark_service.ingest import parse_upload

# Session hashes and names that the schema's patterns allow.
HASHES = st.integers(0, 2**256 - 1).map(lambda number: f"{number:064x}")
Post = Callable[..., httpx2.Response]


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/openapi.json").json()
    return found


def raised_codes() -> set[tuple[int, str]]:
    """Statuses and codes of every problem in the service's source but the pages, which are no part of the API."""
    found = set()
    for path in Path(spark_service.__file__).parent.rglob("*.py"):
        if path.parent.name == "dashboard":
            continue
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
                assert {"401", "403", "429", "503"} <= statuses
                assert operation["security"]
    upload = document["paths"]["/api/v1/histograms"]["post"]["responses"]
    assert set(upload) == {
        "202",
        "400",
        "401",
        "403",
        "409",
        "413",
        "415",
        "422",
        "429",
        "500",
        "503",
        "507",
        "default",
    }


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


@st.composite
def uploads(draw: st.DrawFn) -> dict[str, Any]:
    """Uploads by the words of the description alone: none of the service's own code makes or checks them."""
    n_blocks = draw(st.integers(1, 6))
    blocks = sorted(draw(st.sets(st.integers(0, n_blocks - 1), min_size=1)))
    layers = []
    for block in blocks:
        n_experts = draw(st.integers(1, 9))
        top_k = draw(st.integers(1, n_experts))
        layers.append(
            {"block": block, "n_experts": n_experts, "top_k": top_k, "expert_bytes": 7, "tensor_types": {"up": "f16"}}
        )
    model = {
        # Another shape is another model.
        "fingerprint": "mf1-" + hashlib.sha256(repr((n_blocks, layers)).encode()).hexdigest()[:32],
        "sibling": "ms1-" + "0" * 32,
        "architecture": "other",
        "n_blocks": n_blocks,
        "context_length": 1,
        "core_bytes": 0,
        "kv_bytes_per_token": 0,
        "layers": layers,
    }
    sessions = [draw(sessions_of(model)) for _ in range(draw(st.integers(1, 3)))]
    return {"schema_version": 1, "agent_version": "another program", "model": model, "sessions": sessions}


@st.composite
def sessions_of(draw: st.DrawFn, model: dict[str, Any]) -> dict[str, Any]:
    session_hash = draw(HASHES)
    digest = hashlib.sha256(b"spark-split-v1" + bytes.fromhex(session_hash)).digest()
    session: dict[str, Any] = {
        "session_hash": session_hash,
        "split": "held_out" if int.from_bytes(digest[:8], "big") * 5 < 2**64 else "calibration",
        "workload": draw(st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)),
    }
    phases = draw(st.sampled_from([["prefill"], ["decode"], ["prefill", "decode"]]))
    for phase in phases:
        tokens = draw(st.integers(1, 6))
        session[phase] = {"tokens": tokens, "layers": []}
        if phase == "decode":
            session["reuse"] = []
        for layer in model["layers"]:
            last = layer["block"] == model["n_blocks"] - 1
            routed = draw(st.integers(0, tokens)) if phase == "prefill" and last else tokens
            experts = range(layer["n_experts"])
            chosen = [draw(st.permutations(experts))[: layer["top_k"]] for _ in range(routed)]
            flat = [expert for row in chosen for expert in row]
            counts = [flat.count(expert) for expert in experts]
            session[phase]["layers"].append({"block": layer["block"], "tokens": routed, "counts": counts})
            if phase == "decode":
                session["reuse"].append({"block": layer["block"], "distances": distances(chosen, layer["n_experts"])})
    return session


def distances(chosen: list[list[int]], n_experts: int) -> list[int]:
    """Entry d counts selections of the d-th most recently used expert, the last entry first selections."""
    found, recent = [0] * (n_experts + 1), list[int]()
    for row in chosen:
        for expert in row:
            found[recent.index(expert) if expert in recent else n_experts] += 1
        for expert in row:
            recent = [expert, *(other for other in recent if other != expert)]
    return found


def session_of(upload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = upload["sessions"][0]
    return found


def phase_of(upload: dict[str, Any]) -> dict[str, Any]:
    session = session_of(upload)
    found: dict[str, Any] = session.get("decode") or session["prefill"]
    return found


def swap_split(upload: dict[str, Any]) -> None:
    session = session_of(upload)
    session["split"] = {"held_out": "calibration", "calibration": "held_out"}[session["split"]]


def count_one_more(upload: dict[str, Any]) -> None:
    phase_of(upload)["layers"][0]["counts"][0] += 1


def turn_reuse_round(upload: dict[str, Any]) -> None:
    session = session_of(upload)
    session["reuse"] = None if "reuse" in session else []


BREAKS: list[Callable[[dict[str, Any]], object]] = [
    swap_split,
    count_one_more,
    turn_reuse_round,
    lambda upload: phase_of(upload)["layers"].pop(),
    lambda upload: phase_of(upload)["layers"][0]["counts"].append(0),
    lambda upload: phase_of(upload).update(tokens=0),
    lambda upload: upload["model"].update(core_bytes=2**53),
    lambda upload: upload.update(received_at="1970-01-01"),
]


@settings(max_examples=60)
@given(upload=uploads())
def test_another_program_can_be_written_from_the_description(upload: dict[str, Any]) -> None:
    """What holds by the description is taken; each rule broken alone is refused, with the field."""
    assert parse_upload(json.dumps(upload).encode()).model.fingerprint == upload["model"]["fingerprint"]
    for break_rule in BREAKS:
        broken = copy.deepcopy(upload)
        break_rule(broken)
        with pytest.raises(RequestError) as caught:
            parse_upload(json.dumps(broken).encode())
        assert (caught.value.status, caught.value.code) == (422, "invalid_histogram")
        assert caught.value.field
