"""Predictors of the next selections with and without hidden states, on trained models: the published table, and ours.

Usage: predictor_tables.py --model GGUF [--model GGUF …] --texts FOLDER [--chunks N] [--device cuda] [--out FILE].

Each model computes chunks of 960 tokens of every text; three quarters of a chunk count as decoded and are what is
predicted. Every second text judges. Beside these sessions of one text there are mixed ones, as hostile as can be:
pieces of 64 tokens of all texts of the same side in turn, in one context.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_routing import CHUNK_TOKENS, PROMPT_SHARE
from report import parser_of, report

from spark_agent.recording import Segment, record
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.predict import mlp, mlp_torch
from spark_runtime.predict.fitted import FittedLayer
from spark_runtime.predict.kinds import PredictorKind, parse_kind
from spark_runtime.predict.losses import LOSSES
from spark_runtime.predict.study import Judged, Sessions, judge, learn
from spark_runtime.session_counts import TokenTrace
from spark_runtime.simulator.traces import Trace

PIECE_TOKENS = 64
PUBLISHED: dict[tuple[str, str | None], tuple[float, float | None, float | None]] = {
    ("temporal", None): (0.24, None, None),
    ("ridge:hidden", "squared"): (0.496, 0.646, 0.720),
    ("mlp:hidden", "bce"): (0.528, 0.683, 0.759),
}
"""Recall at 8, 16 and 24 of another model: 256 experts, top-8, coding sessions."""
KINDS = (
    "frequency", "temporal", "moving-average", "naive-bayes",
    "ridge:layers1", "ridge:layers1+average", "ridge:layers2", "ridge:layers2+average",
    "ridge:hidden", "ridge:hidden+layers2", "ridge:hidden+layers2+average", "ridge:router",
)  # fmt: skip
NETWORKS = {
    "linear:hidden": LOSSES,
    "linear:router": LOSSES[1:2],
    "mlp:hidden": LOSSES,
    "mlp:hidden+layers2+average": LOSSES[1:2],
    "mlp:router": LOSSES[1:2],
}
MIXED = ("frequency", "temporal", "moving-average", "naive-bayes", "ridge:layers2", "ridge:layers2+average",
         "ridge:hidden", "ridge:hidden+layers2+average", "ridge:router")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token lists of sessions, and which of them judge."""

    name: str
    sessions: list[list[int]]
    held_out: list[bool]


