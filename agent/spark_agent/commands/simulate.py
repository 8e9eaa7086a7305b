"""``spark simulate``: policies and slots on a local trace or on counts, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_agent.context import AgentContext
from spark_agent.errors import SparkError, UsageError
from spark_agent.sizes import format_size, parse_size

if TYPE_CHECKING:
    from spark_agent.output import Output
    from spark_agent.simulation.rows import Row, TunedRow
    from spark_agent.simulation.runs import Plan

__all__ = ["simulate_command"]

_COLUMNS = ("policy", "slots of", "profile", "resident", "slots", "cold rate", "low", "high", "cold/token", "tok/s")
_EARLY_COLUMNS = ("early", "fetched", "used", "wasted", "wasted/token")
_LIST = "may be repeated"


def simulate_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="Traces of spark-agent record --trace (folder or file), histograms of spark-agent upload show, or the "
            "output of spark import.",
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help=f"Policy; {_LIST}. [default: all that the input allows]")
    ] = None,
    sharing: Annotated[
        list[str] | None,
        typer.Option(
            help="Slots of each layer's own, equal (layer) or by the profile's frequency per byte (placed), or one "
            f"pool; {_LIST}. [default: all three]"
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What caches start with: none, mixed, own, foreign, or a file; {_LIST}. [default: none, own]"
        ),
    ] = None,
    residency: Annotated[
        list[float] | None, typer.Option(help=f"Share of the experts in slots; {_LIST}. [default: 0.3, 0.6, 0.8]")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Judge sessions of this workload only.")] = None,
    phase: Annotated[str, typer.Option(help="decode, prefill, or both in the order of the session.")] = "decode",
    batch: Annotated[int, typer.Option(min=1, help="Tokens decoded at once.")] = 1,
    ubatch: Annotated[int, typer.Option(min=1, help="Prompt tokens computed at once.")] = 512,
    positions: Annotated[
        str, typer.Option(help="Inner edges of the parts of a session that are told apart, tokens.")
    ] = "64,256",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Also search decay and prior weight of scored, on calibration sessions; with --early and a machine's "
            "figures the fastest way of fetching early, too.",
        ),
    ] = False,
    early: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPERTS[:THRESHOLD]",
            help="Also replay scored in one pool with so many experts fetched early for a layer and token, from a "
            f"guess of THRESHOLD on (0.3 if left out), e.g. 1:0.3, which is what run does; {_LIST}. Fetched, used and "
            "wasted are experts for each selection.",
        ),
    ] = None,
    guesses: Annotated[
        str | None,
        typer.Option(
            help="What guesses start from: none, calibrated (what the sessions that calibrate teach), kept (what this "
            "machine has learned), or a file of those. They go on learning. [default: calibrated with a profile, "
            "else none]"
        ),
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(help="Figures of a machine: the JSON of spark-agent bench, or a file of them.")
    ] = None,
    token_ms: Annotated[float, typer.Option(min=0, help="A token with every expert resident; 0: the machine's.")] = 0,
    miss_us: Annotated[float, typer.Option(min=0, help="Launching a copy of an expert; 0: the machine's.")] = 0,
    link: Annotated[str, typer.Option(help="Bytes a second from host memory to slots, e.g. 25GB.")] = "",
    pageable: Annotated[
        float, typer.Option(help="Share of those copies that come from memory that is not locked.")
    ] = 0.0,
    pageable_link: Annotated[
        str, typer.Option(help="Bytes a second from memory that is not locked; the machine's if left out.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Write the curves to this PNG or SVG file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay cache policies over a trace, or judge them from counts: cold-hit rates and tokens a second to expect."""
    from spark_agent.simulation.machines import machine_of
    from spark_agent.simulation.runs import Plan, run
    from spark_agent.simulation.sources import read_source

    context = AgentContext.create(json_mode=json)
    plan = Plan.of(
        policies=policy or (),
        sharings=sharing or (),
        profiles=profile or (),
        residencies=residency or (),
        positions=_positions(positions),
        phase=phase,
        batch=batch,
        ubatch=ubatch,
        pageable_share=pageable,
        tune=tune,
        early=early or (),
        guesses=guesses,
    )
    figures = machine_of(
        machine,
        token_ms,
        miss_us,
        parse_size(link, "--link") if link else None,
        parse_size(pageable_link, "--pageable-link") if pageable_link else None,
    )
    if plot is not None and plot.suffix not in {".png", ".svg"}:
        raise UsageError(f"--plot: found {plot.name!r}, expected a name that ends in .png or .svg")
    found = read_source(source)
    with context.output.progress("simulating", None) as advance:
        report = run(plan, found, workload, figures, advance)
    for note in report.notes:
        context.output.warning(note)
    if not report.rows:
        raise SparkError("nothing could be simulated", "; ".join(report.notes) or None)
    if plot is not None:
        from spark_agent.simulation.plots import save_plot

        save_plot(plot, report.rows)
    value: dict[str, Any] = {
        "source": found.kind,
        "fingerprint": found.fingerprint,
        "imported_from": found.imported_from,
        "n_sessions": report.n_sessions,
        "n_calibration": report.n_calibration,
        "tuned": [tuned.as_json() for tuned in report.tuned],
        "notes": list(report.notes),
        "rows": [row.as_json() for row in report.rows],
    }
    context.output.result(value, lambda: _show(context.output, report.rows, plan))
    for tuned in report.tuned:
        context.output.info(
            f"tuned at {tuned.residency:.0%} ({tuned.sharing}, {tuned.profile}): decay {tuned.decay:g}, prior worth "
            f"{tuned.prior_tokens:g} tokens: cold-hit rate {tuned.cold_hit_rate:.4f} where "
            f"{tuned.default_cold_hit_rate:.4f} is the runtime's own, both on calibration sessions"
            f"{_tuned_early(tuned)}"
        )


