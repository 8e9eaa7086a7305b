"""The evaluation callback in native code: what ``tap`` does, without a call into Python for every node."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from spark_runtime.collector import Collector
from spark_runtime.errors import InstallationError
from spark_runtime.ggml import MAX_DIMS, GgmlTensor, ggml_base, op_number
from spark_runtime.native.build import library_path
from spark_runtime.tap import malformed_ids

__all__ = ["NativeTap", "native_library"]

_READ_MEMBERS = ("type", "ne", "nb", "op", "src", "data", "name")
_FAULT_IDS = 1
_RECORD_HEADER = 3


@functools.cache
def native_library() -> ctypes.CDLL:
    """The native library, built if need be; raise :class:`InstallationError` when it cannot be or does not fit."""
    ggml_base()  # its functions, for the library to find
    path, stamp = library_path()
    try:
        library = ctypes.CDLL(str(path))
        library.spark_native_stamp.restype = ctypes.c_char_p
        found = library.spark_native_stamp().decode()
    except (OSError, AttributeError) as error:
        raise InstallationError(f"{path} is not Spark's native library: {error}", f"remove {path.parent}") from error
    if found != stamp:
        raise InstallationError(f"{path} was built as {found}, expected {stamp}", f"remove {path.parent}")
    _check_layout(library)
    library.spark_tap_new.restype = ctypes.c_void_p
    library.spark_tap_new.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
    for name in ("spark_tap_free", "spark_tap_reset"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.spark_tap_set_learning.restype = None
    library.spark_tap_set_learning.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    library.spark_tap_selected.restype = ctypes.POINTER(ctypes.c_int32)
    library.spark_tap_selected.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    library.spark_tap_fault.restype = ctypes.c_int32
    library.spark_tap_fault.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)]
    return library


def _check_layout(library: ctypes.CDLL) -> None:
    expected = [getattr(GgmlTensor, name).offset for name in _READ_MEMBERS] + [ctypes.sizeof(GgmlTensor)]
    found = (ctypes.c_size_t * len(expected))()
    library.spark_native_layout(found)
    if list(found) != expected:
        raise InstallationError(
            f"the native library lays out ggml's tensors as {list(found)}, expected {expected}",
            "report this machine and compiler",
        )


class NativeTap:
    """A callback for ``llama_context_params.cb_eval`` that feeds a collector; use as ``tap.EvalTap``."""

    def __init__(self, library: ctypes.CDLL, collector: Collector) -> None:
        self._library = library
        self._collector = collector
        base = ggml_base()
        address = ctypes.c_void_p
        self.user_data: int = library.spark_tap_new(
            ctypes.cast(base.ggml_backend_tensor_get, address),
            ctypes.cast(base.ggml_nbytes, address),
            op_number("MUL_MAT_ID"),
        )
        if not self.user_data:
            raise MemoryError("no memory for the native tap")
        self.callback = library.spark_tap_call
        # Freed with this object, which the context that calls into it keeps alive.
        weakref.finalize(self, library.spark_tap_free, self.user_data)

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Inside the block graphs run uncut: nothing is counted, and what precedes each layer's experts is learned."""
        self._library.spark_tap_set_learning(self.user_data, True)
        try:
            yield
        finally:
            self._library.spark_tap_set_learning(self.user_data, False)

    def check(self) -> None:
        """Hand what the last call selected to the collector; raise what was wrong with it."""
        size = ctypes.c_size_t()
        pointer = self._library.spark_tap_selected(self.user_data, ctypes.byref(size))
        records = (
            np.ctypeslib.as_array(pointer, (size.value,)).astype(np.int64) if size.value else np.empty(0, np.int64)
        )
        shape = (ctypes.c_int64 * (2 * MAX_DIMS))()
        fault = self._library.spark_tap_fault(self.user_data, shape)
        self._library.spark_tap_reset(self.user_data)
        if fault == _FAULT_IDS:
            raise malformed_ids(shape[:MAX_DIMS], shape[MAX_DIMS:])
        if fault:
            raise MemoryError("no memory for what the routers selected")
        start = 0
        while start < len(records):
            block, n_tokens, top_k = records[start : start + _RECORD_HEADER].tolist()
            end = start + _RECORD_HEADER + n_tokens * top_k
            self._collector.observe(block, records[start + _RECORD_HEADER : end].reshape(n_tokens, top_k))
            start = end
