"""What a process and its children take over time, from /proc (Linux)."""

from __future__ import annotations

import json
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Sample", "Watch", "of_quarters"]

SAMPLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. Bytes are anonymous memory in use by the process itself: no file's pages."""

    at: float
    """Seconds since the epoch."""
    anonymous_bytes: int
    heap_bytes: int
    """Of it, in the heap that grows at its end; the rest are mappings of their own."""
    open_files: int
    threads: int
    children: int
    children_anonymous_bytes: int


class Watch(threading.Thread):
    """Samples a process until it is stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="watch")
        self._proc = Path(f"/proc/{pid}")
        self._ending = threading.Event()
        self.samples: list[Sample] = []

    def run(self) -> None:
        """Sample."""
        while not self._ending.wait(SAMPLE_S):
            self.samples.append(self._sample())

    def stop(self) -> None:
        """Stop, and return when it has."""
        self._ending.set()
        self.join()

    def _sample(self) -> Sample:
        status = _status(self._proc)
        children = [child for pid in self._children() if (child := _status(Path(f"/proc/{pid}")))]
        return Sample(
            at=time.time(),
            anonymous_bytes=_anonymous(status),
            heap_bytes=self._heap_bytes(),
            open_files=sum(1 for _ in (self._proc / "fd").iterdir()),
            threads=int(status["Threads"]),
            children=len(children),
            children_anonymous_bytes=sum(map(_anonymous, children)),
        )

    def _children(self) -> list[int]:
        found = []
        for task in (self._proc / "task").iterdir():
            try:
                found += [int(pid) for pid in (task / "children").read_text().split()]
            except FileNotFoundError:
                continue  # the thread ended meanwhile
        return found

    def _heap_bytes(self) -> int:
        inside = False
        for line in (self._proc / "smaps").read_text().splitlines():
            if line[:1].isdigit() or line[:1] in "abcdef":
                inside = line.endswith("[heap]")
            elif inside and line.startswith("Anonymous:"):
                return 1024 * int(line.split()[1])
        return 0


def _status(process: Path) -> dict[str, str]:
    """Empty for a process that has ended."""
    try:
        return dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return {}


def _anonymous(status: dict[str, str]) -> int:
    # A child that ended and was not waited for has no memory any more.
    return 1024 * int(status.get("RssAnon", "0").split()[0])


def of_quarters(samples: list[Sample], inside: Path) -> list[dict[str, Any]]:
    """Largest value in each quarter of the time, and the median of what is in use; ``inside`` as ``agent_inside``."""
    if not samples:
        return []
    within = [json.loads(line) for line in inside.read_text().splitlines()] if inside.exists() else []
    first, last = samples[0].at, samples[-1].at
    found = []
    for quarter in range(4):
        low, high = (first + (last - first) * part / 4 for part in (quarter, quarter + 1))
        part = [asdict(sample) for sample in samples if low <= sample.at <= high]
        if not part:
            continue  # a short run, or a machine that slept
        row: dict[str, Any] = {name: max(each[name] for each in part) for name in part[0] if name != "at"}
        row["anonymous_bytes_median"] = int(statistics.median(each["anonymous_bytes"] for each in part))
        row["anonymous_bytes_end"] = part[-1]["anonymous_bytes"]
        for name in ("heap_in_use_bytes", "heap_free_bytes", "python_blocks"):
            values = [sample[name] for sample in within if low <= sample["at"] <= high]
            if values:
                row[f"{name}_median"] = int(statistics.median(values))
        found.append(row)
    return found
