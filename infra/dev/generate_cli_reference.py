"""Write the command reference from the commands' own help; ``--check`` only compares.

Usage: generate_cli_reference.py [--check]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "TERMINAL_WIDTH": "100"}

import typer
from generated import write_or_check
from typer.testing import CliRunner

from spark_agent.cli import app as spark_agent
from spark_service.cli import app as spark_service

TARGET = Path(__file__).parents[2] / "infra/docs/commands.md"
INTRODUCTION = """# Commands

Generated from `--help` by `make generate`. Every `spark X` is also `spark-agent X`: the profile commands stand under
`spark-agent` here.
"""


def paths(command: object) -> list[list[str]]:
    """A command and, if it is a group, all that it holds."""
    members = getattr(command, "commands", {})
    return [[], *([name, *path] for name, member in members.items() if not member.hidden for path in paths(member))]


def rendered() -> str:
    """The whole page."""
    runner = CliRunner()
    text = INTRODUCTION
    for name, app in (("spark-agent", spark_agent), ("spark-service", spark_service)):
        for path in paths(typer.main.get_command(app)):
            result = runner.invoke(app, [*path, "--help"], prog_name=name, terminal_width=100)
            if result.exit_code:
                raise RuntimeError(f"{name} {' '.join(path)} --help ended with {result.exit_code}: {result.output}")
            lines = "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines())
            text += f"\n## {' '.join([name, *path])}\n\n```\n{lines}\n```\n"
    return text


if __name__ == "__main__":
    sys.exit(write_or_check({TARGET: rendered()}))
