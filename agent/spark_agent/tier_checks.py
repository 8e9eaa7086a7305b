"""What tiers can do on this machine, for ``spark-agent doctor``. Each function gives a line or raises why it cannot."""

from __future__ import annotations

import contextlib
import datetime as dt
import shlex
from pathlib import Path

from spark_agent.prefetching import what_pays
from spark_agent.sizes import format_size

__all__ = ["cuda_driver", "host_memory_line", "llama_server", "nvrtc", "prefetch", "proxies", "tier_engine"]

NO_GPU = "not needed: there is no GPU to tier on"


def proxies() -> str:
    """The proxy devices and what they stand for."""
    from spark_runtime.devices import device_at
    from spark_runtime.native_tier import proxy_devices
    from spark_runtime.tier_plan import cards

    found = cards()
    devices = [device_at(address) for address in proxy_devices(len(found) or 1)]
    named = ", ".join(f"{device.name}: {device.description}" for device in devices)
    return named if found else f"{named}; there is no GPU, so nothing is gained"


def tier_engine() -> str:
    """Who decides which experts are fetched, on every GPU."""
    from spark_runtime.native_tier import kernel_fault, proxy_devices
    from spark_runtime.tier_plan import cards

    found = cards()
    if not found:
        return "host, over the CPU"
    for index in range(len(proxy_devices(len(found)))):
        if (fault := kernel_fault(index)) is not None:
            raise fault
    return "cuda: the GPU decides and fetches by itself"


def prefetch(model: Path) -> str:
    """Whether a model's experts are fetched early where nobody says, and why."""
    from spark_agent import __version__
    from spark_agent.measured import find_benchmark, machine_name
    from spark_agent.prefetch_trials import find_trials
    from spark_runtime.model_shape import read_model_shape

    fingerprint, machine = read_model_shape(model).fingerprint, machine_name()
    measured = find_benchmark(fingerprint, machine)
    tried = find_trials(fingerprint, machine, __version__, dt.datetime.now(dt.UTC).date())
    paying = what_pays(measured, next(iter(tried), None))
    if tried or (measured is not None and measured.prefetch_gain is not None):
        return f"{paying.use}: {paying.reason}"
    return f"{paying.use}: {paying.reason}; spark-agent bench --prefetch on measures it"


def nvrtc() -> str:
    """The compiler of the CUDA kernels."""
    from spark_runtime.native.nvrtc import nvrtc_version
    from spark_runtime.native_tier import cuda_version, proxy_devices
    from spark_runtime.tier_plan import cards

    if not cards():
        return NO_GPU
    proxy_devices(1)
    _, driver = cuda_version(0)
    return _dotted(nvrtc_version(driver))


def cuda_driver() -> str:
    """What CUDA the driver knows, and the first card's capability."""
    from spark_runtime.native_tier import cuda_version, proxy_devices
    from spark_runtime.tier_plan import cards

    if not cards():
        return NO_GPU
    proxy_devices(1)
    capability, driver = cuda_version(0)
    return f"CUDA {_dotted(driver)}, compute capability {_dotted(capability)}"


def host_memory_line() -> str:
    """How much memory can be had, and how much of it pinned for the GPU."""
    from spark_runtime.host_probe import probe_host

    memory = probe_host()
    return (
        f"{format_size(memory.available_bytes)} available ({memory.available_reason}), "
        f"{format_size(memory.pinnable_bytes)} may be pinned ({memory.pinnable_reason})"
    )


def llama_server() -> str:
    """How an unchanged llama-server of the same llama.cpp uses the tiers."""
    from spark_runtime.errors import InstallationError
    from spark_runtime.native.build import library_path
    from spark_runtime.native.nvrtc import kernels_path
    from spark_runtime.native_tier import cuda_version, proxy_devices
    from spark_runtime.tier_plan import cards

    library, _ = library_path()
    parts = [f"GGML_BACKEND_PATH={shlex.quote(str(library))}", "SPARKMOE_RESIDENCY=0.6"]
    if cards():
        proxy_devices(1)
        # Said by the check of the engine; without kernels the host decides.
        with contextlib.suppress(InstallationError):
            parts.append(f"SPARKMOE_KERNELS={shlex.quote(str(kernels_path(*cuda_version(0))))}")
    return " ".join([*parts, "llama-server --device SPARK0 -ngl 999 --fit off -m MODEL"])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
