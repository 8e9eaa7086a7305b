"""Traces that the tables are made of: published routing, and a model's own over texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from real_routing import workload_of

from spark_agent.recording import Segment, record
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.simulator.traces import Trace
from spark_schemas.split import split_of

CHUNK_TOKENS = 960
PROMPT_SHARE = 0.25
CODE = {"python", "js", "c", "rust", "go"}


@dataclass(frozen=True, slots=True)
class Sessions:
    """A trace with what judges it."""

    name: str
    trace: Trace
    workloads: list[str]
    held_out: list[bool]


def published(folder: Path, name: str, n_experts: int, split: int = 0) -> Sessions:
    """A folder of tokens.npz and sessions.json; sessions that fell into a loop are left out.

    The split is by number; another ``split`` holds other sessions out.
    """
    with np.load(folder / "tokens.npz") as file:
        experts, offsets = file["experts"].astype(np.int32), file["offsets"].astype(np.int64)
    about = json.loads((folder / "sessions.json").read_text())
    kept = [index for index, session in enumerate(about) if not session.get("repetition")]
    ids = tuple(np.ascontiguousarray(experts[:, layer]) for layer in range(experts.shape[1]))
    trace = Trace(ids, (n_experts,) * len(ids), offsets).select(kept)
    names = [hashlib.sha256(f"{folder.name} {index}{split or ''}".encode()).hexdigest() for index in kept]
    workloads = [workload_of(about[index]) for index in kept]
    return Sessions(name, trace, workloads, [split_of(session) == "held_out" for session in names])


def recorded(model: Path, texts: Path, chunks: int, split: int = 0) -> Sessions:
    """A model's selections over chunks of texts, a quarter of each as prompt.

    Every second project judges; with an odd ``split`` the others do.
    """
    parts, workloads, held_out = [], [], []
    with Engine.load(model, EngineOptions(n_threads=1)) as engine:
        shape = engine.shape
        for number, path in enumerate(sorted(texts.glob("*/*.txt"))):
            tokens = engine.tokenize(path.read_text(errors="replace")[: chunks * CHUNK_TOKENS * 8])
            for chunk in _chunks(tokens, chunks):
                prompt = int(len(chunk) * PROMPT_SHARE)
                segments = [Segment("prefill", chunk[:prompt]), Segment("decode", chunk[prompt:])]
                parts.append(record(engine, segments, keep_trace=True).token_trace())
                workloads.append("code" if path.parent.name in CODE else "text")
                held_out.append((number + split) % 2 == 1)
    ids = tuple(np.concatenate(layers).astype(np.int32) for layers in zip(*(part[1] for part in parts), strict=True))
    # Of prompts the last layer routes what needs an output only: it is left out.
    whole = [layer for layer, selected in enumerate(ids) if (selected >= 0).all()]
    trace = Trace(
        tuple(ids[layer] for layer in whole),
        tuple(shape.layers[layer].n_experts for layer in whole),
        np.cumsum([0, *(len(part[0]) for part in parts)]).astype(np.int64),
        np.concatenate([part[0] for part in parts]),
        tuple(shape.layers[layer].expert_bytes for layer in whole),
    )
    return Sessions(model.stem, trace, workloads, held_out)


def _chunks(tokens: list[int], most: int) -> Iterator[list[int]]:
    for start in range(0, min(len(tokens), most * CHUNK_TOKENS) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        yield tokens[start : start + CHUNK_TOKENS]
