"""Small files as tools keep them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from spark_runtime.models import demo_model_path

MODEL = "application/vnd.ollama.image.model"


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Write a GGUF of one small tensor, or none, with these texts as metadata."""

    def write(path: Path, architecture: str = "llama", tensors: int = 1, **texts: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(128)
        writer.add_block_count(1)
        for key, value in texts.items():
            writer.add_string(key.replace("__", "."), value)
        for index in range(tensors):
            writer.add_tensor(f"blk.{index}.attn_q.weight", np.zeros((32, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def demo_at() -> Callable[[Path], Path]:
    """Put the bundled demo model at a path."""

    def put(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(demo_model_path().read_bytes())
        return path

    return put


@pytest.fixture
def ollama_model() -> Callable[..., Path]:
    """Put files into a folder as Ollama does; gives the first one's blob."""

    def put(folder: Path, place: str, *layers: tuple[str, Path]) -> Path:
        blobs, described = [], []
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        for kind, path in layers:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            blob = folder / "blobs" / f"sha256-{digest}"
            blob.write_bytes(content)
            blobs.append(blob)
            described.append({"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)})
        manifest = folder / "manifests" / place
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": described}))
        return blobs[0]

    return put


@pytest.fixture
def hub_model() -> Callable[..., Path]:
    """Put a file into a cache of the Hugging Face hub: contents in blobs, names in snapshots."""

    def put(hub: Path, repository: str, name: str, content: bytes, revision: str = "a" * 40) -> Path:
        folder = hub / f"models--{repository.replace('/', '--')}"
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = folder / "snapshots" / revision / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
        return link

    return put
