"""Reads what this machine says about its memory; :mod:`spark_runtime.host_memory` makes sense of it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from spark_runtime.host_memory import CgroupMemory, HostMemory, host_memory

__all__ = ["probe_host"]

_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
_V2_FILES = ("memory.max", "memory.current", "memory.stat")
_ASSUMED_SHARE = 0.5
"""Of a machine that does not say how much of its memory can be had."""


def probe_host(root: Path = Path("/")) -> HostMemory:
    """Memory of this machine now. ``root`` is where ``proc`` and ``sys`` are."""
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except OSError:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        reason = "half of the physical memory: this system has no /proc/meminfo"
        half = int(_ASSUMED_SHARE * physical)
        return HostMemory(half, reason, half, reason)
    return host_memory(meminfo, _cgroups(root), platform.release())


def _cgroups(root: Path) -> list[CgroupMemory]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[CgroupMemory] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, files = root / "sys/fs/cgroup", _V2_FILES
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", _V1_FILES
        else:
            continue
        # Every group up to the root may have a limit; inside a container the path may lie outside of what is mounted.
        parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
        for depth in range(len(parts), -1, -1):
            limit, usage, stat = (_read(mount.joinpath(*parts[:depth], name)) for name in files)
            if limit:
                groups.append(CgroupMemory("/" + "/".join(parts[:depth]), limit, usage, stat))
    return groups


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
