"""Write the JSON Schema of everything that crosses a process boundary; ``--check`` only compares.

Usage: generate_schemas.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from generated import write_or_check

from spark_schemas.api import Problem, ProfileList, UploadReceipt
from spark_schemas.drift import DriftList
from spark_schemas.histogram import HistogramUpload
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_api import NearestWorkloads, Pin, PinRequest, ServedHistory
from spark_schemas.manifest_diff import ManifestDiff
from spark_schemas.model import ModelShape
from spark_schemas.profile import Profile
from spark_schemas.signature import SigningKeyInfo

FOLDER = Path(__file__).parents[2] / "schemas/spark_schemas/json"
EXPORTED = (
    DriftList,
    HistogramUpload,
    ManifestDiff,
    ModelShape,
    NearestWorkloads,
    Pin,
    PinRequest,
    PlacementManifest,
    Problem,
    Profile,
    ProfileList,
    ServedHistory,
    SigningKeyInfo,
    UploadReceipt,
)


def rendered() -> dict[Path, str]:
    """Every file's content."""
    return {
        FOLDER / f"{schema.__name__}.json": json.dumps(schema.model_json_schema(), indent=1, sort_keys=True) + "\n"
        for schema in EXPORTED
    }


if __name__ == "__main__":
    sys.exit(write_or_check(rendered(), FOLDER.glob("*.json")))
