"""What huge pages for the CPU's own memory give: the same model loaded with and without them, in turn.

Usage: huge_pages.py [--model random|FILE.gguf] [--threads 1 2] [--pairs N] [--out FILE]. Each load is a process of its
own, as where its memory comes to lie changes speed, too; ``over`` is of each pair's two, the median over pairs.
``random`` is a model with random weights (``big_model.py``), written and removed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import parser_of, report
from serving_overhead import model_file

N_CTX = 1024
PROMPT_TOKENS, DECODE_TOKENS, REPEATS = 256, 32, 10
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def once(path: Path, threads: int, *, huge: bool) -> dict[str, float]:
    """Load, and time prompts and generations of this process."""
    from spark_runtime import huge_pages
    from spark_runtime.engine import Engine, EngineOptions
    from spark_runtime.llama import bindings
    from spark_runtime.sampling import Sampling

    if not huge:
        huge_pages.HugePages.ask = lambda _pages: 0  # type: ignore[method-assign]
    bindings()
    began = time.perf_counter()
    prompt_s, decode_s = [], []
    with Engine.load(path, EngineOptions(n_ctx=N_CTX, n_threads=threads)) as engine:
        load_s = time.perf_counter() - began
        for number in range(REPEATS + 2):
            tokens = [(7 * number + 13 * at) % 1000 + 5 for at in range(PROMPT_TOKENS)]
            engine.conversations[0].forget()
            began = time.perf_counter()
            engine.prompt(tokens)
            prompted = time.perf_counter()
            for _ in engine.generate(Sampling(), DECODE_TOKENS):
                pass
            if number >= 2:
                prompt_s.append(prompted - began)
                decode_s.append(time.perf_counter() - prompted)
    return {
        "load_s": load_s,
        "prompt_tok_s": PROMPT_TOKENS / statistics.median(prompt_s),
        "decode_tok_s": DECODE_TOKENS / statistics.median(decode_s),
    }


def compare(path: Path, threads: int, pairs: int) -> dict[str, Any]:
    """Medians of both kinds."""
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for number in range(2 * pairs):
        # Each goes first in half of the pairs.
        kind = ("with", "without", "without", "with")[number % 4]
        command = [sys.executable, __file__, "--once", kind, "--model", str(path), "--threads", str(threads)]
        found[kind].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    row: dict[str, Any] = {"threads": threads, "pairs": pairs}
    for key in ("load_s", "prompt_tok_s", "decode_tok_s"):
        row[key] = {kind: round(statistics.median(one[key] for one in runs), 3) for kind, runs in found.items()}
        over = [one[key] / other[key] - 1 for one, other in zip(found["with"], found["without"], strict=True)]
        row[key] |= {"over": round(statistics.median(over), 4), "each": [round(value, 4) for value in over]}
    return row


def main() -> None:
    """Measure what the options say, or be one of the processes."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="random")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--once", choices=["with", "without"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once is not None:
        print(json.dumps(once(Path(arguments.model), arguments.threads[0], huge=arguments.once == "with")))
        return
    with model_file(arguments.model) as path:
        rows = [compare(path, threads, arguments.pairs) for threads in arguments.threads]
        about = {"model": path.name, "bytes": path.stat().st_size, "system": ENABLED.read_text().strip()}
    report({**about, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
