"""The figures behind the dashboard's table of GPU classes, from runs that were measured.

Usage: gpu_classes.py [--out FILE]. From ``bench-h200.json`` and ``link-h200.json`` the time that one block adds to a
token beside what it reads, and what a miss takes beside its bytes; from the rate that others published of Laguna-XS.2
on an RTX 3090 the time of a block there. A test compares the dashboard's with them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
from big_model import Recipe, tensors_of
from report import parser_of, report

from spark_runtime.simulator.cost import Machine, MeasuredRun

RESULTS = Path(__file__).with_name("results")
H200_BYTES_PER_S, RTX_3090_BYTES_PER_S = 4800e9, 936e9
LAGUNA = {"blocks": 40, "experts": 256, "top_k": 8, "tok_s": 111.0, "core_gib": 1.35, "hot_gib": 10.61, "hot": 0.6}
"""As published (lucebox, optimizations/spark): GiB of core weights, and of 60% of the experts."""


def core_bytes(recipe: Recipe) -> int:
    """Bytes of what is no routed expert in the model that was measured."""
    total = 0
    for tensor in tensors_of(recipe):
        weights, n_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        total += 0 if "_exps" in tensor.name else math.prod(tensor.shape) // weights * n_bytes
    return total


def figures() -> dict[str, float]:
    """Seconds of a block on either card, and of a miss beside its bytes."""
    bench = json.loads((RESULTS / "bench-h200.json").read_text())["rows"]
    link = json.loads((RESULTS / "link-h200.json").read_text())
    expert_bytes = float(link["model"]["expert_bytes"])
    token_s = 1 / next(row["decode_tok_s"] for row in bench if row["config"] == "all-gpu")
    runs = [MeasuredRun(row["decode_tok_s"], row["cold_hits_per_token"]) for row in bench if row["cold_hits_per_token"]]
    rate = float(link["link"]["bytes_per_s"])
    recipe = Recipe()
    read = core_bytes(recipe) + recipe.layers * recipe.top_k * expert_bytes
    laguna_expert = LAGUNA["hot_gib"] * 2**30 / LAGUNA["hot"] / LAGUNA["blocks"] / LAGUNA["experts"]
    laguna_read = LAGUNA["core_gib"] * 2**30 + LAGUNA["blocks"] * LAGUNA["top_k"] * laguna_expert
    return {
        "h200_block_us": 1e6 * (token_s - read / H200_BYTES_PER_S) / recipe.layers,
        "h200_miss_us": 1e6 * Machine.fitted(token_s, runs, expert_bytes, rate).miss_s,
        "h200_link_gb_s": rate / 1e9,
        "rtx_3090_block_us": 1e6 * (1 / LAGUNA["tok_s"] - laguna_read / RTX_3090_BYTES_PER_S) / LAGUNA["blocks"],
    }


if __name__ == "__main__":
    options = parser_of(__doc__).parse_args()
    report({name: round(value, 2) for name, value in figures().items()}, options.out)
