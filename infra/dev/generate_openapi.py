"""Write the service's OpenAPI document; ``--check`` only compares.

Usage: generate_openapi.py [--check]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from generated import write_or_check

from spark_service.app import create_app
from spark_service.db.store import Store

TARGET = Path(__file__).parents[2] / "schemas/openapi.json"


def rendered() -> str:
    """The document, as the service answers it."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "service.duckdb")
        try:
            document = create_app(store, open_access=True).openapi()
        finally:
            store.close()
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check({TARGET: rendered()}))
