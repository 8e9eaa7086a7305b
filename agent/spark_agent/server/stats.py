"""What ``/spark/stats`` answers: how the agent has served so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spark_agent.server.activity import Numbers, Promise

if TYPE_CHECKING:
    from spark_agent.server.state import AgentState
    from spark_runtime.engine import Engine
    from spark_runtime.tier_counting import TierTotals

__all__ = ["agent_stats", "tier_stats"]


def agent_stats(state: AgentState) -> dict[str, Any]:
    """Everything, as a JSON object: no text of a request, no session's identity, no path, no host."""
    numbers = state.numbers
    return {
        **_tier_stats(state.totals, state.resident_share),
        "version": state.version,
        "model": state.model,
        "fingerprint": state.fingerprint,
        "uptime_s": state.uptime_s,
        "workload": state.workload,
        "running": state.running,
        "waiting": state.waiting,
        "sequences": state.sequences,
        "tokens_cached": state.tokens_cached,
        "requests": [
            {"route": route, "status": status, "count": count}
            for (route, status), count in sorted(numbers.requests.items())
        ],
        "generations": _summed(numbers.generations),
        "tokens": {
            "prompt": numbers.prompt_tokens.total(),
            "reused": numbers.reused_tokens.total(),
            "completion": numbers.completion_tokens.total(),
        },
        "workloads": _workloads(numbers),
        "decode_tok_s": numbers.decode_tok_s,
        "live": _live(state),
        "prefetch": state.prefetch.as_json(),
        "suggestion": None if numbers.suggestion is None else _suggestion(numbers),
        "sessions": {
            "open": state.sessions_open,
            "closed": numbers.closed.total(),
            "lost": state.sessions_lost,
            "last": [asdict(session) for session in numbers.last_closed],
        },
        "spool": None
        if state.spool is None
        else {
            "pending": state.spool.pending,
            "bytes": state.spool.bytes,
            "rejected": state.spool.rejected,
            "dropped": state.spool.dropped,
        },
        "uploads": {
            "ok": numbers.uploads_ok,
            "failed": numbers.uploads_failed,
            "histograms": numbers.uploaded_histograms,
        },
    }


def tier_stats(engine: Engine, resident_share: float) -> dict[str, Any]:
    """Counters of all finished requests by phase; called from any thread.

    ``resident_share`` is that of the experts' bytes in slots.
    """
    return _tier_stats(engine.tier_totals, resident_share)


def _tier_stats(totals: TierTotals | None, resident_share: float) -> dict[str, Any]:
    if totals is None:
        return {"tiered": False, "resident_share": 1.0, "phases": {}}
    return {
        "tiered": True,
        "resident_share": resident_share,
        "phases": {
            phase: {
                "tokens": totals.tokens[phase],
                "selections": totals.selections[phase],
                "cold_hits": totals.cold_hits[phase],
                "cold_hit_rate": totals.cold_hit_rate(phase),
                "loads": totals.loads[phase],
                "bytes_moved": totals.bytes_moved[phase],
                # In slots, and in host memory, from which the GPU reads; there is no disk tier.
                "l1_hits": totals.selections[phase] - totals.cold_hits[phase],
                "l2_hits": totals.cold_hits[phase],
                "prefetched_bytes": totals.early_bytes[phase],
                "prefetched_used_bytes": totals.early_used_bytes[phase],
                "prefetched_wasted_bytes": totals.early_wasted_bytes[phase],
            }
            for phase in totals.tokens
        },
    }


def _live(state: AgentState) -> dict[str, Any]:
    promise: Promise | None = state.promise
    return {
        "cold_hit_rate": None if state.totals is None else state.totals.cold_hit_rate("decode"),
        "promised_cold_hit_rate": None if promise is None else promise.cold_hit_rate,
        "promised_low": None if promise is None else promise.low,
        "promised_high": None if promise is None else promise.high,
        "placement": None if promise is None else promise.workload,
    }


def _suggestion(numbers: Numbers) -> dict[str, Any] | None:
    found = numbers.suggestion
    if found is None:
        return None
    return {
        "workload": found.workload,
        "cold_hit_rate": found.cold_hit_rate,
        "best_cold_hit_rate": found.best_cold_hit_rate,
        "source": found.source,
        "decode_tokens": found.decode_tokens,
        "others": [{"workload": name, "cold_hit_rate": rate} for name, rate in found.others],
    }


def _summed(generations: Counter[tuple[str, str]]) -> dict[str, int]:
    found = dict.fromkeys(("stop", "length", "cancelled", "error"), 0)
    for (outcome, _), count in generations.items():
        found[outcome] = found.get(outcome, 0) + count
    return found


def _workloads(numbers: Numbers) -> list[dict[str, Any]]:
    names = sorted({name for _, name in numbers.generations})
    return [
        {
            "workload": name,
            "generations": sum(count for (_, other), count in numbers.generations.items() if other == name),
            "prompt_tokens": numbers.prompt_tokens[name],
            "completion_tokens": numbers.completion_tokens[name],
            "sessions_closed": numbers.closed[name],
        }
        for name in names
    ]
