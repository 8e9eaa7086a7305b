"""How many uploads a second the service takes over HTTP, how long it keeps them waiting, and what it holds in memory.

Usage: service_ingest.py [--seconds S] [--concurrency N] [--rate R] [--layers L] [--experts E] [--live] [--out FILE], or
with --uploads N in place of the seconds, to see what its memory does over many.
Starts ``spark-service run -p 0`` on a temporary folder and uploads distinct sessions of L x E counts (prefill, decode
and reuse distances; with --live also what each missed), zstd: first as fast as N connections can for S seconds, then R
a second for as long; or N uploads as fast as can be. The client runs in this process, on the same machine, and is part
of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import numpy as np
import zstandard
from report import parser_of, report
from synthetic_models import TOP_K, shape_of

from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.live import LiveMisses, LiveProfile
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of

DECODE_TOKENS, PREFILL_TOKENS = 2000, 6000
TEMPLATES = 64
BODIES_PER_SECOND = 400
"""Made beforehand for the first phase; beyond that they are made while it runs."""
UPLOADS = "/api/v1/histograms"
MEMORY_EVERY = 5000
"""Uploads between two values of the memory that a run over a number of uploads reports."""


def selections(rng: np.random.Generator, n_experts: int, tokens: int) -> tuple[int, ...]:
    """Counts of one layer: skewed, summing to tokens x top-k, none above the tokens."""
    counts = rng.multinomial(tokens * TOP_K, rng.dirichlet(np.full(n_experts, 2.0)))
    while counts.max() > tokens:
        moved = counts.max() - tokens
        counts[counts.argmax()] -= moved
        counts[counts.argmin()] += moved
    return tuple(counts.tolist())


def template(shape: ModelShape, index: int, *, live: bool) -> str:
    """An upload with ``HASH`` and ``SPLIT`` where its session's belong."""
    rng = np.random.default_rng(index)
    prefill, decode, reuse = [], [], []
    for layer in shape.layers:
        counts = selections(rng, layer.n_experts, DECODE_TOKENS)
        first = sum(1 for count in counts if count)
        nearer = 1.0 / (1.0 + np.arange(layer.n_experts))
        distances = rng.multinomial(DECODE_TOKENS * TOP_K - first, nearer / nearer.sum())
        decode.append(LayerCounts(block=layer.block, tokens=DECODE_TOKENS, counts=counts))
        reuse.append(LayerReuse(block=layer.block, distances=(*distances.tolist(), first)))
        routed = selections(rng, layer.n_experts, PREFILL_TOKENS)
        prefill.append(LayerCounts(block=layer.block, tokens=PREFILL_TOKENS, counts=routed))
    session = SessionHistogram.model_construct(
        session_hash="HASH",
        split="SPLIT",
        workload="code-heavy",
        prefill=PhaseHistogram(tokens=PREFILL_TOKENS, layers=tuple(prefill)),
        decode=PhaseHistogram(tokens=DECODE_TOKENS, layers=tuple(decode)),
        reuse=tuple(reuse),
        live=misses(shape, index) if live else None,
    )
    upload = HistogramUpload.model_construct(
        schema_version=2 if live else 1, agent_version="0.1.0", model=shape, sessions=(session,)
    )
    return upload.model_dump_json(warnings=False)


def misses(shape: ModelShape, index: int) -> LiveMisses:
    """Measurements of a session with a manifest."""
    selections = DECODE_TOKENS * TOP_K * len(shape.layers)
    profile = LiveProfile(workload="code-heavy", revision="7a" * 32, vram_budget_bytes=14 * 2**30)
    resident_bytes = shape.expert_bytes_total * 3 // 5
    return LiveMisses(
        selections=selections, cold_hits=selections // (10 + index), resident_bytes=resident_bytes, profile=profile
    )


