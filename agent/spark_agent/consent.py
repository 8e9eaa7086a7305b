"""Asking a person, once, whether counts may leave this machine.

Only on a terminal, and only where nobody has answered yet. Whoever leaves the question (Ctrl-C, the end of input) was
not asked, and nothing leaves.
"""

from __future__ import annotations

import dataclasses
import sys

from spark_agent.config import save_config
from spark_agent.context import AgentContext
from spark_agent.errors import ConfigError
from spark_agent.paths import config_path

__all__ = ["ask_once", "what_is_sent"]

_TRIES = 3
_YES, _NO = frozenset({"y", "yes"}), frozenset({"", "n", "no"})


def what_is_sent(service_url: str) -> str:
    """What a person consents to."""
    return (
        f"Routing counts can be sent to {service_url}, which builds your team's profiles from them.\n"
        "Sent, for each session: how often each expert was chosen (prompts and answers apart), how soon again, and\n"
        "how many choices missed video memory; the workload's name; a keyed hash of the session; the model's name\n"
        "and shape.\n"
        "Never sent: text, tokens, their order, file, host or user names, times.\n"
        "See the exact bytes at any time: spark-agent upload show. Change the answer: spark-agent upload consent."
    )


def ask_once(context: AgentContext) -> AgentContext:
    """Ask, if a person is there, nobody has answered, and uploads are not off; return the context with the answer."""
    environment = context.environment
    if context.config.consent is not None or environment.do_not_track or environment.offline:
        return context
    if context.output.json_mode or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return context
    address = context.service_url()
    context.output.info(what_is_sent(address))
    granted = _answer()
    if granted is None:
        context.output.info("not answered: nothing is sent, and the next start asks again")
        return context
    config = context.config.with_consent(granted, address)
    try:
        save_config(config_path(), config)
    except ConfigError as error:
        context.output.warning(f"the answer could not be kept, so nothing is sent: {error}")
        return context
    context.output.info("counts will be sent" if granted else "nothing is sent")
    return dataclasses.replace(context, config=config)


def _answer() -> bool | None:
    for _ in range(_TRIES):
        sys.stderr.write("Send these counts? [y/N] ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            sys.stderr.write("\n")
            return None
        word = line.strip().lower()
        if word in _YES:
            return True
        if word in _NO:
            return False
        sys.stderr.write("expected y or n\n")
    return None
