"""Asking an agent that runs on this machine what it is. Nothing else on the network is asked."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from spark_agent.agent_client import fetch
from spark_agent.errors import SparkError

if TYPE_CHECKING:
    from spark_agent.tls import ClientTls

__all__ = ["AgentInfo", "ask_agent", "get_json"]

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """What a running agent says of itself."""

    base_url: str
    models: tuple[str, ...]
    """Names that it serves its model under, the main one first."""
    fingerprint: str | None
    n_ctx: int | None
    """Its context, tokens; ``None`` where it does not say."""


def ask_agent(base_url: str, key: str | None, tls: ClientTls | None = None, *, address: str | None = None) -> AgentInfo:
    """What the agent at an address says; raise :class:`SparkError` where there is none, or it wants another key.

    ``tls`` says how it is trusted where it speaks TLS; ``address`` where it is reached, if not as its URL says.
    """
    health = get_json(base_url, "/health", key, tls, address)
    if not isinstance(health.get("fingerprint"), str):
        raise SparkError(f"what answers at {base_url} is no spark-agent", "name its port: -p PORT")
    served = get_json(base_url, "/v1/models", key, tls, address).get("data")
    entries = [entry for entry in served if isinstance(entry, dict)] if isinstance(served, list) else []
    names = tuple(entry["id"] for entry in entries if isinstance(entry.get("id"), str))
    if not names:
        raise SparkError(f"the agent at {base_url} serves no model", "start it again: spark-agent run MODEL")
    sizes = [health.get("n_ctx"), *(entry.get("n_ctx") for entry in entries)]
    sizes += [entry["meta"].get("n_ctx") for entry in entries if isinstance(entry.get("meta"), dict)]
    n_ctx = next((size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0), None)
    return AgentInfo(base_url, names, health["fingerprint"], n_ctx)


def get_json(
    base_url: str, path: str, key: str | None, tls: ClientTls | None = None, address: str | None = None
) -> dict[str, Any]:
    """An object that an agent answers with; raise :class:`SparkError` for anything else."""
    status, content = _get(base_url, path, key, tls, address)
    if status in {401, 403}:
        raise SparkError(
            f"the agent at {base_url} wants its token" if key is None else f"the agent at {base_url} refuses the token",
            "set SPARKMOE_API_KEY to the key that the agent was started with, or name its file: --api-key-file",
        )
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if status != 200 or not isinstance(value, dict):
        raise SparkError(
            f"what answers at {base_url} is no spark-agent: {path} gave {status}", "name its port: -p PORT"
        )
    return value


def _get(base_url: str, path: str, key: str | None, tls: ClientTls | None, address: str | None) -> tuple[int, bytes]:
    parts = urlsplit(base_url)
    try:
        host = address or parts.hostname or ""
        return fetch(host, parts.port, "GET", path, token=key, tls=tls, timeout_s=_TIMEOUT_S)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or getattr(error, "reason", None) or error
        raise SparkError(
            f"the agent at {base_url} cannot be trusted: {reason}",
            "name who signed its certificate, or the certificate itself: --tls-ca-file FILE; and the host as it says",
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SparkError(
            f"no agent answers at {base_url}: {getattr(error, 'strerror', None) or error or type(error).__name__}",
            "start one in another terminal: spark-agent run MODEL (or name its port: -p PORT)",
        ) from error
