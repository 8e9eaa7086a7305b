"""The tables of infra/docs/measurements.md that result files hold, made of them.

Usage: measured_tables.py [--write]. Prints the tables, or puts each in the place of the one with the same head in the
document. A test compares the two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCUMENT = ROOT / "infra/benchmarks/results", ROOT / "infra/docs/measurements.md"
Row = Mapping[str, Any]

NAMES = {"gpt-oss-20b": "gpt-oss", "DeepSeek-V2-Lite": "DS-V2-Lite", "tiny-q4_0": "tiny"}
KEEPING = {
    "uniform": "first experts, nothing moves",
    "static": "profile, nothing moves",
    "oracle": "their own counts, nothing moves",
    "lru_pinned": "3/4 pinned, rest LRU",
    "lru": "LRU",
    "scored": "scored (what runs)",
    "belady": "Bélády",
}
SHARING = {
    "layer": "equal slots per layer",
    "placed": "slots per layer by frequency per byte (manifests)",
    "placed, nothing moves": "the same, nothing moves",
    "pool": "**one pool (what runs)**: scores of layers to come doubled",
    "placed pool": "the same, starts by frequency per byte",
    "pool, layers to come as any other": "one pool, layers to come as any other",
    "pool, layers to come doubled twice": "doubled twice",
    "pool, token foreseen": "one pool that foresees the token",
}
SHAPES = ("26x64", "24x32", "16x512")
"""Layers and experts of `big_model.py`'s other models on the H200."""
PROFILES = ("none", "mixed", "own", "foreign")
LAGUNA = ("gpt-oss-20b", "DeepSeek-V2-Lite", "nano-q4_0", "nano-f16", "tiny-q4_0")


def tables() -> Iterator[list[str]]:
    """Lines of each table, its head first."""
    rows = json.loads((RESULTS / "policy-tables.json").read_text())["rows"]
    yield keeping(rows)
    yield sharing(rows)
    yield tuned(rows)
    yield positions(rows)
    yield nearly_all(rows)
    yield laguna(rows)
    yield real_routing(json.loads((RESULTS / "real-routing.json").read_text())["rows"])
    predicted = [
        json.loads((RESULTS / f"predicted-speed-{name}.json").read_text())
        for name in ("h200", "h200-models", "2-cores")
    ]
    yield predicted_speeds(*predicted)
    yield predicted_early(json.loads((RESULTS / "predicted-early-h200.json").read_text())["rows"])
    yield offload({shape: json.loads((RESULTS / f"bench-h200-{shape}.json").read_text())["rows"] for shape in SHAPES})


def sentences() -> Iterator[str]:
    """What stands in the text itself."""
    rows = json.loads((RESULTS / "simulator-speed-2-cores.json").read_text())["rows"]
    yield simulator_speed(rows)
    yield simulator_early_speed(rows)
    yield early_fit(json.loads((RESULTS / "predicted-early-h200.json").read_text()))


def keeping(rows: Sequence[Row]) -> list[str]:
    columns = [("gpt-oss-20b", share) for share in (0.3, 0.45, 0.6, 0.8)]
    columns += [(name, share) for name in ("DeepSeek-V2-Lite", "tiny-q4_0") for share in (0.3, 0.6)]
    lines = _head(["", *_columns(columns)])
    for policy, label in KEEPING.items():
        found = [_one(rows, table="keeping", model=name, residency=share, policy=policy) for name, share in columns]
        lines.append(_line([label, *map(_cell, found)]))
    return lines


def sharing(rows: Sequence[Row]) -> list[str]:
    columns = [(name, share) for name in NAMES for share in (0.3, 0.6)]
    lines = _head(["", *_columns(columns)])
    for kind, label in SHARING.items():
        found = [_one(rows, table="one pool", model=name, residency=share, sharing=kind) for name, share in columns]
        lines.append(_line([label, *map(_cell, found)]))
    return lines


