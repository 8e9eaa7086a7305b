"""``spark-agent upload``: what waits, what it says, and sending it, after a yes."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_agent.config import save_config
from spark_agent.consent import what_is_sent
from spark_agent.context import AgentContext
from spark_agent.errors import RefusedError, SparkError, UsageError
from spark_agent.output import counted
from spark_agent.paths import config_path
from spark_agent.privacy import MINIMUM_TOKENS

__all__ = ["upload_app"]

upload_app = typer.Typer(no_args_is_help=True, help="What waits to be uploaded, the exact bytes, and consent.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Service = Annotated[str | None, typer.Option("--service", help="Address of the calibration service.")]
MinimumTokens = Annotated[
    int, typer.Option(min=1, help="Tokens every uploaded histogram stands for at least; smaller ones are merged.")
]


@upload_app.command("status")
def status_command(service: Service = None, json: Json = False) -> None:
    """Show what waits in the spool and whether it may leave."""
    _report_status(AgentContext.create(json_mode=json), service)


@upload_app.command("show")
def show_command(minimum_tokens: MinimumTokens = MINIMUM_TOKENS) -> None:
    """Print the exact bytes that a flush would send, one request a line (before compression)."""
    import sys

    from spark_agent.upload import preview

    context = AgentContext.create()
    with context.spool() as spool:
        pending = spool.stats().pending
        count = 0
        for body in preview(spool, minimum_tokens=minimum_tokens, ignore_waits=True):
            sys.stdout.buffer.write(body + b"\n")
            count += 1
    if not count:
        context.output.info(
            f"nothing would be sent: {pending} histograms wait"
            + (f", together too few tokens (minimum {minimum_tokens})" if pending else "")
        )


@upload_app.command("flush")
def flush_command(
    service: Service = None,
    minimum_tokens: MinimumTokens = MINIMUM_TOKENS,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="Also what the service refused before, e.g. after an update.")
    ] = False,
    json: Json = False,
) -> None:
    """Send what waits, now."""
    from spark_agent.upload import flush, require_permission

    context = AgentContext.create(json_mode=json)
    with context.spool() as spool, context.client(service) as client:
        if rejected:
            require_permission(
                context.environment, context.config.consent, client.base_url, paused=context.config.paused
            )
            context.output.info(f"tried again: {counted(spool.restore_rejected(), 'rejected histogram')}")
        report = flush(
            spool,
            client,
            context.config.consent,
            environment=context.environment,
            paused=context.config.paused,
            minimum_tokens=minimum_tokens,
            ignore_waits=True,
        )
        stats = spool.stats()
    context.output.result(
        {
            "uploaded": report.uploaded,
            "duplicates": report.duplicates,
            "held_back": report.held_back,
            "rejected": report.rejected,
            "dropped": stats.dropped,
            "pending": stats.pending,
            "bytes": stats.bytes,
            "last_error": report.last_error,
        },
        f"uploaded {report.uploaded}, known already {report.duplicates}, held back {report.held_back}, "
        f"rejected {report.rejected}, still pending {stats.pending}",
    )
    if report.held_back:
        context.output.info(
            f"held back: sessions that, merged with others of their model, workload and split, are under "
            f"{minimum_tokens} tokens; they leave once there is more"
        )
    if report.last_error is not None:
        raise SparkError(report.last_error, "nothing was lost: what could not be sent stays in the spool")


@upload_app.command("pause")
def pause_command(
    off: Annotated[bool, typer.Option("--off", help="Go on uploading.")] = False,
    json: Json = False,
) -> None:
    """Keep counting but send nothing until ``--off``."""
    import dataclasses

    context = AgentContext.create(json_mode=json)
    config = dataclasses.replace(context.config, paused=not off)
    save_config(config_path(), config)
    context.output.info("uploads go on" if off else "uploads are paused; counting goes on")
    if json:
        _report_status(dataclasses.replace(context, config=config))


@upload_app.command("consent")
def consent_command(
    service: Service = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Consent without being asked.")] = False,
    no: Annotated[bool, typer.Option("--no", help="Refuse, or take a consent back.")] = False,
    json: Json = False,
) -> None:
    """Decide whether counts may be sent to the service, and say what they are."""
    import dataclasses
    import sys

    context = AgentContext.create(json_mode=json)
    address = context.service_url(service)
    if yes and no:
        raise UsageError("found --yes and --no together, expected one")
    if not yes and not no:
        if not sys.stdin.isatty():
            raise UsageError("nobody is there to ask: not a terminal", "pass --yes or --no")
        context.output.info(what_is_sent(address))
        yes = typer.confirm("Send these counts?", default=False, err=True)
    config = context.config.with_consent(yes, address)
    save_config(config_path(), config)
    context.output.info(f"consent {'granted' if yes else 'refused'} for {address}")
    if json:
        _report_status(dataclasses.replace(context, config=config), service)


@upload_app.command("purge")
def purge_command(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without being asked.")] = False,
    json: Json = False,
) -> None:
    """Delete every histogram kept on this machine, waiting and rejected."""
    import sys

    context = AgentContext.create(json_mode=json)
    with context.spool() as spool:
        stats = spool.stats()
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError("nobody is there to ask: not a terminal", "pass --yes")
            question = f"Delete {stats.pending} waiting and {stats.rejected} rejected histograms?"
            yes = typer.confirm(question, default=False, err=True)
        count = spool.purge() if yes else 0
    context.output.info(f"deleted {counted(count, 'histogram')}; what was uploaded before is with the service")
    if json:
        _report_status(context)


def _report_status(context: AgentContext, service: str | None = None) -> None:
    from spark_agent.batch import plan
    from spark_agent.upload import require_permission

    address = context.service_url(service)
    with context.spool() as spool:
        stats = spool.stats()
        rejected = spool.rejected()
        held_back = len(plan(spool.pending(), MINIMUM_TOKENS)[1])
    try:
        require_permission(context.environment, context.config.consent, address, paused=context.config.paused)
        refusal = None
    except RefusedError as error:
        refusal = str(error)
    next_attempt = _moment(stats.next_try)
    consent = context.config.consent
    state = "never asked" if consent is None else "granted" if consent.granted else "refused"
    lines = [
        f"pending   {counted(stats.pending, 'histogram')}, {stats.bytes} bytes",
        f"held back {held_back} (under {MINIMUM_TOKENS} tokens until there are more to merge them with)",
        f"rejected  {stats.rejected}",
        f"dropped   {stats.dropped} (the spool was full)",
        f"consent   {state}" + (f" for {consent.service_url} on {consent.at:%Y-%m-%d}" if consent else ""),
        *(["paused    until `spark-agent upload pause --off`"] if context.config.paused else []),
        f"service   {address}",
        f"uploads   {'on' if refusal is None else 'off: ' + refusal}",
        f"next try  {next_attempt or 'with the next flush'}",
        f"error     {stats.last_error or 'none'}",
        *(f"rejected {row.content_id[:12]}: {row.reason}" for row in rejected[:5]),
    ]
    context.output.result(
        {
            "pending": stats.pending,
            "bytes": stats.bytes,
            "held_back": held_back,
            "rejected": stats.rejected,
            "dropped": stats.dropped,
            "last_error": stats.last_error,
            "next_attempt_at": next_attempt,
            "allowed": refusal is None,
            "refused_because": refusal,
            "consent": consent.granted if consent else None,
            "paused": context.config.paused,
            "service_url": address,
        },
        "\n".join(lines),
    )


def _moment(epoch_s: float | None) -> str | None:
    """When to try again, for people and machines; ``None`` for what no clock can have meant."""
    import datetime as dt
    import time

    from spark_agent.batch import LONGEST_WAIT_S

    if epoch_s is None or not 0 <= epoch_s - time.time() <= LONGEST_WAIT_S:
        return None
    return dt.datetime.fromtimestamp(epoch_s, dt.UTC).isoformat(timespec="seconds")
