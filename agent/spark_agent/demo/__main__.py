"""``make demo``: from nothing to a calibrated model, through the real commands, in one go.

Everything runs in a temporary folder with the real service and agent as processes on free ports. The table and, as
the last line, one JSON object go to stdout; progress goes to stderr.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spark_agent.demo.adaptive import adaptive_rate
from spark_agent.demo.identity_check import DEMO_THREADS, PROMPTS, TOKENS, say
from spark_agent.demo.processes import Sandbox
from spark_agent.demo.sessions import DEMO_KEY
from spark_agent.errors import SparkError, UsageError
from spark_agent.manifests import load_manifest
from spark_agent.output import Output, report_fault
from spark_agent.trace_files import SessionTrace
from spark_agent.traces import load_traces
from spark_runtime.engine import default_context
from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_runtime.placement import layer_sizes, residency_budget
from spark_runtime.tier_start import manifest_start
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

__all__ = ["main"]

RESIDENCIES = (0.3, 0.6, 0.8)
TOKENS_PER_SESSION = 960
_THREADS = ("--threads", str(DEMO_THREADS))
_COUNTED_POLICIES = ("uniform", "own", "other", "oracle")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell of the table."""

    workload: str
    residency: float
    policy: str
    cold_hit_rate: float
    low: float
    high: float
    n_held_out: int


def main() -> None:
    """Run the demo; exit code 1 with the reason if any step fails."""
    output = Output()
    # So that a stopped demo also stops the service and the agent that it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if sys.argv[1:]:
            raise UsageError(f"the demo takes no arguments, found {sys.argv[1:]}")
        with tempfile.TemporaryDirectory(prefix="spark-demo-") as home:
            _run(Sandbox(Path(home), DEMO_KEY), output)
    except KeyboardInterrupt:
        output.info("interrupted")
        sys.exit(130)
    except Exception as fault:
        sys.exit(report_fault(fault))


def _run(sandbox: Sandbox, output: Output) -> None:
    started = time.monotonic()
    model = demo_model_path()
    shape = read_model_shape(model)
    trace = sandbox.home / "traces"
    with sandbox.serving(
        "spark_service.cli", "run", "--open", "-p", "0", "--json", "--data-dir", str(sandbox.home / "service")
    ) as up:
        sandbox.environment["SPARKMOE_SERVICE_URL"] = up["base_url"]
        output.info(f"[1/5] calibration service at {up['base_url']}")
        recorded = sandbox.run(
            "spark_agent.cli",
            "record",
            "--demo",
            "--json",
            "--trace",
            str(trace),
            "--max-tokens",
            str(TOKENS_PER_SESSION),
            *_THREADS,
            watch=True,
        )
        output.info(
            f"[2/5] recorded {recorded['sessions']} sessions of this machine's own texts: "
            f"{recorded['tokens_prefill']} prefill and {recorded['tokens_decode']} decode tokens"
        )
        sandbox.run("spark_agent.cli", "upload", "consent", "--yes")
        # Every session stays a session here: the service is this folder's own, so nobody else learns their counts.
        sent = sandbox.run("spark_agent.cli", "upload", "flush", "--json", "--minimum-tokens", "1")
        output.info(f"[3/5] uploaded {sent['uploaded']} histograms: counts only")
        traces = load_traces(trace).sessions
        rows: list[Row] = []
        verdicts: dict[str, str] = {}
        manifest = sandbox.home / "code-heavy.json"
        for workload in sorted(recorded["workloads"]):
            profile = sandbox.run("spark_agent.cli_spark", "profiles", "show", workload, "--json")
            verdicts[workload] = f"{profile['verdict'] or 'none yet'}: {profile['verdict_reason']}"
            rows += _rows(sandbox, shape, workload, profile, traces)
        sandbox.run("spark_agent.cli_spark", "pull-profile", "code-heavy", "--output", str(manifest), "--json")
        output.info("[4/5] built the profiles, judged them on held-out sessions, pulled the manifests")
        identical = _identical_output(sandbox, model, manifest)
        output.info(
            f"[5/5] {len(PROMPTS)} answers of {TOKENS} tokens, counted and from the manifest's slots: "
            + ("the same bits" if identical else "DIFFERENT from plain llama.cpp")
        )
    _print_table(output, rows)
    for workload, verdict in verdicts.items():
        sys.stdout.write(f"{workload}: {verdict}\n")
    output.info(f"done in {time.monotonic() - started:.0f} s")
    sys.stdout.write(json.dumps({"identical_output": identical, "rows": [asdict(row) for row in rows]}) + "\n")
    if not identical:
        raise SparkError("counting or slots changed what the model says", "report this machine's CPU and compiler")


