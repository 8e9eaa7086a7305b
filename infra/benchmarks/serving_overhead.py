"""What serving costs beside the bare engine: speed through HTTP, idle memory and time, and starting.

Usage: serving_overhead.py [--model demo|random|FILE.gguf …] [--threads 1 2] [--pairs N] [--rounds N] [--tokens N]
[--starts N] [--characters N] [--residency SHARE] [--beside COMMAND [--beside-asked ids]] [--out FILE]. One process has
the bare engine, another is a real agent, and both stay loaded; they are asked the same in turn, so that neither has the
machine at a better time or caches warm from its own last answer. Where a process's memory comes to lie makes it faster
or slower as a whole, so there are ``--pairs`` of such processes, one after another, of which either is the first by
turns.
``random`` is a model with random weights whose token takes several milliseconds on two cores (``big_model.py``),
written and removed again. With one thread llama.cpp leaves the second core to server and client. ``--beside`` is a
command that starts another server of OpenAI's API, asked in the same rounds, with ``{model}``, ``{port}``,
``{threads}`` and ``{context}`` where they belong; with ``--beside-asked ids`` it is asked for completions of token ids.

First tokens are compared twice. Of ``messages``: the engine's time has rendering and tokenising in it
(``prepare_ms``), the agent is asked for a chat completion. Of ``tokens``: both are given the prompt's ids. ``not
counting`` is the engine asked the same again: only its decode speed can be compared, as its prompt is in the context
already. ``tokenising`` is a conversation of ``--characters`` with one turn more: tokenised whole, and as an agent does
it that saw it without that turn.

With ``--residency`` both keep that share of every layer's experts in slots and fetch the rest when it is selected;
nothing is asked without counting then, so that both fetch the same.

Tokens that end an answer are biased away in both, so that all answers are of one length. The client is a socket and
does nothing but note when bytes came: what it takes is not the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from report import parser_of, report
from served import Agent, Beside, cpu_s, private_bytes

N_CTX = 1024
IDLE_S = 20.0
SYSTEM = "You answer questions about a repository. Be brief, and show code where it helps."
ASKED = ("list the files", "why does this test fail", "rename this function", "show me an example", "fix the import")
RANDOM = {"layers": 3, "experts": 32, "vocabulary": 8192}


def conversation(number: int) -> list[dict[str, str]]:
    """A short conversation; all share the system message, and neighbours nothing of the other."""
    last = f"{ASKED[number % len(ASKED)]} of module number {number * 7}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": last}]


def bare(path: Path, threads: int, residency: float) -> None:
    """The engine alone: asked by lines of JSON, answers by lines."""
    from spark_agent.dialogue.messages import Message
    from spark_agent.server.exchange import Ask
    from spark_agent.server.prompting import Prompting
    from spark_runtime.chat import ChatFormat
    from spark_runtime.engine import Engine, EngineOptions
    from spark_runtime.llama import bindings
    from spark_runtime.model_shape import read_model_shape
    from spark_runtime.sampling import Sampling
    from spark_runtime.session_counts import SessionCounts
    from spark_runtime.tier_start import uniform_start

    bindings()
    before = private_bytes(os.getpid())
    began = time.perf_counter()
    tier = uniform_start(read_model_shape(path), residency) if residency < 1 else None
    with Engine.load(path, EngineOptions(n_ctx=N_CTX, n_threads=threads, tier=tier)) as engine:
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
                "fetched": {} if engine.tier_totals is None else dict(engine.tier_totals.loads),
            }
            print(json.dumps(answer), flush=True)


class Bare:
    """A process with the engine alone."""

    def __init__(self, path: Path, threads: int, residency: float = 1.0) -> None:
        command = [sys.executable, __file__, "--bare", str(path), "--threads", str(threads)]
        command += ["--residency", str(residency)]
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


def agent_of(path: Path, threads: int, home: Path, residency: float = 1.0) -> Agent:
    """A real agent of one sequence, whose tiers are as the bare engine's."""
    options: list[object] = ["--ctx", N_CTX, "--parallel", 1, "--threads", threads]
    if residency < 1:
        options += ["--residency", residency, "--prefetch", "off", "--replacement", "off"]
    return Agent(home, path, *options)


KINDS = ("bare", "not counting", "http", "bare tokens", "http tokens", "bare again", "beside")
Rows = dict[str, list[dict[str, Any]]]
HELD = ("bare_before_loading", "bare_loaded", "bare_after", "agent_idle", "agent_beyond_bare", "agent_beyond_model")


