from __future__ import annotations

import select
import signal
import struct
import sys

import pytest

from spark_agent.models.header import HeaderReader, header_reader
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path


@pytest.fixture(scope="module")
def reader():
    with header_reader() as made:
        yield made


def test_the_demo_model(reader):
    shape = read_model_shape(demo_model_path())
    header = reader.read(demo_model_path())
    assert (header.kind, header.architecture, header.quantisation) == ("moe", "qwen3moe", "q4_0")
    assert (header.n_experts, header.top_k, header.moe_blocks) == (64, 8, 4)
    assert (header.core_bytes, header.expert_bytes) == (shape.core_bytes, shape.expert_bytes_total)
    assert header.tensor_bytes == shape.core_bytes + shape.expert_bytes_total
    assert header.fingerprint == shape.fingerprint


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {}),
        ("projector", {"architecture": "clip"}),
        ("projector", {"general__type": "mmproj"}),
        ("adapter", {"general__type": "adapter", "adapter__type": "lora"}),
        ("adapter", {"adapter__type": "lora"}),
        ("imatrix", {"general__type": "imatrix"}),
        ("vocabulary", {"tensors": 0}),
        ("other", {"general__type": "something new"}),
    ],
)
def test_what_is_no_mixture_of_experts(reader, write_gguf, tmp_path, kind, options):
    header = reader.read(write_gguf(tmp_path / "file.gguf", **options))
    assert header.kind == kind
    assert header.reason == ""
    assert header.architecture == options.get("architecture", "llama")


def hostile(n_tensors: int, n_kv: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_kv) + rest


HOSTILE = {
    "empty": b"",
    "text": b"I am no model.\n" * 100,
    "magic alone": b"GGUF",
    "version": b"GGUF" + struct.pack("<IQQ", 2**31, 0, 0),
    "counts": hostile(2**63 - 1, 2**63 - 1),
    "many tensors": hostile(2**60, 0),
    "long key": hostile(0, 1, struct.pack("<Q", 2**62)),
    "long array": hostile(0, 1, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**62)),
    "long strings": hostile(0, 1, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**29) + bytes(100)),
    "alignment": hostile(0, 1, struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_broken_and_nothing_else(reader, tmp_path, name):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    header = reader.read(path)
    assert header.kind == "broken"
    assert header.reason
    assert reader.read(demo_model_path()).kind == "moe", "the next file is read"


def test_a_name_of_gigabytes_ends_at_the_limit_of_memory(reader, tmp_path):
    # A hole in a file costs no disk, but its bytes would be read into memory.
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(hostile(0, 2**20, struct.pack("<Q", 2**40)))
        file.truncate(2**42)
    header = reader.read(path)
    assert header.kind == "broken"
    assert reader.read(demo_model_path()).kind == "moe"


def test_a_file_that_takes_too_long():
    reader = HeaderReader(seconds_per_file=0.1)
    try:
        reader._started().send_signal(signal.SIGSTOP)
        header = reader.read(demo_model_path())
        assert header.kind == "broken"
        assert "more than 0.1 s" in header.reason
        assert reader._process is None
    finally:
        reader.close()


def test_what_the_process_takes_to_start_is_no_files_fault(monkeypatch, tmp_path):
    """On a busy machine that may be longer than any file takes."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 1\nexec "{sys.executable}" "$@"\n')
    slow.chmod(0o755)
    waits, waited = [], select.select

    def select_and_note(reading, writing, failing, seconds):
        waits.append(seconds)
        return waited(reading, writing, failing, seconds)

    monkeypatch.setattr("spark_agent.models.header.sys.executable", str(slow))
    monkeypatch.setattr("spark_agent.models.header.select.select", select_and_note)
    with header_reader() as reader:
        assert reader.read(demo_model_path()).kind == "moe"
        assert reader.read(demo_model_path()).kind == "moe"
    starting, first, second = waits
    assert starting > first == second


def test_a_process_that_does_not_start_is_said(monkeypatch):
    monkeypatch.setattr("spark_agent.models.header.sys.executable", "/bin/false")
    with header_reader() as reader:
        header = reader.read(demo_model_path())
        assert (header.kind, header.reason) == ("broken", "its reader could not be started")
        assert reader._process is None


def test_a_missing_shard_is_said(reader, write_gguf, tmp_path):
    header = reader.read(write_gguf(tmp_path / "big-00001-of-00003.gguf"))
    assert header.kind == "broken"
    assert "2 of 3 files" in header.reason
    assert "no such model file" in reader.read(tmp_path / "absent.gguf").reason