def corpora(engine: Engine, texts: Path, chunks: int) -> list[Corpus]:
    """Sessions of one text each, and as many of all texts of a side in turn."""
    plain, mixed = Corpus("one text a session", [], []), Corpus("all domains in turn", [], [])
    sides: dict[bool, list[list[int]]] = {True: [], False: []}
    for number, path in enumerate(sorted(texts.glob("*/*.txt"))):
        tokens = engine.tokenize(path.read_text(errors="replace")[: chunks * CHUNK_TOKENS * 8])
        whole = len(tokens[: chunks * CHUNK_TOKENS]) // CHUNK_TOKENS
        sides[number % 2 == 1].append(tokens[: whole * CHUNK_TOKENS])
        for start in range(0, whole * CHUNK_TOKENS, CHUNK_TOKENS):
            plain.sessions.append(tokens[start : start + CHUNK_TOKENS])
            plain.held_out.append(number % 2 == 1)
    for held_out, side in sides.items():
        pieces = [list(pieces_of(tokens)) for tokens in side]
        turns = [part for turn in range(max(map(len, pieces))) for parts in pieces for part in parts[turn : turn + 1]]
        joined = [token for part in turns for token in part]
        for start in range(0, len(joined) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            mixed.sessions.append(joined[start : start + CHUNK_TOKENS])
            mixed.held_out.append(held_out)
    return [plain, mixed]


def pieces_of(tokens: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(tokens), PIECE_TOKENS):
        yield tokens[start : start + PIECE_TOKENS]


def recorded(engine: Engine, corpus: Corpus) -> tuple[Sessions, Sessions]:
    """Decoded tokens of the calibration and of the held-out sessions."""
    sides: dict[bool, list[TokenTrace]] = {True: [], False: []}
    for tokens, held_out in zip(corpus.sessions, corpus.held_out, strict=True):
        prompt = int(len(tokens) * PROMPT_SHARE)
        segments = [Segment("prefill", tokens[:prompt]), Segment("decode", tokens[prompt:])]
        parts: list[TokenTrace] = []
        record(engine, segments, on_trace=parts.append)
        (whole,) = parts
        some = whole.decode
        hidden = {kind: [rows[some] for rows in layers] for kind, layers in whole.hidden.items()}
        sides[held_out].append(TokenTrace(whole.decode[some], [ids[some] for ids in whole.ids], hidden))
    calibrating, judging = (joined(engine, sides[held_out]) for held_out in (False, True))
    return calibrating, judging


def joined(engine: Engine, parts: Sequence[TokenTrace]) -> Sessions:
    layers = range(len(engine.shape.layers))
    trace = Trace(
        tuple(np.concatenate([part.ids[layer] for part in parts]).astype(np.int32) for layer in layers),
        tuple(layer.n_experts for layer in engine.shape.layers),
        np.cumsum([0, *(len(part.decode) for part in parts)]).astype(np.int64),
    )
    hidden = {
        kind: [np.concatenate([part.hidden[kind][layer] for part in parts]) for layer in layers]
        for kind in parts[0].hidden
    }

    def hidden_of(kind: str, layer: int) -> NDArray[np.floating]:
        return hidden[kind][layer]

    return Sessions(trace, hidden_of)


def measured(
    kinds: Sequence[PredictorKind], calibrating: Sessions, judging: Sessions, training: mlp.Training, device: str
) -> list[Judged]:
    trainer = mlp.train if device == "numpy" else partial(mlp_torch.train, device=device)
    fitted: dict[PredictorKind, list[FittedLayer]] = {kind: [] for kind in kinds}
    started = time.monotonic()
    for layer, kind, one in learn(kinds, calibrating, training, trainer):
        fitted[kind].append(one)
        sys.stderr.write(f"layer {layer}: {kind.name} {kind.loss or ''}: {time.monotonic() - started:.0f} s\n")
    return judge(fitted, judging)


def row_of(model: str, corpus: str, one: Judged) -> dict[str, Any]:
    published = PUBLISHED.get((one.kind.name, one.kind.loss_name), (None, None, None))
    return {
        "model": model,
        "sessions": corpus,
        "predictor": one.kind.name,
        "loss": one.kind.loss_name,
        **{f"recall_at_{count}": round(one.recall.of(count).mean, 4) for count in (8, 16, 24)},
        "interval_at_8": [round(one.recall.of(8).low, 4), round(one.recall.of(8).high, 4)],
        "published": list(published),
        "first_layer_recall_at_8": round(one.first_layer.of(8).mean, 4),
        "layers_recall_at_8": [round(value, 4) for value in one.layers],
        "cost_ms": round(one.cost_s * 1000, 4),
        "ceiling": one.kind.hidden == "router",
    }


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=8, help="of 960 tokens, from each text")
    parser.add_argument(
        "--device", choices=("numpy", "cpu", "cuda"), default="numpy", help="where networks are trained"
    )
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    started = time.monotonic()
    training = mlp.Training(epochs=options.epochs)
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    networks = [kind for name, losses in NETWORKS.items() for kind in parse_kind(name, losses)]
    for path in options.model:
        load = EngineOptions(n_ctx=CHUNK_TOKENS, n_threads=1, hidden=("input", "router"))
        with Engine.load(path, load) as engine:
            for number, corpus in enumerate(corpora(engine, options.texts, options.chunks)):
                calibrating, judging = recorded(engine, corpus)
                sys.stderr.write(f"{path.stem}, {corpus.name}: {time.monotonic() - started:.0f} s\n")
                about[f"{path.stem}, {corpus.name}"] = {
                    "calibration_sessions": calibrating.trace.n_sessions,
                    "calibration_tokens": calibrating.trace.n_tokens,
                    "held_out_sessions": judging.trace.n_sessions,
                    "held_out_tokens": judging.trace.n_tokens,
                }
                names = MIXED if number else KINDS
                kinds = [kind for name in names for kind in parse_kind(name)] + ([] if number else networks)
                judged = measured(kinds, calibrating, judging, training, options.device)
                rows += [row_of(path.stem, corpus.name, one) for one in judged]
    result = {
        "sessions": about,
        "device": options.device,
        "epochs": options.epochs,
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
