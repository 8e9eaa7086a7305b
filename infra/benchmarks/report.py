"""How a benchmark is called and what becomes of its result."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with ``--out``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    return parser


def report(result: object, out: Path | None) -> None:
    """Print a result as JSON, and write it to ``out``."""
    text = json.dumps(result, indent=1) + "\n"
    if out is not None:
        out.write_text(text)
    sys.stdout.write(text)


def row(table: str, model: str, rate: float | None, number: float | None, **about: Any) -> dict[str, Any]:
    """A cold-hit rate and the published one, rounded to four places."""
    about = {key: round(value, 4) if isinstance(value, float) else value for key, value in about.items()}
    found = None if rate is None else round(rate, 4)
    return {
        "table": table,
        "model": model,
        **about,
        "cold_hit_rate": found,
        "published": None if number is None else round(number, 4),
    }