def tuned(rows: Sequence[Row]) -> list[str]:
    lines = _head(["", "resident", "decay", "prior, tokens", "cold hits saved where it was searched",
                   "on held-out sessions"])  # fmt: skip
    for name in NAMES:
        for row in rows:
            if (row["table"], row["model"]) == ("tuned", name):
                saved = [f"{100 * row[key]:.1f}%" for key in ("saved_where_tuned", "saved_held_out")]
                numbers = [f"{row['residency']:.0%}", f"{row['decay']:g}", f"{row['prior_tokens']:g}"]
                lines.append(_line([name, *numbers, *saved]))
    return lines


def positions(rows: Sequence[Row]) -> list[str]:
    lines = _head(["", "profile", "tokens 0-64", "64-256", "256+", "whole session"])
    for name in ("tiny-q4_0", "gpt-oss-20b", "DeepSeek-V2-Lite"):
        for profile in PROFILES:
            cells = [_cell(_position(rows, name, 0.6, profile, part)) for part in ("0-64", "64-256", "256-", "whole")]
            lines.append(_line([name if profile == "none" else "", profile, *cells]))
    return lines


def nearly_all(rows: Sequence[Row]) -> list[str]:
    lines = _head(["with 85% resident", "none", "mixed", "own"])
    for name in ("gpt-oss-20b", "tiny-q4_0", "DeepSeek-V2-Lite"):
        for part, label in (("0-64", "first 64 tokens"), ("whole", "whole session")):
            cells = [_cell(_position(rows, name, 0.85, profile, part)) for profile in PROFILES[:3]]
            lines.append(_line([f"{name}, {label}", *cells]))
    return lines


def laguna(rows: Sequence[Row]) -> list[str]:
    lines = _head(["", "published", *LAGUNA])

    def add(label: str, published: str, cell: Callable[[Row], str], **wanted: Any) -> None:
        found = [next(iter(_some(rows, model=name, **wanted)), None) for name in LAGUNA]
        lines.append(_line([label, published, *("" if row is None else cell(row) for row in found)]))

    add("first experts 60%", ".360 [66]", _speed, table="budget sweep", profile="first experts", residency=0.6)
    for residency, label, published in ((0.6, "own profile 60%", ".066 [81]"), (0.7, "70%", "lower [85]"),
                                        (0.8, "80%", "lower [87]")):  # fmt: skip
        add(label, published, _speed, table="budget sweep", profile="own", residency=residency)
    add("another workload's 60%", ".160", _speed, table="mismatch", profile="foreign")
    for ring, published in ((0, ".124 [74.5]"), (16, ".017 [80.2]"), (32, ".003 [85.0]"), (48, ".001 [88.2]")):
        add(f"ring {ring} of 256", published, _speed, table="ring sweep", ring_of_256=ring)
    for phase, label in (("prefill", "calibrated on prompts"), ("decode", "on generated tokens too")):
        add(label, "[81]", _speed, table="calibrated on", phase=phase)
    return lines


def real_routing(rows: Sequence[Row]) -> list[str]:
    lines = _head(["model", "workload", "sessions", "uniform", "own profile", "other", "LRU", "oracle", "verdict"])
    last = ""
    verdicts = {"profile": "profile", "cache_only": "cache only", "too_few": "too few", None: "too few"}
    for model, phase in (("gpt-oss-20b", "decode"), ("DeepSeek-V2-Lite", "prefill")):
        found = _some(rows, model=model, phase=phase, residency=0.6)
        # By what their own profile misses, but those that too few sessions judged come last.
        for row in sorted(found, key=lambda row: (row["n_held_out"] < 2, row["cold_hit_rate"]["own"])):
            if row["workload"] == "other":
                continue
            rates = [row["cold_hit_rate"].get(name) for name in ("uniform", "own", "other", "lru", "oracle")]
            named = f"{model}, {phase}"
            verdict = "no distances" if phase == "prefill" else verdicts[row["verdict"]]
            about = ["" if named == last else named, row["workload"].replace("-", " "),
                     f"{row['n_calibration']}+{row['n_held_out']}"]  # fmt: skip
            lines.append(_line([*about, *("" if rate is None else _rate(rate) for rate in rates), verdict]))
            last = named
    return lines


