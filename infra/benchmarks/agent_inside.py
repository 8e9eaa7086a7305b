"""``spark-agent`` with a thread that writes what is in use inside it: agent_inside.py FILE SECONDS [--untrimmed] run …

One JSON object a line. What the system sees of a process is what its heaps grew to; whether that is a leak or room
between what is in use only the C library can tell. ``--untrimmed``: what was freed is not given back.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from pathlib import Path

from spark_runtime import heap

_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def write_samples(path: Path, every_s: float) -> None:
    """Without end: bytes in use and free in malloc's heaps, and blocks of Python's allocator.

    No look at all objects: one would hold tuples that another thread is building, which then fails there.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    with path.open("w", buffering=1) as out:
        while True:
            heaps = mallinfo2()
            sample = {
                "at": time.time(),
                "heap_in_use_bytes": heaps.uordblks + heaps.hblkhd,
                "heap_free_bytes": heaps.fordblks,
                "python_blocks": sys.getallocatedblocks(),
            }
            out.write(json.dumps(sample) + "\n")
            time.sleep(every_s)


def main() -> None:
    """Write beside the agent, which takes the other arguments."""
    path, every_s = Path(sys.argv[1]), float(sys.argv[2])
    arguments = sys.argv[3:]
    if arguments[0] == "--untrimmed":
        del arguments[0]
        heap._malloc_trim = lambda: None  # noqa: SLF001 (to leave it out)
    sys.argv = ["spark-agent", *arguments]
    # As the agent itself does, before it has threads: the one below would bring another heap.
    heap.share_heaps()
    threading.Thread(target=write_samples, args=(path, every_s), name="inside", daemon=True).start()
    from spark_agent.cli import main as agent

    agent()


if __name__ == "__main__":
    main()
