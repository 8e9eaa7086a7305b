"""``spark-agent launch``: start a coding tool against the running agent."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spark_agent.addresses import base_url_of, is_own_address, reachable
from spark_agent.api_key import named_api_key, shown_api_key
from spark_agent.context import AgentContext
from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.launch import TOOLS, Endpoint, Launch, launch_of
from spark_agent.paths import api_key_path, ensure_private_dir, launch_dir
from spark_agent.running import RunningAgent, RunningAgents
from spark_agent.running_agent import ask_agent
from spark_agent.tls import ClientTls
from spark_schemas.local_address import is_loopback

if TYPE_CHECKING:
    from spark_agent.running_agent import AgentInfo

__all__ = ["launch_command"]

_NO_KEY = "spark"
"""An agent on loopback asks for no key, but tools want one."""


def launch_command(
    tool: Annotated[Literal["claude", "codex", "opencode", "aider"], typer.Argument(help="Which tool.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The tool's own arguments, after --.")] = None,
    host: Annotated[str | None, typer.Option(help="Where the agent listens.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", min=1, max=65535, help="The agent's port.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model; left out: what the agent serves.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of the agent's key; left out: SPARKMOE_API_KEY, else what agents here were started with."
        ),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="The agent speaks TLS; known of those that run here.")] = False,
    tls_ca_file: Annotated[
        Path | None, typer.Option(help="Who signed its certificate, PEM, or that itself; means --tls.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Variable to leave in the tool's environment; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
) -> None:
    """Start a coding tool against the running agent, with every cloud's keys taken out of its environment.

    The tool takes this process's place: its exit code and its signals are its own. Start the agent first, in another
    terminal: spark-agent run MODEL.
    """
    context = AgentContext.create(json_mode=json)
    if json and not dry_run:
        raise SparkError("--json describes what --dry-run would run", "add --dry-run", exit_code=2)
    environment = context.environment
    where = host or environment.host, port or environment.port
    key = _key_of(context, api_key_file, *where)
    found, trusted = _found(where, key, tls=tls or tls_ca_file is not None, ca_file=tls_ca_file)
    chosen, served = TOOLS[tool], _model_of(found, model)

    def launched(shown_key: str) -> Launch:
        endpoint = Endpoint(found.base_url, served, shown_key, found.n_ctx, trusted)
        return launch_of(chosen, endpoint, arguments or [], os.environ, keep or [], folder=launch_dir())

    if chosen.cramped(found.n_ctx):
        context.output.warning(
            f"{tool}'s own prompt takes about {chosen.prompt_tokens:,} tokens of this context's {found.n_ctx:,}: "
            "start the agent with a larger --ctx"
        )

    if dry_run:
        # A secret is named, never shown.
        shown_key = _shown_key(key, api_key_file)
        shown = launched(shown_key)
        value = {
            "tool": tool,
            "command": list(shown.arguments),
            "environment": shown.environment,
            "removed": list(shown.removed),
            "files": {str(path): text for path, text in shown.files.items()},
            "base_url": found.base_url,
            "model": served,
            "installed": shutil.which(chosen.program) is not None,
        }
        context.output.result(value, _script(shown, shown_key))
        return
    launch = launched(key or _NO_KEY)
    program = shutil.which(chosen.program)
    if program is None:
        raise SparkError(f"{chosen.program} is not installed: it is in no folder of PATH", chosen.install)
    if launch.removed:
        context.output.info(f"not handed on: {', '.join(launch.removed)}")
    _write(launch)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, launch.arguments, launch.environment_of(os.environ))  # noqa: S606
    except OSError as error:
        raise SparkError(f"cannot run {program}: {error.strerror}", chosen.install) from error


def _registered(host: str, port: int) -> RunningAgent | None:
    """The agent of this machine that is meant. One that listens everywhere has the port of no other machine."""
    if not (is_loopback(host) or is_own_address(reachable(host))):
        return None
    return RunningAgents.of_this_machine().listening_on(host, port)


def _found(
    where: tuple[str, int], key: str | None, *, tls: bool, ca_file: Path | None
) -> tuple[AgentInfo, Path | None]:
    """What the agent says, and the file of those whom its tool must be told to trust, if any."""
    registered = _registered(*where)
    if registered is None:
        if not tls:
            return ask_agent(base_url_of(*where), key), None
        trust = ca_file if ca_file is None else ca_file.absolute()
        return ask_agent(base_url_of(*where, "https"), key, ClientTls(ca_file=trust)), trust
    found = ask_agent(registered.base_url, key, registered.tls, address=registered.address)
    if ca_file is not None:
        return found, ca_file.absolute()
    return found, None if registered.trust_file is None else Path(registered.trust_file)


def _key_of(context: AgentContext, file: Path | None, host: str, port: int) -> str | None:
    """What the agent at an address asks for, as far as it is known here."""
    registered = _registered(host, port)
    if file is None and registered is not None:
        return registered.token
    named = named_api_key(context.environment, file)
    if named is not None:
        return named.value
    own = api_key_path()
    # What agents of this machine were started with is nobody else's to see.
    if not own.exists() or is_loopback(host) or not is_own_address(reachable(host)):
        return None
    kept = named_api_key(context.environment, own)
    return None if kept is None else kept.value


def _shown_key(key: str | None, file: Path | None) -> str:
    if key is None:
        return _NO_KEY
    return f"$(cat {shlex.quote(str(file))})" if file is not None else shown_api_key(key)


def _model_of(found: AgentInfo, asked: str | None) -> str:
    if asked is not None and asked not in found.models:
        raise SparkError(
            f"--model: the agent serves no {asked!r}, only {', '.join(found.models)}", "leave --model out", exit_code=2
        )
    return asked or found.models[0]


def _write(launch: Launch) -> None:
    for path, text in launch.files.items():
        try:
            ensure_private_dir(path.parent)
            with replacing(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise SparkError(
                f"cannot write {path}: {error.strerror}", "make room, or check who owns the folder"
            ) from error


def _script(launch: Launch, shown_key: str) -> str:
    """The same as a person would type it."""
    lines = [f"unset {' '.join(launch.removed)}"] if launch.removed else []
    for path, text in launch.files.items():
        lines += [
            f"mkdir -p {shlex.quote(str(path.parent))}",
            f"echo {shlex.quote(text.strip())} > {shlex.quote(str(path))}",
        ]
    for name, value in launch.environment.items():
        lines.append(f"export {name}=" + (f'"{value}"' if value == shown_key else shlex.quote(value)))
    return "\n".join([*lines, shlex.join(launch.arguments)])
