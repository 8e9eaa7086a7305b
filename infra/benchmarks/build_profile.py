"""How long the service takes to bring a profile up to date, from a real database.

Usage: build_profile.py [--sessions 1000 10000] [--layers 48] [--experts 128] [--others 2] [--ray] [--out FILE].
Sessions are synthetic (popularity by workload, disturbed for each session): what is measured is reading and arithmetic,
which do not depend on the numbers. Each size gets a database, each measurement a process of its own for its memory:

- ``rebuild``: everything counted anew, the other workloads too, and judged by the held-out sessions;
- ``rebuild_of_it_alone``: the same with the other workloads' tallies as they are stored;
- ``update``: the same after 100 more sessions, from the tally that is stored;
- ``ray``: the same rebuild on a Ray cluster of two workers, and whether its bytes are the local ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from report import parser_of, report
from synthetic_models import TOP_K, shape_of

from spark_schemas.model import ModelShape
from spark_schemas.split import split_of
from spark_service import env
from spark_service.catalog import Catalog
from spark_service.db.connection import Database
from spark_service.db.migrate import migrate
from spark_service.db.store import Store
from spark_service.executors import Executor, LocalExecutor, RayExecutor
from spark_service.packed import pack_counts

TOKENS = 2000
WORKLOAD, MORE, AT_ONCE, RAY_WORKERS = "code-heavy", 100, 500, 2
_T = TypeVar("_T")


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """The result and the seconds it took."""
    start = time.perf_counter()
    result = work()
    return result, round(time.perf_counter() - start, 2)


def draws(rng: np.random.Generator, weights: np.ndarray, rows: int) -> np.ndarray:
    """``[row, …]`` with the sums of TOKENS tokens in every layer ``weights[layer, …]``, each row disturbed."""
    expected = weights * rng.uniform(0.5, 1.5, (rows, *weights.shape))
    expected *= TOKENS * TOP_K / expected.sum(axis=-1, keepdims=True)
    counts = expected.astype(np.int64)
    counts[..., 0] += TOKENS * TOP_K - counts.sum(axis=-1)
    return counts.reshape(rows, -1)


def tables(shape: ModelShape, workload: str, first: int, count: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Rows of parts and histograms as an upload would store them, so many at a time."""
    n_layers, n_experts = len(shape.layers), shape.layers[0].n_experts
    taste = np.random.default_rng(list(workload.encode())).permuted(
        np.tile(1.0 / (1.0 + np.arange(n_experts)), (n_layers, 1)), axis=1
    )
    far = np.full((n_layers, n_experts + 1), 1.0 / (n_experts + 1))
    for start in range(first, first + count, AT_ONCE):
        rows = min(AT_ONCE, first + count - start)
        rng = np.random.default_rng([*workload.encode(), start])
        ids = [hashlib.sha256(f"{workload} {index}".encode()).hexdigest() for index in range(start, start + rows)]
        lists = {"counts": draws(rng, taste, rows), "reuse": draws(rng, far, rows)}
        flat = {name: pa.array([pack_counts(row) for row in values], pa.binary()) for name, values in lists.items()}
        same = {
            "blocks": [list(range(n_layers))] * rows,
            "n_experts": [[n_experts] * n_layers] * rows,
            "layer_tokens": [[TOKENS] * n_layers] * rows,
        }
        parts = {
            "content_id": ids,
            "fingerprint": [shape.fingerprint] * rows,
            "workload": [workload] * rows,
            "session_hash": ids,
            "split": [split_of(session_hash) for session_hash in ids],
        }
        histograms = {"content_id": ids, "phase": ["decode"] * rows, "tokens": [TOKENS] * rows, **same, **flat}
        yield pa.table(parts), pa.table(histograms)


