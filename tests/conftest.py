"""Every test starts from a clean environment, so that a developer's own settings cannot decide a result."""

from __future__ import annotations

import os
import sys
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


@pytest.fixture(autouse=True)
def clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> None:
    """Scrub our variables and point every XDG folder at a temporary one.

    All tests share one cache, which holds nothing but what can be made again: the native library is built once a run.
    """
    for name in list(os.environ):
        if name.startswith(SCRUBBED_PREFIXES) or name in SCRUBBED_NAMES:
            monkeypatch.delenv(name)
    run = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "cache"))
    for kind in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / "xdg" / kind.lower()))


@pytest.fixture(scope="session")
def make() -> Any:
    """Synthetic sessions, for what service and agent both compute of them."""
    from synthetic_sessions import Make

    return Make()


def pytest_unconfigure() -> None:
    """llama-cpp-python opens the null device twice and never closes it, of which Python would complain at the end."""
    utilities = sys.modules.get("llama_cpp._utils")
    if utilities is not None:
        utilities.outnull_file.close()
        utilities.errnull_file.close()
