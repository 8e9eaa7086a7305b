"""Flags for plain llama.cpp: what they match, that they fit, and that no others would keep more."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.formats.llama_cpp import flags_for
from spark_schemas.model import ExpertLayer, ModelShape

EXPERTS = [
    f"ffn_{kind}_{group}.{end}"
    for kind in ("up", "down", "gate", "gate_up")
    for group in ("exps", "chexps")
    for end in ("weight", "bias", "scale")
]
"""As several architectures name them: gpt-oss has biases, fused tensors are one, chunks have their own experts."""
OTHERS = [
    *(f"ffn_{kind}_shexp.weight" for kind in ("up", "down", "gate", "gate_inp")),
    *(f"ffn_{kind}.weight" for kind in ("up", "down", "gate", "gate_inp", "norm")),
    "ffn_norm_exps.weight",
    "ffn_gate_inp.bias",
    "exp_probs_b.bias",
    "attn_q.weight",
    "attn_norm.weight",
]
PROGRAM = r"""
#include <iostream>
#include <regex>
#include <string>
int main(int, char ** argv) {
    std::regex pattern(argv[1]);
    for (std::string name; std::getline(std::cin, name);) std::cout << std::regex_search(name, pattern);
}
"""


def model(layers: list[tuple[int, int, int, int]]) -> ModelShape:
    """Of layers of so many blocks after the one before, experts, selections and bytes."""
    made, block = [], -1
    for gap, n_experts, top_k, n_bytes in layers:
        block += 1 + gap
        made.append(
            ExpertLayer(block=block, n_experts=n_experts, top_k=min(top_k, n_experts), expert_bytes=n_bytes,
                        tensor_types={"up": "q4_K"})
        )  # fmt: skip
    return ModelShape(fingerprint="mf1-" + "a" * 32, sibling="ms1-" + "a" * 32, architecture="qwen3moe", name="Tiny",
                      n_blocks=block + 1, context_length=10, core_bytes=0, kv_bytes_per_token=0,
                      layers=tuple(made))  # fmt: skip


LAYERS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=9
)


@settings(deadline=None)
@given(layers=LAYERS, share=st.floats(0, 1))
def test_no_other_layers_would_be_read_more(layers: list[tuple[int, int, int, int]], share: float) -> None:
    shape = model(layers)
    budget = int(share * shape.expert_bytes_total)
    flags = flags_for(shape, budget)
    sizes = {layer.block: layer.n_experts * layer.expert_bytes for layer in shape.layers}
    reads = {layer.block: layer.top_k * layer.expert_bytes for layer in shape.layers}
    kept = set(sizes) - set(flags.blocks_on_cpu)
    assert sum(sizes[block] for block in kept) == flags.resident_bytes <= budget
    assert flags.resident_bytes_n_cpu_moe <= budget
    best = max(
        sum(reads[block] for block in chosen)
        for count in range(len(sizes) + 1)
        for chosen in itertools.combinations(sizes, count)
        if sum(sizes[block] for block in chosen) <= budget
    )
    assert sum(reads[block] for block in kept) == best
    assert flags.decode_share == pytest.approx(best / sum(reads.values()))
    assert (flags.override == "") == (not flags.blocks_on_cpu)


def test_two_smaller_layers_are_kept_for_a_larger_one() -> None:
    flags = flags_for(model([(0, 1, 1, 6), (0, 1, 1, 5), (0, 1, 1, 5)]), 10)
    assert (flags.blocks_on_cpu, flags.resident_bytes, flags.n_cpu_moe) == ((0,), 10, 1)


def test_alike_layers_leave_the_first_to_the_host() -> None:
    flags = flags_for(model([(3, 8, 2, 10)] + [(0, 8, 2, 10)] * 47), 10 * 8 * 40)
    assert flags.blocks_on_cpu == tuple(range(3, 11))
    assert (flags.n_cpu_moe, flags.resident_bytes_n_cpu_moe) == (11, flags.resident_bytes)


def test_layers_of_very_many_sizes_still_fit() -> None:
    shape = model([(0, 128, 8, 10**6 + 7919 * 3**n % 10**5) for n in range(60)])
    budget = shape.expert_bytes_total // 2
    flags = flags_for(shape, budget)
    assert 0.99 * budget < flags.resident_bytes <= budget


def test_the_expression_matches_as_llama_cpp_matches(tmp_path: Path) -> None:
    """It asks ``std::regex_search`` of every tensor's name."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "match.cpp").write_text(PROGRAM)
    subprocess.run([compiler, "-O0", "-o", tmp_path / "match", tmp_path / "match.cpp"], check=True)
    flags = flags_for(model([(1, 8, 2, 10)] + [(0, 8, 2, 10)] * 20), 80 * 9)
    pattern, _, where = flags.override.partition("=")
    assert where == "CPU"
    assert "," not in pattern  # which separates overrides
    blocks = range(23)
    names = [(block, name, name in EXPERTS) for block in blocks for name in (*EXPERTS, *OTHERS)]
    asked = "".join(f"blk.{block}.{name}\n" for block, name, _ in names) + "token_embd.weight\noutput.weight\n"
    found = subprocess.run(
        [tmp_path / "match", pattern], input=asked, text=True, capture_output=True, check=True
    ).stdout
    expected = [expert and block in flags.blocks_on_cpu for block, _, expert in names] + [False, False]
    assert [answer == "1" for answer in found] == expected
    assert set(flags.blocks_on_cpu) == set(range(1, 13))
