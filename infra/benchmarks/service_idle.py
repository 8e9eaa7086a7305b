"""What the service takes when it does nothing: seconds from start to ready, and memory, of the real process.

Usage: service_idle.py [--starts N] [--idle SECONDS] [--out FILE]. Ready means that /readyz answers 200 over a new
connection. Memory is that of the whole process from /proc (Linux): resident, and what only it uses.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import duckdb
from report import parser_of, report


def started(data_dir: Path) -> tuple[subprocess.Popen[str], float]:
    """Start the service and return it with the seconds until it was ready."""
    command = [
        sys.executable,
        "-m",
        "spark_service.cli",
        "run",
        "--open",
        "-p",
        "0",
        "--data-dir",
        str(data_dir),
        "--json",
    ]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    base_url = json.loads(process.stdout.readline())["base_url"]
    with urllib.request.urlopen(f"{base_url}/readyz", timeout=30) as answer:
        answer.read()
    return process, time.perf_counter() - start


def memory_of(pid: int) -> dict[str, int]:
    """Bytes resident, those of them that no other process shares, and the most that were ever resident."""
    fields = {}
    for name in ("smaps_rollup", "status"):
        for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                fields[key] = 1024 * int(value.split()[0])
    return {
        "rss_bytes": fields["Rss"],
        "private_bytes": fields["Private_Clean"] + fields["Private_Dirty"],
        "peak_rss_bytes": fields["VmHWM"],
    }


def measure(starts: int, idle_seconds: float) -> list[dict[str, Any]]:
    """One run per start, on a database that the first one creates."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(starts):
            process, ready_seconds = started(Path(folder))
            try:
                time.sleep(idle_seconds)
                runs.append({"start_to_ready_s": round(ready_seconds, 3), **memory_of(process.pid)})
            finally:
                process.terminate()
                process.communicate()
    return runs


def main() -> None:
    """Measure and print (or write) the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--idle", type=float, default=5.0, help="seconds between ready and the look at the memory")
    options = parser.parse_args()
    runs = measure(options.starts, options.idle)
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "duckdb": duckdb.__version__},
        "idle_s": options.idle,
        "start_to_ready_s": statistics.median(run["start_to_ready_s"] for run in runs),
        "slowest_start_to_ready_s": max(run["start_to_ready_s"] for run in runs),
        "rss_mib": round(max(run["rss_bytes"] for run in runs) / 2**20, 1),
        "private_mib": round(max(run["private_bytes"] for run in runs) / 2**20, 1),
        "runs": runs,
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
