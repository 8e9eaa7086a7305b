"""``spark-agent record``: transcripts in, histograms kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_agent.consent import ask_once
from spark_agent.context import AgentContext, warn_about_counting
from spark_agent.errors import SparkError, UsageError
from spark_agent.interrupts import interrupts_at_checks, unless
from spark_agent.output import counted
from spark_agent.sizes import format_size, parse_size
from spark_agent.tiering import MOST_THREADS, TierOptions, plan_for, planned_options, warn_about_tiers
from spark_agent.transcripts import Skipped, Transcript, read_transcripts
from spark_agent.workload_name import check_workload_name

if TYPE_CHECKING:
    from spark_agent.recording import Segment
    from spark_agent.traces import TraceFolder
    from spark_runtime.engine import Engine
    from spark_runtime.hidden_kinds import HiddenKind
    from spark_runtime.session_counts import TokenTrace

__all__ = ["record_command"]


@dataclass(slots=True)
class _Report:
    sessions: int = 0
    tokens_prefill: int = 0
    tokens_decode: int = 0
    tokens_new: int = 0
    known: int = 0
    grown: int = 0
    served: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    workloads: dict[str, int] = field(default_factory=dict)

    def note(self, workload: str, segments: Sequence[Segment], new: int) -> None:
        """Take a session of which so many tokens were new."""
        self.sessions += 1
        self.workloads[workload] = self.workloads.get(workload, 0) + 1
        tokens = {"prefill": 0, "decode": 0}
        for segment in segments:
            tokens[segment.phase] += len(segment.tokens)
        self.tokens_prefill += tokens["prefill"]
        self.tokens_decode += tokens["decode"]
        self.tokens_new += new
        self.known += not new
        self.grown += 0 < new < sum(tokens.values())


def record_command(
    model: Annotated[Path | None, typer.Argument(help="GGUF file; the bundled demo model if left out.")] = None,
    sessions: Annotated[
        Path | None,
        typer.Option(
            help="Transcripts: a file or a folder (Claude Code, Codex, Qwen Code, aider, opencode export, SpecStory, "
            "plain text)."
        ),
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Name of the class of sessions, e.g. code-heavy.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Record the bundled demo sessions of three workloads.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Also keep token-level traces in this local folder; they are never uploaded.")
    ] = None,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Traces also keep the hidden state that each layer starts from (float16).")
    ] = False,
    router_input: Annotated[
        bool,
        typer.Option(
            "--router-input",
            help="Traces also keep what each router reads, after attention: how well selections could be predicted.",
        ),
    ] = False,
    trace_limit: Annotated[
        str, typer.Option(help="Most that the folder of traces may take; the oldest files leave.")
    ] = "1G",
    include_served: Annotated[
        bool,
        typer.Option(
            "--include-served", help="Count conversations, too, that an agent here counted when it served them."
        ),
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens of each session; 0: all.")] = 0,
    ctx: Annotated[int, typer.Option(min=0, help="Context, tokens; 0: as trained, at most 8192.")] = 0,
    threads: Annotated[
        int, typer.Option(min=0, max=MOST_THREADS, help="CPU threads; 0: all this process may use.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Feed transcripts through a model and keep their routing histograms in the spool."""
    context = AgentContext.create(json_mode=json)
    report = _Report()
    work = _demo_work(sessions, workload) if demo else _named_work(sessions, workload)
    limit_bytes = parse_size(trace_limit, "--trace-limit")
    _check_trace(trace)
    if trace is None and (hidden or router_input):
        raise UsageError("--hidden and --router-input say what a trace keeps", "add --trace FOLDER")
    path = context.model_path(model)
    context = ask_once(context)
    try:
        _record(
            context,
            path,
            work,
            report,
            trace=trace,
            trace_limit_bytes=limit_bytes,
            hidden=_hidden_kinds(block_input=hidden, router_input=router_input),
            max_tokens=max_tokens,
            ctx=ctx,
            threads=threads,
            demo=demo,
            include_served=include_served,
        )
    except KeyboardInterrupt:
        context.output.info(f"kept in the spool: {counted(report.sessions, 'session')}")
        raise
    _warn_about(context, report)
    if report.served:
        context.output.info(
            f"{counted(report.served, 'session')} that an agent served here, which counted them then: not counted again"
        )
        context.output.hint("if it served only a part of them: --include-served, which counts that part twice")
    if not report.sessions and not report.served:
        found = "see the reasons above" if report.skipped else f"found no files in {sessions}"
        raise SparkError("no session could be recorded", f"{found}; --sessions takes a file or a folder")
    summary = ", ".join(f"{count} {name}" for name, count in sorted(report.workloads.items()))
    context.output.result(
        {
            "sessions": report.sessions,
            "tokens_prefill": report.tokens_prefill,
            "tokens_decode": report.tokens_decode,
            "tokens_new": report.tokens_new,
            "known": report.known,
            "grown": report.grown,
            "skipped": report.skipped,
            "workloads": report.workloads,
            "served": report.served,
        },
        f"recorded {counted(report.sessions, 'session')} ({summary}): {report.tokens_prefill} prefill and "
        f"{report.tokens_decode} decode tokens; {report.known} were known already, of {report.grown} a part",
    )


