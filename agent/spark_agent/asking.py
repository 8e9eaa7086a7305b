"""Asking the running agents of this machine how they do. None of them can hold up the others, or whoever asks."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_agent.agent_client import fetch
from spark_agent.running import RunningAgent

__all__ = ["Asked", "ask_all"]

TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """An agent and its answer."""

    agent: RunningAgent
    stats: dict[str, Any] | None
    """What ``/spark/stats`` said; ``None`` without a usable answer."""
    problem: str | None
    """Why there is none."""


def ask_all(agents: Sequence[RunningAgent], timeout_s: float = TIMEOUT_S) -> list[Asked]:
    """Ask all at once and wait so long at most, whatever they do."""
    answers: dict[int, Asked] = {}

    def ask(index: int, agent: RunningAgent) -> None:
        try:
            answers[index] = Asked(agent, _stats(agent, timeout_s), None)
        except TimeoutError:
            answers[index] = _silent(agent, timeout_s)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            answers[index] = Asked(agent, None, f"cannot be asked: {error or type(error).__name__}")

    # Daemons: one that sends a byte a second must not keep this process.
    threads = [threading.Thread(target=ask, args=one, name="spark-ask", daemon=True) for one in enumerate(agents)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [answers.get(index) or _silent(agent, timeout_s) for index, agent in enumerate(agents)]


def _silent(agent: RunningAgent, timeout_s: float) -> Asked:
    return Asked(agent, None, f"no answer within {timeout_s:g} s")


def _stats(agent: RunningAgent, timeout_s: float) -> dict[str, Any]:
    status, content = fetch(
        agent.address, agent.port, "GET", "/spark/stats", token=agent.token, tls=agent.tls, timeout_s=timeout_s
    )
    if status != http.client.OK:
        raise ValueError(f"it answered {status}")
    stats = json.loads(content)
    if not isinstance(stats, dict) or stats.get("fingerprint") != agent.fingerprint:
        raise ValueError("another program answered")
    return stats
