"""Servers as benchmarks start and ask them: a real agent or another server, and a client that takes no time itself."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

START_S = 60.0


def private_bytes(pid: int) -> int:
    """Memory that a process has for itself, without the file pages that are its model and its libraries."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return 1024 * int(dict(line.split(":", 1) for line in lines)["Anonymous"].split()[0])


def cpu_s(pid: int) -> float:
    """Processor time that a process took so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client:
    """One connection to a server, and nothing that takes time."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(
        self, prompt: list[dict[str, str]] | list[int], tokens: int, bias: dict[str, float], **options: object
    ) -> dict[str, Any]:
        """One streamed chat completion, greedy unless ``options`` say otherwise; of token ids a completion."""
        chat = isinstance(prompt[0], dict)
        path, key = ("chat/completions", "messages") if chat else ("completions", "prompt")
        body = {key: prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": bias}
        raw = json.dumps(body | {"stream_options": {"include_usage": True}} | options).encode()
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        cpu, parts = cpu_s(self.process.pid), []
        began = time.perf_counter()
        self._socket.sendall(head.encode() + raw)
        ended = False
        while not ended:
            part = self._socket.recv(65536)
            parts.append((time.perf_counter() - began, part))
            tail = b"".join(each for _, each in parts[-3:])
            ended = not part or tail.endswith(b"0\r\n\r\n")
        return self._read(parts) | {"cpu_ms_per_token": 1000 * (cpu_s(self.process.pid) - cpu) / tokens}

    def _read(self, parts: Sequence[tuple[float, bytes]]) -> dict[str, Any]:
        came: list[float] = []
        text, usage, rest = "", None, b""
        for at_s, part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    said = choice["text"] if "text" in choice else choice["delta"].get("content")
                    if said:
                        came.append(at_s)
                        text += said
        if not came:
            raise SystemExit(f"error: an answer without text: {parts!r:.2000}")
        # Some servers tell no usage; each token is an event of theirs.
        usage = usage or {"completion_tokens": len(came)}
        if came[-1] == came[0]:
            raise SystemExit("error: an answer came in one piece: ask for more --tokens")
        return {
            "first_s": came[0],
            "decode_tok_s": (usage["completion_tokens"] - 1) / (came[-1] - came[0]),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage["completion_tokens"],
            "reused_tokens": usage.get("prompt_tokens_details", {}).get("cached_tokens"),
            "events": len(came),
            "text": text,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def start_agent(program: Sequence[str], home: Path, *options: object) -> tuple[subprocess.Popen[str], str]:
    """``PROGRAM run`` on a free port, with folders of its own in ``home``, and its address once it serves."""
    names = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
    environment = {**os.environ, **{name: str(home / name) for name in names}, "SPARKMOE_OFFLINE": "1"}
    command = [*program, "run", "-p", "0", "--json", *map(str, options)]
    with (home / "agent.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, stdin=subprocess.DEVNULL
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("error: the agent did not start: " + (home / "agent.log").read_text())
    return process, json.loads(line)["base_url"]


class Agent(Client):
    """A real agent with folders of its own in ``home``, started with options of ``spark-agent run``."""

    def __init__(self, home: Path, model: Path, *options: object) -> None:
        began = time.perf_counter()
        program = [str(Path(sys.executable).with_name("spark-agent"))]
        process, base_url = start_agent(program, home, *options, model)
        self.ready_s = time.perf_counter() - began
        super().__init__(process, urlsplit(base_url).port or 80)

    def stats(self) -> dict[str, Any]:
        """``GET /spark/stats``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/spark/stats", timeout=START_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def fetched(self) -> dict[str, int]:
        """Experts that were fetched so far, by phase."""
        return {phase: each["loads"] for phase, each in self.stats()["phases"].items()}


class Beside(Client):
    """Another server of OpenAI's API, by the command that starts it; ``words`` go where it names them."""

    def __init__(self, command: str, home: Path, **words: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = [word.format(port=port, **words) for word in shlex.split(command)]
        with (home / "beside.log").open("w") as log:
            process = subprocess.Popen(program, stdout=log, stderr=log, text=True, stdin=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while True:
            try:
                super().__init__(process, port)
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    process.kill()
                    log_text = (home / "beside.log").read_text()[-2000:]
                    raise SystemExit(f"error: {program[0]} did not start: {log_text}") from None
                time.sleep(0.1)
