"""``spark``: profiles, from any machine."""

from __future__ import annotations

import typer

from spark_agent import __version__
from spark_agent.commands.import_export import export_command, import_command
from spark_agent.commands.predict import predict_app
from spark_agent.commands.profiles import profiles_app, pull_profile_command
from spark_agent.commands.service_key import service_key_app
from spark_agent.commands.simulate import simulate_command
from spark_agent.output import run_app

__all__ = ["add_profile_commands", "app", "main", "print_version"]

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="Routing profiles: pull, list and compare them."
)


def print_version(wanted: bool) -> None:
    """Print the version and end, when ``--version`` was given."""
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=print_version, is_eager=True),
) -> None:
    """Routing profiles: pull, list and compare them."""


def add_profile_commands(target: typer.Typer) -> None:
    """Add what ``spark`` can do; ``spark-agent`` has it too, because other packages also install a ``spark``."""
    target.command("pull-profile")(pull_profile_command)
    target.command("simulate")(simulate_command)
    target.command("import")(import_command)
    target.command("export")(export_command)
    target.add_typer(predict_app, name="predict")
    target.add_typer(profiles_app, name="profiles")
    target.add_typer(service_key_app, name="service-key")


add_profile_commands(app)


def main() -> None:
    """Entry point."""
    run_app(app)
