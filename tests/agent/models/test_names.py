from __future__ import annotations

from pathlib import Path

import pytest

from spark_agent.errors import SparkError
from spark_agent.models.names import find_model, match_name
from spark_agent.models.stores import Candidate

NAMES = ("qwen3:30b", "qwen3:latest", "org/repo/Qwen3-30B-Q4_K_M", "org/repo/Qwen3-30B-Q8_0", "other/tiny", "tiny-2")


def matched(name: str) -> list[str]:
    candidates = [Candidate(each, "spark", Path(f"/{index}")) for index, each in enumerate(NAMES)]
    return [candidate.name for candidate in match_name(name, candidates)]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3:30b", ["qwen3:30b"]),
        ("qwen3", ["qwen3:latest"]),
        ("QWEN3-30b-q4_k_m", ["org/repo/Qwen3-30B-Q4_K_M"]),
        ("qwen3-30b-q4_k_m.gguf", ["org/repo/Qwen3-30B-Q4_K_M"]),
        ("tiny", ["other/tiny"]),
        ("q8", ["org/repo/Qwen3-30B-Q8_0"]),
        ("org/repo", ["org/repo/Qwen3-30B-Q4_K_M", "org/repo/Qwen3-30B-Q8_0"]),
        ("absent", []),
        ("", []),
    ],
)
def test_what_a_name_means(name, found):
    assert matched(name) == found


@pytest.fixture
def own(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARKMOE_MODELS_DIR", str(tmp_path / "own"))
    return tmp_path / "own"


def test_one_file_under_two_names_is_one_model(own, write_gguf):
    first = write_gguf(own / "a/model-x.gguf")
    second = own / "b/model-x.gguf"
    second.parent.mkdir()
    second.hardlink_to(first)
    assert find_model("model-x") == first
    write_gguf(own / "c/model-x.gguf")
    with pytest.raises(SparkError, match="a/model-x, c/model-x") as refused:
        find_model("model-x")
    assert "in full" in refused.value.hint


def test_a_name_that_nothing_has(own, write_gguf):
    with pytest.raises(SparkError, match="no folder of a known tool"):
        find_model("model")
    write_gguf(own / "other.gguf")
    with pytest.raises(SparkError, match=str(own)) as refused:
        find_model("model")
    assert "models ls" in refused.value.hint
