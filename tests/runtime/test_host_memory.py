"""Host memory from the texts of several kinds of machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_runtime.host_memory import CgroupMemory, host_memory
from spark_runtime.host_probe import probe_host

GIB = 2**30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:        1048576 kB\nMemAvailable:   25165824 kB\nSwapTotal: 0 kB\n"


def test_a_plain_machine_pins_all_but_a_reserve() -> None:
    found = host_memory(MEMINFO)
    assert found.available_bytes == 24 * GIB
    assert found.available_reason == "MemAvailable of /proc/meminfo"
    assert found.pinnable_bytes == 24 * GIB - int(0.05 * 32 * GIB)


def test_an_old_kernel_counts_free_memory() -> None:
    assert host_memory("MemTotal: 4194304 kB\nMemFree: 1048576 kB\n").available_bytes == GIB
    with pytest.raises(ValueError, match="MemTotal"):
        host_memory("nothing\n")


def test_the_narrowest_control_group_decides() -> None:
    groups = [
        CgroupMemory("/a/b", "max\n", "123\n"),
        CgroupMemory("/a", f"{8 * GIB}\n", f"{5 * GIB}\n", f"anon 1\ninactive_file {GIB}\n"),
        CgroupMemory("/", "9223372036854771712\n", f"{30 * GIB}\n", "total_inactive_file 4\n"),
    ]
    found = host_memory(MEMINFO, groups)
    assert found.available_bytes == 4 * GIB
    assert found.available_reason == "what the control group /a has left of its limit"
    assert found.pinnable_bytes == 4 * GIB - 512 * 2**20
    full = CgroupMemory("/a", "100", "200")
    assert host_memory(MEMINFO, [full]).available_bytes == host_memory(MEMINFO, [full]).pinnable_bytes == 0


def test_wsl_pins_half() -> None:
    found = host_memory(MEMINFO, kernel="5.15.167.4-microsoft-standard-WSL2")
    assert found.pinnable_bytes == 16 * GIB
    assert "half" in found.pinnable_reason
    assert found.available_bytes == 24 * GIB


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job/step\n", "sys/fs/cgroup/job", ("memory.max", "memory.current")),
        (
            "5:cpu:/job/step\n4:memory:/job/step\n0::/\n",
            "sys/fs/cgroup/memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
    ids=["v2", "v1"],
)
def test_limits_of_outer_groups_are_found(tmp_path: Path, line: str, folder: str, names: tuple[str, str]) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "proc/self/cgroup").write_text(line)
    (tmp_path / folder).mkdir(parents=True)
    for name, value in zip(names, (2 * GIB, GIB), strict=True):
        (tmp_path / folder / name).write_text(f"{value}\n")
    found = probe_host(tmp_path)
    assert found.available_bytes == GIB
    assert "/job" in found.available_reason


def test_this_machine_and_one_that_says_nothing(tmp_path: Path) -> None:
    assert 0 < probe_host().pinnable_bytes <= probe_host(tmp_path).available_bytes * 4
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    assert probe_host(tmp_path).available_bytes == 24 * GIB
