"""How a benchmark is called and what becomes of its result."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


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