def _named_work(sessions: Path | None, workload: str | None) -> Iterator[tuple[str, Transcript | Skipped]]:
    if sessions is None or workload is None:
        raise UsageError("nothing to record", "pass --sessions PATH --workload NAME, or --demo")
    name = check_workload_name(workload)
    if not sessions.exists():
        raise SparkError(f"no such file or folder: {sessions}", "check --sessions")
    return ((name, item) for item in read_transcripts(sessions))


def _demo_work(sessions: Path | None, workload: str | None) -> list[tuple[str, Transcript | Skipped]]:
    from spark_agent.demo.sessions import demo_sessions

    if sessions is not None or workload is not None:
        raise UsageError("--demo brings its own sessions and workloads", "leave out --sessions and --workload")
    return [(name, transcript) for name, transcripts in demo_sessions().items() for transcript in transcripts]


def _check_trace(path: Path | None) -> None:
    """Find out before the work, not after it, that a trace cannot be written."""
    if path is None:
        return
    folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise SparkError(f"cannot write the trace {path}", "--trace takes a folder that you may write to")


def _record(
    context: AgentContext,
    model: Path,
    work: Iterable[tuple[str, Transcript | Skipped]],
    report: _Report,
    *,
    trace: Path | None,
    trace_limit_bytes: int,
    hidden: Sequence[HiddenKind],
    max_tokens: int,
    ctx: int,
    threads: int,
    demo: bool,
    include_served: bool,
) -> None:
    from spark_agent.recorded import missing, stretches
    from spark_agent.recording import DECODE_BATCH, record, segments_of, tokens_of
    from spark_agent.served import marks_of_transcript, marks_to_record
    from spark_runtime.chat import ChatFormat
    from spark_runtime.engine import Engine, context_for
    from spark_runtime.gguf_file import read_gguf
    from spark_runtime.model_shape import shape_of

    file = read_gguf(model)
    shape = shape_of(file)
    n_ctx = context_for(shape, ctx)
    # Slots count what was selected, not in which order.
    tiers = TierOptions(no_tier=trace is not None)
    plan = plan_for(file, shape, tiers, None, n_ctx, n_outputs_max=DECODE_BATCH)
    options = planned_options(plan, tiers, n_ctx, threads, n_outputs_max=DECODE_BATCH)
    options = replace(options, hidden=tuple(hidden))
    with (
        interrupts_at_checks() as check_interrupt,
        Engine.load(model, options, wanted=unless(check_interrupt)) as engine,
        _trace_folder(trace, engine, trace_limit_bytes) as traces,
        context.spool() as spool,
        context.output.progress("recording sessions", len(work) if isinstance(work, list) else None) as advance,
    ):
        warn_about_counting(context, engine)
        warn_about_tiers(context, engine)
        if traces is not None and hidden:
            context.output.info(
                f"a token with its hidden states takes {format_size(traces.token_bytes)}: {trace} holds about "
                f"{trace_limit_bytes // traces.token_bytes} (--trace-limit)"
            )
        key = context.session_key()
        hash_of = _session_hashes(key, demo=demo)
        dropped = spool.stats().dropped
        chat = ChatFormat(engine)
        for workload, item in work:
            if isinstance(item, Skipped):
                report.skipped.append({"source": str(item.source), "reason": item.reason})
                continue
            marks = [] if demo else marks_of_transcript(key, item)
            was_served = not include_served and spool.was_served(engine.shape.fingerprint, marks)
            report.served += was_served
            if was_served and traces is None:
                advance(1)
                continue
            segments = segments_of(engine, chat, item, max_tokens)
            tokens = tokens_of(segments)
            if not tokens:
                report.skipped.append({"source": str(item.source), "reason": "no tokens"})
                continue
            hashed = hash_of(item)
            left = missing(key, tokens, spool.recorded(engine.shape.fingerprint, hashed, workload))
            is_new = left == [(0, len(tokens))]
            if traces is not None:
                add = _adder(traces, hashed, workload)
                counts = record(engine, segments, on_trace=add, before_step=check_interrupt)
            if was_served:
                left = []
            if left and (traces is None or not is_new):
                counts = record(engine, segments, only=left, before_step=check_interrupt)
            histogram = counts.to_histogram(hashed, workload) if left else None
            added = histogram is not None and spool.add(
                engine.shape,
                histogram,
                stretches(key, tokens, left),
                transcribed=[] if demo else marks_to_record(key, item),
                even_if_served=include_served,
            )
            # It may have come to be served while it was computed here.
            if not (added or was_served or include_served) and spool.was_served(engine.shape.fingerprint, marks):
                report.served += 1
                advance(1)
                continue
            report.note(workload, segments, sum(end - start for start, end in left) if added else 0)
            advance(1)
        dropped = spool.stats().dropped - dropped
    if dropped:
        context.output.warning(f"the spool was full: {counted(dropped, 'histogram')}, the oldest, had to leave it")
    if traces is not None and traces.removed:
        context.output.warning(
            f"{counted(traces.removed, 'file')} of older traces left {trace}, which may take "
            f"{format_size(trace_limit_bytes)} (--trace-limit)"
        )