def _tuned_early(tuned: TunedRow) -> str:
    if tuned.early_experts is None:
        return ""
    way = f"--early {tuned.early_experts}:{tuned.early_threshold:g}" if tuned.early_experts else "nothing early"
    return (
        f"; fastest there with {way}: {tuned.predicted_tok_s:.1f} tokens a second to expect where "
        f"{tuned.default_predicted_tok_s:.1f} is what the runtime's own 1:0.3 gives"
    )


def _positions(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = (0,)
    if any(first >= second for first, second in zip((0, *found), found, strict=False)):
        raise UsageError(f"--positions: found {text!r}, expected rising numbers of tokens", "e.g. --positions 64,256")
    return found


def _show(output: Output, rows: list[Row], plan: Plan) -> None:
    parts = [f"{part.first}-{part.end or ''}" for part in rows[0].parts] if plan.positions else []
    cells = [
        (
            row.policy,
            row.sharing or "-",
            row.profile,
            f"{row.residency:.0%}",
            row.slots,
            f"{row.cold_hit_rate:.4f}",
            "-" if row.low is None else f"{row.low:.4f}",
            "-" if row.high is None else f"{row.high:.4f}",
            "-" if row.cold_hits_per_token is None else f"{row.cold_hits_per_token:.2f}",
            "-" if row.predicted_tok_s is None else f"{row.predicted_tok_s:.1f}",
            *(_early_cells(row) if plan.early else ()),
            *("-" if part.cold_hit_rate is None else f"{part.cold_hit_rate:.4f}" for part in row.parts),
            *["-"] * (len(parts) - len(row.parts)),
        )
        for row in rows
    ]
    output.table((*_COLUMNS, *(_EARLY_COLUMNS if plan.early else ()), *parts), cells)


def _early_cells(row: Row) -> tuple[str, ...]:
    if row.early is None:
        return ("-",) * len(_EARLY_COLUMNS)
    per_selection = (row.early_per_selection, row.early_used_per_selection, row.early_wasted_per_selection)
    wasted_bytes = row.early_wasted_bytes_per_token
    return (
        f"{row.early} from {row.early_guesses}",
        *("-" if value is None else f"{value:.4f}" for value in per_selection),
        "-" if wasted_bytes is None else format_size(round(wasted_bytes)),
    )
