"""How much host memory there is, and how much of it may be pinned. Pure: from the texts that Linux has about it.

The limit on locked memory (``ulimit -l``) does not matter, as the GPU's driver pins on its own account. What matters:
memory that can be had without swapping, every limit of the control groups around this process, and on Windows' Linux
subsystem about half of the memory, more than which its driver does not pin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CgroupMemory", "HostMemory", "host_memory"]

PINNED_RESERVE_BYTES = 512 * 2**20
PINNED_RESERVE_SHARE = 0.05
"""Never pinned: pinned pages cannot be swapped or dropped, so the rest of the machine must live in what is left."""
WSL_PINNED_SHARE = 0.5

_KIB = 1024
_UNLIMITED = 2**60
"""Old control groups write a limit near 2**63 for none."""


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """What one control group's files say, of either version: limit, usage and statistics."""

    name: str
    limit: str
    usage: str
    stat: str = ""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes with the reason beside each."""

    available_bytes: int
    available_reason: str
    pinnable_bytes: int
    pinnable_reason: str


def host_memory(meminfo: str, cgroups: Sequence[CgroupMemory] = (), kernel: str = "") -> HostMemory:
    """Read ``/proc/meminfo``, the control groups from this process up to the root, and the kernel's release.

    Raises ``ValueError`` when the first has no ``MemTotal``.
    """
    total = _meminfo(meminfo, "MemTotal")
    if total is None:
        raise ValueError("/proc/meminfo has no MemTotal")
    available, source = _meminfo(meminfo, "MemAvailable"), "MemAvailable"
    if available is None:  # kernels before 3.14, and some containers
        available, source = _meminfo(meminfo, "MemFree") or 0, "MemFree"
    limits = [(available, f"{source} of /proc/meminfo")]
    capacity = total
    for group in cgroups:
        limit = _number(group.limit)
        if limit is None or limit >= _UNLIMITED:
            continue
        capacity = min(capacity, limit)
        # Files that were read once are dropped before anything is refused.
        reclaimable = max(_stat(group.stat, "inactive_file"), _stat(group.stat, "total_inactive_file"))
        left = max(0, limit - max(0, (_number(group.usage) or 0) - reclaimable))
        limits.append((left, f"what the control group {group.name} has left of its limit"))
    available, reason = min(limits, key=lambda entry: entry[0])
    reserve = max(PINNED_RESERVE_BYTES, int(PINNED_RESERVE_SHARE * capacity))
    pinnable, why = max(0, available - reserve), f"{reason}, less 5% (512 MiB at least) that stays unpinned"
    if "microsoft" in kernel.lower() and (quota := int(WSL_PINNED_SHARE * total)) < pinnable:
        pinnable, why = quota, "half of the memory: Windows' driver pins no more for its Linux subsystem"
    return HostMemory(available, reason, pinnable, why)


def _meminfo(text: str, name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) * _KIB if match else None


def _stat(text: str, name: str) -> int:
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _number(text: str) -> int | None:
    """The number in a file of a control group; ``None`` for ``max`` and for what is no number."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None
