"""``spark-agent bench``: the published tables, on this machine."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_agent.context import AgentContext
from spark_agent.errors import SparkError, UsageError
from spark_agent.interrupts import interrupts_at_checks
from spark_agent.measured import PREFETCHED, RING, measured_of
from spark_agent.prefetching import Paying, Prefetch, describe_budget, what_pays
from spark_agent.sizes import format_size
from spark_agent.tiering import MOST_THREADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_agent.benchmark import Benchmark, Row
    from spark_agent.measured import Measured
    from spark_agent.output import Output
    from spark_runtime.link import Link
    from spark_runtime.placement import FloatArray
    from spark_schemas.model import ModelShape

__all__ = ["bench_command"]

_COLUMNS = (
    "config",
    "residency",
    "slots",
    "decode tok/s",
    "of all-gpu",
    "prefill tok/s",
    "cold/token",
    "cold rate",
    "early/token",
    "used",
    "memory",
    "planned",
    "off by",
    "logits",
)
_DIGEST_SHOWN = 8


def bench_command(
    model: Annotated[Path | None, typer.Argument(help="GGUF file; the bundled demo model if left out.")] = None,
    residency: Annotated[
        list[float] | None, typer.Option(help="Share of the experts in slots; may be repeated. [default: 0.6, 0.31]")
    ] = None,
    ring: Annotated[
        list[float] | None,
        typer.Option(help="Share of the slots that experts move through; may be repeated. [default: 0.25, 0.5, 1]"),
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(
            help="Take a profile instead of counting one: a manifest (file or pulled name), or a file of spark import."
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before decode.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded one at a time, the first 16 not timed.")] = 144,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 4096,
    calibration: Annotated[int, typer.Option(min=1, help="Other tokens that are counted for the profile.")] = 512,
    ubatch: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt computed at once; 0: 2048 on a GPU if it fits, else 512.")
    ] = 0,
    devices: Annotated[int, typer.Option(min=0, help="GPUs to spread the layers over; 0: all.")] = 0,
    threads: Annotated[
        int, typer.Option(min=0, max=MOST_THREADS, help="CPU threads; 0: all this process may use.")
    ] = 0,
    prefetch: Annotated[
        Prefetch, typer.Option(help="Measure fetching early as well: on, off, or auto, which is on with a GPU.")
    ] = Prefetch.AUTO,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure speed, cold hits, memory and bits of every way to run a model, in one run on this machine."""
    from spark_agent.benchmark import Benchmark, Workload
    from spark_runtime.gguf_file import read_gguf
    from spark_runtime.model_shape import shape_of

    context = AgentContext.create(json_mode=json)
    residencies = _shares("--residency", residency, (0.6, 0.31))
    rings = _shares("--ring", ring, (0.25, 0.5, 1.0))
    path = context.model_path(model)
    file = read_gguf(path)
    shape = shape_of(file)
    profile, told = _profile(context.output, manifest, shape)
    workload = Workload.within(shape, prompt, tokens, prefill, calibration)
    benchmark = Benchmark(file, shape, workload, residencies, rings, threads, ubatch, devices, profile)
    paying = what_pays()
    benchmark.prefetch = prefetch is Prefetch.ON or (prefetch is Prefetch.AUTO and paying.use != "off")
    with (
        interrupts_at_checks() as check,
        context.output.progress("measuring", benchmark.steps) as advance,
    ):
        benchmark.check = check
        rows = benchmark.run(advance)
    value = _value(benchmark, rows, _link(context.output, benchmark), told)
    value["prefetch"] = _prefetch_line(rows, prefetch, paying, value)
    _report(context.output, benchmark, rows, value)


def _profile(
    output: Output, named: str | None, shape: ModelShape
) -> tuple[Sequence[FloatArray] | None, dict[str, Any] | None]:
    """Frequencies of a manifest or an imported profile, and what is told of it."""
    from spark_agent.imported_start import find_start
    from spark_runtime.tier_start import manifest_frequency

    if named is None:
        return None, None
    manifest, imported = find_start(named, shape)
    if manifest is not None:
        return manifest_frequency(manifest), {"source": "manifest", "workload": manifest.workload, "format": None}
    if imported is None:
        raise SparkError(f"{named} is no profile")
    imported.warn(output, used=True)
    return imported.frequency(), {
        "source": "imported",
        "workload": imported.workload,
        "format": imported.profile.format,
    }


def _shares(option: str, given: list[float] | None, default: tuple[float, ...]) -> tuple[float, ...]:
    for share in given or ():
        if not 0 < share <= 1:
            raise UsageError(f"{option}: found {share:g}, expected a share above 0, at most 1", f"e.g. {option} 0.6")
    return tuple(dict.fromkeys(given)) if given else default


def _link(output: Output, benchmark: Benchmark) -> Link | None:
    """What a copy takes here, which tells a simulation of other models what their misses would."""
    from spark_runtime.link import LinkError, measure_link

    try:
        return measure_link(on_gpu=benchmark.on_cards)
    except LinkError as error:
        output.warning(f"the link to the GPU was not measured: {error}")
        return None