def predicted_speeds(h200: Row, h200_models: Row, two_cores: Row) -> list[str]:
    """How far off the cost model is, by what it was told."""
    lines = _head(["predicted", "from", "predictions", "within 10%", "worst"])

    def add(what: str, source: str, rows: Sequence[Row]) -> None:
        off = [abs(row[key]) for row in rows for key in row if key.startswith("off_by")]
        within = sum(each <= 0.1 for each in off)
        lines.append(
            _line([what, source, str(len(off)), "all" if within == len(off) else str(within), f"{max(off):.1%}"])
        )

    file = "../benchmarks/results/predicted-speed"
    add(f"H200, decode, [other runs]({file}-h200.json)", "the time of a miss fitted to one `bench` run (76 µs)",
        h200["rows"])  # fmt: skip
    add("H200, decode at 100, 60 and 31%", "**nothing fitted**: the all-resident token and the link",
        h200["from_the_link_alone"]["rows"])  # fmt: skip
    add("H200, prompts of 512 to 4,096 tokens at 60 and 31%", "nothing fitted: the all-resident prompt and the link",
        h200["prompts_from_the_link_alone"]["rows"])  # fmt: skip
    add(f"H200, decode at 60, 45 and 30%, [three other models]({file}-h200-models.json)", "nothing fitted",
        h200_models["from_the_link_alone"]["rows"])  # fmt: skip
    add("the same", "the model's own runs at 60%", h200_models["one_residency_from_another"]["rows"])
    add("the same", "another model's runs, and the all-resident token", h200_models["one_model_from_another"]["rows"])
    add("the same, prompts of 2,048 tokens at once", "nothing fitted",
        h200_models["prompts_from_the_link_alone"]["rows"])  # fmt: skip
    add(f"two cores, decode at 100, 45 and 31%, [five models]({file}-2-cores.json)", "the model's own run at 60%",
        two_cores["one_residency_from_another"]["rows"])  # fmt: skip
    kin = two_cores["one_model_from_another_of_its_architecture"]["rows"]
    add("the three qwen3moe models, at 100, 60, 45 and 31%", "**another one's** runs, and the all-resident token", kin)
    add("all five", "the runs of one of another architecture", two_cores["one_model_from_another"]["rows"])
    return lines


def predicted_early(rows: Sequence[Row]) -> list[str]:
    """Tokens a second with experts fetched early: measured, and predicted twice."""
    ways = list(dict.fromkeys(row["early"] for row in rows))
    named = {"off": "nothing early", "guess": "guesses alone"}
    lines = _head(
        ["resident", *(named.get(way, "{} from {}".format(*way.split(":")) if ":" in way else way) for way in ways)]
    )
    for residency in dict.fromkeys(row["residency"] for row in rows):
        found = [_one(rows, residency=residency, early=way) for way in ways]
        cells = [
            f"{row['decode_tok_s']:.1f} ({row['predicted_tok_s_link_alone']:.1f}, {row['predicted_tok_s_fitted']:.1f})"
            for row in found
        ]
        lines.append(_line([f"{residency:.0%}", *cells]))
    return lines


def early_fit(found: Row) -> str:
    """How far off those predictions are, and what was fitted."""
    machine, fitted = found["machine"], [row for row in found["rows"] if not row["fitted_to"]]
    within = sum(abs(row["off_by_link_alone"]) <= 0.1 for row in found["rows"])
    return (
        f"From the link alone (a layer of {machine['layer_us']:g} µs, a copy of {machine['copy_us']:g}) {within} of "
        f"{len(found['rows'])} are within 10%, the worst is {found['worst_link_alone']:.1%} too fast; fitted to the "
        f"runs at {found['fit_residency']:.0%} (a miss takes {machine['fitted_copy_us']:g} µs, an early copy begins "
        f"{machine['fitted_guess_us']:g} µs into its layer) the {len(fitted)} others are within "
        f"{found['worst_fitted']:.1%}."
    )


