"""Every test starts from a clean environment, so that a developer's own settings cannot decide a result."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The tests' helpers lie here.
sys.path.append(str(Path(__file__).resolve().parent))

# The same examples every time, however slow the machine is: a red test is a fault of the code, not of the moment.
settings.register_profile("spark", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("spark")

SCRUBBED_PREFIXES = ("SPARKMOE_", "CUDA_", "LLAMA_", "HF_", "RAY_", "OPENAI_", "ANTHROPIC_")
SCRUBBED_NAMES = ("DO_NOT_TRACK", "NO_COLOR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")


DEADLINE_S = 120.0
"""For what takes a moment, on a machine at a fraction of the speed that does much else: only a fault takes so long."""


@pytest.fixture(scope="session", autouse=True)
def clean_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """Scrub our variables and point every XDG folder at a temporary one, for what lives longer than a test.

    All tests share one cache, which holds nothing but what can be made again: the native library is built once a run.
    """
    base = tmp_path_factory.getbasetemp()
    run = base if worker_id == "master" else base.parent
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(SCRUBBED_PREFIXES) or name in SCRUBBED_NAMES:
                patch.delenv(name)
        patch.setenv("XDG_CACHE_HOME", str(run / "cache"))
        for kind in ("CONFIG", "STATE", "DATA"):
            patch.setenv(f"XDG_{kind}_HOME", str(base / "xdg" / kind.lower()))
        yield


@pytest.fixture(autouse=True)
def clean_environment(clean_run: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test folders of its own."""
    for kind in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / "xdg" / kind.lower()))


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until something is true, which another thread or process makes so; with a deadline."""

    def wait(true: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def make() -> Any:
    """Synthetic sessions, for what service and agent both compute of them."""
    from synthetic_sessions import Make

    return Make()


def pytest_configure() -> None:
    """Tests send interrupts to processes they start, which would ignore them if this one does: in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """llama-cpp-python opens the null device twice and never closes it, of which Python would complain at the end."""
    utilities = sys.modules.get("llama_cpp._utils")
    if utilities is not None:
        utilities.outnull_file.close()
        utilities.errnull_file.close()
