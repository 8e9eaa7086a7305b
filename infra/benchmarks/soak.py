"""A day of coding tools in some minutes: many clients of every dialect, cancelled, broken and refused requests.

Usage: soak.py [--model MODEL.gguf] [--minutes N] [--clients N] [--seed N] [--untrimmed] [--run OPTION]... [--out FILE].
Starts a real agent on a free port and says at the end whether its memory stayed flat, whether any request hung, and
whether it ended in order. Memory is told by quarters of the time: what the system counts, what is in use inside
(``agent_inside.py``), and what the processes take that follow grammars. ``--untrimmed`` never gives back what was
freed, to see what that is worth. ``--run`` is handed to ``spark-agent run``, for example ``--run=--residency=0.6``.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from process_watch import Watch, of_quarters
from report import parser_of, report
from served import start_agent

HUNG_S = 120.0
INSIDE_S = 10.0
WORDS = ("list", "file", "test", "error", "why", "does", "this", "function", "return", "early", "rename", "fix", "the")
TOOL = {
    "name": "read_file",
    "description": "Read it.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
SCHEMA = {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}
BROKEN = (
    b"{",
    b"[]",
    b'{"messages": []}',
    b'{"messages": [{"role": "wizard", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b"\xff\xfe\x00",
    b'{"a":' * 5000,
)


class Client(threading.Thread):
    """One coding tool: conversations that grow turn by turn, in a dialect of its own, with accidents."""

    def __init__(self, base_url: str, seed: int, until: float) -> None:
        super().__init__(name=f"client-{seed}")
        self._random = random.Random(seed)
        self._until = until
        self._http = httpx.Client(base_url=base_url, timeout=HUNG_S)
        self._turns: list[tuple[str, str]] = []
        self._last_response: str | None = None
        self.seen: Counter[str] = Counter()
        self.tokens = 0
        self.hung: list[str] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        actions: dict[Callable[[], None], int] = {
            self._chat: 6,
            self._messages: 5,
            self._responses: 3,
            self._formed: 1,
            self._complete: 1,
            self._leave_early: 4,
            self._leave_at_once: 2,
            self._broken: 3,
            self._look: 3,
            self._too_long: 1,
        }
        while time.monotonic() < self._until:
            action = self._random.choices(list(actions), list(actions.values()))[0]
            began = time.monotonic()
            try:
                action()
            except httpx.TimeoutException as error:
                self.hung.append(f"{action.__name__}: {type(error).__name__} after {time.monotonic() - began:.0f} s")
            except httpx.HTTPError as error:
                self.wrong.append(f"{action.__name__}: {type(error).__name__}: {error}")
        self._http.close()

    def _say(self, n_words: int = 12) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(n_words))

    def _history(self) -> list[dict[str, str]]:
        if len(self._turns) > 6 or self._random.random() < 0.15:
            self._turns.clear()
        messages = [{"role": role, "content": text} for role, text in self._turns]
        return [*messages, {"role": "user", "content": self._say(self._random.randint(3, 60))}]

    def _answered(self, what: str, answer: httpx.Response, *expected: int) -> None:
        self.seen[f"{what} {answer.status_code}"] += 1
        if answer.status_code not in (*expected, 503):
            self.wrong.append(f"{what}: {answer.status_code}: {answer.text[:200]}")

    def _remember(self, messages: list[dict[str, str]], answer: str) -> None:
        self._turns = [(message["role"], message["content"]) for message in messages]
        self._turns.append(("assistant", answer or "-"))

    def _limit(self) -> int:
        return self._random.randint(1, 48)

    def _chat(self) -> None:
        messages = self._history()
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": self._limit(),
            "stream": self._random.random() < 0.7,
        }
        if self._random.random() < 0.3:
            body["tools"] = [{"type": "function", "function": TOOL}]
        if self._random.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 2}
        if not body["stream"]:
            answer = self._http.post("/v1/chat/completions", json=body)
            self._answered("chat", answer, 200)
            if answer.status_code == 200:
                self.tokens += answer.json()["usage"]["completion_tokens"]
                self._remember(messages, answer.json()["choices"][0]["message"]["content"] or "")
            return
        text, done = "", False
        with self._http.stream("POST", "/v1/chat/completions", json=body) as stream:
            if stream.status_code != 200:
                stream.read()
                self._answered("chat stream", stream, 200)
                return
            for line in stream.iter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        text += choice["delta"].get("content") or ""
                        self.tokens += 1
        self.seen["chat stream 200"] += 1
        if not done:
            self.wrong.append("chat stream: ended without [DONE]")
        self._remember(messages, text)

    def _messages(self) -> None:
        body: dict[str, Any] = {
            "model": "any",
            "system": "Be brief.",
            "messages": self._history(),
            "max_tokens": self._limit(),
        }
        body["model"] = self._model()
        if self._random.random() < 0.3:
            answer = self._http.post(
                "/v1/messages/count_tokens", json={k: v for k, v in body.items() if k != "max_tokens"}
            )
            self._answered("count", answer, 200)
            return
        with self._http.stream("POST", "/v1/messages", json=body | {"stream": True}) as stream:
            if stream.status_code != 200:
                stream.read()
                self._answered("messages", stream, 200)
                return
            events = [line[7:] for line in stream.iter_lines() if line.startswith("event: ")]
        self.seen["messages 200"] += 1
        if not events or events[-1] != "message_stop":
            self.wrong.append(f"messages: ended with {events[-1:]}")

    def _responses(self) -> None:
        body: dict[str, Any] = {
            "model": self._model(),
            "input": self._say(),
            "max_output_tokens": max(16, self._limit()),
            "store": self._random.random() < 0.7,
        }
        if self._last_response is not None and self._random.random() < 0.5:
            body["previous_response_id"] = self._last_response
        answer = self._http.post("/v1/responses", json=body)
        # What it would go on with may have grown beyond the context, or given way to newer ones.
        going_on = "previous_response_id" in body
        self._answered("responses", answer, 200, *((400, 404) if going_on else ()))
        self._last_response = answer.json()["id"] if answer.status_code == 200 and body["store"] else None

    def _formed(self) -> None:
        """An answer of a form, which a process of its own follows."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self._say()}], "max_tokens": self._limit()}
        if self._random.random() < 0.5:
            schema = {"name": "state", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        else:
            body |= {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
        self._answered("formed", self._http.post("/v1/chat/completions", json=body), 200)

    def _complete(self) -> None:
        headers = {"X-Spark-Workload": self._random.choice(("code", "chat", "review"))}
        body = {"prompt": self._say(), "max_tokens": self._limit(), "stream": False}
        self._answered("completions", self._http.post("/v1/completions", json=body, headers=headers), 200)

    def _model(self) -> str:
        if not hasattr(self, "_served"):
            self._served: str = self._http.get("/v1/models").json()["data"][0]["id"]
        return self._served

    def _leave_early(self) -> None:
        body = {"messages": self._history(), "max_tokens": 512, "stream": True}
        lines = self._random.randint(0, 8)
        with self._http.stream("POST", "/v1/chat/completions", json=body) as stream:
            self.seen[f"left early {stream.status_code}"] += 1
            for number, _ in enumerate(stream.iter_lines()):
                if number >= lines:
                    return

    def _leave_at_once(self) -> None:
        body = {"messages": self._history(), "max_tokens": 512}
        with suppress(httpx.TimeoutException):  # this is the client that does not wait
            self._http.post("/v1/chat/completions", json=body, timeout=self._random.uniform(0.001, 0.2))
        self.seen["left at once"] += 1

    def _broken(self) -> None:
        path = self._random.choice(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"))
        answer = self._http.post(
            path, content=self._random.choice(BROKEN), headers={"Content-Type": "application/json"}
        )
        self._answered("broken", answer, 400, 413, 422)

    def _too_long(self) -> None:
        messages = [{"role": "user", "content": self._say(20000)}]
        self._answered("too long", self._http.post("/v1/chat/completions", json={"messages": messages}), 400)

    def _look(self) -> None:
        path = self._random.choice(("/health", "/metrics", "/spark/stats", "/v1/models"))
        self._answered("look", self._http.get(path), 200)


def start(arguments: argparse.Namespace, home: Path) -> tuple[subprocess.Popen[str], str]:
    program = [sys.executable, str(Path(__file__).with_name("agent_inside.py")), str(home / "inside"), str(INSIDE_S)]
    program += ["--untrimmed"] if arguments.untrimmed else []
    return start_agent(program, home, *arguments.run, *([arguments.model] if arguments.model else []))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="spark-soak-") as name:
        home = Path(name)
        process, base_url = start(arguments, home)
        watch = Watch(process.pid)
        watch.start()
        until = time.monotonic() + 60 * arguments.minutes
        clients = [Client(base_url, arguments.seed + number, until) for number in range(arguments.clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        watch.stop()
        time.sleep(3)
        stats = httpx.get(f"{base_url}/spark/stats", timeout=HUNG_S).json()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        ended_s = time.monotonic() - began
        log = (home / "agent.log").read_text()
        quarters = of_quarters(watch.samples, home / "inside")
    seen = sum((client.seen for client in clients), Counter())
    return {
        "settings": {key: str(value) for key, value in vars(arguments).items() if key != "out"},
        "requests": sum(seen.values()),
        "tokens": sum(client.tokens for client in clients),
        "answers": dict(sorted(seen.items())),
        "hung": [text for client in clients for text in client.hung],
        "wrong": [text for client in clients for text in client.wrong][:50],
        "quarters": quarters,
        "growth_last_quarter_bytes": {
            name: quarters[-1][name] - quarters[-2][name]
            for name in ("anonymous_bytes", "anonymous_bytes_median", "anonymous_bytes_end")
        },
        "stats_afterwards": stats,
        "exit_code": code,
        "ended_s": round(ended_s, 2),
        "agent_log": log.splitlines()[-20:],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--untrimmed", action="store_true", help="never give back what was freed")
    parser.add_argument("--run", action="append", default=[], help="an option of spark-agent run")
    arguments = parser.parse_args()
    report(run(arguments), arguments.out)


if __name__ == "__main__":
    main()