def offload(benches: Mapping[str, Sequence[Row]]) -> list[str]:
    """Calibrated slots beside llama.cpp's own offload in the same memory, in the same run."""
    lines = _head(["shape", "all resident", "calibrated 60 / 45 / 30%", "`--n-cpu-moe` at 60 / 45 / 30%", "times"])
    for shape, rows in benches.items():

        def speeds(config: str, rows: Sequence[Row] = rows) -> list[float]:
            found = [_one(rows, config=config, residency=share)["decode_tok_s"] for share in (0.6, 0.45, 0.3)]
            return [float(each) for each in found]

        ours, theirs = speeds("calibrated"), speeds("llama-offload")
        resident = _one(rows, config="all-gpu")["decode_tok_s"]
        times = [f"{one / other:.1f}" for one, other in zip(ours, theirs, strict=True)]
        cells = [[f"{each:.0f}" for each in ours], [f"{each:.0f}" for each in theirs], times]
        link = f"[{shape.replace('x', ' x ')}](../benchmarks/results/bench-h200-{shape}.json)"
        lines.append(_line([link, f"{resident:.0f}", *(" / ".join(each) for each in cells)]))
    return lines


def simulator_speed(rows: Sequence[Row]) -> str:
    """Lowest and highest rate of what people ask about, and the slowest of all."""

    def span(policy: str, **wanted: str) -> str:
        rates = [row["million_selections_per_s"] for row in _some(rows, policy=policy, **wanted)]
        return f"{min(rates):g} to {max(rates):g}"

    slowest = min((row for row in rows if "early" not in row), key=lambda row: row["million_selections_per_s"])
    about = f"{slowest['policy']} ({slowest['sharing']}, {slowest['shape']}, {slowest['residency']:.0%})"
    return (
        f"static {span('static')}, LRU {span('lru', sharing='layer')}, the scored policy with slots per layer "
        f"{span('scored', sharing='layer')} and in one pool {span('scored', sharing='pool')}, Bélády "
        f"{span('belady')}; the slowest of all policies and shapes, {about}, {slowest['million_selections_per_s']:g}."
    )


def simulator_early_speed(rows: Sequence[Row]) -> str:
    """With and without experts fetched early, over layers that tell the next one's selection."""

    def span(early: str) -> str:
        rates = [row["million_selections_per_s"] for row in _some(rows, policy="scored, early", early=early)]
        return f"{min(rates):g} to {max(rates):g}"

    return (
        f"With experts fetched early, guessing and learning included, {span('1:0.3')} (1 from 0.3) and "
        f"{span('4:0.2')} (4 from 0.2), where nothing early has {span('off')}"
    )


def _position(rows: Sequence[Row], name: str, residency: float, profile: str, part: str) -> Row:
    wanted = {"model": name, "residency": residency, "profile": profile, "part": part}
    return _one(rows, table="profile by position", **wanted)


def _some(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _one(rows: Sequence[Row], **wanted: Any) -> Row:
    found = _some(rows, **wanted)
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of {wanted}, expected one")
    return found[0]


def _columns(columns: Sequence[tuple[str, float]]) -> Iterator[str]:
    last = ""
    for name, share in columns:
        yield f"{share:.0%}" if name == last else f"{NAMES[name]} {share:.0%}"
        last = name


def _rate(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def _cell(row: Row) -> str:
    published = row["published"]
    return _rate(row["cold_hit_rate"]) + ("" if published is None else f" ({_rate(published)})")


def _speed(row: Row) -> str:
    return f"{_rate(row['cold_hit_rate'])} [{row['predicted_tok_s_published_machine']:.0f}]"


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _head(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def placed(text: str, table: Sequence[str]) -> str:
    """The document with a table in the place of the one with the same head; raise ``ValueError`` without one."""
    lines = text.splitlines()
    if lines.count(table[0]) != 1:
        raise ValueError(f"{lines.count(table[0])} tables with the head {table[0]!r}, expected one")
    start = lines.index(table[0])
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "\n".join([*lines[:start], *table, *lines[end:]]) + "\n"


def main() -> None:
    """Print the tables, or put them into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = DOCUMENT.read_text() if parser.parse_args().write else None
    for table in tables():
        if text is None:
            sys.stdout.write("\n".join([*table, "", ""]))
        else:
            text = placed(text, table)
    for sentence in sentences():
        sys.stdout.write(sentence + "\n")
    if text is not None:
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