def _rows(
    sandbox: Sandbox, shape: ModelShape, workload: str, profile: Mapping[str, Any], traces: list[SessionTrace]
) -> list[Row]:
    n_held_out = profile["n_held_out"]
    held_out = [
        t for t in traces if t.workload == workload and split_of(t.session_hash) == "held_out" and t.decode.any()
    ]
    points = {(point["residency"], point["policy"]): point for point in profile["curves"]}
    rows: list[Row] = []
    for residency in RESIDENCIES:
        for policy in _COUNTED_POLICIES:
            point = points[residency, policy]
            rows.append(
                Row(workload, residency, policy, point["cold_hit_rate"], point["low"], point["high"], n_held_out)
            )
        pulled = _pull(sandbox, shape, workload, residency)
        rate = adaptive_rate(held_out, pulled)
        rows.append(Row(workload, residency, "adaptive", rate.mean, rate.low, rate.high, len(held_out)))
    return rows


def _pull(sandbox: Sandbox, shape: ModelShape, workload: str, residency: float) -> PlacementManifest:
    n_ctx = default_context(shape)
    experts = residency_budget(layer_sizes(shape), residency)
    vram_bytes = shape.core_bytes + shape.context_bytes(n_ctx) + experts
    pulled = sandbox.run(
        "spark_agent.cli_spark", "pull-profile", workload, "--vram", str(vram_bytes), "--ctx", str(n_ctx), "--json"
    )
    return PlacementManifest.model_validate_json(json.dumps(pulled["manifest"]))


def _identical_output(sandbox: Sandbox, model: Path, manifest: Path) -> bool:
    start = manifest_start(load_manifest(manifest))
    plain, counted, tiered = (
        say(model, counting=False),
        say(model, counting=True),
        say(model, counting=True, tier=start),
    )
    with sandbox.serving(
        "spark_agent.cli", "run", str(model), "-p", "0", "--json", "--manifest", str(manifest), *_THREADS
    ) as agent:
        served = tuple(_ask(agent, prompt) for prompt in PROMPTS)
    return plain == counted == tiered and served == plain.answers


def _ask(agent: Mapping[str, Any], prompt: str) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "temperature": 0}
    address = urlsplit(agent["base_url"])
    with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    if answer.status != HTTPStatus.OK:
        raise SparkError(f"the agent answered {answer.status}: {content.decode(errors='replace')[:200]}")
    return str(json.loads(content)["choices"][0]["message"]["content"])


def _print_table(output: Output, rows: list[Row]) -> None:
    policies = (*_COUNTED_POLICIES, "adaptive")
    cells = {(row.workload, row.residency, row.policy): row for row in rows}
    sys.stdout.write("\ncold-hit rate on held-out sessions (mean over sessions, 95% interval)\n\n")
    output.table(
        ["workload", "resident", "held out", *policies],
        [
            [
                workload,
                f"{residency:.0%}",
                cells[workload, residency, "own"].n_held_out,
                *(_cell(cells[workload, residency, policy]) for policy in policies),
            ]
            for workload in dict.fromkeys(row.workload for row in rows)
            for residency in RESIDENCIES
        ],
    )
    sys.stdout.write(
        "\nuniform: the first experts of every layer; own, other: placed by the profile of this workload, of the\n"
        "other workloads (their mean), and never changed; oracle: placed by the held-out sessions themselves;\n"
        "adaptive: an LRU cache started from the workload's own profile, replayed in order on this machine.\n\n"
    )


def _cell(row: Row) -> str:
    return f"{row.cold_hit_rate:.3f} ({row.low:.3f}-{row.high:.3f})"


if __name__ == "__main__":
    main()
