"""Own sessions: ``--local`` of ``pull-profile`` and ``profiles``, and ``profiles forget``."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_agent.context import AgentContext
from spark_agent.errors import SparkError, UsageError
from spark_agent.output import counted
from spark_agent.sizes import format_size
from spark_agent.workload_name import check_workload_name

if TYPE_CHECKING:
    from spark_agent.own_counts import OwnWorkload
    from spark_agent.own_profile import OwnProfile
    from spark_agent.signatures import SignedBy
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape
    from spark_schemas.profile import Profile

__all__ = [
    "forget_command",
    "local_manifest",
    "local_profile",
    "local_profiles",
    "offer_to_running",
    "refuse_with_local",
]

_SERVE_HINT = "sessions that spark-agent run serves are counted here; see spark profiles ls --local"


def _own(context: AgentContext, shape: ModelShape, workload: str) -> OwnProfile:
    from spark_agent.own_counts import OwnCounts, today
    from spark_agent.own_profile import own_profile
    from spark_agent.paths import own_counts_path

    check_workload_name(workload, option="NAME")
    with OwnCounts(own_counts_path(), context.output.warning) as counts:
        found = own_profile(shape, counts.parts(shape), workload, today())
    if found is None:
        raise SparkError(f"no own session of {workload} calibrates a profile of this model yet", _SERVE_HINT)
    return found


def offer_to_running(
    context: AgentContext,
    fingerprint: str,
    *,
    content: bytes | None = None,
    signed: SignedBy | None = None,
    local: str | None = None,
) -> None:
    """Let this machine's running agents of a model take a placement over, and say what came of it."""
    from spark_agent.apply_placement import apply_to_running
    from spark_agent.running import RunningAgents

    agents = RunningAgents.of_this_machine().find(context.output.warning)
    apply_to_running(agents, fingerprint, content=content, signed=signed, local=local, say=context.output.info)


def refuse_with_local(*options: tuple[str, object]) -> None:
    """Raise :class:`UsageError` for what only a service can do."""
    for name, value in options:
        if value is not None:
            raise UsageError(f"{name} asks a service, and --local asks none", f"leave out {name}")


def local_manifest(
    context: AgentContext, shape: ModelShape, workload: str, *, vram_bytes: int, n_ctx: int, reserve_bytes: int
) -> PlacementManifest:
    """The best placement by this machine's own sessions within a budget. Raises :class:`SparkError`."""
    from spark_runtime.placement import BudgetTooSmallError

    try:
        return _own(context, shape, workload).manifest(n_ctx, vram_bytes=vram_bytes, reserve_bytes=reserve_bytes)
    except BudgetTooSmallError as error:
        fixed = shape.core_bytes + shape.context_bytes(n_ctx) + reserve_bytes
        raise SparkError(
            f"--vram: found {format_size(vram_bytes)}, expected at least {format_size(fixed + error.needed_bytes)}",
            f"--vram {-(-(fixed + error.needed_bytes) // 2**20)}M, or a smaller --ctx",
        ) from error


def local_profile(context: AgentContext, shape: ModelShape, workload: str) -> Profile:
    """The profile of this machine's own sessions of a workload, judged as the service judges."""
    return _own(context, shape, workload).profile()


def local_profiles(context: AgentContext) -> None:
    """Print what is kept of this machine's own sessions."""
    from spark_agent.own_counts import OwnCounts
    from spark_agent.paths import own_counts_path

    with OwnCounts(own_counts_path(), context.output.warning) as counts:
        kept = counts.workloads()
    context.output.result(
        {"profiles": [_described(one) for one in kept], "path": str(own_counts_path())},
        lambda: context.output.table(
            ["workload", "phase", "model", "fingerprint", "sessions", "decoded tokens", "last", "bytes"],
            [
                [
                    one.workload,
                    "decode",
                    one.model_name or "",
                    one.fingerprint,
                    one.sessions,
                    one.tokens,
                    _date(one.last_day),
                    format_size(one.bytes),
                ]
                for one in kept
            ],
        ),
    )
    if not kept:
        context.output.info("nothing yet: sessions that spark-agent run serves are counted on this machine")


def _described(one: OwnWorkload) -> dict[str, Any]:
    return {
        "workload": one.workload,
        "phase": "decode",
        "model_name": one.model_name,
        "fingerprint": one.fingerprint,
        "sessions": one.sessions,
        "tokens": one.tokens,
        "bytes": one.bytes,
        "last_day": _date(one.last_day),
        "source": "local",
    }


def _date(day: int) -> str:
    try:
        return (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()
    except OverflowError:
        return f"day {day}"  # a clock that was far off


def forget_command(
    workload: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Workload; left out with --all.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Only of this GGUF file.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every workload.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Delete what this machine counted of its own sessions. What was uploaded, or waits for it, is not touched."""
    from spark_agent.own_counts import OwnCounts
    from spark_agent.paths import own_counts_path
    from spark_runtime.model_shape import read_model_shape

    context = AgentContext.create(json_mode=json)
    if (workload is None) != everything:
        raise UsageError("name a workload, or --all", "spark profiles ls --local lists them")
    if workload is not None:
        check_workload_name(workload, option="NAME")
    fingerprint = None if model is None else read_model_shape(model).fingerprint
    with OwnCounts(own_counts_path(), context.output.warning) as counts:
        gone = counts.forget(fingerprint, workload)
    context.output.result({"forgotten": gone}, f"{counted(gone, 'session')} forgotten")
