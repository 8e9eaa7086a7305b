"""exllamav3's profiles as its tools write them, packed and not, and what is refused."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
from found import COUNTS, counts, rankings, says

from spark_agent.formats.reading import FormatError

RANKING = [[0, 2, 1], [1, 0, 2]]
KEYS = ["model.layers.3.mlp", "model.layers.4.mlp"]


def safetensors(metadata: Any = None, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> bytes:
    """Counts alone, changed as told, or these tensors."""
    entries, data = {}, b""
    for name, array in ({"counts": np.array(COUNTS, dtype="<i8")} if tensors is None else tensors).items():
        kind = {"i8": "I64", "i4": "I32", "f8": "F64"}[array.dtype.str[1:]]
        span = [len(data), len(data) + array.nbytes]
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span} | changes
        data += array.tobytes()
    header = json.dumps(entries | ({} if metadata is None else {"__metadata__": metadata})).encode()
    return struct.pack("<Q", len(header)) + header + data


def npz(compress: bool = True, **arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def test_a_packed_profile(write, read):
    bound = {"fingerprint": json.dumps({"architecture": "Glm5", "layers": 2}), "source_bank": "counts_decode",
             "layer_keys": json.dumps(KEYS), "has_ranking": "1", "layers": "2", "experts": "3", "prompts": "1",
             "census_shape": "[1, 2, 3]", "packed_from": "wiki.npz", "corpus": "wiki"}  # fmt: skip
    whole = {"ranking": np.array(RANKING, dtype="<i4"), "counts": np.array(COUNTS, dtype="<i8"),
             "census": np.array([COUNTS], dtype="<i4")}  # fmt: skip
    found = read("exl3moe", write("a.exl3moe", safetensors(bound, whole)))
    assert counts(found) == COUNTS
    assert ([layer.block for layer in found.histograms], found.phase) == ([3, 4], "decode")
    assert found.model is not None
    assert "Glm5" in found.model
    assert says(read("exl3moe", write("a.exl3moe", safetensors())), "of which model")
    assert read("exl3moe", write("a.exl3moe", safetensors({"source_bank": "counts_prefill"}))).phase == "prefill"


def test_a_profile_that_was_packed_without_counts(write, read):
    content = safetensors({"layer_keys": json.dumps(KEYS[::-1])}, {"ranking": np.array(RANKING, dtype="<i4")})
    found = read("exl3moe", write("a.exl3moe", content), top_k=2)
    assert rankings(found) == RANKING[::-1]
    assert [layer.block for layer in found.histograms] == [3, 4]
    assert not found.has_counts
    assert says(found, "only an order")


def test_a_census(write, read, tmp_path):
    prompts = np.array([COUNTS, COUNTS], dtype="<i8")
    content = npz(counts_decode=prompts, counts_prefill=prompts * 5)
    found = read("exl3moe", write("a.npz", content))
    assert (counts(found), found.phase) == ((prompts.sum(axis=0)).tolist(), "decode")
    assert says(found, "largely chance")
    empty = npz(counts_decode=prompts * 0, counts_prefill=prompts * 5, other=np.array(["text"]))
    assert read("exl3moe", write("a.npz", empty)).phase == "prefill"
    flat = npz(compress=False, counts=np.asfortranarray(COUNTS))
    assert (counts(read("exl3moe", write("a.npz", flat))), found.model) == (COUNTS, None)
    write("a.meta.json", {"layer_keys": KEYS, "fingerprint": {"architecture": "Glm5"}, "corpus": "wiki"})
    named = read("exl3moe", write("a.npz", content))
    assert [layer.block for layer in named.histograms] == [3, 4]
    assert named.model == '{"architecture": "Glm5"}'
    assert "wiki" not in named.model_dump_json()


def test_split_statistics(write, read):
    found = read("exl3moe", write("a.json", dict(zip(KEYS, COUNTS, strict=True))))
    assert ([layer.block for layer in found.histograms], counts(found)) == ([3, 4], COUNTS)
    draft = {"model.layers.0.mlp": COUNTS[0], "mtp.layers.0.mlp": COUNTS[1]}
    found = read("exl3moe", write("a.json", draft))
    assert ([layer.block for layer in found.histograms], counts(found)) == ([0], COUNTS[:1])
    assert says(found, "1 layers of a draft head")
    for value in ({"mtp.layers.0.mlp": [1, 2]}, {"a.layers.0.mlp": [1, 2], "b.layers.0.mlp": [1, 2]}):
        with pytest.raises(FormatError):
            read("exl3moe", write("a.json", value))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}",
        safetensors({"fingerprint": "text"}),
        safetensors({"fingerprint": "[1]"}),
        safetensors({"fingerprint": {"architecture": "Glm5"}}),
        safetensors({"layer_keys": "[]"}),
        safetensors({"layer_keys": '["model.layers.1.mlp", "model.layers.1.mlp"]'}),
        safetensors({"layer_keys": '["model.layers.1.mlp", "head"]'}),
        safetensors({"layer_keys": '["model.layers.1.mlp", "model.layers.9999.mlp"]'}),
        safetensors({"layer_keys": "{"}),
        safetensors([]),
        safetensors(dtype="BF16"),
        safetensors(shape=[3, 3]),
        safetensors(shape=[2**40, 3]),
        safetensors(shape=[6]),
        safetensors(shape=[-2, -3]),
        safetensors(data_offsets=[8, 56]),
        safetensors(data_offsets=[-8, 40]),
        safetensors(data_offsets=None),
        safetensors(dtype="F64"),
        safetensors()[:-1],
        safetensors(tensors={"ranking": np.array([[0, 0, 1], [1, 0, 2]], dtype="<i4")}),
        safetensors(tensors={"ranking": np.array([[0, 1, 3], [1, 0, 2]], dtype="<i4")}),
        safetensors(tensors={"ranking": np.array([[0, 1, -1], [1, 0, 2]], dtype="<i4")}),
        safetensors(tensors={"ranking": np.array(RANKING, dtype="<f8")}),
        safetensors(tensors={"ranking": np.array(RANKING[:1], "<i4"), "counts": np.array(COUNTS, "<i8")}),
        safetensors(tensors={"ranking": np.array(RANKING[::-1], "<i4"), "counts": np.array(COUNTS, "<i8")}),
        safetensors({"layers": "3"}),
        safetensors({"experts": "4"}),
        safetensors(tensors={"counts": np.array([[1, -1, 0]], "<i8")}),
        safetensors(tensors={"counts": np.array([[1, np.nan, 0]], "<f8")}),
    ],
    ids=range(35),
)
def test_packed_profiles_that_are_none(write, read, content):
    with pytest.raises(FormatError):
        read("exl3moe", write("a.exl3moe", content))


def test_censuses_that_are_none(write, read):
    for arrays in (
        {"counts_decode": np.zeros((2, 2), "<i8")},
        {"other": np.ones((2, 2), "<i8")},
        {"counts": np.ones(3, "<i8")},
        {"counts": np.full((2, 2), -1, "<i8")},
        {"counts": np.full((2, 2), np.nan)},
        {"counts": np.full((4, 1, 2), 2**62, "<i8")},
        {"counts": np.array([["a"]])},
        {"counts": np.ones((2, 2), dtype=complex)},
    ):
        with pytest.raises(FormatError):
            read("exl3moe", write("a.npz", npz(**arrays)))
    pickled = npz(compress=False, counts=np.array([[{}]], dtype=object))
    with pytest.raises(FormatError, match="of type object"):
        read("exl3moe", write("a.npz", pickled))
    good = npz(counts=np.ones((2, 3), "<i8"))
    for content in (b"", b"PK\x03\x04", good[:-30], good[:40]):
        with pytest.raises(FormatError):
            read("exl3moe", write("a.npz", content))
    write("a.meta.json", {"layer_keys": ["model.layers.1.mlp"]})
    with pytest.raises(FormatError, match="a name for each of 2 layers"):
        read("exl3moe", write("a.npz", good))
    write("b.meta.json", "[]")
    with pytest.raises(FormatError, match="no object"):
        read("exl3moe", write("b.npz", good))


def test_a_bomb_is_not_unpacked(write, read):
    """A header that claims little, a gigabyte behind it; and one that claims what is not there."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<i8", "fortran_order": False, "shape": (1, 2)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("counts.npy", "w") as file:
        file.write(head.getvalue() + np.array([[1, 2]], "<i8").tobytes())
        for _ in range(64):
            file.write(bytes(2**20))
    assert len(buffer.getvalue()) < 2**18
    assert counts(read("exl3moe", write("a.npz", buffer.getvalue()))) == [[1, 2]]
    large = io.BytesIO()
    np.lib.format.write_array_header_1_0(large, {"descr": "<i8", "fortran_order": False, "shape": (2**20, 2**20)})
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("counts.npy", large.getvalue())
    with pytest.raises(FormatError, match="bytes, its entry"):
        read("exl3moe", write("a.npz", buffer.getvalue()))
    broken = bytearray(npz(counts=np.ones((64, 64), "<i8")))
    broken[80] ^= 0xFF
    with pytest.raises(FormatError):
        read("exl3moe", write("a.npz", bytes(broken)))
