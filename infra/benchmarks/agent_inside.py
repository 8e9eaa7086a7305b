"""``spark-agent`` with a thread that writes what is in use inside it: agent_inside.py FILE SECONDS run …

One JSON object a line. What the system sees of a process is what its heaps grew to; whether that is a leak or room
between what is in use only the C library can tell.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def write_samples(path: Path, every_s: float) -> None:
    """Without end: bytes in use and free in malloc's heaps, blocks of Python's allocator, objects by type."""
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
                "objects": Counter(type(one).__name__ for one in gc.get_objects()).most_common(12),
            }
            out.write(json.dumps(sample) + "\n")
            time.sleep(every_s)


def main() -> None:
    """Write beside the agent, which takes the other arguments."""
    path, every_s = Path(sys.argv[1]), float(sys.argv[2])
    sys.argv = ["spark-agent", *sys.argv[3:]]
    threading.Thread(target=write_samples, args=(path, every_s), name="inside", daemon=True).start()
    from spark_agent.cli import main as agent

    agent()


if __name__ == "__main__":
    main()