def _hidden_kinds(*, block_input: bool, router_input: bool) -> list[HiddenKind]:
    asked: dict[HiddenKind, bool] = {"input": block_input, "router": router_input}
    return [kind for kind, wanted in asked.items() if wanted]


def _trace_folder(path: Path | None, engine: Engine, limit_bytes: int) -> AbstractContextManager[TraceFolder | None]:
    from spark_agent.traces import TraceFolder

    if path is None:
        return nullcontext()
    widths = {str(kind): widths for kind, widths in engine.hidden_widths.items()}
    return TraceFolder(path, engine.shape, limit_bytes, widths)


def _adder(traces: TraceFolder, session_hash: str, workload: str) -> Callable[[TokenTrace], None]:
    """Adds a session piece by piece."""
    from spark_agent.trace_files import SessionTrace

    first = 0

    def add(piece: TokenTrace) -> None:
        nonlocal first
        traces.add(SessionTrace(session_hash, workload, piece.ids, piece.decode, first, piece.hidden))
        first += len(piece.decode)

    return add


def _session_hashes(key: bytes, *, demo: bool) -> Callable[[Transcript], str]:
    if demo:
        from spark_agent.demo.sessions import demo_session_hash

        # Chosen under their own key, so that both sides of the split are filled on every machine.
        return demo_session_hash
    from spark_agent.identity import session_hash

    return lambda transcript: session_hash(key, transcript.lineage)


def _warn_about(context: AgentContext, report: _Report) -> None:
    shown = 5
    for entry in report.skipped[:shown]:
        context.output.warning(f"skipped {entry['source']}: {entry['reason']}")
    if len(report.skipped) > shown:
        context.output.warning(f"and {len(report.skipped) - shown} more; --json lists them all")
