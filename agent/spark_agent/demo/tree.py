"""Where the source tree is, when the demo runs from one."""

from __future__ import annotations

from pathlib import Path

__all__ = ["source_tree"]


def source_tree() -> Path | None:
    """Return the repository's folder, or None for an installed package."""
    # agent/spark_agent/demo/tree.py
    root = Path(__file__).resolve().parents[3]
    project = root / "pyproject.toml"
    return root if project.is_file() and 'name = "spark-moe"' in project.read_text(encoding="utf-8") else None
