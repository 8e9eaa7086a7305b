"""``spark-agent ps``: the agents that run on this machine, and how they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_agent.context import AgentContext
from spark_agent.output import Output, counted

if TYPE_CHECKING:
    from spark_agent.asking import Asked

__all__ = ["ps_command"]

_COLUMNS = (
    "model",
    "url",
    "pid",
    "up",
    "resident",
    "workload",
    "sessions",
    "running",
    "waiting",
    "tok/s",
    "cold hits",
    "promised",
    "prefetch",
    "uploads",
)
_NONE = "-"


def ps_command(json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False) -> None:
    """Show the agents that run on this machine."""
    from spark_agent.asking import ask_all
    from spark_agent.running import RunningAgents

    context = AgentContext.create(json_mode=json)
    output = context.output
    answers = ask_all(RunningAgents.of_this_machine().find(output.warning))

    def show() -> None:
        if not answers:
            output.info("no agent runs on this machine")
            output.hint("spark-agent run")
            return
        output.table(_COLUMNS, [_row(asked) for asked in answers])
        for asked in answers:
            _tell(output, asked)

    output.result({"agents": [_value(asked) for asked in answers]}, show)


def _tell(output: Output, asked: Asked) -> None:
    if asked.problem is not None:
        output.warning(f"process {asked.agent.pid} ({asked.agent.base_url}): {asked.problem}")
    prefetch = _part(asked.stats, "prefetch")
    if prefetch and (asked.stats or {}).get("tiered"):
        output.info(f"{asked.agent.base_url}: prefetch: {prefetch.get('use')}; {prefetch.get('reason')}")
    found = _part(asked.stats, "suggestion")
    if found:
        output.info(
            f"{asked.agent.base_url}: unlabelled requests look like {found.get('workload')}: "
            f"{'the profile of your own sessions of it' if found.get('source') == 'local' else 'its profile'} misses "
            f"{_percent(found.get('cold_hit_rate'))} of the latest session at 60% resident, and no placement less "
            f"than {_percent(found.get('best_cold_hit_rate'))}"
        )
        output.hint(f"to count them so: spark-agent run --workload {found.get('workload')}")


def _value(asked: Asked) -> dict[str, Any]:
    agent = asked.agent
    return {
        "pid": agent.pid,
        "base_url": agent.base_url,
        "model": agent.model,
        "fingerprint": agent.fingerprint,
        "answers": asked.stats is not None,
        "problem": asked.problem,
        "stats": asked.stats,
    }


def _row(asked: Asked) -> tuple[object, ...]:
    agent, stats = asked.agent, asked.stats
    if stats is None:
        return (agent.model, agent.base_url, agent.pid, *[_NONE] * (len(_COLUMNS) - 3))
    sessions, live, spool = _part(stats, "sessions"), _part(stats, "live"), _part(stats, "spool")
    uploads = _part(stats, "uploads")
    return (
        agent.model,
        agent.base_url,
        agent.pid,
        _duration(stats.get("uptime_s")),
        _percent(stats.get("resident_share"), digits=0),
        stats.get("workload", _NONE),
        f"{sessions.get('open', 0)} open, {sessions.get('closed', 0)} kept",
        stats.get("running", _NONE),
        stats.get("waiting", _NONE),
        _number(stats.get("decode_tok_s")),
        _percent(live.get("cold_hit_rate")),
        _percent(live.get("promised_cold_hit_rate")),
        _prefetch(_part(stats, "prefetch")),
        f"{counted(uploads.get('histograms', 0), 'histogram')}, {spool.get('pending', '?')} waiting"
        + (f", {uploads['failed']} failed" if uploads.get("failed") else ""),
    )


def _prefetch(found: dict[str, Any]) -> str:
    trial = _part(found, "trial")
    return f"trial, {trial.get('pairs')} pairs" if found.get("use") == "trial" else str(found.get("use", _NONE))


def _part(stats: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """An object inside of what a peer said, whatever it is."""
    found = None if stats is None else stats.get(name)
    return found if isinstance(found, dict) else {}


def _percent(value: object, digits: int = 1) -> str:
    return f"{value:.{digits}%}" if isinstance(value, int | float) else _NONE


def _number(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else _NONE


def _duration(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return _NONE
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"
