"""The numbers in the documents are those of the result files."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def made(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("measured_tables", root / "infra/benchmarks/measured_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "infra/docs/measurements.md").read_text(encoding="utf-8")


def test_tables_are_made_of_the_results(made: ModuleType, page: str) -> None:
    """`infra/benchmarks/measured_tables.py --write` puts them there."""
    tables = list(made.tables())
    assert len({table[0] for table in tables}) == len(tables) == 10
    for table in tables:
        assert made.placed(page, table) == page, table[0]
    for sentence in made.sentences():
        assert sentence in page


def test_a_number_that_is_another_is_noticed(made: ModuleType, page: str) -> None:
    [table, *_] = made.tables()
    changed = [*table[:2], table[2].replace(".712", ".713"), *table[3:]]
    assert changed != table
    assert made.placed(page, changed) != page
    with pytest.raises(ValueError, match="0 tables"):
        made.placed(page, ["| another |", "|---|"])


def test_predictions_of_fetching_early_come_out_again(root: Path, tmp_path: Path) -> None:
    """By the command in the document, of other results alone."""
    results = root / "infra/benchmarks/results"
    sources = {"measured": "early-fetch-h200", "link": "link-h200", "bench": "bench-h200-prefetch"}
    arguments = [part for name, file in sources.items() for part in (f"--{name}", results / f"{file}.json")]
    command = [sys.executable, root / "infra/benchmarks/predicted_early.py", *arguments, "--out", tmp_path / "a.json"]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(
        (results / "predicted-early-h200.json").read_text()
    )


def short(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


@pytest.mark.parametrize(
    ("label", "predictor"),
    [
        ("naive Bayes, the layer before", "naive Bayes"),
        ("ridge regression, two layers before", "ridge"),
        ("**on the way, two layers before**", "on the way"),
        ("the same from nothing, tokens 100 to 250", "from nothing, tokens 100 to 250"),
    ],
)
def test_recall_of_guesses_is_that_of_the_results(root: Path, label: str, predictor: str) -> None:
    decision = (root / "infra/docs/decisions/0015-guesses-by-whole-numbers.md").read_text(encoding="utf-8")
    rows = json.loads((root / "infra/benchmarks/results/early-fetch-tables.json").read_text())["rows"]
    cells = [
        " ".join(short(value) for value in row["recall"])
        for model in ("gpt-oss-20b", "DeepSeek-V2-Lite", "tiny-q4_0")
        for row in rows
        if (row["table"], row["model"], row.get("predictor")) == ("recall", model, predictor)
    ]
    assert f"| {label} | {' | '.join(cells)} |\n" in decision


def test_the_other_split_is_told_as_it_came_out(root: Path) -> None:
    decision = (root / "infra/docs/decisions/0015-guesses-by-whole-numbers.md").read_text(encoding="utf-8")
    rows = json.loads((root / "infra/benchmarks/results/early-fetch-tables-split-1.json").read_text())["rows"]
    for model, name in (("gpt-oss-20b", "gpt-oss"), ("DeepSeek-V2-Lite", "DeepSeek"), ("nano-q4_0", "nano-q4_0")):
        of_model = [row for row in rows if row["model"] == model]
        [recall] = [row["recall"] for row in of_model if row.get("predictor") == "on the way"]
        assert f"{', '.join(map(short, recall))} ({name}" in decision
        for residency in (0.3, 0.6):
            slots = [row for row in of_model if row.get("residency") == residency]
            rates = {(row["experts"], row["threshold"]): short(row["cold_hit_rate"]) for row in slots}
            assert f"{rates[0, None]} and {rates[1, 0.3]}" in decision


def test_the_front_page_says_the_same(root: Path) -> None:
    """Of routing that others published, in whole percents."""
    rows = json.loads((root / "infra/benchmarks/results/real-routing.json").read_text())["rows"]
    readme = (root / "README.md").read_text(encoding="utf-8")

    def rates(model: str, workload: str) -> list[str]:
        [row] = [r for r in rows if (r["model"], r["workload"], r["residency"]) == (model, workload, 0.6)]
        found: list[Any] = [row["cold_hit_rate"].get(name) for name in ("uniform", "own", "other", "lru")]
        return ["" if rate is None else f"{100 * rate:.0f}%" for rate in found]

    for label, model, workload in (
        ("gpt-oss-20b, safety questions", "gpt-oss-20b", "safety"),
        ("gpt-oss-20b, physics", "gpt-oss-20b", "physics"),
        ("DeepSeek-V2-Lite, translation (prompts)", "DeepSeek-V2-Lite", "translation"),
    ):
        line = next(line for line in readme.splitlines() if line.startswith(f"| {label} "))
        assert [cell.strip() for cell in line.split("|")[2:6]] == rates(model, workload)


def test_every_result_that_is_named_is_there(root: Path, page: str) -> None:
    named = set(re.findall(r"\]\(\.\./benchmarks/results/([a-z0-9-]+\.json)\)", page))
    assert named
    for name in named:
        json.loads((root / "infra/benchmarks/results" / name).read_text())
