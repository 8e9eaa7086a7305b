"""Write the JSON Schema of everything that crosses a process boundary; ``--check`` only compares.

Usage: generate_schemas.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spark_schemas.api import Problem, ProfileList, UploadReceipt
from spark_schemas.histogram import HistogramUpload
from spark_schemas.manifest import PlacementManifest
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile

FOLDER = Path(__file__).parents[2] / "schemas/spark_schemas/json"
EXPORTED = (HistogramUpload, ModelShape, PlacementManifest, Problem, Profile, ProfileList, UploadReceipt)


def rendered() -> dict[Path, str]:
    """Every file's content."""
    return {
        FOLDER / f"{schema.__name__}.json": json.dumps(schema.model_json_schema(), indent=1, sort_keys=True) + "\n"
        for schema in EXPORTED
    }


def main() -> int:
    """Write or compare; 1 when a file differs."""
    files = rendered()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    stale += [path for path in FOLDER.glob("*.json") if path not in files]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"error: {path.name} is not what the schemas say\nhint: make generate\n")
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        if path not in files:
            path.unlink()
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
