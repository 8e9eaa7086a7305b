"""Routes of drift: what is known of every workload's traffic, and counting all of it again."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel

from spark_schemas.api import API_PREFIX
from spark_schemas.drift import DriftList
from spark_schemas.ids import Fingerprint, WorkloadName
from spark_service.auth import actor_of
from spark_service.db.store import Store
from spark_service.drift_watch import all_drift, clear_drift

__all__ = ["Cleared", "drift_router"]

_PathFingerprint = Annotated[Fingerprint, Path()]
_PathWorkload = Annotated[WorkloadName, Path()]


class Cleared(BaseModel):
    """Answer to clearing."""

    cleared: bool
    """Whether anything was known of the workload."""


def drift_router(store: Store) -> APIRouter:
    """Make the routes."""
    router = APIRouter()

    @router.get(f"{API_PREFIX}/drift")
    def list_drift() -> DriftList:
        """What recent sessions missed against what their manifests promised, as of the last look, by workload.

        The service looks once a minute, where something was uploaded.
        """
        return all_drift(store)

    @router.delete(f"{API_PREFIX}/admin/drift/{{fingerprint}}/{{workload}}")
    def clear(fingerprint: _PathFingerprint, workload: _PathWorkload, request: Request) -> Cleared:
        """Build profiles from all sessions again, whenever they came. Nothing known is no error."""
        return Cleared(cleared=clear_drift(store, fingerprint, workload, actor_of(request)))

    return router
