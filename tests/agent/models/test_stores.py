from __future__ import annotations

import json
import os

import pytest

from spark_agent.models import stores
from spark_agent.models.stores import survey

MODEL, PROJECTOR = "application/vnd.ollama.image.model", "application/vnd.ollama.image.projector"


def names(found) -> list[tuple[str, str]]:
    return [(candidate.source, candidate.name) for candidate in found.candidates]


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def test_a_machine_without_any_store(home, tmp_path):
    found = survey({}, home, tmp_path)
    assert (found.candidates, found.folders, found.skipped) == ((), (), ())


def test_every_default_place(home, tmp_path, write_gguf, ollama_model, hub_model):
    small = write_gguf(home / ".cache/llama.cpp/ggml-org_tiny.gguf")
    hub_model(home / ".cache/huggingface/hub", "org/repo", "sub/Big-Q4_K_M.gguf", small.read_bytes())
    write_gguf(home / ".lmstudio/models/publisher/repo/model.gguf")
    write_gguf(home / ".cache/lm-studio/models/other/repo/model.GGUF")
    ollama_model(home / ".ollama/models", "registry.ollama.ai/library/qwen3/30b", (MODEL, small))
    ollama_model(tmp_path / "usr/share/ollama/.ollama/models", "hf.co/org/repo/Q4", (MODEL, small))
    found = survey({}, home, tmp_path)
    assert names(found) == [
        ("llama.cpp", "ggml-org_tiny"),
        ("huggingface", "org/repo/sub/Big-Q4_K_M"),
        ("ollama", "qwen3:30b"),
        ("ollama", "hf.co/org/repo:Q4"),
        ("lmstudio", "publisher/repo/model"),
        ("lmstudio", "other/repo/model"),
    ]
    assert not found.skipped
    assert all(candidate.path.is_file() for candidate in found.candidates)


def test_every_variable(home, tmp_path, write_gguf, hub_model, ollama_model):
    small = write_gguf(tmp_path / "own/mine.gguf")
    write_gguf(tmp_path / "llama/one.gguf")
    hub_model(tmp_path / "hub", "org/repo", "two.gguf", small.read_bytes())
    ollama_model(tmp_path / "ollama", "registry.ollama.ai/someone/three/latest", (MODEL, small), (PROJECTOR, small))
    write_gguf(home / ".ollama/models/ignored.gguf")
    variables = {
        "SPARKMOE_MODELS_DIR": str(tmp_path / "own"),
        "LLAMA_CACHE": str(tmp_path / "llama"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HOME": str(tmp_path / "not used"),
        "OLLAMA_MODELS": str(tmp_path / "ollama"),
    }
    assert [name for _, name in names(survey(variables, home, tmp_path))] == [
        "mine",
        "one",
        "org/repo/two",
        "someone/three:latest",
        "someone/three:latest (projector)",
    ]
    hub_model(tmp_path / "hf/hub", "org/repo", "two.gguf", small.read_bytes())
    assert names(survey({"HF_HOME": str(tmp_path / "hf")}, home, tmp_path)) == [("huggingface", "org/repo/two")]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    write_gguf(tmp_path / "cache/llama.cpp/four.gguf")
    assert names(survey(cache, home, tmp_path)) == [("llama.cpp", "four")]


def test_one_folder_under_two_variables_is_looked_at_once(home, tmp_path, write_gguf):
    write_gguf(tmp_path / "models/one.gguf")
    variables = {"SPARKMOE_MODELS_DIR": str(tmp_path / "models"), "LLAMA_CACHE": str(tmp_path / "models")}
    assert names(survey(variables, home, tmp_path)) == [("spark", "one")]


def test_shards_are_one_model_even_without_the_first(home, tmp_path, write_gguf):
    for index in (1, 2, 3):
        write_gguf(tmp_path / f"own/big-{index:05d}-of-00003.gguf")
    (tmp_path / "own/big-00001-of-00003.gguf").unlink()
    (candidate,) = survey({"SPARKMOE_MODELS_DIR": str(tmp_path / "own")}, home, tmp_path).candidates
    assert (candidate.name, candidate.path.name) == ("big", "big-00001-of-00003.gguf")


def test_links_that_lead_round_or_nowhere(home, tmp_path, write_gguf):
    own = tmp_path / "own"
    write_gguf(own / "deep/model.gguf")
    (own / "deep/round").symlink_to(own)
    (own / "gone.gguf").symlink_to(own / "absent")
    os.mkfifo(own / "pipe.gguf")
    (own / "folder.gguf").mkdir()
    found = survey({"SPARKMOE_MODELS_DIR": str(own)}, home, tmp_path)
    assert [name for _, name in names(found)] == ["deep/model"]
    (line,) = found.skipped
    assert "gone.gguf" in line


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"layers": 5}',
        b"\xff\xfe",
        json.dumps({"layers": [{"mediaType": MODEL, "digest": "sha256:../../../etc/passwd"}]}).encode(),
        json.dumps({"layers": [{"mediaType": MODEL}]}).encode(),
    ],
)
def test_manifests_that_are_none(home, tmp_path, content):
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/model/tag"
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(content)
    found = survey({}, home, tmp_path)
    assert not found.candidates
    (line,) = found.skipped
    assert str(manifest) in line


def test_a_layer_of_another_kind_is_not_a_model(home, tmp_path):
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/model/tag"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [{"mediaType": ["x"], "digest": 5}, 7, {"mediaType": "text/plain"}]}))
    found = survey({}, home, tmp_path)
    assert (found.candidates, found.skipped) == ((), ())


def test_a_folder_that_is_no_store_is_given_up(home, tmp_path, write_gguf, monkeypatch):
    monkeypatch.setattr(stores, "_MOST_ENTRIES", 10)
    for index in range(20):
        write_gguf(tmp_path / f"own/{index:02d}.gguf")
    found = survey({"SPARKMOE_MODELS_DIR": str(tmp_path / "own")}, home, tmp_path)
    assert len(found.candidates) == 10
    assert "more than 10 entries" in found.skipped[0]
