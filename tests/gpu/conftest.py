"""What the tests on a device share with the benchmarks: generated models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "infra/benchmarks"))
