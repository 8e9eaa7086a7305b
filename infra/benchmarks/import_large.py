"""How fast a table of selections is read that is larger than memory should be, and how much memory that takes.

Usage: import_large.py [--gib N] [--to FOLDER | --fifo] [--library] [--out FILE]. Writes `layer,expert` rows of a model
of 48 layers and 128 experts (a file in FOLDER, removed afterwards; with --fifo a pipe, which costs the time of writing
to it), reads them in a process of its own, and checks every count. With --library pyarrow's CSV reader takes the same
file in as large blocks, on one thread, and its counts are checked too: it is not as strict.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from report import parser_of, report

from spark_agent.formats.hints import Hints
from spark_agent.formats.layer_expert_csv import read_layer_expert_csv
from spark_agent.formats.reading import Found

LAYERS, EXPERTS, ROWS = 48, 128, 2**20
SEED = 7


def block_of_rows() -> tuple[bytes, np.ndarray]:
    """A million rows as text, and their counts."""
    drawn = np.random.default_rng(SEED)
    layers = np.repeat(np.arange(LAYERS), 8)
    layers = np.resize(layers, ROWS)
    experts = np.minimum(drawn.zipf(1.3, ROWS) - 1, EXPERTS - 1)
    text = "\n".join(f"{layer},{expert}" for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True))
    counts = np.bincount(layers * EXPERTS + experts, minlength=LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)
    return text.encode() + b"\n", counts


def write(path: Path, block: bytes, repeats: int) -> None:
    """The block again and again."""
    with path.open("wb") as file:
        for _ in range(repeats):
            file.write(block)


def peak_kib() -> int:
    """Most memory that this process had; unlike ``ru_maxrss`` not its parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def read_here(path: Path) -> None:
    """Read a file in this process and tell what it took."""
    before_kib = peak_kib()
    started = time.monotonic()
    found: Found = read_layer_expert_csv(path, Hints(n_experts=EXPERTS))
    tell(before_kib, started, [list(layer.counts or ()) for layer in found.layers])


def read_with_library(path: Path) -> None:
    """The same with pyarrow's reader."""
    import pyarrow as pa
    import pyarrow.csv

    before_kib = peak_kib()
    started = time.monotonic()
    counts = np.zeros(LAYERS * EXPERTS, dtype=np.int64)
    reader = pyarrow.csv.open_csv(
        path,
        pyarrow.csv.ReadOptions(use_threads=False, block_size=2**20, column_names=["layer", "expert"]),
        convert_options=pyarrow.csv.ConvertOptions(column_types={"layer": pa.int32(), "expert": pa.int32()}),
    )
    for batch in reader:
        layers, experts = (column.to_numpy() for column in batch.columns)
        counts += np.bincount(layers * EXPERTS + experts, minlength=len(counts))
    tell(before_kib, started, counts.reshape(LAYERS, EXPERTS).tolist())


def tell(before_kib: int, started: float, counts: list[list[int]]) -> None:
    """What reading took in this process."""
    seconds = time.monotonic() - started
    usage = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "seconds": round(seconds, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "before_mib": round(before_kib / 1024, 1),
        "peak_mib": round(peak_kib() / 1024, 1),
        "counts": counts,
    }
    json.dump(told, sys.stdout)


def main() -> None:
    """Write, read, check, tell."""
    parser = parser_of(__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--to", type=Path, help="a folder with room")
    parser.add_argument("--fifo", action="store_true")
    parser.add_argument("--library", action="store_true")
    parser.add_argument("--read", type=Path, help="internal: read this file and tell")
    options = parser.parse_args()
    if options.read is not None:
        (read_with_library if options.library else read_here)(options.read)
        return
    block, counts = block_of_rows()
    repeats = max(1, round(options.gib * 2**30 / len(block)))
    with tempfile.TemporaryDirectory(dir=options.to, prefix="import-large-") as folder:
        path = Path(folder) / "rows.csv"
        writer = threading.Thread(target=write, args=(path, block, repeats))
        if options.fifo:
            os.mkfifo(path)
            writer.start()
        else:
            write(path, block, repeats)
        command = [sys.executable, __file__, "--read", str(path)]
        told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        beside = None
        if options.library and not options.fifo:
            beside = json.loads(subprocess.run([*command, "--library"], check=True, capture_output=True).stdout)
        if options.fifo:
            writer.join()
    right = told.pop("counts") == (counts * repeats).tolist()
    n_bytes = len(block) * repeats
    if beside is not None:
        right = right and beside["counts"] == (counts * repeats).tolist()
        told["library_cpu_s"] = beside["cpu_s"]
        told["library_mb_per_cpu_s"] = round(n_bytes / 1e6 / beside["cpu_s"], 1)
    report(
        {
            "bytes": n_bytes,
            "rows": ROWS * repeats,
            "through": "a pipe" if options.fifo else "a file",
            "counts_are_right": right,
            "mb_per_s": round(n_bytes / 1e6 / told["seconds"], 1),
            "mb_per_cpu_s": round(n_bytes / 1e6 / told["cpu_s"], 1),
            "grown_mib": round(told["peak_mib"] - told["before_mib"], 1),
            **told,
        },
        options.out,
    )
    if not right:
        sys.exit("error: the counts are not those that were written")


if __name__ == "__main__":
    main()
