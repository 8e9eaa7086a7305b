"""A manifest's way from the service to the agent: signed, pinned, rotated, altered, rolled back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from between import Between, Change, standing_between

from spark_agent.manifests import load_manifest
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.recency import RecencyOrder
from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

pytestmark = pytest.mark.e2e

SERVICE, SPARK = "spark_service.cli", "spark_agent.cli_spark"
VRAM = 9 * 2**20
PULL = ("pull-profile", "code", "--vram", "9M", "--ctx", "256")
TOKENS = 60


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_model_shape(demo_model_path())


def session(shape: ModelShape, number: int, workload: str = "code") -> SessionHistogram:
    """Tokens routed by a popularity that all sessions of a workload share."""
    session_hash = f"{number:064x}"
    layers, reuse = [], []
    for layer in shape.layers:
        popularity = np.random.default_rng([len(workload), layer.block]).standard_normal(layer.n_experts)
        noise = np.random.default_rng([number, layer.block]).gumbel(size=(TOKENS, layer.n_experts))
        ids = np.argsort(-(2 * popularity + noise), axis=1)[:, : layer.top_k]
        distances = RecencyOrder(layer.n_experts).observe(ids)
        counts = np.bincount(ids.ravel(), minlength=layer.n_experts)
        layers.append(LayerCounts(block=layer.block, tokens=TOKENS, counts=tuple(counts.tolist())))
        counted = np.bincount(distances.ravel(), minlength=layer.n_experts + 1)
        reuse.append(LayerReuse(block=layer.block, distances=tuple(counted.tolist())))
    return SessionHistogram(
        session_hash=session_hash,
        split=split_of(session_hash),
        workload=workload,
        decode=PhaseHistogram(tokens=TOKENS, layers=tuple(layers)),
        reuse=tuple(reuse),
    )


def upload(base_url: str, shape: ModelShape, numbers: range, workload: str = "code") -> None:
    body = HistogramUpload(
        agent_version="0", model=shape, sessions=tuple(session(shape, number, workload) for number in numbers)
    )
    headers = {"Idempotency-Key": f"{workload}-{numbers.start}", "Content-Type": "application/json"}
    answer = httpx.post(f"{base_url}/api/v1/histograms", content=body.model_dump_json(), headers=headers, timeout=120)
    assert answer.status_code == 202, answer.text


@pytest.fixture
def serving(machine, shape: ModelShape, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A service with sessions of one workload; its address and data folder."""
    data = tmp_path / "service"
    with machine.serving(SERVICE, "run", "--open", "-p", "0", "--json", "--data-dir", str(data)) as (started, _):
        upload(started["base_url"], shape, range(12))
        machine.environment["SPARKMOE_SERVICE_URL"] = started["base_url"]
        yield started["base_url"], data


@pytest.fixture
def between(serving, machine) -> Iterator[Between]:
    with standing_between(serving[0]) as made:
        machine.environment["SPARKMOE_SERVICE_URL"] = made.url
        yield made


def refused(done: Any, *words: str) -> None:
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "\nhint: " in "\n" + done.stderr
    for word in words:
        assert word in done.stderr


