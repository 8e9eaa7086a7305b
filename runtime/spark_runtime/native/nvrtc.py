"""The CUDA kernels, compiled by NVRTC for the card that is there, once, into the cache of the native library.

NVRTC is NVIDIA's compiler as a library: from PyPI (the `cuda` extra, also what PyTorch installs) or of a CUDA toolkit.
A driver refuses PTX of an NVRTC that is newer than itself, even by a minor version, but runs machine code (a cubin) of
every NVRTC of its major version and earlier ones. So machine code is made, and PTX only for a card that NVRTC is too
old to know.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_runtime.errors import InstallationError
from spark_runtime.native import cache
from spark_runtime.native.cache import cache_key, complaints, kept, packaged

__all__ = ["Nvrtc", "Source", "find_nvrtc", "kernels_path", "nvrtc_version", "ptx_path"]

#: Without --fmad=false a product and a sum are rounded once on the card and twice on the host.
OPTIONS = ("--std=c++17", "--fmad=false")
KERNELS = "kernels.cu"
_MAJORS = (13, 12)
_PACKAGES = {13: ("nvidia-cuda-nvrtc", "cu13"), 12: ("nvidia-cuda-nvrtc-cu12", "cuda_nvrtc")}
_INSTALL = "pip install 'spark-moe[cuda]'"

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Source:
    """One file of CUDA C++, with the headers that it may include by name: NVRTC is given texts, not a folder."""

    name: str
    text: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """One NVRTC: its library, where it was found and its version."""

    library: ctypes.CDLL
    place: str
    version: Version

    def capabilities(self) -> tuple[Version, ...]:
        """The compute capabilities that it compiles for, ascending."""
        count = ctypes.c_int()
        self._check(self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self.library.nvrtcGetSupportedArchs(numbers))
        return tuple((number // 10, number % 10) for number in sorted(numbers))

    def ptx(self, source: Source, capability: Version) -> bytes:
        """Compile CUDA C++ to PTX, which runs on cards of this compute capability and newer ones."""
        return self._compile(source, f"compute_{_digits(capability)}", "PTX")

    def cubin(self, source: Source, capability: Version) -> bytes:
        """Compile CUDA C++ to machine code for cards of this compute capability."""
        return self._compile(source, f"sm_{_digits(capability)}", "CUBIN")

    def _compile(self, source: Source, target: str, kind: str) -> bytes:
        """Raise :class:`InstallationError` with the compiler's log when it refuses the source."""
        program = ctypes.c_void_p()
        count = len(source.headers)
        texts, names = (ctypes.c_char_p * count)(), (ctypes.c_char_p * count)()
        for place, (name, text) in enumerate(source.headers):
            texts[place], names[place] = text, name.encode()
        self._check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program), source.text, source.name.encode(), ctypes.c_int(count), texts, names
            )
        )
        try:
            options = [option.encode() for option in (f"--gpu-architecture={target}", *OPTIONS)]
            status = self.library.nvrtcCompileProgram(
                program, ctypes.c_int(len(options)), (ctypes.c_char_p * len(options))(*options)
            )
            if status:
                log = self._result(program, "ProgramLog").decode(errors="replace").rstrip("\0")
                reason = f"{self._title} cannot compile {source.name} for {target} ({self._error(status)})"
                raise InstallationError(f"{reason}:\n{complaints(log)}", "report this, with the version of NVRTC")
            return self._result(program, kind)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _result(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            raise InstallationError(f"{self._title} fails: {self._error(status)}", _INSTALL)

    def _error(self, status: int) -> str:
        get = self.library.nvrtcGetErrorString
        get.restype = ctypes.c_char_p
        return str(get(status).decode())

    @property
    def _title(self) -> str:
        return f"NVRTC {_dotted(self.version)} ({self.place})"


def nvrtc_version(driver: Version | None = None) -> Version:
    """The version of the NVRTC that is used, for a driver that supports CUDA up to ``driver``.

    Raises :class:`InstallationError` when there is none, or none that this driver can follow.
    """
    return _chosen(driver).version


def ptx_path(capability: Version) -> Path:
    """PTX of the packaged kernels for one compute capability, such as (9, 0), compiled now if it is not in the cache.

    A driver older than :func:`nvrtc_version` refuses it: see :func:`kernels_path`. The text ends with the zero byte
    that the driver wants. For a card newer than NVRTC it is that of the newest capability that NVRTC knows, which the
    driver translates. Raises :class:`InstallationError` without NVRTC, for a card that is too old for it, or with its
    complaints.
    """
    return _kernels(_chosen(None), capability, "ptx")


def kernels_path(capability: Version, driver: Version) -> Path:
    """What the driver loads as a module: the packaged kernels as a cubin, or as PTX for a card newer than NVRTC.

    ``driver`` is the CUDA version that the driver supports, such as (12, 4). Raises as :func:`ptx_path`, and when
    every installed NVRTC is too new for the driver.
    """
    nvrtc = _chosen(driver)
    if _target(nvrtc, capability) == capability:
        return _kernels(nvrtc, capability, "cubin")
    if nvrtc.version > driver:
        major, minor = driver
        raise InstallationError(
            f"{_too_new(nvrtc, driver)}, and it has no machine code for compute capability {_dotted(capability)}",
            f"pip install '{_PACKAGES[major][0]}<{major}.{minor + 1}', or install a newer driver",
        )
    return _kernels(nvrtc, capability, "ptx")


def _chosen(driver: Version | None) -> Nvrtc:
    """The newest NVRTC whose major version the driver knows."""
    majors = [major for major in _MAJORS if driver is None or major <= driver[0]]
    for major in majors:
        if (nvrtc := find_nvrtc(major)) is not None:
            return nvrtc
    hint = "install a newer driver"
    if majors:
        hint = _INSTALL if majors[0] == _MAJORS[0] else f"pip install {_PACKAGES[majors[0]][0]}, or {hint}"
    for major in _MAJORS:
        if driver is not None and (nvrtc := find_nvrtc(major)) is not None:
            raise InstallationError(_too_new(nvrtc, driver), hint)
    raise InstallationError("NVRTC, which compiles the CUDA kernels, is not installed", hint)


def _too_new(nvrtc: Nvrtc, driver: Version) -> str:
    return f"driver supports CUDA {_dotted(driver)}, NVRTC is {_dotted(nvrtc.version)}"


def _kernels(nvrtc: Nvrtc, capability: Version, kind: str) -> Path:
    headers = tuple((path.name, path.read_bytes()) for path in packaged(".h"))
    source = Source(KERNELS, (cache.PACKAGE / KERNELS).read_bytes(), headers)
    texts = (source.text, *(part for header in headers for part in header))
    made_by = (_dotted(nvrtc.version), platform.machine(), _dotted(capability), kind)
    key = cache_key([KERNELS, *OPTIONS, *made_by, *texts])

    def make(path: Path) -> None:
        if kind == "ptx":
            path.write_bytes(nvrtc.ptx(source, _target(nvrtc, capability)))
        else:
            path.write_bytes(nvrtc.cubin(source, capability))

    return kept(key, f"kernels-{_digits(capability)}.{kind}", make)


def _target(nvrtc: Nvrtc, capability: Version) -> Version:
    """The capability to make PTX for: the card's own, or the newest before it."""
    known = nvrtc.capabilities()
    older = [each for each in known if each <= capability]
    if not older:
        raise InstallationError(
            f"the card's compute capability is {_dotted(capability)}, NVRTC {_dotted(nvrtc.version)} compiles for "
            f"{_dotted(known[0])} and newer",
            f"pip install {_PACKAGES[12][0]}" if nvrtc.version[0] != _MAJORS[-1] else None,
        )
    return older[-1]


@functools.cache
def find_nvrtc(major: int) -> Nvrtc | None:
    """An installed NVRTC of one major version, if there is one."""
    return next((nvrtc for place in _places(major) if (nvrtc := _load(place)) is not None), None)


def _load(place: str) -> Nvrtc | None:
    try:
        library = ctypes.CDLL(place)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
            return None
    except (OSError, AttributeError):
        return None  # not there, or damaged: another may do
    return Nvrtc(library, place, (major.value, minor.value))


def _places(major: int) -> Iterator[str]:
    """Where an NVRTC of a major version may be: packages, then toolkits, then wherever the system's loader looks."""
    name = f"libnvrtc.so.{major}"
    for folder in _package_folders():
        yield str(folder / _PACKAGES[major][1] / "lib" / name)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield str(Path(root) / "lib64" / name)
    yield name


def _package_folders() -> list[Path]:
    """The folders of the namespace that NVIDIA's packages share."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _digits(capability: Version) -> str:
    return f"{capability[0]}{capability[1]}"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
