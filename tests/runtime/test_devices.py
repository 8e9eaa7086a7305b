from __future__ import annotations

from spark_runtime.buffer_sizes import HOST
from spark_runtime.devices import device_at, gpus, registered_devices
from spark_runtime.native_tier import proxy_devices


def test_the_cpu_is_a_device_with_memory() -> None:
    (cpu,) = (device for device in registered_devices() if device.name == HOST)
    assert cpu.buffers == HOST
    assert not cpu.is_gpu
    assert not cpu.is_card
    assert 0 < cpu.memory().free <= cpu.memory().total
    assert device_at(cpu.address).name == HOST


def test_a_proxy_is_no_registered_device() -> None:
    (address,) = proxy_devices(1)
    proxy = device_at(address)
    assert (proxy.name, proxy.is_card) == ("SPARK0", True)
    assert "tiers over" in proxy.description
    assert proxy.address not in {device.address for device in registered_devices()}
    assert all(gpu.name != "SPARK0" for gpu in gpus())
