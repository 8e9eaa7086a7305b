"""Curves of a simulation as a picture; needs the ``plot`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.simulation.rows import Row

__all__ = ["save_plot"]


def save_plot(path: Path, rows: Sequence[Row]) -> None:
    """Cold-hit rates by residency and, where they are predicted, tokens a second by memory; a PNG or SVG file.

    Raises :class:`SparkError` without matplotlib, and when the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SparkError("plots need matplotlib", "pip install 'spark-moe[plot]'") from error
    curves: dict[str, list[Row]] = {}
    for row in rows:
        parts = (row.policy, row.profile, row.sharing)
        curves.setdefault(", ".join(part for part in parts if part is not None), []).append(row)
    predicted = any(row.predicted_tok_s is not None for row in rows)
    figure = Figure(figsize=(14 if predicted else 9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if predicted else 1, squeeze=False)[0]
    for name, points in curves.items():
        ordered = sorted(points, key=lambda row: row.residency)
        axes[0].plot([100 * row.residency for row in ordered], [row.cold_hit_rate for row in ordered], "o-", label=name)
        timed = [row for row in ordered if row.predicted_tok_s is not None]
        if predicted and timed:
            known = all(row.slot_bytes is not None for row in timed)
            memory = [(row.slot_bytes or 0) / 2**30 if known else 100 * row.residency for row in timed]
            axes[1].plot(memory, [row.predicted_tok_s for row in timed], "o-", label=name)
            axes[1].set_xlabel("experts in slots, GiB" if known else "experts in slots, %")
    axes[0].set_xlabel("experts in slots, %")
    axes[0].set_ylabel("cold-hit rate")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize="small")
    if predicted:
        axes[1].set_ylabel("predicted tokens a second")
    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
    try:
        with replacing(path, mode=0o644) as file:
            figure.savefig(
                file, format=path.suffix.removeprefix("."), metadata={"Date": None} if path.suffix == ".svg" else None
            )
    except OSError as error:
        raise SparkError(f"cannot write {path}: {error.strerror}", "check the folder and its space") from error
