"""The documents name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spark_agent.privacy import MINIMUM_TOKENS
from spark_schemas.histogram import MAX_SESSIONS_PER_UPLOAD, HistogramUpload, SessionHistogram

PACKAGES = {
    "spark_schemas": "schemas",
    "spark_runtime": "runtime",
    "spark_agent": "agent",
    "spark_service": "service",
}


def named_modules(section: str) -> set[str]:
    return set(re.findall(r"`([a-z_/]+\.py|[a-z_]+/)`", section))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_structure_names_every_module(root: Path, package: str) -> None:
    page = (root / "infra/docs/structure.md").read_text(encoding="utf-8")
    section = page.split(f"**`{package}`**")[1].split("\n**`spark_")[0].split("\n## ")[0]
    folder = root / PACKAGES[package] / package
    there = {path.name for path in folder.glob("*.py")}
    there |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert named_modules(section) <= there | {path.name for path in folder.rglob("*.py")}
    # What needs no word: the package itself, errors, and small helpers of one caller.
    small = {path.name for path in folder.glob("*.py") if len(path.read_text(encoding="utf-8").splitlines()) < 80}
    assert there - named_modules(section) <= small | {"__init__.py", "errors.py"}


def test_the_privacy_page_names_every_uploaded_field(root: Path) -> None:
    page = (root / "infra/docs/privacy.md").read_text(encoding="utf-8")
    rows = set(
        re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|")))
    )
    assert rows == (set(HistogramUpload.model_fields) | set(SessionHistogram.model_fields)) - {"sessions"}
    assert f"at least {MINIMUM_TOKENS:,} tokens" in page
    assert f"up to {MAX_SESSIONS_PER_UPLOAD} histograms" in page


def test_links_lead_somewhere(root: Path) -> None:
    pages = [root / "README.md", *(root / "infra").rglob("*.md")]
    broken = {
        f"{page.relative_to(root)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    }
    assert not broken


def test_the_api_page_names_every_route(root: Path) -> None:
    app = (root / "agent/spark_agent/server/app.py").read_text(encoding="utf-8")
    routes = {path.replace(":path", "") for path in re.findall(r'Route\("([^"]+)"', app)}
    page = (root / "infra/docs/api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(/[^`]*)`", page.split("## Who is answered")[0]))
    assert named == routes
    assert len(routes) >= 9
