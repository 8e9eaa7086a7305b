"""``spark-agent``: this machine's runtime, its recordings and its uploads."""

from __future__ import annotations

import typer

from spark_agent.cli_spark import add_profile_commands, print_version
from spark_agent.commands.bench import bench_command
from spark_agent.commands.doctor import doctor_command
from spark_agent.commands.launch import launch_command
from spark_agent.commands.models import models_app
from spark_agent.commands.paths import paths_command
from spark_agent.commands.ps import ps_command
from spark_agent.commands.record import record_command
from spark_agent.commands.run import run_command
from spark_agent.commands.upload import upload_app
from spark_agent.output import run_app

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run mixture-of-experts models, count their routing, and place their experts by it.",
)


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=print_version, is_eager=True),
) -> None:
    """Run mixture-of-experts models, count their routing, and place their experts by it."""


app.command("run")(run_command)
app.command("ps")(ps_command)
app.command("record")(record_command)
app.command("bench")(bench_command)
app.command("launch")(launch_command)
app.command("doctor")(doctor_command)
app.command("paths")(paths_command)
app.add_typer(models_app, name="models")
app.add_typer(upload_app, name="upload")
add_profile_commands(app)


def main() -> None:
    """Entry point."""
    run_app(app)
