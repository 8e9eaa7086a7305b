"""An agent in a process of its own, started as a person would, and what is asked of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx

KEY = b"k" * 16
"""Of session hashes."""
START_S, END_S = 600.0, 120.0
"""The first start of all builds the native library, beside whatever else the machine does."""


@contextlib.contextmanager
def running(
    *arguments: object, before: str = "", **variables: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start the agent on a free port, give the process and its start-up object, and end it.

    ``before`` is Python that its process runs first.
    """
    code = f"{before}\nfrom spark_agent.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "-p", "0", "--json"]
    # With this variable Python would not hold back what it writes to a pipe.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [*command, "--threads", "1", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "SPARKMOE_TEAM_KEY": KEY.hex(), **variables},
    ) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            line = process.stdout.readline() if ready else ""
            if not line:
                process.kill()
                raise AssertionError(f"it did not start: {process.communicate()[1]}")
            yield process, json.loads(line)
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> str:
    """Ask it to end, and give what it said on standard error all along."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=END_S)
    assert process.returncode == 0, said
    return said


def chat(start: dict[str, Any], text: str, max_tokens: int = 12, headers: dict[str, str] | None = None) -> str:
    """The answer to one message."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    url = f"{start['base_url']}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=END_S, trust_env=False)
    assert reply.status_code == 200, reply.text
    content = reply.json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def asked(start: dict[str, Any], path: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The object that it answers at a path."""
    found = httpx.get(f"{start['base_url']}{path}", headers=headers, timeout=END_S, trust_env=False).json()
    assert isinstance(found, dict)
    return found
