from __future__ import annotations

from pathlib import Path

import pytest
from signing_keys import info, sign

from spark_agent.manifests import ManifestStore, PullKey, save_manifest
from spark_agent.paths import manifests_dir, service_keys_dir
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_diff import ManifestDiff, diff_manifests


@pytest.fixture
def shape():
    return read_model_shape(demo_model_path())


@pytest.fixture
def pair(shape, make_manifest) -> tuple[PlacementManifest, PlacementManifest]:
    """All experts of all layers, and one fewer in the first block after the coolest became the hottest."""
    before = make_manifest(shape)
    first = before.layers[0]
    changed = first.model_copy(update={"slots": first.n_experts - 1, "prior": tuple(reversed(first.prior))})
    smaller = before.bytes.vram_slots - first.expert_bytes
    parts = before.bytes.model_copy(
        update={"vram_slots": smaller, "vram_total": before.bytes.vram_total - first.expert_bytes}
    )
    after = before.model_copy(
        update={"layers": (changed, *before.layers[1:]), "bytes": parts, "profile_revision": "d" * 64, "expected": None}
    )
    return before, after


@pytest.fixture
def files(pair, tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, manifest in zip(paths, pair, strict=True):
        save_manifest(path, manifest.model_dump_json().encode(), None)
    return paths


def test_files(spark_cli, files, pair, shape):
    result = spark_cli("profiles", "diff", *files, "--json")
    found = ManifestDiff.model_validate_json(result.out)
    assert found == diff_manifests(*pair)
    assert (found.slots_change, found.experts_leaving, found.experts_entering) == (-1, 1, 0)
    people = spark_cli("profiles", "diff", *files)
    assert people.code == 0
    first = shape.layers[0]
    assert f"{first.n_experts} -> {first.n_experts - 1}" in people.out
    assert f"{len(shape.layers) - 1} block" in people.err
    assert "expected cold-hit rate if never adapted: 25.0% (20.0% to 30.0%) -> none promised" in people.err


def test_a_pulled_name_against_a_file(spark_cli, files, pair):
    ManifestStore(manifests_dir()).put(pair[0], PullKey("http://x", 1, 1, 0), None)
    result = spark_cli("profiles", "diff", "chat", files[1], "--json")
    assert ManifestDiff.model_validate_json(result.out) == diff_manifests(*pair)


def test_revisions_are_asked_from_the_service_and_checked(
    spark_cli, service, make_reply, pair, shape, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", service.url)
    key = PullKey(service.url, pair[0].vram_budget_bytes, pair[0].n_ctx, 0)
    ManifestStore(manifests_dir()).put(pair[0], key, None)
    path = f"/api/v1/manifests/{shape.fingerprint}/chat"
    body = pair[1].model_dump_json().encode()
    headers = {"Content-Type": "application/json", "Spark-Signature": sign(0, body).header()}
    service.answers[path] = make_reply(200, body, headers)
    service.answers["/api/v1/signing-key"] = make_reply(200, info(0).model_dump_json().encode())
    result = spark_cli("profiles", "diff", "chat", f"chat@{'d' * 64}", "--json")
    # The pulled one has no signature, but its service signs by now.
    assert ManifestDiff.model_validate_json(result.out) == diff_manifests(*pair)
    assert f"revision={'d' * 64}" in service.requests[0].path
    assert list(service_keys_dir().iterdir())
    service.answers[path] = make_reply(200, body + b" ", headers)
    spark_cli("profiles", "diff", f"chat@{'d' * 64}", f"chat@{'d' * 64}").failed(3, "altered")
    service.answers[path] = make_reply(200, body, headers)
    spark_cli("profiles", "diff", f"chat@{'d' * 64}", f"chat@{'e' * 64}").failed(1, "expected one for")


@pytest.mark.parametrize(
    ("named", "code", "word"),
    [
        ("absent.json", 1, "cannot read"),
        ("nothing-pulled", 1, "no profile"),
        (f"nothing-pulled@{'a' * 64}", 1, "its budget is not known"),
        ("chat@abc", 2, "64 hex digits"),
        ("Chat", 2, "--manifest"),
    ],
)
def test_what_cannot_be_compared(spark_cli, files, named, code, word):
    spark_cli("profiles", "diff", files[0], named).failed(code, word)


def test_another_model(spark_cli, files, pair, tmp_path):
    other = pair[1].model_copy(update={"fingerprint": "mf1-" + "9" * 32})
    save_manifest(tmp_path / "c.json", other.model_dump_json().encode(), None)
    spark_cli("profiles", "diff", files[0], tmp_path / "c.json").failed(1, "cannot be compared: fingerprint")
