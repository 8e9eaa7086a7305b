"""The devices that ggml can compute on: what they are called, and how much memory they have now."""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spark_runtime.ggml import ggml_base, library_dir, typed
from spark_runtime.llama import bindings

__all__ = ["Device", "DeviceBytes", "device_at", "gpus", "registered_devices"]

_CARD, _GPU_IN_PROCESSOR = 1, 2
"""In ggml's numbering."""


class DeviceBytes(NamedTuple):
    """Memory of a device."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Device:
    """One device."""

    address: int
    name: str
    description: str
    buffers: str
    """Name of its buffers, by which llama.cpp logs their sizes; a proxy's are those of the GPU that it stands for."""
    is_gpu: bool
    is_card: bool
    """A GPU with memory of its own, which is what experts are tiered on."""

    def memory(self) -> DeviceBytes:
        """What it has now; asking a GPU makes its driver take some for this process."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _base().ggml_backend_dev_memory(self.address, ctypes.byref(free), ctypes.byref(total))
        return DeviceBytes(free.value, total.value)


def device_at(address: int) -> Device:
    """A device by its address, registered or not."""
    base = _base()
    kind = base.ggml_backend_dev_type(address)
    return Device(
        address=address,
        name=base.ggml_backend_dev_name(address).decode(),
        description=base.ggml_backend_dev_description(address).decode(),
        buffers=base.ggml_backend_buft_name(base.ggml_backend_dev_buffer_type(address)).decode(),
        is_gpu=kind in {_CARD, _GPU_IN_PROCESSOR},
        is_card=kind == _CARD,
    )


def registered_devices() -> list[Device]:
    """Every device that llama.cpp knows of."""
    bindings()  # llama.cpp finds them
    registry = _registry()
    count = registry.ggml_backend_dev_count()
    return [device_at(registry.ggml_backend_dev_get(index)) for index in range(count)]


def gpus() -> list[Device]:
    """Those that are GPUs."""
    return [device for device in registered_devices() if device.is_gpu]


_ADDRESS, _TEXT = ctypes.c_void_p, ctypes.c_char_p


@functools.cache
def _base() -> ctypes.CDLL:
    return typed(
        ggml_base(),
        {
            "ggml_backend_dev_name": (_TEXT, [_ADDRESS]),
            "ggml_backend_dev_description": (_TEXT, [_ADDRESS]),
            "ggml_backend_dev_type": (ctypes.c_int, [_ADDRESS]),
            "ggml_backend_dev_memory": (None, [_ADDRESS, _ADDRESS, _ADDRESS]),
            "ggml_backend_dev_buffer_type": (_ADDRESS, [_ADDRESS]),
            "ggml_backend_buft_name": (_TEXT, [_ADDRESS]),
        },
    )


@functools.cache
def _registry() -> ctypes.CDLL:
    """The library that knows the devices; ``libggml-base`` does not."""
    name = {"darwin": "libggml.dylib", "win32": "ggml.dll"}.get(sys.platform, "libggml.so")
    return typed(
        ctypes.CDLL(str(Path(library_dir()) / name)),
        {
            "ggml_backend_dev_count": (ctypes.c_size_t, []),
            "ggml_backend_dev_get": (_ADDRESS, [ctypes.c_size_t]),
        },
    )
