"""A machine's own figures, from a measurement or as given."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_agent.errors import SparkError, UsageError
from spark_runtime.simulator.cost import Machine, MeasuredRun

__all__ = ["PREFETCHED", "RING", "MachineFigures", "fitted_machine", "machine_of"]

RING, PREFETCHED = "calibrated+ring", "calibrated+prefetch"
"""Configurations of a benchmark's rows that differ in nothing but fetching early."""

_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What predicts tokens a second, with the size of the experts it was measured with."""

    machine: Machine
    expert_bytes: float | None
    """Mean bytes of an expert of the measured model; ``None`` where nobody says."""
    fingerprint: str | None = None
    """Of the model whose tokens were measured; ``None`` where nobody says, or a token's time was given."""


def machine_of(
    path: Path | None,
    token_ms: float,
    miss_us: float,
    link_bytes_per_s: int | None,
    pageable_bytes_per_s: int | None = None,
) -> MachineFigures | None:
    """A machine from a file, with what was said on the command line in its place; ``None`` when nothing was said.

    A file is the JSON of ``spark-agent bench``, whose tiered rows tell what a miss costs, or an object with
    ``token_s``, ``miss_s`` and, if known, ``link_bytes_per_s``, ``pageable_bytes_per_s`` (from memory that is not
    locked), ``layer_s`` with ``n_layers``, ``prompt_token_s``, ``guess_s`` and ``guess_token_s``. Raises
    :class:`SparkError` and :class:`UsageError`.
    """
    if path is None and not (token_ms or miss_us or link_bytes_per_s):
        return None
    value = {} if path is None else _read(path)
    expert_bytes = _number(value, "expert_bytes")
    measured = value.get("fingerprint")
    fingerprint = measured if isinstance(measured, str) and not token_ms else None
    if "rows" in value:
        fitted = _fitted(value, path, token_ms / 1000)
        value = {
            **_measured_link(value),
            "token_s": fitted.token_s,
            "miss_s": fitted.miss_s,
            "layer_s": fitted.layer_s,
            "n_layers": fitted.n_layers,
            "guess_s": fitted.guess_s,
            "guess_token_s": fitted.guess_token_s,
            "prompt_token_s": _prompt_token_s(value),
        }
    token_s = token_ms / 1000 or _number(value, "token_s")
    link = link_bytes_per_s or _number(value, "link_bytes_per_s")
    miss_s = miss_us / 1e6 or _number(value, "miss_s")
    if token_s is None:
        raise UsageError("nothing says what a token takes", "pass --machine BENCH.json, or --token-ms")
    if miss_s is None and link is None:
        raise UsageError("nothing says what a miss takes", "pass --machine BENCH.json, or --link and --miss-us")
    try:
        machine = Machine(
            token_s,
            miss_s or 0.0,
            link,
            _number(value, "layer_s") or 0.0,
            int(_number(value, "n_layers") or 0),
            pageable_bytes_per_s or _number(value, "pageable_bytes_per_s"),
            _number(value, "prompt_token_s"),
            _number(value, "guess_s") or 0.0,
            _number(value, "guess_token_s") or 0.0,
        )
        return MachineFigures(machine, expert_bytes, fingerprint)
    except ValueError as error:
        raise SparkError(f"{path or 'the figures'}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SparkError(f"{path} is too large for a machine's figures")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SparkError(
            f"cannot read {path}: {error.strerror}", "measure one: spark-agent bench --json > FILE"
        ) from error
    except ValueError as error:
        raise SparkError(f"{path} is not JSON: {error}", "measure one: spark-agent bench --json > FILE") from error
    if not isinstance(value, dict):
        raise SparkError(f"{path} holds no object", "measure one: spark-agent bench --json > FILE")
    return value


def _number(value: Mapping[str, Any], key: str) -> float | None:
    found = value.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found < 0:
        raise SparkError(f"{key} is {found!r}, expected a number from 0 on")
    return float(found)


def _machine(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``spark-agent bench`` measured of the machine itself; earlier ones did not."""
    found = value.get("machine") or {}
    if not isinstance(found, dict):
        raise SparkError(f"machine is {found!r}, expected an object")
    return found


def _measured_link(value: Mapping[str, Any]) -> dict[str, float]:
    names = {
        "link_bytes_per_s": "bytes_per_s",
        "pageable_bytes_per_s": "pageable_bytes_per_s",
        "latency_s": "latency_s",
    }
    link = _machine(value).get("link") or {}
    if not isinstance(link, dict):
        raise SparkError(f"machine.link is {link!r}, expected an object")
    found = {name: _number(link, key) for name, key in names.items()}
    return {name: number for name, number in found.items() if number}


def _prompt_token_s(value: dict[str, Any]) -> float | None:
    for row in value["rows"]:
        rate = _number(row, "prefill_tok_s") if row.get("config") == "all-gpu" else None
        if rate:
            return 1.0 / rate
    return None


def fitted_machine(value: Mapping[str, Any], token_s: float = 0.0) -> Machine:
    """What the tiered rows of ``spark-agent bench`` say of slots and misses, with the link where it was measured.

    ``token_s`` stands in for the row with every expert resident. Raises ``ValueError``, ``KeyError``, ``TypeError`` or
    ``AttributeError`` where the rows tell no machine, :class:`SparkError` for figures that are none.
    """
    rows = [row for row in value["rows"] if row.get("decode_tok_s")]
    # spark-agent bench, and infra/benchmarks/tier_interleaved.py
    resident = [float(row["decode_tok_s"]) for row in rows if row["config"] in {"all-gpu", "plain"}]
    runs = [
        MeasuredRun(
            float(row["decode_tok_s"]), float(row["cold_hits_per_token"]), _number(row, "pageable_share") or 0.0
        )
        for row in rows
        if row.get("cold_hits_per_token") and row["config"] != PREFETCHED
    ]
    runs += [
        MeasuredRun(
            float(row["decode_tok_s"]),
            float(row["cold_hits_per_token"]),
            _number(row, "pageable_share") or 0.0,
            # It fetches one expert of a layer and token.
            (float(row["early_per_token"]),),
        )
        for row in rows
        if row["config"] == PREFETCHED
        and row.get("cold_hits_per_token") is not None
        and row.get("early_per_token") is not None
    ]
    if not token_s and not resident:
        raise ValueError("no row was measured with every expert resident")
    link = _measured_link(value)
    expert_bytes = _number(value, "expert_bytes") or 0.0
    n_layers = int(_number(_machine(value), "n_layers") or 0)
    rate, pageable = link.get("link_bytes_per_s"), link.get("pageable_bytes_per_s")
    on_host = (_machine(value).get("link") or {}).get("device") == "cpu"
    token_s = token_s or 1.0 / resident[0]
    if not rate or not expert_bytes:
        return Machine.fitted(token_s, runs, n_layers=n_layers, host_guesses=on_host)
    latency_s = link.get("latency_s")
    return Machine.fitted(token_s, runs, expert_bytes, rate, n_layers, pageable, latency_s, host_guesses=on_host)


def _fitted(value: dict[str, Any], path: Path | None, token_s: float) -> Machine:
    try:
        return fitted_machine(value, token_s)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SparkError(
            f"{path} tells no machine's figures: {error}", "measure one: spark-agent bench --json > FILE"
        ) from error
