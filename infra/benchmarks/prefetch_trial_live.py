"""What ``spark-agent run --prefetch auto`` finds out on this machine's card, and whether it is right.

Usage: prefetch_trial_live.py MODEL [--residency 0.6 0.45] [--rounds N] [--tokens N] [--most-tokens N] [--out FILE]

An agent is asked, with sampled tokens, until its trial is over. Then two agents that start with what it has learned
are asked the same in turn, one with ``--prefetch on`` and one with ``off``: what the trial should have found. A start
with ``auto`` after that says what is made of it. Texts are compared: fetching early must change none. At last the trial
is repeated by an agent that begins with what was learned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import parser_of, report
from served import Agent

N_CTX = 1024
ASKED = ("list the files", "why does this test fail", "rename this function", "show me an example", "fix the import")


def ask(agent: Agent, number: int, tokens: int) -> dict[str, Any]:
    """A conversation of its own, whose answer is sampled with a seed of its own."""
    messages = [{"role": "user", "content": f"{number}: {ASKED[number % len(ASKED)]} of module number {number * 7}"}]
    return agent.ask(messages, tokens, {}, temperature=1.0, seed=number)


def prefetch(agent: Agent) -> dict[str, Any]:
    """What the agent says of fetching early."""
    stats = agent.stats()
    found: dict[str, Any] = stats["prefetch"] | {"decode": stats["phases"]["decode"]}
    return found


def start(home: Path, way: str, arguments: argparse.Namespace, residency: float) -> Agent:
    """An agent that tiers ``residency`` of the experts."""
    options = ("--residency", residency, "--ctx", N_CTX, "--parallel", 1, "--prefetch", way, *arguments.run)
    return Agent(home, arguments.model, *options)


def tried(home: Path, arguments: argparse.Namespace, residency: float) -> dict[str, Any]:
    """A trial from the first token to its end, and its pairs' gains in their order."""
    with start(home, "auto", arguments, residency) as agent:
        asked, said = 0, prefetch(agent)
        while said["use"] == "trial" and asked * arguments.tokens < arguments.most_tokens:
            ask(agent, asked, arguments.tokens)
            asked += 1
            said = prefetch(agent)
    kept = [json.loads(path.read_text()) for path in home.glob("XDG_STATE_HOME/*/prefetch/*.json")]
    return {"asked": asked, "kept": kept} | said


def compared(home: Path, arguments: argparse.Namespace, residency: float) -> dict[str, Any]:
    """Both ways in turn, with what the trial's agent had learned when it ended."""
    homes = {way: home.with_name(f"{home.name}-{way}") for way in ("off", "on")}
    with contextlib.ExitStack() as stack:
        agents = {}
        for way, folder in homes.items():
            shutil.copytree(home, folder)
            agents[way] = stack.enter_context(start(folder, way, arguments, residency))
        rows: dict[str, list[dict[str, Any]]] = {way: [] for way in agents}
        for number in range(1000, 1002 + arguments.rounds):
            order = list(agents.items())
            for way, agent in order if number % 2 else reversed(order):
                row = ask(agent, number, arguments.tokens)
                if number >= 1002:  # the first two warm both
                    rows[way].append(row)
        said = {way: prefetch(agent) for way, agent in agents.items()}
    speeds = {way: [row["decode_tok_s"] for row in of] for way, of in rows.items()}
    return {
        "decode_tok_s": {way: round(statistics.median(of), 2) for way, of in speeds.items()},
        "gain": round(statistics.median(on / off - 1 for on, off in zip(speeds["on"], speeds["off"], strict=True)), 4),
        "gains": [round(on / off - 1, 4) for on, off in zip(speeds["on"], speeds["off"], strict=True)],
        "same_text": sum(on["text"] == off["text"] for on, off in zip(rows["on"], rows["off"], strict=True)),
        "rounds": arguments.rounds,
        "phases": {way: of["decode"] for way, of in said.items()},
    }


def main() -> None:
    """Measure every residency."""
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--residency", type=float, nargs="+", default=[0.6, 0.45])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--most-tokens", type=int, default=12000)
    parser.add_argument("--run", action="append", default=[], help="another option of spark-agent run")
    arguments = parser.parse_args()
    found = {}
    for residency in arguments.residency:
        with tempfile.TemporaryDirectory(prefix="spark-trial-") as name:
            home = Path(name) / "home"
            home.mkdir()
            trial = tried(home, arguments, residency)
            truth = compared(home, arguments, residency)
            with start(home, "auto", arguments, residency) as agent:
                again = prefetch(agent)
            for path in home.glob("XDG_STATE_HOME/*/prefetch/*.json"):
                path.unlink()
            learned = tried(home, arguments, residency)
        found[str(residency)] = {"trial": trial, "both_ways": truth, "next_start": again, "trial_once_learned": learned}
        print(json.dumps({residency: found[str(residency)]}), file=sys.stderr, flush=True)
    card = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        if shutil.which("nvidia-smi")
        else None
    )
    report(
        {"model": arguments.model.name, "card": card.stdout.strip() if card else None, "found": found}, arguments.out
    )


if __name__ == "__main__":
    main()
