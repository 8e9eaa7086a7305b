"""The parts of ggml's C interface that Spark uses, from the library inside the installed llama-cpp-python.

Reading a GGUF needs only ``libggml-base``, so this module loads that alone: no model code, no Python package import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from spark_runtime.errors import InstallationError

__all__ = [
    "LLAMA_CPP_PYTHON_VERSION",
    "LOG_CALLBACK",
    "MAX_DIMS",
    "GgmlTensor",
    "GgufInitParams",
    "complaints",
    "ggml_base",
    "library_dir",
    "op_number",
    "share_registry",
    "type_name",
    "typed",
]

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
MAX_DIMS = 4
_MAX_OP_PARAMS = 16  # int32 values; GGML_MAX_OP_PARAMS is 64 bytes
_MAX_SRC = 10
_MAX_NAME = 64
_OPS_SEARCHED = 80
_LOG_LEVEL_WARN, _LOG_LEVEL_ERROR = 3, 4
_INSTALL_HINT = f"install it with: pip install 'spark-moe[agent]' (llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION})"


class GgmlTensor(ctypes.Structure):
    """``struct ggml_tensor`` of ggml 0.25.3. A test checks the layout against the library's own accessors."""

    _fields_: ClassVar = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * MAX_DIMS),
        ("nb", ctypes.c_size_t * MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * _MAX_OP_PARAMS),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * _MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * _MAX_NAME),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class GgufInitParams(ctypes.Structure):
    """``struct gguf_init_params``: metadata only when ``no_alloc`` is set and ``ctx`` is null."""

    _fields_: ClassVar = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


_recent: deque[tuple[int, str]] = deque(maxlen=64)


def _keep_complaint(level: int, text: bytes | None, _data: object) -> None:
    if text and level in {_LOG_LEVEL_WARN, _LOG_LEVEL_ERROR}:
        _recent.append((level, text.decode(errors="replace").strip()))


LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep_complaint)
"""Receives what ggml and llama.cpp log, for as long as the process lives; keeps warnings and errors."""


def _give_up(message: bytes) -> None:
    # ggml calls abort() after this: the process cannot go on, but it can say why and end with a proper exit code.
    sys.stdout.flush()
    sys.stderr.write(f"error: llama.cpp cannot go on: {message.decode(errors='replace').rsplit('/', 1)[-1]}\n")
    sys.stderr.write("hint: the model's metadata may be damaged or unsupported; `spark-agent doctor MODEL` reads it\n")
    sys.stderr.flush()
    os._exit(1)


_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_give_up)


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Collect what the libraries complain about inside the block; the list is filled when it ends, errors first."""
    collected: list[str] = []
    _recent.clear()
    try:
        yield collected
    finally:
        # Stable: the first error is the cause, later ones are its consequences.
        collected.extend(text for _, text in sorted(_recent, key=lambda entry: -entry[0]))


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "gguf_init_from_file": (ctypes.c_void_p, [ctypes.c_char_p, GgufInitParams]),
    "gguf_free": (None, [ctypes.c_void_p]),
    "gguf_get_data_offset": (ctypes.c_size_t, [ctypes.c_void_p]),
    "gguf_get_n_kv": (ctypes.c_int64, [ctypes.c_void_p]),
    "gguf_get_key": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_kv_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_arr_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_arr_n": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_arr_data": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_val_data": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_val_str": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_n_tensors": (ctypes.c_int64, [ctypes.c_void_p]),
    "gguf_get_tensor_name": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_tensor_ne": (ctypes.POINTER(ctypes.c_int64), [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_tensor_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_tensor_offset": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_tensor_size": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_op_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_nbytes": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_get_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_tensor_get": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
    "ggml_set_abort_callback": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_log_set": (None, [ctypes.c_void_p, ctypes.c_void_p]),
}


def library_dir() -> Path:
    """Folder of llama-cpp-python's shared libraries.

    Raises :class:`InstallationError` when it is missing or of any version but the pinned one.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise InstallationError("llama-cpp-python is not installed", _INSTALL_HINT)
    version = importlib.metadata.version("llama_cpp_python")
    if version != LLAMA_CPP_PYTHON_VERSION:
        raise InstallationError(
            f"llama-cpp-python is {version}, expected {LLAMA_CPP_PYTHON_VERSION}: ggml's structures differ by version",
            _INSTALL_HINT,
        )
    return Path(spec.submodule_search_locations[0]) / "lib"


def _library_path(name: str) -> Path:
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    prefix = "" if sys.platform == "win32" else "lib"
    return library_dir() / f"{prefix}{name}.{suffix}"


def _share_libstdcxx() -> None:
    """Let all libraries use one copy of the C++ library.

    Some toolchains link it into each of llama.cpp's libraries. With numpy loaded first such a build crashes while it
    loads a model (seen with a CUDA build), because parts of two copies meet. A global copy comes before all of them.
    """
    # Without one to share, as on musl, there is no second copy either.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)


def typed(library: ctypes.CDLL, signatures: Mapping[str, tuple[Any, list[Any]]]) -> ctypes.CDLL:
    """The library, with the types of these functions' results and arguments set."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def ggml_base() -> ctypes.CDLL:
    """The loaded ``libggml-base`` with argument and result types set."""
    path = _library_path("ggml-base")
    if sys.platform == "linux":
        _share_libstdcxx()
    try:
        # Global: Spark's native library uses its functions without being linked with it.
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InstallationError(f"cannot load {path.name} of llama-cpp-python: {error}", _INSTALL_HINT) from error
    typed(library, _SIGNATURES)
    library.ggml_log_set(LOG_CALLBACK, None)
    library.ggml_set_abort_callback(_ABORT_CALLBACK)
    return library


def type_name(ggml_type: int) -> str:
    """Name of a tensor type, for example ``q4_K``."""
    name: bytes = ggml_base().ggml_type_name(ggml_type)
    return name.decode()


@functools.cache
def share_registry() -> None:
    """Let Spark's native library find ggml's list of devices, which is in a library of its own."""
    ggml_base()
    path = _library_path("ggml")
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InstallationError(f"cannot load {path.name} of llama-cpp-python: {error}", _INSTALL_HINT) from error


@functools.cache
def op_number(name: str) -> int:
    """Number of a ggml operation by its name; raise :class:`InstallationError` when the library has none such."""
    library = ggml_base()
    # Names beyond the enumeration's end lie outside ggml's table; the pinned version has more operations than this.
    for number in range(_OPS_SEARCHED):
        found: bytes = library.ggml_op_name(number)
        if found.decode() == name:
            return number
    raise InstallationError(f"the installed ggml has no operation {name}", _INSTALL_HINT)
