"""``spark predict``: predictors of the next selection, learned from local traces and judged on held-out sessions."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_agent.context import AgentContext
from spark_agent.errors import SparkError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_agent.output import Output
    from spark_agent.prediction.inputs import Recorded
    from spark_runtime.predict.fitted import FittedLayer, Trainer
    from spark_runtime.predict.kinds import PredictorKind
    from spark_runtime.predict.study import Judged, Sessions
    from spark_runtime.simulator.study import PhaseOf

__all__ = ["predict_app"]

predict_app = typer.Typer(
    no_args_is_help=True, help="Predictors of the next selections, learned from local traces and kept here."
)
_DEVICES = ("auto", "numpy", "cpu", "cuda")
_LEAST_TOKENS = 100
Inputs = Annotated[
    list[Path],
    typer.Argument(metavar="INPUT", help="Traces of spark-agent record --trace: folders or files of one model."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@predict_app.command("train")
def train_command(
    inputs: Inputs,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the predictors in this file (.npz).")
    ] = None,
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            help="frequency, temporal, moving-average, naive-bayes; or ridge, linear or mlp with what they read, "
            "joined by +: layers1 or layers2 (the layers before), average, hidden or router; e.g. "
            "ridge:hidden+layers2. May be repeated. [default: all that the input allows]"
        ),
    ] = None,
    loss: Annotated[
        str, typer.Option(help="What linear and mlp are trained for: bce, listnet, ranknet, or all of them.")
    ] = "ranknet",
    phase: Annotated[str, typer.Option(help="decode, prefill, or both.")] = "decode",
    tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens to learn from, spread over the sessions; 0: all.")
    ] = 200_000,
    width: Annotated[int, typer.Option(min=1, max=65536, help="Of a network's hidden layer.")] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="Of a network's training.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of a network's start and its batches.")] = 0,
    device: Annotated[
        str,
        typer.Option(
            help="Where networks are trained: numpy, or with PyTorch (the extra predict) cpu or cuda; auto is cuda if "
            "there is one, else numpy."
        ),
    ] = "auto",
    json: Json = False,
) -> None:
    """Learn predictors from the calibration sessions, and judge them on the held-out ones."""
    from spark_runtime.predict.kinds import TRAINED
    from spark_runtime.predict.mlp import Training
    from spark_runtime.predict.study import judge, learn

    context = AgentContext.create(json_mode=json)
    started = time.monotonic()
    kinds = _kinds(predictor or (), loss)
    if device not in _DEVICES:
        raise UsageError(f"--device: found {device!r}, expected one of {', '.join(_DEVICES)}")
    recorded = _read(context, inputs, phase, kinds)
    kinds = kinds or _all_kinds(recorded, loss)
    where, trainer = _trainer(device, needed=any(kind.learner in TRAINED for kind in kinds))
    calibrating = recorded.side(held_out=False, most_tokens=tokens)
    judging = recorded.side(held_out=True)
    _check_sides(calibrating, judging)
    training = Training(width=width, epochs=epochs, seed=seed)
    fitted: defaultdict[PredictorKind, list[FittedLayer]] = defaultdict(list)
    n_steps = 2 * len(kinds) * len(recorded.layers)
    with context.output.progress("learning and judging", n_steps) as advance:
        for _, kind, one in learn(kinds, calibrating, training, trainer):
            fitted[kind].append(one)
            advance(1)
        judged = judge(fitted, judging, advance)
    if output is not None:
        from spark_agent.prediction.files import save_predictors

        save_predictors(
            output,
            recorded.shape,
            recorded.layers,
            [
                {kind: recorded.hidden_width(kind, layer) for kind in recorded.hidden_kinds}
                for layer in range(len(recorded.layers))
            ],
            fitted,
            phase=phase,
            width=width,
            sessions=calibrating.trace.n_sessions,
            tokens=calibrating.trace.n_tokens,
        )
    about = {
        "n_calibration": calibrating.trace.n_sessions,
        "tokens_calibration": calibrating.trace.n_tokens,
        "device": where,
        "seed": seed,
        "output": None if output is None else str(output),
    }
    _report(context.output, recorded, judging, judged, about, time.monotonic() - started)


@predict_app.command("eval")
def eval_command(
    inputs: Inputs,
    predictors: Annotated[Path, typer.Option("--predictors", help="File of spark predict train --output.")],
    all_sessions: Annotated[
        bool, typer.Option("--all-sessions", help="Judge on every session: of traces that nothing was learned from.")
    ] = False,
    json: Json = False,
) -> None:
    """Judge predictors that were kept, on held-out sessions."""
    from spark_agent.prediction.files import load_predictors
    from spark_agent.traces import load_traces
    from spark_runtime.predict.study import judge

    context = AgentContext.create(json_mode=json)
    started = time.monotonic()
    about, fitted = load_predictors(predictors, load_traces(inputs[0]).shape)
    recorded = _read(context, inputs, about.phase, about.kinds)
    blocks = [layer.block for layer in about.layers]
    if blocks != recorded.blocks:
        raise SparkError(
            f"{predictors} predicts blocks {blocks}, but the trace has whole tokens of {recorded.blocks}",
            "train on traces like these",
        )
    judging = recorded.side(held_out=None if all_sessions else True)
    if not judging.trace.n_tokens:
        raise SparkError("no held-out session has tokens", "record more sessions, or judge on --all-sessions")
    _check_widths(predictors, about.layers, recorded)
    n_steps = len(fitted) * len(recorded.layers)
    with context.output.progress("judging", n_steps) as advance:
        judged = judge(fitted, judging, advance)
    known: dict[str, Any] = {
        "n_calibration": about.sessions,
        "tokens_calibration": about.tokens,
        "predictors": str(predictors),
    }
    _report(context.output, recorded, judging, judged, known, time.monotonic() - started)


def _kinds(names: Sequence[str], loss: str) -> list[PredictorKind]:
    from spark_runtime.predict.kinds import parse_kind

    losses = _losses(loss)
    try:
        found = [kind for name in names for kind in parse_kind(name, losses)]
    except ValueError as error:
        raise UsageError(f"--predictor: {error}") from error
    return list(dict.fromkeys(found))


def _all_kinds(recorded: Recorded, loss: str) -> list[PredictorKind]:
    from spark_runtime.predict.kinds import default_kinds

    return default_kinds(recorded.hidden_kinds, _losses(loss))


def _losses(name: str) -> list[Any]:
    from spark_runtime.predict.losses import LOSSES

    if name not in {*LOSSES, "all"}:
        raise UsageError(f"--loss: found {name!r}, expected one of {', '.join(LOSSES)}, all")
    return list(LOSSES) if name == "all" else [name]


def _read(context: AgentContext, paths: Sequence[Path], phase: str, kinds: Sequence[PredictorKind]) -> Recorded:
    from spark_agent.prediction.inputs import read_recorded

    recorded = read_recorded(paths, _phase(phase), _wanted(kinds))
    for note in recorded.notes:
        context.output.warning(note)
    return recorded


def _wanted(kinds: Sequence[PredictorKind]) -> list[str] | None:
    """Hidden states that are read; ``None`` when whatever is there will be."""
    return [kind.hidden for kind in kinds if kind.hidden is not None] if kinds else None


def _phase(name: str) -> PhaseOf:
    match name:
        case "decode" | "prefill" | "both":
            return name
    raise UsageError(f"--phase: found {name!r}, expected decode, prefill or both")


def _trainer(device: str, *, needed: bool) -> tuple[str, Trainer]:
    from spark_runtime.predict import mlp, mlp_torch

    if not needed:
        return "numpy", mlp.train
    if device == "auto":
        device = "cuda" if mlp_torch.cuda_is_there() else "numpy"
    if device == "numpy":
        return device, mlp.train
    try:
        mlp_torch.check_device(device)
    except mlp_torch.TorchMissingError as error:
        raise SparkError(
            f"--device {device}: {error}", "pip install 'spark-moe[predict]', or train with --device numpy"
        ) from error
    return device, partial(mlp_torch.train, device=device)


def _check_sides(calibrating: Sessions, judging: Sessions) -> None:
    for side, name in ((calibrating, "calibration"), (judging, "held-out")):
        if side.trace.n_tokens < _LEAST_TOKENS:
            raise SparkError(
                f"{side.trace.n_tokens} tokens of {name} sessions, expected at least {_LEAST_TOKENS}",
                "record more sessions with --trace: each is on one side of the split by its hash",
            )


def _check_widths(path: Path, layers: Sequence[Any], recorded: Recorded) -> None:
    for place, layer in enumerate(layers):
        for kind in recorded.hidden_kinds:
            found = recorded.hidden_width(kind, place)
            if layer.hidden.get(kind) != found:
                raise SparkError(
                    f"{path} reads {layer.hidden.get(kind)} values of block {layer.block}, the trace has {found}",
                    "train on traces like these",
                )


def _report(
    output: Output,
    recorded: Recorded,
    judging: Sessions,
    judged: Sequence[Judged],
    about: dict[str, Any],
    seconds: float,
) -> None:
    top_k = max(ids.shape[1] for ids in judging.trace.ids)
    rows = [_row(one, top_k, recorded.blocks) for one in judged]
    value = {
        "fingerprint": recorded.shape.fingerprint,
        "top_k": top_k,
        "n_held_out": judging.trace.n_sessions,
        "tokens_held_out": judging.trace.n_tokens,
        **about,
        "notes": recorded.notes,
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    output.result(value, lambda: _show(output, judged, top_k))
    output.info(
        f"learned from {about['tokens_calibration']} tokens of {about['n_calibration']} sessions, judged on "
        f"{judging.trace.n_tokens} of {judging.trace.n_sessions} held-out ones; recall is a mean over sessions and all "
        "layers but the first"
    )
    if any(one.kind.hidden == "router" for one in judged):
        output.info("router: what the router itself reads, which nobody has before it: the ceiling, not a predictor")


def _row(one: Judged, top_k: int, blocks: Sequence[int]) -> dict[str, Any]:
    recall = one.recall
    return {
        "predictor": one.kind.name,
        "loss": one.kind.loss_name,
        **{f"recall_at_{count}": recall.of(count).mean for count in (8, 16, 24)},
        "cost_ms": one.cost_s * 1000,
        "recall_at_top_k": recall.of(top_k).mean,
        "recall_at_2_top_k": recall.of(2 * top_k).mean,
        "recall_at_3_top_k": recall.of(3 * top_k).mean,
        "intervals": {
            str(count): [interval.low, interval.high] for count, interval in zip(recall.counts, recall.at, strict=True)
        },
        "first_layer_recall_at_top_k": one.first_layer.of(top_k).mean,
        "layers": [{"block": block, "recall_at_top_k": value} for block, value in zip(blocks, one.layers, strict=True)],
        "ceiling": one.kind.hidden == "router",
    }


def _show(output: Output, judged: Sequence[Judged], top_k: int) -> None:
    counts = sorted({8, 16, 24, top_k, 2 * top_k, 3 * top_k})
    columns = ("predictor", "loss", *(f"@{count}" for count in counts), f"low @{top_k}", f"high @{top_k}", "cost ms")
    output.table(
        columns,
        [
            (
                one.kind.name,
                one.kind.loss_name or "-",
                *(f"{one.recall.of(count).mean:.3f}" for count in counts),
                f"{one.recall.of(top_k).low:.3f}",
                f"{one.recall.of(top_k).high:.3f}",
                f"{one.cost_s * 1000:.3f}",
            )
            for one in judged
        ],
    )
