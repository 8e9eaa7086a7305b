"""The calibration service: stores routing histograms, builds profiles, answers with placement manifests."""

from __future__ import annotations

import importlib.metadata

__all__ = ["version"]


def version() -> str:
    """Return the version of the installed distribution, ``0+unknown`` in a source tree that nothing installed."""
    try:
        return importlib.metadata.version("spark-moe")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
