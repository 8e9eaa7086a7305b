"""The check itself: it repeats, and it would notice another model."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_agent.demo import identity_check
from spark_agent.demo.identity_check import PROMPTS, say
from spark_runtime.gguf_file import read_gguf
from spark_runtime.model_shape import expert_tensors, read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.tier_start import uniform_start


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_check, "TOKENS", 8)


def test_counting_and_slots_change_nothing_and_answers_repeat() -> None:
    plain = say(demo_model_path(), counting=False)
    assert plain == say(demo_model_path(), counting=True)
    tier = uniform_start(read_model_shape(demo_model_path()), 0.4)
    assert plain == say(demo_model_path(), counting=True, tier=tier)
    assert len(plain.answers) == len(PROMPTS)
    assert all(plain.answers)


def test_another_weight_is_noticed(tmp_path: Path) -> None:
    data = bytearray(demo_model_path().read_bytes())
    tensors = expert_tensors(read_gguf(demo_model_path()))
    for tensor in tensors[0].values():
        middle = tensor.offset + tensor.n_bytes // 2
        data[middle : middle + 20_000] = bytes(20_000)
    other = tmp_path / "other.gguf"
    other.write_bytes(data)
    assert say(other, counting=False).logits_sha256 != say(demo_model_path(), counting=False).logits_sha256
