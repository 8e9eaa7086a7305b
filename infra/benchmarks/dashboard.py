"""How long the dashboard's pages take and how much they transfer, with many sessions in the store.

Usage: dashboard.py [--sessions 100000] [--layers 24] [--experts 64] [--repeats 30] [--keep FOLDER] [--out FILE].
Sessions are synthetic: four workloads of one model over a year, a fifth of them measured with tiers. They are stored
without the API, which has a benchmark of its own, and a real process serves them. Every page is asked for on one kept
connection with gzip, as browsers do: ``first_s`` is until it shows everything for the first time after the start, with
profiles built meanwhile; ``unchanged_ms`` then, ``while_written_ms`` with an upload every 100 ms beside it.
``page_bytes`` is the page compressed, ``with_assets_bytes`` with everything that it loads, as for a first visit.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import platform
import re
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from build_profile import fill
from report import parser_of, report
from service_reads import serving, synthetic_session
from synthetic_models import shape_of

from spark_schemas.histogram import HistogramUpload
from spark_schemas.model import ModelShape
from spark_service.db.connection import Database

SHARES = {"code-heavy": 0.55, "chat": 0.25, "review": 0.15, "docs": 0.05}
DAYS = 365
WRITE_EVERY_SECONDS = 0.1
MOST_MS, MOST_BYTES = 200, 150_000
COMPUTING = b'http-equiv="refresh"'


def prepare(path: Path, shape: ModelShape, sessions: int) -> None:
    """Fill a store: sessions over a year, a fifth of them with what they missed."""
    for workload, share in SHARES.items():
        fill(path, shape, workload, 0, round(share * sessions))
    database = Database(path)
    with database.transaction() as cursor:
        cursor.execute("UPDATE parts SET received_day = current_date - CAST(number % ? AS INTEGER)", [DAYS])
        cursor.execute(
            "INSERT INTO live SELECT content_id, 384000, 24000 + CAST(number % 9000 AS UBIGINT), ?, "
            "CASE WHEN number % 2 = 0 THEN workload END, CASE WHEN number % 2 = 0 THEN ? END, "
            "CASE WHEN number % 2 = 0 THEN ? END FROM parts WHERE number % 5 < 2",
            [round(0.6 * shape.expert_bytes_total), "0" * 64, 8 * 10**9],
        )
    database.close()


class Browser:
    """One kept connection that takes gzip, and what it has loaded."""

    def __init__(self, base_url: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=600)

    def get(self, path: str) -> tuple[int, bytes, float]:
        """Status, body as it was sent, and milliseconds until it was there."""
        began = time.perf_counter()
        self.connection.request("GET", path, headers={"Accept": "text/html", "Accept-Encoding": "gzip"})
        answer = self.connection.getresponse()
        body = answer.read()
        return answer.status, body, 1000 * (time.perf_counter() - began)

    def plain(self, path: str) -> bytes:
        """The body without compression."""
        self.connection.request("GET", path, headers={"Accept": "text/html"})
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"error: {path} answered {answer.status}: {body[:500]!r}")
        return body


def pages_of(browser: Browser, shape: ModelShape) -> list[str]:
    """The pages of the navigation, and one of a workload's."""
    found = re.search(r"<nav.*?</nav>", browser.plain("/").decode(), re.DOTALL)
    linked = re.findall(r'href="([^"]+)"', found[0]) if found else []
    wanted = [*linked, f"/profiles/{shape.fingerprint}/code-heavy", "/privacy/audit", "/privacy/tokens"]
    return [path for path in wanted if browser.get(path)[0] == 200]


def first_s(browser: Browser, path: str, limit_s: float) -> float:
    """Seconds until nothing on a page is being computed any more."""
    began = time.perf_counter()
    while COMPUTING in browser.plain(path):
        if time.perf_counter() - began > limit_s:
            raise SystemExit(f"error: {path} is still being computed after {limit_s:.0f} s")
        time.sleep(0.25)
    return round(time.perf_counter() - began, 1)


def times(browser: Browser, path: str, repeats: int, pause_s: float = 0.0) -> dict[str, float]:
    """Milliseconds of some requests, with a pause before each."""
    taken = []
    for _ in range(repeats):
        time.sleep(pause_s)
        taken.append(browser.get(path)[2])
    taken.sort()
    return {"median": round(statistics.median(taken), 1), "worst": round(taken[-1], 1)}


def assets_bytes(browser: Browser, path: str) -> int:
    """What a first visit loads beside the page."""
    urls = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', browser.plain(path).decode()))
    return sum(len(browser.get(url)[1]) for url in urls)


@contextmanager
def writing(base_url: str, shape: ModelShape) -> Iterator[None]:
    """Upload one session every 100 ms."""
    stop = threading.Event()

    def write() -> int:
        connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=60)
        run, sent = secrets.randbelow(2**40), 0
        while not stop.wait(WRITE_EVERY_SECONDS):
            session = synthetic_session(shape, run + sent)
            body = HistogramUpload(agent_version="0.1.0", model=shape, sessions=(session,)).model_dump_json()
            headers = {"Content-Type": "application/json", "Idempotency-Key": str(run + sent)}
            connection.request("POST", "/api/v1/histograms", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 202:
                raise SystemExit(f"error: an upload answered {answer.status}: {text[:300]!r}")
            sent += 1
        connection.close()
        return sent

    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write)
        try:
            yield
        finally:
            stop.set()
        if not written.result():
            raise SystemExit("error: nothing was written meanwhile")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All pages of one store."""
    shape, path = shape_of(options.layers, options.experts), folder / "service.duckdb"
    if not path.exists():
        prepare(path, shape, options.sessions)
    rows = []
    with serving(folder) as base_url:
        browser = Browser(base_url)
        pages = pages_of(browser, shape)
        first = {page: first_s(browser, page, options.limit) for page in pages}
        unchanged = {page: times(browser, page, options.repeats) for page in pages}
        with writing(base_url, shape):
            written = {page: times(browser, page, options.repeats, WRITE_EVERY_SECONDS) for page in pages}
        for page in pages:
            page_bytes = len(browser.get(page)[1])
            rows.append(
                {
                    "page": page.replace(shape.fingerprint, "MODEL"),
                    "first_s": first[page],
                    "unchanged_ms": unchanged[page],
                    "while_written_ms": written[page],
                    "page_bytes": page_bytes,
                    "with_assets_bytes": page_bytes + assets_bytes(browser, page),
                }
            )
    worst_ms = max(row[kind]["worst"] for row in rows for kind in ("unchanged_ms", "while_written_ms"))
    most_bytes = max(row["with_assets_bytes"] for row in rows)
    return {
        "sessions": options.sessions,
        "workloads": list(SHARES),
        "layers": options.layers,
        "experts": options.experts,
        "database_bytes": path.stat().st_size,
        "rows": rows,
        "worst_ms": worst_ms,
        "most_bytes": most_bytes,
        "within": worst_ms < MOST_MS and most_bytes < MOST_BYTES,
        "limits": {"ms": MOST_MS, "bytes": MOST_BYTES},
    }


def main() -> int:
    """Measure and report; 1 where a page is slower or larger than it may be."""
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a page may be computed at first")
    parser.add_argument("--keep", type=Path, help="folder of the store, made if it is not there and used again")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spark-dashboard-")))
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(options, folder)
    machine = {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    report({"benchmark": "dashboard", "script_sha256": digest, **machine, **found}, options.out)
    return 0 if found["within"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
