from __future__ import annotations

import pytest

from spark_runtime.models import demo_model_path


@pytest.fixture
def own(monkeypatch, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARKMOE_MODELS_DIR", str(folder))
    return folder


@pytest.fixture
def full(own, broken_model, tmp_path):
    """The demo model under two names, a dense model, a damaged one."""
    (own / "nano.gguf").write_bytes(demo_model_path().read_bytes())
    (own / "same.gguf").hardlink_to(own / "nano.gguf")
    lmstudio = tmp_path / "home/.lmstudio/models/publisher/repo"
    lmstudio.mkdir(parents=True)
    (lmstudio / "linked.gguf").symlink_to(own / "nano.gguf")
    broken_model("truncated").rename(own / "cut.gguf")
    broken_model("not_gguf").rename(own / "text.gguf")
    return own


def test_the_list(agent_cli, full):
    result = agent_cli("models", "ls", "--json")
    models = {model["name"]: model for model in result.json["models"]}
    assert list(models) == ["nano", "cut", "text"], "mixtures first, what is broken last"
    nano = models["nano"]
    assert nano["names"] == ["nano", "same", "publisher/repo/linked"]
    assert nano["sources"] == ["spark", "lmstudio"]
    assert (nano["moe"], nano["n_experts"], nano["top_k"], nano["quantisation"]) == (True, 64, 8, "q4_0")
    assert nano["file_bytes"] == demo_model_path().stat().st_size
    assert nano["fit"] in {"gpu", "host"}
    assert (models["cut"]["kind"], models["cut"]["fit"]) == ("broken", None)
    assert "truncated" in models["cut"]["reason"]
    assert [folder["source"] for folder in result.json["folders"]] == ["spark", "lmstudio"]


def test_the_list_for_a_person(agent_cli, full):
    result = agent_cli("models", "ls")
    assert result.code == 0
    assert "8 of 64" in result.out
    assert "nano is also publisher/repo/linked" in result.err
    assert "warning: cut: " in result.err
    only = agent_cli("models", "ls", "--moe")
    assert "nano" in only.out
    assert "cut" not in only.out + only.err


def test_nothing_is_changed(agent_cli, full):
    before = {path: path.stat().st_mtime_ns for path in full.rglob("*")}
    agent_cli("models", "ls")
    assert {path: path.stat().st_mtime_ns for path in full.rglob("*")} == before


def test_no_models_at_all(agent_cli, own):
    result = agent_cli("models", "ls")
    assert (result.code, result.out) == (0, "")
    assert "no models found" in result.err
    assert "SPARKMOE_MODELS_DIR" in result.err
    assert agent_cli("models", "ls", "--json").json["models"] == []


def test_a_name_stands_for_its_file(agent_cli, full):
    result = agent_cli("run", "--dry-run", "--json", "NANO")
    assert result.json["model"] == str(full / "nano.gguf")
    assert agent_cli("doctor", "linked", "--json").json["checks"]
    agent_cli("run", "--dry-run", "absent").failed(1, "'absent'", "models ls")
    agent_cli("run", "--dry-run", "absent.gguf").failed(1, "no such model file")
