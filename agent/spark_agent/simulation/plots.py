"""Curves of a simulation as a picture; needs the ``plot`` extra.

A policy is a colour and a shape, so that either tells it (the colours are those of Okabe and Ito, which people tell
apart however they see colours); what the slots belong to is the kind of line, and the profile how the shape is filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_agent.errors import SparkError
from spark_agent.files import replacing
from spark_agent.simulation.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save_plot"]

_POLICIES: Mapping[str, tuple[str, str]] = {
    "uniform": ("#999999", "v"),
    "static": ("#0072b2", "s"),
    "oracle": ("#56b4e9", "D"),
    "lru_unprotected": ("#cc79a7", "<"),
    "lru": ("#e69f00", ">"),
    "lfu": ("#a6761d", "P"),
    "lru_pinned": ("#d55e00", "h"),
    "scored": ("#000000", "o"),
    "scored_tuned": ("#5c3b99", "X"),
    "belady": ("#009e73", "^"),
}
"""Colour and shape."""
_EARLY: Sequence[tuple[str, str]] = (
    ("#aa3377", "*"),
    ("#228833", "p"),
    ("#4477aa", "d"),
    ("#ccbb44", "8"),
    ("#ee6677", "H"),
)
"""Of the ways of fetching early, in turn."""
_SHARING: Mapping[str | None, tuple[str, str]] = {
    None: ("-", "nothing moves"),
    "layer": ("-", "equal in each layer"),
    "placed": ("--", "by frequency per byte"),
    "pool": (":", "one pool"),
}
_PROFILES: Mapping[str, str] = {
    "none": "none",
    "own": "full",
    "mixed": "left",
    "foreign": "bottom",
    "given": "top",
    "held-out": "full",
    "itself": "full",
}
"""How a shape is filled."""
_TITLES = ("policy", "slots", "starts with the profile")
_FEW = 4
"""Curves that leave room for their intervals."""
_WIDTH, _HEIGHT, _DPI = 6.5, 5.5, 144
_Curve = tuple[str, str | None, str]
_Look = tuple[str, str]


def save_plot(path: Path, rows: Sequence[Row]) -> None:
    """Cold-hit rates by residency and, where they are predicted, tokens a second by memory; a PNG or SVG file.

    Raises :class:`SparkError` without matplotlib, and when the file cannot be written.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SparkError("plots need matplotlib", "pip install 'spark-moe[plot]'") from error
    curves: dict[_Curve, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.residency):
        curves.setdefault((_name(row), row.sharing, row.profile), []).append(row)
    looks = _looks(curves)
    predicted = any(row.predicted_tok_s is not None for row in rows)
    n_plots = 2 if predicted else 1
    figure = Figure(figsize=(n_plots * _WIDTH + 2.5, _HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, n_plots, squeeze=False)[0]
    _draw_rates(axes[0], curves, looks)
    if predicted:
        _draw_speeds(axes[1], curves, looks)
    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.04)
    legend = figure.legend(handles=_keys(curves, looks), loc="outside right upper", fontsize="small", frameon=False)
    for text in legend.get_texts():
        if text.get_text() in _TITLES:
            text.set_fontweight("bold")
    phases, judged = sorted({row.phase for row in rows}), max(row.n_sessions for row in rows)
    title = f"{' and '.join(phases)}, {judged} sessions" if judged else "imported counts, by themselves"
    figure.suptitle(title, fontsize="medium")
    svg = path.suffix == ".svg"
    try:
        # The same bytes for the same rows.
        with mpl.rc_context({"svg.hashsalt": "spark"}), replacing(path, mode=0o644) as file:
            figure.savefig(file, format=path.suffix.removeprefix("."), metadata={"Date": None} if svg else None)
    except OSError as error:
        raise SparkError(f"cannot write {path}: {error.strerror}", "check the folder and its space") from error


def _name(row: Row) -> str:
    """What a curve's colour stands for."""
    return row.policy if row.early is None else f"{row.policy}, {row.early} early"


