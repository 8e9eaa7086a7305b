"""Shapes of the service's API besides histograms, profiles and manifests."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from spark_schemas.base import Schema
from spark_schemas.ids import Count
from spark_schemas.profile import ProfileSummary

__all__ = ["API_PREFIX", "PROBLEM_MEDIA_TYPE", "Problem", "ProfileList", "UploadReceipt"]

API_PREFIX = "/api/v1"
PROBLEM_MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """Problem details (RFC 9457) with a stable ``code`` and, for bad input, the field, the found and the expected.

    Open to unknown members: a newer service may say more.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    field: str | None = None
    found: str | None = None
    expected: str | None = None
    hint: str | None = None


class UploadReceipt(Schema):
    """Answer to an upload, sent only after commit."""

    accepted: Count
    """Histograms stored by this request."""
    duplicates: Count
    """Histograms that were stored before; sending them again changes nothing."""


class ProfileList(Schema):
    """All profiles that can be pulled."""

    profiles: tuple[ProfileSummary, ...]
