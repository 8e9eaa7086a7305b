"""What serving costs beside the bare engine: speed through HTTP, idle memory and time, and starting.

Usage: serving_overhead.py [--model demo|random|FILE.gguf …] [--threads 1 2] [--pairs N] [--rounds N] [--tokens N]
[--starts N] [--characters N] [--beside COMMAND] [--out FILE]. One process has the bare engine, another is a real agent,
and both stay loaded; they are asked the same in turn, so that neither has the machine at a better time or caches warm
from its own last answer. Where a process's memory comes to lie makes it faster or slower as a whole, so there are
``--pairs`` of such processes, one after another. ``random`` is a model with random weights whose token takes several
milliseconds on two cores (``big_model.py``), written and removed again. With one thread llama.cpp leaves the second
core to server and client. ``--beside`` is a command that starts another server of OpenAI's API, asked in the same
rounds, with ``{model}``, ``{port}``, ``{threads}`` and ``{context}`` where they belong.

First tokens are compared twice. Of ``messages``: the engine's time has rendering and tokenising in it
(``prepare_ms``), the agent is asked for a chat completion. Of ``tokens``: both are given the prompt's ids. ``not
counting`` is the engine asked the same again: only its decode speed can be compared, as its prompt is in the context
already. ``tokenising`` is a conversation of ``--characters`` with one turn more: tokenised whole, and as an agent does
it that saw it without that turn.

Tokens that end an answer are biased away in both, so that all answers are of one length. The client is a socket and
does nothing but note when bytes came: what it takes is not the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from report import parser_of, report

N_CTX = 1024
IDLE_S = 20.0
START_S = 60.0
SYSTEM = "You answer questions about a repository. Be brief, and show code where it helps."
ASKED = ("list the files", "why does this test fail", "rename this function", "show me an example", "fix the import")
RANDOM = {"layers": 3, "experts": 32, "vocabulary": 8192}


def conversation(number: int) -> list[dict[str, str]]:
    """A short conversation; all share the system message, and neighbours nothing of the other."""
    last = f"{ASKED[number % len(ASKED)]} of module number {number * 7}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": last}]


def private_bytes(pid: int) -> int:
    """Memory that a process has for itself, without the file pages that are its model and its libraries."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return 1024 * int(dict(line.split(":", 1) for line in lines)["Anonymous"].split()[0])


