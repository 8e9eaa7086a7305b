"""A placement taken over by agents that already run its model, without a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from spark_agent.agent_client import ask_agent
from spark_agent.errors import SparkError
from spark_agent.signatures import SignedBy

if TYPE_CHECKING:
    from spark_agent.tls import ClientTls

__all__ = ["Applied", "RunningAgent", "apply_to_running"]


class RunningAgent(Protocol):
    """What has to be known of an agent that runs on this machine."""

    @property
    def base_url(self) -> str:
        """As it is told."""

    @property
    def address(self) -> str:
        """Where it is reached from this machine."""

    @property
    def tls(self) -> ClientTls | None:
        """How it is trusted, where it speaks TLS."""

    @property
    def fingerprint(self) -> str:
        """Of the model that it serves."""

    @property
    def token(self) -> str | None:
        """That it asks for, if it asks for one."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one agent said."""

    base_url: str
    refusal: str | None
    """``None``: the placement is in force there."""


def apply_to_running(
    agents: Iterable[RunningAgent],
    fingerprint: str,
    *,
    content: bytes | None = None,
    signed: SignedBy | None = None,
    local: str | None = None,
    say: Callable[[str], None],
) -> list[Applied]:
    """Offer a placement to every running agent of the model and say what came of each.

    Either ``content`` as it was signed, with its signature, or the workload of this machine's own sessions (``local``).
    An agent that refuses keeps its placement; none of them makes a pull fail.
    """
    order = (
        {"local": local}
        if local is not None
        else {
            "content": None if content is None else content.decode(),
            "signed": None if signed is None else signed.model_dump(mode="json"),
        }
    )
    body = json.dumps(order).encode()
    results = []
    for agent in agents:
        if agent.fingerprint != fingerprint:
            continue
        try:
            ask_agent(
                agent.base_url,
                "POST",
                "/spark/placement",
                body,
                address=agent.address,
                token=agent.token,
                tls=agent.tls,
            )
        except SparkError as error:
            results.append(Applied(agent.base_url, str(error)))
            say(f"not applied: {error}")
        else:
            results.append(Applied(agent.base_url, None))
            say(f"applied to the agent at {agent.base_url}, between two tokens")
    return results
