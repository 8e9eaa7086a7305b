"""What each format says, and what is refused: small files of our own making."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from found import COUNTS, counts, rankings, says

from spark_agent.errors import SparkError
from spark_agent.formats.reading import MOST_CELLS, FormatError

# ---- lucebox

HEAD = "# hotness table: n_layer=2 n_expert=3 n_expert_used=2\n# format: rows\n"


def test_lucebox_csv(write, read):
    found = read("lucebox-csv", write("a.csv", HEAD + "4,0,2\n1,5,0\n"))
    assert counts(found) == COUNTS
    assert (found.histograms[0].top_k, found.tokens, found.phase) == (2, 3, None)
    assert found.imported is True
    bare = read("lucebox-csv", write("b.csv", "4,0,2\n1,5,0\n"))
    assert (counts(bare), bare.histograms[0].top_k, bare.tokens) == (COUNTS, None, None)
    assert says(bare, "no header")


@pytest.mark.parametrize(
    "row",
    ["-1,2,3", "1,2", "1,2,3,4", "1,,3", "1,2 3", "1 2 3 4", "+1,2,3", "1e3,2,3", "nan,2,3", "inf,2,3", "1.0,2,3",
     "9" * 25 + ",1,1",
     f"{2**53 + 1},2,3", "٣,2,3", ""],
)  # fmt: skip
def test_lucebox_counts_that_are_none(write, read, row):
    with pytest.raises(FormatError):
        read("lucebox-csv", write("a.csv", HEAD + f"4,0,2\n{row}\n"))


def test_lucebox_tables_of_every_version(write, read):
    """Its loader takes blanks around counts, and in their place where there is no comma."""
    for rows in ("4, 0,2\t\r\n1,5 ,0\n", "4 0 2\n1\t5  0 \n"):
        assert counts(read("lucebox-csv", write("a.csv", HEAD.replace("=2\n", "=2 \t\r\n") + rows))) == COUNTS


@pytest.mark.parametrize(
    "content",
    [
        "",
        HEAD,
        HEAD + "1,2,3\n" * 3,
        "a\0b\n",
        HEAD + "0,0,0\n0,0,0\n",
        HEAD + HEAD + "4,0,2\n1,5,0\n",
        "4,0,2\n1,5,0\n" + HEAD,
        "# hotness table: n_layer=two n_expert=3 n_expert_used=2\n4,0,2\n1,5,0\n",
        "# hotness table: n_layer=2 n_expert=3\n4,0,2\n1,5,0\n",
        HEAD.replace("n_expert_used=2", "n_expert_used=4") + "4,0,2\n1,5,0\n",
    ],
)
def test_lucebox_tables_that_are_none(write, read, content):
    with pytest.raises(FormatError):
        read("lucebox-csv", write("a.csv", content))


PLACEMENT = {
    "arch": "laguna",
    "version": 1,
    "n_layer": 2,
    "n_expert": 300,
    "n_expert_used": 2,
    "total_hot": 3,
    "hot_counts": [2, 1],
    "hot_expert_ids": [[299, 4], [0]],
}


def test_lucebox_placement(write, read):
    found = read("lucebox-placement", write("a.json", PLACEMENT))
    assert rankings(found) == [[299, 4], [0]]
    assert (found.model, found.histograms[0].counts) == ("laguna", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"hot_expert_ids": [[9999, 9998], [0]]},
        {"hot_expert_ids": [[-1, 4], [0]]},
        {"hot_expert_ids": [[4, 4], [0]]},
        {"hot_expert_ids": [[4, 5.0], [0]]},
        {"hot_expert_ids": [[True, 5], [0]]},
        {"hot_expert_ids": [[4, 5]]},
        {"hot_expert_ids": {"0": []}},
        {"hot_counts": [1, 2]},
        {"hot_counts": [2]},
        {"total_hot": 4},
        {"version": 2},
        {"version": True},
        {"version": None},
        {"arch": 3},
        {"n_layer": 10**9},
        {"n_expert": 0},
        {"n_expert_used": 301},
        {"n_ranks": 2, "owner": [[0, -1], [1, 0]]},
    ],
    ids=str,
)
def test_lucebox_placements_that_are_none(write, read, changes):
    with pytest.raises(FormatError):
        read("lucebox-placement", write("a.json", PLACEMENT | changes))


# ---- imatrix


@pytest.fixture
def imatrix(tmp_path: Path) -> Callable[..., Path]:
    def make(tensors: dict[str, np.ndarray], kind: str = "imatrix", **metadata: int) -> Path:
        path = tmp_path / "imatrix.gguf"
        writer = gguf.GGUFWriter(path, "imatrix")
        writer.add_type(kind)
        writer.add_array("imatrix.datasets", ["text"])
        for key, value in metadata.items():
            writer.add_uint32(f"imatrix.{key}", value)
        for name, values in tensors.items():
            writer.add_tensor(name, np.asarray(values, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def of_layer(block: int, row: list[float], kinds: tuple[str, ...] = ("up", "gate", "down")) -> dict[str, np.ndarray]:
    return {f"blk.{block}.ffn_{kind}_exps.weight.counts": np.array([row]) for kind in kinds}


def test_imatrix(imatrix, read):
    tensors = of_layer(1, [4, 0, 2]) | of_layer(2, [1, 5, 0], ("gate_up", "down"))
    tensors |= {
        "blk.0.ffn_up.weight.counts": np.array([[3]]),
        "blk.1.ffn_up_shexp.weight.counts": np.array([[3]]),
        "blk.1.ffn_up_exps.weight.in_sum2": np.ones((3, 8)),
    }
    found = read("imatrix", imatrix(tensors, chunk_count=3, chunk_size=1), top_k=2)
    assert counts(found) == COUNTS
    assert [layer.block for layer in found.histograms] == [1, 2]
    assert (found.phase, found.tokens) == ("prefill", 3)


def test_imatrix_says_what_it_cannot_know(imatrix, read):
    found = read("imatrix", imatrix(of_layer(0, [2**24, 4, 0]) | of_layer(1, [1, 5, 0]), chunk_count=7, chunk_size=512))
    assert says(found, "rounded")
    assert says(found, "not all saw the same tokens")
    assert says(found, "no multiple of the header's")
    assert says(read("imatrix", imatrix(of_layer(0, [7, 7, 7]))), "every expert counts the same")
    different = of_layer(0, [4, 0, 2], ("up",)) | of_layer(0, [4, 1, 1], ("down",))
    assert says(read("imatrix", imatrix(different)), "counts its tensors differently")


@pytest.mark.parametrize("row", [[1, -1, 2], [1, 0.5, 2], [1, np.nan, 2], [1, np.inf, 2], [0, 0, 0]])
def test_imatrix_counts_that_are_none(imatrix, read, row):
    with pytest.raises(FormatError):
        read("imatrix", imatrix(of_layer(0, row)))


def older(name: str, n_values: int = 8) -> bytes:
    """The format before GGUF: entries of a name, the number of calls, and a mean for each column."""
    entry = struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 10, n_values) + bytes(4 * n_values)
    return struct.pack("<i", 1) + entry + struct.pack("<ii", 10, 4) + b"text"


def test_imatrix_files_that_are_none(imatrix, read, write, tmp_path):
    with pytest.raises(FormatError, match=r"general\.type"):
        read("imatrix", imatrix(of_layer(0, [1, 2, 3]), kind="model"))
    with pytest.raises(FormatError, match="no counts of experts"):
        read("imatrix", imatrix({"blk.0.ffn_up.weight.counts": np.array([[3]])}))
    with pytest.raises(FormatError, match="a float32 for each expert"):
        read("imatrix", imatrix({"blk.0.ffn_up_exps.weight.counts": np.ones((2, 3))}))
    with pytest.raises(FormatError, match="older format"):
        read("imatrix", write("imatrix.dat", older("blk.0.ffn_up_exps.weight")))
    with pytest.raises(FormatError, match="not a GGUF model"):
        read("imatrix", write("imatrix.dat", struct.pack("<i", 3) + b"blk"))
    with pytest.raises(FormatError, match="converted from the older format"):
        read("imatrix", imatrix(of_layer(0, [512.0])))
    whole = imatrix(of_layer(0, [1, 2, 3])).read_bytes()
    for length in (8, len(whole) // 2, len(whole) - 24):
        with pytest.raises(FormatError):
            read("imatrix", write("cut.gguf", whole[:length]))


# ---- layer,expert


def test_layer_expert_csv(write, read):
    found = read("layer-expert-csv", write("a.csv", "layer,expert\n" + "0,0\n0,2\r\n3,1\n" * 2 + "3,0"))
    assert [(layer.block, list(layer.counts)) for layer in found.histograms] == [(0, [2, 0, 2]), (3, [1, 2, 0])]
    assert says(found, "order of tokens")
    assert says(found, "not known")
    padded = read("layer-expert-csv", write("a.csv", "0,1\n"), n_experts=4, top_k=1)
    assert (counts(padded), padded.tokens) == ([[0, 1, 0, 0]], 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("0,1\n-1,2\n", "line 2 is"),
        ("0,1\n1,-2\n", "line 2 is"),
        ("0,1\n1\n", "line 2 is"),
        ("0,1\n1,2,3\n4\n", "line 2 is"),
        ("0,1\n1,\n", "line 2 is"),
        ("0,1\n\n1,2\n", "line 2 is"),
        ("0,1\n1;2\n", "line 2 is"),
        ("0,1\n1, 2\n", "line 2 is"),
        ("0,1\n1,nan\n", "line 2 is"),
        ("0,1\n1,12345678\n", "line 2 is"),
        ("0,1\n0,99999\n", "no model has so many"),
        ("99999,1\n", "no model has so many"),
        ("4000,60000\n", "no model has so many"),
        ("expert,layer\n1,2\n", "line 1 is"),
        ("layer,expert\n", "no row"),
        ("", "no row"),
        ("1,2\n" + "3" * (9 * 2**20), "longer than"),
    ],
    ids=lambda text: text[:12],
)
def test_layer_expert_rows_that_are_none(write, read, content, reason):
    with pytest.raises(FormatError, match=reason):
        read("layer-expert-csv", write("a.csv", content))
    with pytest.raises(FormatError, match="at most 1"):
        read("layer-expert-csv", write("a.csv", "0,5\n"), n_experts=2)


def test_a_long_csv_takes_no_more_memory(write, read, tmp_path):
    """96 MiB here; what is held is a block of it."""
    path = tmp_path / "long.csv"
    with path.open("wb") as file:
        for _ in range(48):
            file.write(b"12,345\n3,45\n" * (2**21 // 12))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read("layer-expert-csv", path)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(counts(found)[1]) == 48 * (2**21 // 12)
    # A peak of the whole process, which other tests may have raised: it then grows less.
    assert grown_kib < 96 * 1024


# ---- mbolt


def perms(**changes: Any) -> dict[str, Any]:
    """As ``mbolt-sim cluster`` writes them."""
    layers = [
        {
            "layer": layer,
            "clique_perm": [0, 1, 2],
            "chain_perm": [0, 1, 2],
            "heat_perm": order,
            "heat": [float(n) for n in row],
            "lift": {},
            "cluster_sizes": [3],
        }
        for layer, (row, order) in enumerate(zip(COUNTS, [[0, 2, 1], [1, 0, 2]], strict=True))
    ]
    whole = {"n_layers": 2, "n_expert": 3, "n_tokens": 6, "train_frac": 0.8, "train_tokens": 6, "layers": layers}
    return whole | changes


def test_mbolt(write, read):
    found = read("mbolt", write("a.json", perms()))
    assert (counts(found), found.tokens, found.histograms[0].top_k, found.phase) == (COUNTS, 6, 1, "decode")
    assert says(found, "first 80%")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layers": 3},
        {"n_expert": 4},
        {"n_tokens": 4},
        {"n_tokens": 3},  # an expert that is selected more often than there are tokens
        {"n_tokens": -1},
        {"layers": [{"layer": layer, "heat": [2.0, 3.0, 1.0], "heat_perm": [0, 1, 2]} for layer in range(2)]},
        {"layers": [{"layer": layer, "heat": [2.0, 3.0, 1.0], "heat_perm": [1, 0]} for layer in range(2)]},
        {"layers": [{"layer": 0, "heat": [1.0, 2.0, 0.0]}] * 2},
        {"layers": [{"layer": 0, "heat": [1.5, 1.5, 0.0]}, {"layer": 1, "heat": [1, 2, 0]}]},
        {"layers": [{"layer": 0, "heat": [-1.0, 4.0, 0.0]}, {"layer": 1, "heat": [1, 2, 0]}]},
        {"layers": [{"layer": 0}, {"layer": 1}]},
        {"layers": None},
    ],
    ids=str,
)
def test_mbolt_permutations_that_are_none(write, read, changes):
    with pytest.raises(FormatError):
        read("mbolt", write("a.json", perms(**changes)))
    with pytest.raises(FormatError, match="expected 3"):
        read("mbolt", write("a.json", perms()), top_k=3)


# ---- fitz

PINS = "# EXPERT_CACHE_PIN_LIST v1\nn_layer 3\nn_expert 300\nlayer 0:\nlayer 1: 299 4\nlayer 2: 0\n"


def test_fitz_lists_as_the_tool_writes_them(write, read):
    head = "# source trace: router_trace.bin\n# top_k: 8\n# format: 'layer <il>: <eid> ...'\n"
    path = write("pins.txt", PINS.replace("n_layer", head + "n_layer").replace("layer 0:", "layer 0: "))
    found = read("fitz", path, top_k=8)
    assert rankings(found) == [[299, 4], [0]]
    assert "router_trace" not in found.model_dump_json()
    assert not says(found, "first 8 choices")
    assert says(read("fitz", path, top_k=4), "first 8 choices of each token were counted, and the model selects 4")


def test_fitz(write, read):
    found = read("fitz", write("pins.txt", PINS))
    assert [(layer.block, list(layer.ranking)) for layer in found.histograms] == [(1, [299, 4]), (2, [0])]
    assert rankings(read("fitz", write("pins.txt", PINS.replace("n_layer 3", "# n_layer = 3")))) == [[299, 4], [0]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("v1", "v2"),
        ("n_layer 3\n", ""),
        ("n_layer 3", "n_layer 2"),
        ("n_layer 3", "n_layer 3\nn_layer 3"),
        ("n_expert 300", "n_expert 299"),
        ("n_expert 300", "n_expert 0"),
        ("299 4", "4 4"),
        ("299 4", "-1"),
        ("299 4", "1.5"),
        ("layer 2", "layer 1"),
        ("layer 2: 0", "layer two: 0"),
        ("layer 1: 299 4\nlayer 2: 0\n", ""),
    ],
)
def test_fitz_lists_that_are_none(write, read, old, new):
    assert old in PINS
    with pytest.raises(FormatError):
        read("fitz", write("pins.txt", PINS.replace(old, new)))


# ---- moe-l2


def test_moe_l2(write, read):
    maps = {name: {"per_layer_domain_preferred": {"0": [2, 1], "10": [0]}} for name in ("code", "chat")}
    path = write("map.json", {"domains": maps, "num_experts": 4, "experts_per_token": 16, "model": "qwen"})
    found = read("moe-l2", path, domain="chat")
    assert [(layer.block, list(layer.ranking)) for layer in found.histograms] == [(0, [2, 1]), (10, [0])]
    assert (found.model, found.histograms[0].n_experts, found.histograms[0].top_k) == ("qwen", 4, None)
    with pytest.raises(FormatError, match="pass --domain"):
        read("moe-l2", path)
    with pytest.raises(FormatError, match="no domain"):
        read("moe-l2", path, domain="law")
    with pytest.raises(FormatError, match="num_experts 4"):
        read("moe-l2", path, domain="chat", n_experts=8)
    assert rankings(read("moe-l2", write("v4.json", {"layers": {"0": [7, 3]}}))) == [[7, 3]]
    for table in ({"per_layer": {"0": [7, 3]}}, {"0": [7, 3]}, {"per_layer_domain_preferred": {"0": [7, 3]}}):
        assert rankings(read("moe-l2", write("any.json", table))) == [[7, 3]]
    text = read("moe-l2", write("router.map", "# EXPERT_TOTAL 3\n0 3 7\n2 1\n"), n_experts=8)
    assert [(layer.block, list(layer.ranking)) for layer in text.histograms] == [(0, [3, 7]), (2, [1])]
    assert says(text, "by their ids")


def test_moe_l2_takes_the_most_frequent_first(write, read):
    """What a domain prefers to others leaves out what all of them select; what it selects most is listed beside it."""
    domain = {"per_layer_top": {"0": [5, 2, 1], "1": [4]}, "per_layer_domain_preferred": {"0": [2, 7], "1": []}}
    whole = {"domains": {"code": domain | {"total_lines": 9}}, "num_experts": 8}
    assert rankings(read("moe-l2", write("a.json", whole))) == [[5, 2, 1, 7], [4]]
    collected = {"per_layer_top": {"0": [5, 2]}, "per_layer_domain_preferred": {"0": [5, 2, 7, 1]}}
    assert rankings(read("moe-l2", write("a.json", {"domains": {"code": collected}}))) == [[5, 2, 7, 1]]
    assert rankings(read("moe-l2", write("a.json", {"domains": {"code": {"per_layer_top": {"0": [3]}}}}))) == [[3]]


def test_moe_l2_inside_a_model(tmp_path, read):
    def model(text: str | None) -> Path:
        writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama")
        if text is not None:
            writer.add_string("moe_l2.domain_expert_map", text)
        writer.add_tensor("token_embd.weight", np.zeros((1, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    table = {"domains": {"code": {"per_layer_domain_preferred": {"0": [2, 1]}}}, "num_experts": 4}
    assert rankings(read("moe-l2", model(json.dumps(table)))) == [[2, 1]]
    for text in (None, "{", "[1]"):
        with pytest.raises(FormatError):
            read("moe-l2", model(text))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", {}),
        ("a.json", {"layers": {"0": [1, 1]}}),
        ("a.json", {"layers": {"-1": [1]}}),
        ("a.json", {"layers": {"0": [-1]}}),
        ("a.json", {"layers": {"0": [99999]}}),
        ("a.json", {"layers": {"0": "1 2"}}),
        ("a.json", {"layers": {}}),
        ("a.json", {"layers": {"0": [4]}, "num_experts": 4}),
        ("a.json", {"domains": {"a": 3}}),
        ("a.map", "0 1 1\n"),
        ("a.map", "0 1\n0 2\n"),
        ("a.map", "0 -1\n"),
        ("a.map", "# only a comment\n"),
        ("a.map", "# EXPERT_TOTAL 12000\n"),
        ("a.map", "# EXPERT_TOTAL 3\n0 1\n"),
        ("a.map", "# EXPERT_TOTAL -1\n0 1\n"),
        ("a.json", {"per_layer_top": [1]}),
        ("a.json", {"per_layer_top": {"0": 3}}),
        ("a.json", {"per_layer_top": {"0": [1, 1]}}),
        ("a.json", {"per_layer_top": {"0": [True]}}),
        ("a.json", {"per_layer_top": {"0": [1]}, "layers": {"0": [2, 2]}}),
        ("a.gguf", "no model"),
    ],
    ids=str,
)
def test_moe_l2_maps_that_are_none(write, read, name, content):
    with pytest.raises(FormatError):
        read("moe-l2", write(name, content))


# ---- freetoken


def test_freetoken(write, read):
    found = read("freetoken", write("a.json", {"model": "Qwen3", "expert_counts": COUNTS}))
    assert (counts(found), found.model) == (COUNTS, "Qwen3")
    for rows in ([], [[1, 2], [3]], [[-1, 2]], [[0.5, 2]], [[True, 2]], [3], None):
        with pytest.raises(FormatError):
            read("freetoken", write("a.json", {"model": "Qwen3", "expert_counts": rows}))


def test_files_that_are_not_there_or_too_large(read, tmp_path):
    with pytest.raises(SparkError, match="no such file"):
        read("plumb", tmp_path / "absent.json")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FormatError, match="expected at most"):
        read("plumb", large)
    assert MOST_CELLS < 2**30