def fill(path: Path, shape: ModelShape, workload: str, first: int, count: int) -> None:
    """Store sessions without the API, which has a benchmark of its own."""
    database = Database(path)
    migrate(database)
    for parts, histograms in tables(shape, workload, first, count):
        with database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO models VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                [shape.fingerprint, shape.sibling, shape.model_dump_json()],
            )
            for name, rows in (("parts", parts), ("histograms", histograms)):
                cursor.register("batch", rows)
                cursor.execute(f"INSERT INTO {name} BY NAME SELECT * FROM batch")
                cursor.unregister("batch")
    database.close()


def built(path: Path, shape: ModelShape, executor: Executor) -> dict[str, Any]:
    """One request for the profile by a service that has just started."""
    opened, open_s = timed(lambda: Store.open(path, memory=env.DB_MEMORY.read()))
    profile, seconds = timed(lambda: Catalog(opened, executor=executor).profile(shape.fingerprint, WORKLOAD, "decode"))
    opened.close()
    executor.close()
    return {
        "open_s": open_s,
        "seconds": seconds,
        "n_calibration": profile.n_calibration,
        "n_held_out": profile.n_held_out,
        "peak_bytes": peak_bytes(),
        "sha256": hashlib.sha256(profile.model_dump_json().encode()).hexdigest(),
    }


def peak_bytes() -> int:
    """Most resident memory of this process so far; getrusage would also count what its parent had."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def forget(path: Path, *, others: bool) -> None:
    """Drop the stored tally, so that the next build counts everything, ``others``' too where they are to be dropped."""
    database = Database(path)
    with database.transaction() as cursor:
        cursor.execute("DELETE FROM tallies WHERE workload = ? OR ?", [WORKLOAD, others])
    database.close()


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One measurement in this process."""
    shape, path = shape_of(job["layers"], job["experts"]), Path(job["path"])
    if job["executor"] == "local":
        return built(path, shape, LocalExecutor())
    import ray

    _, start_s = timed(lambda: ray.init(num_cpus=RAY_WORKERS, include_dashboard=False, log_to_driver=False))
    result = built(path, shape, RayExecutor("auto"))
    ray.shutdown()
    return result | {"start_ray_s": start_s}


def measured(path: Path, options: argparse.Namespace, executor: str) -> dict[str, Any]:
    job = {"path": str(path), "layers": options.layers, "experts": options.experts, "executor": executor}
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def size(options: argparse.Namespace, sessions: int, folder: Path) -> dict[str, Any]:
    """All measurements of one number of sessions."""
    shape, path = shape_of(options.layers, options.experts), folder / "service.duckdb"
    for other in range(options.others):
        fill(path, shape, f"other-{other}", 0, sessions // 10)
    _, fill_s = timed(lambda: fill(path, shape, WORKLOAD, 0, sessions))
    row: dict[str, Any] = {"sessions": sessions, "other_workloads": options.others, "fill_s": fill_s}
    row["database_bytes"] = path.stat().st_size
    row["rebuild"] = measured(path, options, "local")
    fill(path, shape, WORKLOAD, sessions, MORE)
    row["update"] = measured(path, options, "local")
    forget(path, others=True)
    again = measured(path, options, "local")
    row["update_has_the_bits_of_a_rebuild"] = again["sha256"] == row["update"]["sha256"]
    forget(path, others=False)
    row["rebuild_of_it_alone"] = measured(path, options, "local")
    if options.ray:
        forget(path, others=True)
        row["ray"] = measured(path, options, "ray")
        row["ray_has_the_bits_of_a_rebuild"] = row["ray"]["sha256"] == again["sha256"]
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Measure and print (or write)."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1000, 10000], help="of the workload that is built")
    parser.add_argument("--others", type=int, default=2, help="other workloads, each with a tenth of the sessions")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--ray", action="store_true", help=f"also on Ray with {RAY_WORKERS} workers")
    options = parser.parse_args()
    rows = []
    for sessions in options.sessions:
        with tempfile.TemporaryDirectory(prefix="spark-build-profile-") as folder:
            rows.append(size(options, sessions, Path(folder)))
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
    model = {"layers": options.layers, "experts": options.experts}
    report({"machine": machine, "model": model, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
