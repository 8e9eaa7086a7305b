"""What a copy takes, on this machine and through a driver of our own making."""

from __future__ import annotations

import ctypes
import sys

import pytest

from spark_runtime import link
from spark_runtime.devices import gpus
from spark_runtime.link import LinkError, measure_gpu_link, measure_link


class Driver:
    """Counts what is allocated, and copies as a driver would."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.held, self.memory = failing, [], []

    def __getattr__(self, name: str):
        def function(*arguments):
            if name == self.failing:
                return 2
            if name in {"cuMemAlloc_v2", "cuMemHostAlloc"}:
                self.memory.append(ctypes.create_string_buffer(arguments[1].value))
                arguments[0]._obj.value = ctypes.addressof(self.memory[-1])
            if name == "cuMemcpyHtoD_v2":
                ctypes.memmove(arguments[0].value, arguments[1].value, arguments[2].value)
            pairs = {"cuMemAlloc_v2": "cuMemFree_v2", "cuMemHostAlloc": "cuMemFreeHost",
                     "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease_v2",
                     "cuCtxPushCurrent_v2": "cuCtxPopCurrent_v2"}  # fmt: skip
            if name in pairs:
                self.held.append(pairs[name])
            elif name in self.held:
                self.held.remove(name)
            return 0

        return function


def check(found: link.Link, device: str) -> None:
    assert found.device == device
    assert found.bytes_per_s > 0
    assert found.pageable_bytes_per_s > 0
    assert 0 <= found.latency_s < 1
    assert set(found.as_json()) == {"device", "bytes_per_s", "latency_s", "pageable_bytes_per_s"}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(link, "_SPREAD_BYTES", 8 * 2**20)


def test_host_memory(small):
    check(measure_link(on_gpu=False), "cpu")


@pytest.mark.skipif(not gpus(), reason="needs a GPU")
def test_a_gpu():
    check(measure_link(on_gpu=True), "gpu")


def test_a_driver_gets_everything_back(small, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    check(measure_gpu_link(), "gpu")
    assert driver.held == []


@pytest.mark.parametrize(
    "failing", ["cuInit", "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemcpyHtoD_v2", "cuCtxSynchronize"]
)
def test_a_driver_that_refuses(small, monkeypatch, failing):
    driver = Driver(failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    with pytest.raises(LinkError, match=failing):
        measure_gpu_link()
    assert driver.held == []


@pytest.mark.skipif(sys.platform != "linux" or bool(gpus()), reason="there is a driver")
def test_no_driver():
    with pytest.raises(LinkError, match="no CUDA driver"):
        measure_gpu_link()