def pair(path: Path, threads: int, arguments: argparse.Namespace, rows: Rows, *, agent_first: bool) -> dict[str, Any]:
    """Adds what two new processes take, and returns what they hold."""
    with tempfile.TemporaryDirectory(prefix="spark-overhead-") as name, contextlib.ExitStack() as others:
        if agent_first:
            agent = others.enter_context(agent_of(path, threads, Path(name), arguments.residency))
        engine = others.enter_context(Bare(path, threads, arguments.residency))
        if not agent_first:
            agent = others.enter_context(agent_of(path, threads, Path(name), arguments.residency))
        beside = None
        if arguments.beside is not None:
            beside = others.enter_context(
                Beside(arguments.beside, Path(name), model=path, threads=threads, context=N_CTX)
            )
        count, ends = arguments.tokens, engine.told["end_tokens"]
        for number in range(arguments.rounds + 2):
            # Whoever is asked comes after the other one.
            messages = conversation(3 * number)
            found = {"bare": engine.ask(messages, count)}
            if arguments.residency == 1:
                found["not counting"] = engine.ask(messages, count, counting=False)
            found["http"] = agent.ask(messages, count, ends)
            found["bare tokens"] = engine.ask(conversation(3 * number + 1), count)
            found["http tokens"] = agent.ask(found["bare tokens"]["prompt"], count, ends)
            for kind in ("", " tokens"):
                if len(found["bare" + kind]["prompt"]) != found["http" + kind]["prompt_tokens"]:
                    raise SystemExit("error: the agent and the engine were asked different things")
            if beside is not None:
                messages = conversation(3 * number + 2)
                found["bare again"] = again = engine.ask(messages, count)
                if arguments.beside_asked == "ids":
                    found["beside"] = beside.ask(again["prompt"], count, ends)
                else:
                    found["beside"] = beside.ask(messages, count, ends)
                    again["first_s"] += again["prepare_s"]
            found["bare"]["first_s"] += found["bare"]["prepare_s"]
            if number >= 2:  # the first ones warm everything
                for kind, row in found.items():
                    rows[kind].append(row)
        time.sleep(2)
        fetched = {"engine": found["bare tokens"]["fetched"], "http": agent.fetched()}
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
        "fetched": fetched,
    }


def _measured(kind: str, arguments: argparse.Namespace) -> bool:
    return kind != "not counting" or arguments.residency == 1


def compare(path: Path, threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One model with one number of threads."""
    kinds = [kind for kind in (KINDS if arguments.beside is not None else KINDS[:-2]) if _measured(kind, arguments)]
    rows: Rows = {kind: [] for kind in kinds}
    held = [pair(path, threads, arguments, rows, agent_first=number % 2 == 1) for number in range(arguments.pairs)]
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

    def by_pair(kind: str, key: str) -> list[float]:
        # Two processes that do the same differ by some percent, as long as they live: what of that is luck shows here.
        count = arguments.rounds
        each = [rows[kind][at : at + count] for at in range(0, len(rows[kind]), count)]
        return [statistics.median(row[key] for row in part) for part in each]

    def late(kind: str, other: str) -> float:
        pairs = zip(rows[kind], rows[other], strict=True)
        return 1000 * statistics.median(one["first_s"] - two["first_s"] for one, two in pairs)

    first = {"messages": ("http", "bare"), "tokens": ("http tokens", "bare tokens")}
    decoding = [kind for kind in KINDS[:3] if _measured(kind, arguments)]
    if arguments.beside is not None:
        first["beside"] = ("beside", "bare again")
        decoding.append("beside")
    return {
        "model": path.name,
        "threads": threads,
        "residency": arguments.residency,
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
        "by_pair": {
            "decode_tok_s": {kind: [round(each, 1) for each in by_pair(kind, "decode_tok_s")] for kind in decoding},
            "first_token_ms": {
                kind: [round(1000 * each, 2) for each in by_pair(kind, "first_s")]
                for two in first.values()
                for kind in two
            },
        },
        "http_first_token_late_ms": {of: round(late(*two), 2) for of, two in first.items()},
        "http_first_token_over_bare": {of: round(over(two[0], "first_s", two[1]), 4) for of, two in first.items()},
        "prepare_ms": round(1000 * median("bare", "prepare_s"), 2),
        "cpu_ms_per_token": {kind: round(median(kind, "cpu_ms_per_token"), 3) for kind in decoding},
        "private_bytes": {key: statistics.median(one[key] for one in held) for key in held[0] if key in HELD},
        "fetched_experts": [one["fetched"] for one in held] if arguments.residency < 1 else None,
        "idle_cpu_share": statistics.median(one["idle_cpu_share"] for one in held),
    }


def starting(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """From a new process to being ready, beside loading alone."""
    ready, load = [], []
    for _ in range(arguments.starts):
        with tempfile.TemporaryDirectory(prefix="spark-overhead-") as name:
            with agent_of(path, 1, Path(name), arguments.residency) as agent:
                ready.append(agent.ready_s)
            with Bare(path, 1, arguments.residency) as engine:
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
    parser.add_argument("--beside-asked", choices=("messages", "ids"), default="messages")
    parser.add_argument("--residency", type=float, default=1.0)
    parser.add_argument("--characters", type=int, default=100_000)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        bare(arguments.bare, arguments.threads[0], arguments.residency)
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
