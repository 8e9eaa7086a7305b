"""Small things that a process may do with its GPU, one at a time, through CUDA's driver interface."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["STEPS", "CudaSteps"]

MEMORY_BYTES = 1 << 20
NON_BLOCKING = 1
STEPS = ("allocation", "stream", "both")


class CudaSteps:
    """Allocations and streams in the first device's primary context, kept until the process ends."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._do("cuInit", 0)
        self._do("cuDeviceGet", ctypes.byref(device), 0)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._do("cuCtxPushCurrent_v2", context)
        self._known = self._memory()

    def take(self, step: str) -> None:
        """Allocate and set a mebibyte, set one in a new stream, or both with the new memory."""
        actions: dict[str, Callable[[], object]] = {
            "allocation": self._memory,
            "stream": lambda: self._stream(self._known),
            "both": lambda: self._stream(self._memory()),
        }
        actions[step]()

    def _memory(self) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(MEMORY_BYTES))
        self._do("cuMemsetD8_v2", address, 0, ctypes.c_size_t(MEMORY_BYTES))
        return address

    def _stream(self, memory: ctypes.c_uint64) -> None:
        stream = ctypes.c_void_p()
        self._do("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self._do("cuMemsetD32Async", memory, 7, ctypes.c_size_t(MEMORY_BYTES // 4), stream)
        self._do("cuStreamSynchronize", stream)

    def _do(self, function: str, *arguments: Any) -> None:
        result = getattr(self._cuda, function)(*arguments)
        if result:
            raise RuntimeError(f"{function} failed: CUDA error {result}")
