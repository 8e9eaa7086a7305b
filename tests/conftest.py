"""Every test starts from a clean environment, so that a developer's own settings cannot decide a result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time, however slow the machine is: a red test is a fault of the code, not of the moment.
settings.register_profile("spark", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("spark")

SCRUBBED_PREFIXES = ("SPARKMOE_", "CUDA_", "LLAMA_", "HF_", "RAY_", "OPENAI_", "ANTHROPIC_")
SCRUBBED_NAMES = ("DO_NOT_TRACK", "NO_COLOR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scrub our variables and point every XDG folder at a temporary one."""
    for name in list(os.environ):
        if name.startswith(SCRUBBED_PREFIXES) or name in SCRUBBED_NAMES:
            monkeypatch.delenv(name)
    for kind in ("CONFIG", "CACHE", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / "xdg" / kind.lower()))
