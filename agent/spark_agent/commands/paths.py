"""``spark-agent paths``: where this machine's files of Spark lie."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_agent import paths
from spark_agent.context import AgentContext

__all__ = ["paths_command"]


def paths_command(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print the folders and files that Spark keeps here; nothing is created."""
    context = AgentContext.create(json_mode=json)
    found = {
        "config": paths.config_path(),
        "workload_rules": paths.workload_rules_path(),
        "state": paths.state_dir(),
        "spool": paths.spool_path(),
        "session_key": paths.local_key_path(),
        "api_key": paths.api_key_path(),
        "service_keys": paths.service_keys_dir(),
        "data": paths.data_dir(),
        "manifests": paths.manifests_dir(),
        "cache": paths.cache_dir(),
        "native": paths.cache_dir() / "native",
        "benchmarks": paths.benchmarks_dir(),
        "prefetch_trials": paths.prefetch_trials_dir(),
    }
    value = {name: str(path) for name, path in found.items()}
    width = max(map(len, value))
    context.output.result(value, "\n".join(f"{name:{width}}  {path}" for name, path in value.items()))