def _prefetch_line(rows: list[Row], asked: Prefetch, paying: Paying, value: dict[str, Any]) -> str:
    """Whether fetching early pays, as measured, or why it was not; and what fits beside a layer."""
    measured = _measured(value)
    budget = None if measured is None or value["device"] != "gpu" else measured.link_budget
    told = _prefetch_gain(rows, asked, paying)
    if budget is not None:
        told += f"; {describe_budget(budget)}"
    if measured is not None and measured.prefetch_gain is not None:
        told += f"; that alone makes --prefetch auto: {what_pays(measured).use}"
    return told


def _measured(value: dict[str, Any]) -> Measured | None:
    """The figures as plans will read them; ``None`` where the rows tell none."""
    try:
        return measured_of({**value, "day": dt.datetime.now(dt.UTC).date().isoformat()})
    except (ValueError, KeyError, TypeError, SparkError):
        return None


def _prefetch_gain(rows: list[Row], asked: Prefetch, paying: Paying) -> str:
    found = []
    for row in rows:
        beside = [each for each in rows if (each.config, each.ring, each.residency) == (RING, 1.0, row.residency)]
        if row.config == PREFETCHED and row.decode_tok_s and beside and beside[0].decode_tok_s:
            found.append(f"{row.decode_tok_s / beside[0].decode_tok_s - 1:+.1%} at {row.residency:.0%}")
    if found:
        return f"prefetch: tokens a second {', '.join(found)} against a ring of all slots"
    if any(row.config == PREFETCHED for row in rows):
        return "prefetch: there is no row of a ring of all slots to compare it with (--ring 1)"
    return f"prefetch: not measured, {'--prefetch off' if asked is Prefetch.OFF else paying.reason}"


def _value(benchmark: Benchmark, rows: list[Row], link: Link | None, profile: dict[str, Any] | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    from spark_agent.benchmark import identical_output

    shape, workload = benchmark.shape, benchmark.workload
    note = None
    if not benchmark.on_cards:
        note = (
            "no GPU: slots and host memory are the same memory here, so speeds show no gain; bits, cold hits and "
            "memory are what this run is about"
        )
    return {
        "model": str(benchmark.model.path),
        "fingerprint": shape.fingerprint,
        "device": "gpu" if benchmark.on_cards else "cpu",
        "n_ctx": workload.n_ctx,
        # What a miss copies: `spark simulate --machine` reads it with the rows.
        "expert_bytes": sum(layer.top_k * layer.expert_bytes for layer in shape.layers)
        / sum(layer.top_k for layer in shape.layers),
        "tokens": {
            "prompt": workload.prompt,
            "decode": workload.decode,
            "long_prompt": workload.long_prompt,
            "calibration": 0 if benchmark.profile is not None else workload.calibration,
        },
        "profile": profile,
        "machine": {"n_layers": len(shape.layers), "link": None if link is None else link.as_json()},
        "identical_output": identical_output(rows),
        "prefetch": None,
        "note": note,
        "rows": [row.as_json() for row in rows],
    }


def _report(output: Output, benchmark: Benchmark, rows: list[Row], value: dict[str, Any]) -> None:
    def show() -> None:
        output.table(_COLUMNS, [_cells(row) for row in rows])

    output.result(value, show)
    if not output.json_mode:
        _say(output, rows, value["note"], identical=value["identical_output"])
        output.info(value["prefetch"])
    if not any(row.tiered and row.decode_tok_s is not None for row in rows):
        raise typer.Exit(1)
    _keep(output, benchmark, value)


def _keep(output: Output, benchmark: Benchmark, value: dict[str, Any]) -> None:
    """Plans of this model on this machine predict from it; that it cannot be kept spoils no measurement."""
    from spark_agent.measured import keep_benchmark, machine_name

    try:
        path = keep_benchmark(value, machine_name(benchmark.devices))
    except SparkError as error:
        output.warning(str(error))
    else:
        output.info(f"kept for the plans of spark-agent run: {path}")


def _say(output: Output, rows: list[Row], note: str | None, *, identical: bool | None) -> None:
    for reason in dict.fromkeys(row.reason for row in rows if row.reason is not None):
        names = ", ".join(f"{_name(row)} at {row.residency:.0%}" for row in rows if row.reason == reason)
        output.warning(f"{names}: {reason}")
    if identical is False:
        output.warning("the logits of tiers differ from those with every expert resident: see the last column")
    if note is not None:
        output.info(note)


def _name(row: Row) -> str:
    return row.config if row.ring is None or row.config == PREFETCHED else f"{row.config} {row.ring:.0%}"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        _name(row),
        f"{row.residency:.0%}",
        _cell(row.slots, "d"),
        _cell(row.decode_tok_s, ".1f"),
        _cell(row.share_of_all_gpu, ".1%"),
        _cell(row.prefill_tok_s, ".0f"),
        _cell(row.cold_hits_per_token, ".2f"),
        _cell(row.cold_hit_rate, ".2%"),
        _cell(row.early_per_token, ".2f"),
        _cell(row.early_used_share, ".0%"),
        "-" if row.vram_bytes is None else format_size(row.vram_bytes),
        "-" if row.planned_bytes is None else format_size(row.planned_bytes),
        "-" if row.difference_percent is None else f"{row.difference_percent:+.1f}%",
        "-" if row.logits_sha256 is None else row.logits_sha256[:_DIGEST_SHOWN],
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