def _looks(curves: Mapping[_Curve, object]) -> dict[str, _Look]:
    """Colour and shape by name, those of fetching early after all others."""
    early = dict.fromkeys(name for name, _, _ in curves if name not in _POLICIES)
    return {**_POLICIES, **{name: _EARLY[number % len(_EARLY)] for number, name in enumerate(early)}}


def _draw_rates(axis: Axes, curves: Mapping[_Curve, Sequence[Row]], looks: Mapping[str, _Look]) -> None:
    for curve, points in curves.items():
        at = [100 * row.residency for row in points]
        axis.plot(at, [100 * row.cold_hit_rate for row in points], **_style(curve, looks))
        ends = [(100 * row.low, 100 * row.high) for row in points if row.low is not None and row.high is not None]
        if len(curves) <= _FEW and len(ends) == len(points):
            low, high = zip(*ends, strict=True)
            axis.fill_between(at, low, high, color=looks[curve[0]][0], alpha=0.12, linewidth=0)
    axis.set_xlabel("experts in slots, % of all")
    axis.set_ylabel("cold hits, % of selections")
    axis.set_ylim(bottom=0)


def _draw_speeds(axis: Axes, curves: Mapping[_Curve, Sequence[Row]], looks: Mapping[str, _Look]) -> None:
    timed = {curve: [row for row in points if row.predicted_tok_s is not None] for curve, points in curves.items()}
    rows = [row for points in timed.values() for row in points]
    sizes = [row.slot_bytes for row in rows if row.slot_bytes is not None]
    known = len(sizes) == len(rows)
    unit, name = (2**30, "GiB") if known and max(sizes) >= 2**30 else (2**20, "MiB")
    for curve, points in timed.items():
        memory = [(row.slot_bytes or 0) / unit if known else 100 * row.residency for row in points]
        axis.plot(memory, [row.predicted_tok_s or 0.0 for row in points], **_style(curve, looks))
    axis.set_xlabel(f"experts in slots, {name}" if known else "experts in slots, % of all")
    axis.set_ylabel("predicted speed, tokens/s")


def _style(curve: _Curve, looks: Mapping[str, _Look] = _POLICIES) -> dict[str, Any]:
    policy, sharing, profile = curve
    colour, shape = looks[policy]
    line, fill = _SHARING[sharing][0], _PROFILES[profile]
    return {"color": colour, "marker": shape, "linestyle": line, "fillstyle": fill, "markersize": 6, "linewidth": 1.4,
            "markerfacecoloralt": "white"}  # fmt: skip


def _keys(curves: Mapping[_Curve, object], looks: Mapping[str, _Look]) -> list[Any]:
    """What colours and shapes, lines and fillings mean, as far as they occur."""
    from matplotlib.lines import Line2D

    def key(label: str, **style: Any) -> Any:
        return Line2D([], [], label=label, **{"linestyle": "none", "color": "black", **style})

    policies = [name for name in looks if any(policy == name for policy, _, _ in curves)]
    lines: dict[str, list[str]] = {}
    for line, label in (_SHARING[name] for name in _SHARING if any(sharing == name for _, sharing, _ in curves)):
        lines.setdefault(line, []).append(label)
    fills: dict[str, list[str]] = {}
    for name in (name for name in _PROFILES if any(profile == name for _, _, profile in curves)):
        fills.setdefault(_PROFILES[name], []).append(name)
    keys = [key(_TITLES[0])]
    keys += [key(name, color=looks[name][0], marker=looks[name][1], linestyle="-") for name in policies]
    keys += [
        key(""),
        key(_TITLES[1]),
        *(key(" / ".join(labels), linestyle=line, linewidth=1.4) for line, labels in lines.items()),
    ]
    keys += [key(""), key(_TITLES[2])]
    keys += [
        key(" / ".join(names), marker="o", fillstyle=fill, markerfacecoloralt="white") for fill, names in fills.items()
    ]
    return keys
