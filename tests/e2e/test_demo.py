"""``make demo`` as it is run by ``make``: the promise on the last line of its output."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def test_demo_prints_the_promised_rows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spark_agent.demo"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["identical_output"] is True
    rates = {(row["workload"], row["residency"], row["policy"]): row["cold_hit_rate"] for row in result["rows"]}
    workloads = {workload for workload, _, _ in rates}
    assert workloads == {"chat", "code-heavy", "docs"}
    policies = {"uniform", "own", "other", "oracle", "adaptive"}
    assert set(rates) == {(w, r, p) for w in workloads for r in (0.3, 0.6, 0.8) for p in policies}
    assert all(0 <= rate <= 1 for rate in rates.values())
    for workload in workloads:
        for residency in (0.3, 0.6, 0.8):
            own = rates[workload, residency, "own"]
            assert own < min(rates[workload, residency, "other"], rates[workload, residency, "uniform"])
            # Another workload's profile promises nothing: sessions are texts of this machine, this project's own files
            # among them, and with most experts resident it lies on either side of uniform as those change.
            # The oracle maximises the covered share of pooled selections; means over sessions may differ a little.
            assert rates[workload, residency, "oracle"] <= own + 0.005
        for policy in policies:
            by_residency = [rates[workload, residency, policy] for residency in (0.3, 0.6, 0.8)]
            assert by_residency == sorted(by_residency, reverse=True)


def test_arguments_are_not_ignored() -> None:
    command = [sys.executable, "-m", "spark_agent.demo", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no arguments, found ['--help']" in done.stderr
