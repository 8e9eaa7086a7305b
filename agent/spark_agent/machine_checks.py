"""What a machine has and does besides tiers, for ``spark-agent doctor``. Each gives a line or raises why it cannot."""

from __future__ import annotations

import datetime as dt
import json
import socket
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from spark_agent.addresses import base_url_of
from spark_agent.asking import ask_all
from spark_agent.errors import SparkError
from spark_agent.paths import benchmarks_dir
from spark_agent.running import RunningAgents
from spark_agent.running_agent import ask_agent
from spark_agent.sizes import format_size

__all__ = ["MOST_SKEW_S", "agents_line", "clock_skew_s", "link_rate", "port_line", "skew_line", "video_memory"]

MOST_SKEW_S = 120.0
"""Uploads and manifests are dated by the day; a clock that is off by more than minutes is set wrong."""
_NO_GPU = "not needed: there is no GPU"


def video_memory() -> str:
    """Free and whole memory of every GPU."""
    from spark_runtime.tier_plan import cards

    parts = []
    for card in cards():
        memory = card.memory()
        parts.append(f"{card.name} {card.description}: {format_size(memory.free)} of {format_size(memory.total)} free")
    return "; ".join(parts) or _NO_GPU


def link_rate() -> str:
    """How fast experts are copied to the GPU, if a benchmark measured it."""
    from spark_agent.measured import machine_name
    from spark_runtime.tier_plan import cards

    if not cards():
        return _NO_GPU
    name = machine_name()
    for path in sorted(benchmarks_dir().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            rate = _rate_of(json.loads(path.read_bytes()), name)
        except (OSError, ValueError):
            continue
        if rate is not None:
            return f"{rate / 1e9:.1f} GB/s, measured by spark-agent bench"
    raise SparkError("the link from host memory to the GPU was not measured", "spark-agent bench MODEL")


def _rate_of(value: Any, name: str) -> float | None:
    """The copy rate that a kept benchmark says, bytes a second."""
    if not isinstance(value, Mapping) or value.get("machine_name") != name:
        return None
    machine = value.get("machine")
    link = machine.get("link") if isinstance(machine, Mapping) else None
    rates = [rate for key, rate in link.items() if key.endswith("bytes_per_s")] if isinstance(link, Mapping) else []
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=None)


def port_line(host: str, port: int) -> str:
    """Whether an agent can listen, or already does; raise :class:`SparkError` where another program is in its place."""
    if port == 0:
        return "any free port"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1" if host == "localhost" else host, port))
    except OSError as error:
        try:
            registered = RunningAgents.of_this_machine().listening_on(host, port)
            found = (
                ask_agent(base_url_of(host, port), None)
                if registered is None
                else ask_agent(registered.base_url, registered.token, registered.tls, address=registered.address)
            )
        except SparkError:
            raise SparkError(
                f"port {port} of {host} cannot be used: {error.strerror}",
                "set SPARKMOE_PORT, or spark-agent run -p 0 for any free port",
            ) from error
        return f"an agent serves {', '.join(found.models)} at {found.base_url}"
    return f"{host} port {port} is free, no agent runs there"


def agents_line() -> str:
    """The agents that run here; raise :class:`SparkError` where one of them cannot be asked, or a file is damaged."""
    faults: list[str] = []
    asked = ask_all(RunningAgents.of_this_machine().find(faults.append))
    if not asked and not faults:
        return "none runs"
    lines = [f"{one.agent.model} at {one.agent.base_url} (process {one.agent.pid})" for one in asked]
    faults += [f"{line}: {one.problem}" for line, one in zip(lines, asked, strict=True) if one.problem is not None]
    if faults:
        raise SparkError("; ".join(faults), "see spark-agent ps; end one that hangs (kill PROCESS), or remove the file")
    return "; ".join(lines)


def clock_skew_s(date: str | None, now: dt.datetime) -> float | None:
    """Seconds by which this machine's clock is ahead of an answer's ``Date``; ``None`` where it has none."""
    try:
        then = parsedate_to_datetime(date or "")
    except ValueError:
        return None
    return (now - (then if then.tzinfo is not None else then.replace(tzinfo=dt.UTC))).total_seconds()


def skew_line(date: str | None, now: dt.datetime) -> str:
    """The same for a person; raise :class:`SparkError` where it is more than :data:`MOST_SKEW_S`."""
    skew = clock_skew_s(date, now)
    if skew is None:
        return "the service does not say what time it is"
    if abs(skew) > MOST_SKEW_S:
        ahead = "ahead of" if skew > 0 else "behind"
        raise SparkError(
            f"this machine's clock is {abs(skew):.0f} s {ahead} the service's", "set it: timedatectl set-ntp true"
        )
    # The header has whole seconds.
    return f"within {max(1.0, abs(skew)):.0f} s of the service's"
