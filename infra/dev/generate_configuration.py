"""Write the page of environment variables from the tables in the code; ``--check`` only compares.

Usage: generate_configuration.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check

from spark_agent import env as agent_env
from spark_service import env as service_env

TARGET = Path(__file__).parents[2] / "infra/docs/configuration.md"
INTRODUCTION = """# Configuration

Generated from the tables in `spark_agent/env.py` and `spark_service/env.py` by `make generate`. An empty variable
counts as unset; a value that cannot be understood is an error, never silently the default. Options win over variables,
variables over the config file.
"""
FILES = """
## Files

`XDG_CONFIG_HOME`, `XDG_STATE_HOME` and `XDG_DATA_HOME` move the folders; these are their usual places on Linux.

| file | holds |
|---|---|
| `~/.config/spark/config.toml` | `[upload]`: consent, pause, `service_url`, `token`; `[team]`: `key` |
| `~/.local/state/spark/spool.db` | histograms that wait for upload |
| `~/.local/state/spark/session.key` | this machine's key of session hashes, where the team shares none |
| `~/.local/share/spark/manifests/` | pulled manifests, one per model and workload |
| `~/.local/share/spark/service/service.duckdb` | the service's database |

The set-up of a clone reads `SPARKMOE_VENV`, and the compilers' variables: see [development](development.md).
"""


def table(rows: list[tuple[str, object, str]]) -> str:
    """A table of variables; unset defaults are empty cells."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, default, meaning in rows:
        shown = "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        lines.append(f"| `{name}` | {shown} | {meaning[0].upper()}{meaning[1:].rstrip('.')}. |")
    return "\n".join(lines) + "\n"


def rendered() -> str:
    """The whole page."""
    agent = [(one.name, one.default, f"{one.meaning.rstrip('.')} ({one.kind})") for one in agent_env.VARIABLES]
    service = [(one.name, one.default, one.help) for one in service_env.VARIABLES]
    return (
        f"{INTRODUCTION}\n## `spark-agent` and `spark`\n\n{table(agent)}\n## `spark-service`\n\n{table(service)}{FILES}"
    )


if __name__ == "__main__":
    sys.exit(write_or_check({TARGET: rendered()}))