def cpu_s(pid: int) -> float:
    """Processor time that a process took so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare(path: Path, threads: int) -> None:
    """The engine alone: asked by lines of JSON, answers by lines."""
    from spark_agent.dialogue.messages import Message
    from spark_agent.server.exchange import Ask
    from spark_agent.server.prompting import Prompting
    from spark_runtime.chat import ChatFormat
    from spark_runtime.engine import Engine, EngineOptions
    from spark_runtime.llama import bindings
    from spark_runtime.sampling import Sampling
    from spark_runtime.session_counts import SessionCounts

    bindings()
    before = private_bytes(os.getpid())
    began = time.perf_counter()
    with Engine.load(path, EngineOptions(n_ctx=N_CTX, n_threads=threads)) as engine:
        load_s = time.perf_counter() - began
        loaded = private_bytes(os.getpid())
        never = tuple((token, -100.0) for token in range(engine.n_vocab) if engine.is_end(token))
        told = {"load_s": load_s, "before_bytes": before, "loaded_bytes": loaded, "end_tokens": dict(never)}
        print(json.dumps(told), flush=True)
        sampling = Sampling(logit_bias=never)
        prompting = Prompting(ChatFormat(engine))
        counts = SessionCounts(engine.shape)
        for line in sys.stdin:
            asked = json.loads(line)
            messages = tuple(Message(each["role"], each["content"]) for each in asked["messages"])
            began = time.perf_counter()
            tokens = prompting.prepare(Ask(sampling, messages)).tokens
            prepare_s = time.perf_counter() - began
            came: list[float] = []
            said: list[int] = []
            began_cpu, began = time.process_time(), time.perf_counter()
            with engine.counting(counts if asked["counting"] else None):
                engine.prompt(tokens)
                for token in engine.generate(sampling, asked["tokens"]):
                    came.append(time.perf_counter() - began)
                    said.append(token)
            answer = {
                "first_s": came[0],
                "prepare_s": prepare_s,
                "decode_tok_s": (len(came) - 1) / (came[-1] - came[0]),
                "cpu_ms_per_token": 1000 * (time.process_time() - began_cpu) / len(came),
                "prompt": tokens,
                "text": b"".join(map(engine.piece, said)).decode(errors="replace"),
                "private_bytes": private_bytes(os.getpid()),
            }
            print(json.dumps(answer), flush=True)


class Bare:
    """A process with the engine alone."""

    def __init__(self, path: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--bare", str(path), "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.told = self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, messages: list[dict[str, str]], tokens: int, *, counting: bool = True) -> dict[str, Any]:
        """One generation."""
        assert self.process.stdin is not None
        print(
            json.dumps({"messages": messages, "tokens": tokens, "counting": counting}),
            file=self.process.stdin,
            flush=True,
        )
        return self._line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


class Client:
    """One connection to a server, and nothing that takes time."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, prompt: list[dict[str, str]] | list[int], tokens: int, bias: dict[str, float]) -> dict[str, Any]:
        """One streamed chat completion; of token ids a completion."""
        chat = isinstance(prompt[0], dict)
        path, key = ("chat/completions", "messages") if chat else ("completions", "prompt")
        body = {key: prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": bias}
        raw = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
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


class Agent(Client):
    """A real agent."""

    def __init__(self, path: Path, threads: int, home: Path) -> None:
        names = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
        environment = {**os.environ, **{name: str(home / name) for name in names}, "SPARKMOE_OFFLINE": "1"}
        command = [str(Path(sys.executable).with_name("spark-agent")), "run", str(path), "-p", "0", "--json"]
        command += ["--ctx", str(N_CTX), "--parallel", "1", "--threads", str(threads)]
        began = time.perf_counter()
        with (home / "agent.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, stdin=subprocess.DEVNULL
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        self.ready_s = time.perf_counter() - began
        if not line:
            raise SystemExit("error: the agent did not start: " + (home / "agent.log").read_text())
        super().__init__(process, urlsplit(json.loads(line)["base_url"]).port or 80)


class Beside(Client):
    """Another server of OpenAI's API, by the command that starts it."""

    def __init__(self, command: str, path: Path, threads: int, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [word.format(model=path, port=port, threads=threads, context=N_CTX) for word in shlex.split(command)]
        with (home / "beside.log").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, text=True, stdin=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while True:
            try:
                super().__init__(process, port)
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    process.kill()
                    log_text = (home / "beside.log").read_text()[-2000:]
                    raise SystemExit(f"error: {words[0]} did not start: {log_text}") from None
                time.sleep(0.1)


KINDS = ("bare", "not counting", "http", "bare tokens", "http tokens", "bare again", "beside")
Rows = dict[str, list[dict[str, Any]]]


def pair(path: Path, threads: int, arguments: argparse.Namespace, rows: Rows) -> dict[str, float]:
    """Adds what two new processes take, and returns what they hold."""
    with (
        tempfile.TemporaryDirectory(prefix="spark-overhead-") as name,
        Bare(path, threads) as engine,
        Agent(path, threads, Path(name)) as agent,
        contextlib.ExitStack() as others,
    ):
        beside = None
        if arguments.beside is not None:
            beside = others.enter_context(Beside(arguments.beside, path, threads, Path(name)))
        count, ends = arguments.tokens, engine.told["end_tokens"]
        for number in range(arguments.rounds + 2):
            # Whoever is asked comes after the other one.
            messages = conversation(3 * number)
            found = {"bare": engine.ask(messages, count)}
            found["not counting"] = engine.ask(messages, count, counting=False)
            found["http"] = agent.ask(messages, count, ends)
            found["bare tokens"] = engine.ask(conversation(3 * number + 1), count)
            found["http tokens"] = agent.ask(found["bare tokens"]["prompt"], count, ends)
            for kind in ("", " tokens"):
                if len(found["bare" + kind]["prompt"]) != found["http" + kind]["prompt_tokens"]:
                    raise SystemExit("error: the agent and the engine were asked different things")
            if beside is not None:
                messages = conversation(3 * number + 2)
                found["bare again"] = engine.ask(messages, count)
                found["beside"] = beside.ask(messages, count, ends)
                found["bare again"]["first_s"] += found["bare again"]["prepare_s"]
            found["bare"]["first_s"] += found["bare"]["prepare_s"]
            if number >= 2:  # the first ones warm everything
                for kind, row in found.items():
                    rows[kind].append(row)
        time.sleep(2)
        idle_bytes, idle_cpu = private_bytes(agent.process.pid), cpu_s(agent.process.pid)
        time.sleep(IDLE_S)
        idle_cpu = cpu_s(agent.process.pid) - idle_cpu
        loaded = engine.told["loaded_bytes"] - engine.told["before_bytes"]
        bare_bytes = rows["bare"][-1]["private_bytes"]
        grown = bare_bytes - engine.told["loaded_bytes"]
    return {
        "bare_before_loading": engine.told["before_bytes"],
        "bare_loaded": engine.told["loaded_bytes"],
        "bare_after": bare_bytes,
        "agent_idle": idle_bytes,
        "agent_beyond_bare": idle_bytes - bare_bytes,
        "agent_beyond_model": idle_bytes - loaded - max(grown, 0),
        "idle_cpu_share": round(idle_cpu / IDLE_S, 5),
    }


def compare(path: Path, threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model with one number of threads."""
    kinds = KINDS if arguments.beside is not None else KINDS[:-2]
    rows: Rows = {kind: [] for kind in kinds}
    held = [pair(path, threads, arguments, rows) for _ in range(arguments.pairs)]
    same = sum(
        one["text"].startswith(other["text"])
        for kind in ("", " tokens")
        for one, other in zip(rows["bare" + kind], rows["http" + kind], strict=True)
    )

    def median(kind: str, key: str) -> float:
        return statistics.median(row[key] for row in rows[kind])

    def over(kind: str, key: str, other: str) -> float:
        # Of each round's two, as what else runs on the machine changes from round to round.
        return statistics.median(one[key] / two[key] - 1 for one, two in zip(rows[kind], rows[other], strict=True))

    def late(kind: str, other: str) -> float:
        pairs = zip(rows[kind], rows[other], strict=True)
        return 1000 * statistics.median(one["first_s"] - two["first_s"] for one, two in pairs)

    first = {"messages": ("http", "bare"), "tokens": ("http tokens", "bare tokens")}
    decoding = [*KINDS[:3]]
    if arguments.beside is not None:
        first["beside"] = ("beside", "bare again")
        decoding.append("beside")
    return {
        "model": path.name,
        "threads": threads,
        "pairs": arguments.pairs,
        "rounds": len(rows["bare"]),
        "prompt_tokens": rows["http"][0]["prompt_tokens"],
        "reused_tokens": rows["http"][0]["reused_tokens"],
        "completion_tokens": median("http", "completion_tokens"),
        "events": median("http", "events"),
        "same_text": f"{same} of {2 * len(rows['bare'])}",
        "decode_tok_s": {kind: round(median(kind, "decode_tok_s"), 2) for kind in decoding},
        "http_decode_over_bare": round(over("http", "decode_tok_s", "bare"), 4),
        "first_token_ms": {kind: round(1000 * median(kind, "first_s"), 2) for kind in kinds if kind != "not counting"},
        "http_first_token_late_ms": {of: round(late(*two), 2) for of, two in first.items()},
        "http_first_token_over_bare": {of: round(over(two[0], "first_s", two[1]), 4) for of, two in first.items()},
        "prepare_ms": round(1000 * median("bare", "prepare_s"), 2),
        "cpu_ms_per_token": {kind: round(median(kind, "cpu_ms_per_token"), 3) for kind in decoding},
        "private_bytes": {key: statistics.median(one[key] for one in held) for key in held[0] if key[-5:] != "share"},
        "idle_cpu_share": statistics.median(one["idle_cpu_share"] for one in held),
    }


def starting(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """From a new process to being ready, beside loading alone."""
    ready, load = [], []
    for _ in range(arguments.starts):
        with tempfile.TemporaryDirectory(prefix="spark-overhead-") as name:
            with Agent(path, 1, Path(name)) as agent:
                ready.append(agent.ready_s)
            with Bare(path, 1) as engine:
                load.append(engine.told["load_s"])
    return {
        "ready_s": round(statistics.median(ready), 3),
        "load_s": round(statistics.median(load), 3),
        "beyond_loading_s": round(statistics.median(ready) - statistics.median(load), 3),
        "ready_runs": [round(value, 3) for value in ready],
    }


def tokenising(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What tokenising a long conversation takes: whole, and the next turn of one whose turns before were seen."""
    from spark_runtime.chat import ChatFormat
    from spark_runtime.engine import Engine, EngineOptions

    source = Path(argparse.__file__).read_text()
    turns: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    while sum(len(turn["content"]) for turn in turns) < arguments.characters:
        at = len(turns)
        shown = {"role": "user", "content": f"{at}: what does this do?\n" + source[97 * at : 97 * at + 8000]}
        turns += [shown, {"role": "assistant", "content": f"It is part {at} of a parser of command lines."}]
    whole_s, again_s, tokens = [], [], 0
    with Engine.load(path, EngineOptions(n_ctx=N_CTX, n_threads=1, count_routing=False)) as engine:
        plain, chat = ChatFormat(engine), ChatFormat(engine)
        chat.learn_markers()
        chat.tokenize(chat.prompt(turns))
        for number in range(arguments.rounds):
            prompt = chat.prompt([*turns, *conversation(number)[1:]])
            began = time.perf_counter()
            expected = plain.tokenize(prompt)
            whole_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            found = chat.tokenize(prompt)
            again_s.append(time.perf_counter() - began)
            if found != expected:
                raise SystemExit("error: tokens in parts are not those of the whole")
            tokens = len(found)
    return {
        "characters": len(prompt),
        "tokens": tokens,
        "whole_ms": round(1000 * statistics.median(whole_s), 2),
        "next_turn_ms": round(1000 * statistics.median(again_s), 2),
    }


@contextmanager
def model_file(model: str) -> Iterator[Path]:
    """The model's file, written where there is none and then removed."""
    from spark_runtime.models import demo_model_path

    if model == "demo":
        yield demo_model_path()
    elif model == "random":
        from big_model import Recipe, write_model

        with tempfile.TemporaryDirectory(prefix="spark-overhead-") as name:
            write_model(path := Path(name) / "random.gguf", Recipe(**RANDOM), demo_model_path())
            yield path
    else:
        yield Path(model)


def main() -> None:
    """Measure what the options say, or be the bare engine."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", default=["demo", "random"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--beside", metavar="COMMAND", help="starts another server, with {model} and so on")
    parser.add_argument("--characters", type=int, default=100_000)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        bare(arguments.bare, arguments.threads[0])
        return
    found: dict[str, Any] = {"n_ctx": N_CTX, "tokens": arguments.tokens, "speed": [], "tokenising": {}, "starting": {}}
    for model in arguments.model:
        with model_file(model) as path:
            found["speed"] += [compare(path, threads, arguments) for threads in arguments.threads]
            found["tokenising"][path.name] = tokenising(path, arguments)
            if arguments.starts:
                found["starting"][path.name] = starting(path, arguments)
    report(found, arguments.out)


if __name__ == "__main__":
    main()