class Bodies:
    """Distinct uploads in a file, made beforehand: the counts of a template, a session of their own, compressed."""

    def __init__(self, shape: ModelShape, path: Path, *, live: bool) -> None:
        self._templates = [template(shape, index, live=live) for index in range(TEMPLATES)]
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._file = path.open("w+b", buffering=0)
        self._made = 0
        self._ready: deque[tuple[str, int, int]] = deque()

    def make(self, count: int) -> None:
        """Make ``count`` more."""
        end = self._file.seek(0, os.SEEK_END)
        for _ in range(count):
            session_hash = hashlib.sha256(f"session {self._made}".encode()).hexdigest()
            text = self._templates[self._made % TEMPLATES].replace("HASH", session_hash, 1)
            body = self._compressor.compress(text.replace("SPLIT", split_of(session_hash), 1).encode())
            self._file.write(body)
            self._ready.append((session_hash, end, len(body)))
            end += len(body)
            self._made += 1

    def next(self) -> tuple[str, bytes]:
        """The next upload's key and body."""
        if not self._ready:
            self.make(1)
        key, start, size = self._ready.popleft()
        return key, os.pread(self._file.fileno(), size, start)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """Processor time that everything on this machine has used."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


class Load:
    """One phase of the benchmark: uploads sent, their latencies, and the service's memory meanwhile."""

    def __init__(self, base_url: str, bodies: Bodies, pid: int) -> None:
        self._base_url, self._bodies, self._pid = base_url, bodies, pid
        self._latencies: list[float] = []
        self._resident: list[int] = []
        self._started = time.perf_counter()
        self._cpu_before = self._cpu()

    def _cpu(self) -> dict[str, float]:
        used = {"service": cpu_seconds(self._pid), "client": time.process_time()}
        return {**used, "others": machine_cpu_seconds() - sum(used.values())}

    def client(self) -> httpx.AsyncClient:
        """A client for one connection: httpx looks through all connections of a pool at every request."""
        headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
        return httpx.AsyncClient(base_url=self._base_url, headers=headers, timeout=60, verify=False)

    async def send(self, client: httpx.AsyncClient) -> None:
        """Upload once; anything but a receipt ends the benchmark."""
        key, body = self._bodies.next()
        start = time.perf_counter()
        answer = await client.post(UPLOADS, content=body, headers={"Idempotency-Key": key})
        self._latencies.append(time.perf_counter() - start)
        if (answer.status_code, answer.content) != (202, b'{"accepted":1,"duplicates":0}'):
            raise SystemExit(f"error: upload answered {answer.status_code}: {answer.text}")
        if len(self._latencies) % 100 == 1:
            self._resident.append(resident_bytes(self._pid))

    def result(self) -> dict[str, object]:
        """What was measured since this object was made."""
        seconds = time.perf_counter() - self._started
        used = {name: after - self._cpu_before[name] for name, after in self._cpu().items()}
        milliseconds = 1000 * np.array(self._latencies)
        resident = [round(size / 2**20, 1) for size in self._resident]
        return {
            "uploads": len(milliseconds),
            "uploads_per_s": round(len(milliseconds) / seconds, 1),
            "p50_ms": round(float(np.percentile(milliseconds, 50)), 1),
            "p99_ms": round(float(np.percentile(milliseconds, 99)), 1),
            "max_ms": round(float(milliseconds.max()), 1),
            "service_cpu_ms_per_upload": round(1000 * used["service"] / len(milliseconds), 2),
            "client_cpu_ms_per_upload": round(1000 * used["client"] / len(milliseconds), 2),
            "cores_taken_by_others": round(max(0.0, used["others"]) / seconds, 2),
            "service_resident_mib": {
                "start": resident[0],
                "middle": resident[len(resident) // 2],
                "end": resident[-1],
                "most": max(resident),
                f"every_{MEMORY_EVERY}": resident[:: MEMORY_EVERY // 100],
            },
        }


async def flat_out(load: Load, concurrency: int, *, seconds: float = math.inf, uploads: float = math.inf) -> None:
    """Upload over ``concurrency`` connections, each the next one once it has its answer, for so long or so many."""
    until = time.perf_counter() + seconds
    begun = 0

    async def worker() -> None:
        nonlocal begun
        async with load.client() as client:
            while time.perf_counter() < until and begun < uploads:
                begun += 1
                await load.send(client)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def at_rate(load: Load, seconds: float, rate: float, connections: int) -> None:
    """Start ``rate`` uploads a second, whether or not earlier ones have their answers."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        clients = [await stack.enter_async_context(load.client()) for _ in range(connections)]
        start = time.perf_counter()
        for number in range(int(seconds * rate)):
            await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
            tasks.create_task(load.send(clients[number % connections]))


async def measure(load: Load, apply: Awaitable[None]) -> dict[str, object]:
    """One phase."""
    await apply
    return load.result()


def phases_of(options: argparse.Namespace, load: Callable[[], Load]) -> dict[str, dict[str, object]]:
    """What the options ask for, one phase after the other."""
    of, concurrency = load(), options.concurrency
    asked = {"uploads": options.uploads} if options.uploads else {"seconds": options.seconds}
    phases = {"flat_out": {"concurrency": concurrency, **asyncio.run(measure(of, flat_out(of, concurrency, **asked)))}}
    if not options.uploads:
        of = load()
        paced = asyncio.run(measure(of, at_rate(of, options.seconds, options.rate, concurrency)))
        phases["paced"] = {"rate_per_s": options.rate, **paced}
    return phases


def main() -> None:
    """Measure and print (or write) the numbers."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each phase")
    parser.add_argument("--uploads", type=int, help="so many, as fast as can be, in place of the phases")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100, help="uploads a second in the second phase")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--live", action="store_true", help="sessions say what they missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bodies = Bodies(shape_of(options.layers, options.experts), Path(folder) / "bodies", live=options.live)
        bodies.make(options.uploads or int(options.seconds * (BODIES_PER_SECOND + options.rate)))
        data_dir = Path(folder) / "data"
        command = [sys.executable, "-m", "spark_service.cli", "run", "--open", "-p", "0", "--json"]
        command += ["--data-dir", str(data_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as service:
            try:
                base_url = json.loads(service.stdout.readline())["base_url"]
                idle = resident_bytes(service.pid)
                phases = phases_of(options, lambda: Load(base_url, bodies, service.pid))
            finally:
                service.terminate()
        database_bytes = sum(path.stat().st_size for path in data_dir.rglob("*") if path.is_file())
        body_bytes = len(bodies.next()[1])
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()},
        "layers": options.layers,
        "experts": options.experts,
        "live": options.live,
        "body_bytes": body_bytes,
        "service_idle_resident_mib": round(idle / 2**20, 1),
        **phases,
        "database_bytes": database_bytes,
    }
    report(result, options.out)


if __name__ == "__main__":
    main()