def key_of(machine, data: Path, command: str = "show") -> dict[str, Any]:
    done = machine.run(SERVICE, "key", command, "--data-dir", str(data), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def pull(machine, *more: str) -> tuple[dict[str, Any], str]:
    done = machine.run(SPARK, *PULL, "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_first_key_is_pinned_and_a_rotated_one_followed(machine, serving, tmp_path: Path) -> None:
    base_url, data = serving
    first, said = pull(machine)
    key = key_of(machine, data)
    assert first["signed_by"] == key["key_id"]
    assert f"pinned its key {key['key_id']}" in said
    again, said = pull(machine)
    assert again == first
    assert "unchanged" in said
    assert "pinned its key" not in said

    rotated = key_of(machine, data, "rotate")
    assert rotated["earlier_key_ids"] == [key["key_id"]]
    # The running service signs with the new key at once; nothing was sent but a new signature.
    moved, said = pull(machine)
    assert (moved["signed_by"], moved["manifest"]) == (rotated["key_id"], first["manifest"])
    assert "unchanged" in said
    assert f"{key['key_id']} vouches for {rotated['key_id']}" in said
    for _ in range(2):
        rotated = key_of(machine, data, "rotate")
    assert pull(machine)[0]["signed_by"] == rotated["key_id"], "two steps at once"
    shown = json.loads(machine.run(SPARK, "service-key", "show", "--json").stdout)
    (pinned,) = shown["pinned"]
    assert (pinned["service"], pinned["key_id"], len(pinned["earlier_key_ids"])) == (base_url, rotated["key_id"], 3)


def test_another_key_is_refused_until_it_is_trusted(machine, serving, tmp_path: Path) -> None:
    base_url, data = serving
    before, _ = pull(machine)
    for name in ("signing-key.pem", "signing-key-rotations.json"):
        (data / name).unlink(missing_ok=True)
    foreign = tmp_path / "foreign"
    other = key_of(machine, foreign)
    (data / "signing-key.pem").write_bytes((foreign / "signing-key.pem").read_bytes())
    (data / "signing-key.pem").chmod(0o600)
    done = machine.run(SPARK, *PULL)
    refused(done, f"signs with key {other['key_id']}", f"spark service-key trust {other['key_id']}")
    stored = next((machine.home / "data").rglob("code.json"))
    assert json.loads(stored.read_text())["signed"]["signature"].split(";")[1] == f"keyid={before['signed_by']}"

    refused(machine.run(SPARK, "service-key", "trust", "0" * 32), other["key_id"])
    refused(machine.run(SPARK, *PULL), other["key_id"])
    trusted = machine.run(SPARK, "service-key", "trust", other["key_id"], "--json")
    assert json.loads(trusted.stdout) == {
        "service": base_url, "key_id": other["key_id"], "replaced": before["signed_by"]
    }  # fmt: skip
    assert pull(machine)[0]["signed_by"] == other["key_id"]


def test_a_key_pinned_up_front(machine, serving, tmp_path: Path) -> None:
    _, data = serving
    key, wrong = key_of(machine, data), key_of(machine, tmp_path / "foreign")
    machine.environment["SPARKMOE_SIGNING_KEY"] = wrong["key"]
    refused(machine.run(SPARK, *PULL), key["key_id"], wrong["key_id"])
    machine.environment["SPARKMOE_SIGNING_KEY"] = key["key"]
    found, said = pull(machine)
    assert found["signed_by"] == key["key_id"]
    assert "pinned its key" not in said
    assert json.loads(machine.run(SPARK, "service-key", "show", "--json").stdout)["pinned"] == []


def warmer(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
    return headers, body.replace(b'"n_calibration":', b'"n_calibration":1') if "/manifests/" in path else body


def unsigned(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
    return {name: value for name, value in headers.items() if name != "spark-signature"}, body


def spaced(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
    """The same JSON value in other bytes."""
    return headers, body + b" " if "/manifests/" in path else body


def garbled(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
    return headers | ({"spark-signature": "ed25519;keyid=x;sig="} if "/manifests/" in path else {}), body


@pytest.mark.parametrize(
    ("change", "word"),
    [(warmer, "altered"), (spaced, "altered"), (unsigned, "is not signed"), (garbled, "cannot be read")],
)
def test_what_was_changed_on_its_way_is_refused(machine, between: Between, change: Change, word: str) -> None:
    # Asked for afresh each time, so that there is a body to change.
    fresh = (*PULL, "--reserve", "1k")
    pull(machine)
    between.change = change
    refused(machine.run(SPARK, *fresh), word)
    kept = next((machine.home / "data").rglob("code.json")).read_text()
    assert json.loads(kept)["reserve_bytes"] == 0, "the good one stays"
    between.change = lambda path, headers, body: (headers, body)
    assert machine.run(SPARK, *fresh).returncode == 0


def test_an_altered_first_answer_pins_nothing(machine, between: Between) -> None:
    between.change = warmer
    refused(machine.run(SPARK, *PULL), "altered")
    assert json.loads(machine.run(SPARK, "service-key", "show", "--json").stdout)["pinned"] == []
    between.change = unsigned
    _, said = pull(machine)
    assert "does not sign" in said
    between.change = lambda path, headers, body: (headers, body)
    assert "pinned its key" in pull(machine)[1]


def test_kept_manifests_are_checked_again(machine, serving, shape: ModelShape, tmp_path: Path) -> None:
    passed_on = tmp_path / "m.json"
    pull(machine, "--output", str(passed_on))
    assert load_manifest(passed_on).workload == "code"
    stored = next((machine.home / "data").rglob("code.json"))
    kept = json.loads(stored.read_text())
    kept["content"] = kept["content"].replace('"n_calibration":', '"n_calibration":1')
    stored.write_text(json.dumps(kept))
    diff = ("profiles", "diff")
    refused(machine.run(SPARK, *diff, "code", "code"), "altered")
    said = pull(machine)[1]
    assert "altered since" in said
    assert machine.run(SPARK, *diff, "code", str(passed_on), "--json").returncode == 0
    passed_on.write_bytes(passed_on.read_bytes() + b"\n")
    refused(machine.run(SPARK, *diff, "code", str(passed_on)), "altered")


def test_rollback_and_what_it_changes(machine, serving, shape: ModelShape) -> None:
    base_url, _ = serving
    first = PlacementManifest.model_validate(pull(machine)[0]["manifest"], strict=False)
    upload(base_url, shape, range(12, 40))
    second = PlacementManifest.model_validate(pull(machine)[0]["manifest"], strict=False)
    assert second.profile_revision != first.profile_revision
    question = ["--vram-bytes", str(VRAM), "--n-ctx", "256", "--service", base_url, "--json"]
    history = machine.run(SERVICE, "manifest", "history", shape.fingerprint, "code", *question)
    listed = json.loads(history.stdout)
    assert [one["revision"] for one in listed["manifests"]] == [second.profile_revision, first.profile_revision]
    assert listed["pinned"] is None

    pin = ["manifest", "pin", shape.fingerprint, "code"]
    unknown = machine.run(SERVICE, *pin, "0" * 64, "--service", base_url)
    assert unknown.returncode == 1
    assert first.profile_revision in unknown.stderr
    assert machine.run(SERVICE, *pin, first.profile_revision, "--service", base_url).returncode == 0
    back, said = pull(machine)
    assert back["manifest"] == json.loads(first.model_dump_json())
    assert f"revision {first.profile_revision[:12]} pinned" in said

    names = [f"code@{one.profile_revision}" for one in (first, second)]
    compared = json.loads(machine.run(SPARK, "profiles", "diff", *names, "--json").stdout)
    assert compared["before"]["profile_revision"] == first.profile_revision
    assert compared["after"]["n_calibration"] == second.n_calibration
    assert len(compared["layers"]) == len(shape.layers)
    for_people = machine.run(SPARK, "profiles", "diff", *names)
    assert for_people.returncode == 0
    assert "expected cold-hit rate" in for_people.stderr

    assert machine.run(SERVICE, "manifest", "unpin", shape.fingerprint, "code", "--service", base_url).returncode == 0
    newest, said = pull(machine)
    assert newest["manifest"] == json.loads(second.model_dump_json())
    assert "there may be a newer one" not in said


def test_an_unknown_workload_is_answered_with_the_most_general_one(machine, serving, shape: ModelShape) -> None:
    base_url, _ = serving
    upload(base_url, shape, range(12, 40), "review-long")
    done = machine.run(SPARK, "pull-profile", "docs", "--vram", "9M")
    assert done.returncode == 1
    assert "until then use " in done.stderr
    assert "held-out sessions of 1 other workload" in done.stderr
    assert "/api/v1/workloads/nearest" in done.stderr


def test_one_placement_for_two_workloads(machine, serving, shape: ModelShape, tmp_path: Path) -> None:
    """Pulled under any spelling, kept under one name, followed, rolled back, and told from its workloads alone."""
    base_url, _ = serving
    upload(base_url, shape, range(60, 90), "review-long")
    mixed = ("--vram", "9M", "--ctx", "256", "--json")
    first = machine.run(SPARK, "pull-profile", "review-long:14+code:6", *mixed)
    assert first.returncode == 0, first.stderr
    pulled = json.loads(first.stdout)["manifest"]
    assert pulled["workload"] == "code:3+review-long:7"
    (kept,) = (machine.home / "data").rglob("*.json")
    assert kept.name == "code_3+review-long_7.json"
    again = machine.run(SPARK, "pull-profile", "code:3+review-long:7", *mixed)
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert "unchanged" in again.stderr

    shown = machine.run(SPARK, "profiles", "show", "review-long:7+code:3", "--json")
    profile = json.loads(shown.stdout)
    alone = [machine.run(SPARK, "profiles", "show", name, "--json") for name in ("code", "review-long")]
    assert profile["n_calibration"] == sum(json.loads(one.stdout)["n_calibration"] for one in alone)
    own = next(p["cold_hit_rate"] for p in profile["curves"] if (p["policy"], p["residency"]) == ("own", 0.6))
    rows = {row["workload"]: row["cold_hit_rate"] for row in profile["mismatch"] if row["residency"] == 0.6}
    assert set(rows) == {"code", "review-long"}
    assert own < min(rows.values())
    assert f"mixed {own:.1%}, code alone {rows['code']:.1%}" in shown.stderr

    planned = machine.run("spark_agent.cli", "run", "--manifest", "review-long:7+code:3", "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    compared = machine.run(SPARK, "profiles", "diff", "code:3+review-long:7", str(kept), "--json")
    assert json.loads(compared.stdout)["experts_entering"] == 0

    upload(base_url, shape, range(12, 20), "code")
    newer = json.loads(machine.run(SPARK, "pull-profile", "code:3+review-long:7", *mixed).stdout)["manifest"]
    assert newer["profile_revision"] != pulled["profile_revision"]
    pin = ["manifest", "pin", shape.fingerprint, "review-long:7+code:3", pulled["profile_revision"]]
    assert machine.run(SERVICE, *pin, "--service", base_url).returncode == 0
    back = machine.run(SPARK, "pull-profile", "code:3+review-long:7", *mixed)
    assert json.loads(back.stdout)["manifest"] == pulled
    assert f"revision {pulled['profile_revision'][:12]} pinned" in back.stderr
    # Another window is another question; nothing is that old.
    window = machine.run(SPARK, "pull-profile", "code:3+review-long:7", *mixed, "--window-days", "30")
    assert json.loads(window.stdout)["manifest"]["n_calibration"] == newer["n_calibration"]
    assert "pinned" not in window.stderr

    unknown = machine.run(SPARK, "pull-profile", "code+docs", *mixed)
    assert unknown.returncode == 1
    assert "workload: found docs" in unknown.stderr
    assert "until then use" in unknown.stderr
    for wrong, code in (("code:0+docs", 2), ("code+code", 2)):
        refusal = machine.run(SPARK, "pull-profile", wrong, *mixed)
        assert refusal.returncode == code
        assert "hint: " in refusal.stderr
    step = machine.run(SPARK, "pull-profile", "code", *mixed, "--window-days", "31")
    assert step.returncode == 1
    assert "query.window_days: found 31, expected one of 0, 7, 14, 30" in step.stderr
