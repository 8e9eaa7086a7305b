"""Asking an agent at an address of this machine: nobody else, through no proxy, bounded in bytes and time."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from spark_agent.addresses import is_own_address
from spark_agent.errors import RefusedError, SparkError

if TYPE_CHECKING:
    from spark_agent.tls import ClientTls

__all__ = ["MAX_ANSWER_BYTES", "ask_agent", "fetch"]

MAX_ANSWER_BYTES = 4 * 2**20


def fetch(
    address: str,
    port: int | None,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    token: str | None = None,
    tls: ClientTls | None = None,
    timeout_s: float,
) -> tuple[int, bytes]:
    """Status and content of an agent's answer; raises ``OSError``, ``HTTPException``, ``ValueError`` for one too long.

    ``timeout_s`` is that of each wait, not of the whole. ``tls`` says how the agent is trusted where it speaks TLS.
    """
    headers = {"Connection": "close"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    if tls is not None:
        connection = http.client.HTTPSConnection(address, port, timeout=timeout_s, context=tls.context())
    try:
        if tls is not None:
            connection.connect()
            shown = connection.sock
            tls.check(shown.getpeercert(binary_form=True) if isinstance(shown, ssl.SSLSocket) else None)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read(MAX_ANSWER_BYTES + 1)
    finally:
        connection.close()
    if len(content) > MAX_ANSWER_BYTES:
        raise ValueError(f"it answered more than {MAX_ANSWER_BYTES} bytes")
    return answer.status, content


def ask_agent(
    base_url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    address: str | None = None,
    token: str | None = None,
    tls: ClientTls | None = None,
    timeout_s: float = 30,
) -> dict[str, Any]:
    """The JSON object that an agent answers. ``address``: where it is reached, if not at the host that its URL names.

    Raises :class:`RefusedError` for an address beyond this machine, :class:`SparkError` with the agent's own words for
    an error status, and for an agent that is gone or answers something else.
    """
    parts = urlsplit(base_url)
    host = address or parts.hostname or ""
    scheme = "http" if tls is None else "https"
    if parts.scheme != scheme or parts.username is not None or not is_own_address(host):
        raise RefusedError(f"{base_url} is not an agent on this machine", "expected http://127.0.0.1:PORT")
    try:
        status, content = fetch(host, parts.port, method, path, body, token=token, tls=tls, timeout_s=timeout_s)
        found = json.loads(content)
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise SparkError(f"the agent at {base_url} does not answer: {error}", "see spark-agent ps") from error
    if not isinstance(found, dict):
        raise SparkError(f"the agent at {base_url} answers something else than expected", "is it another program?")
    if status != 200:
        error_object = found.get("error")
        message = error_object.get("message") if isinstance(error_object, dict) else None
        raise SparkError(f"the agent at {base_url} refused: {message or status}")
    return found
