"""The HTTP API."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Future
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import anyio
from anyio.to_thread import run_sync
from fastapi import Depends, FastAPI, Path, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from spark_schemas.api import API_PREFIX, PROBLEM_MEDIA_TYPE, Problem, UploadReceipt
from spark_schemas.ids import SessionHash
from spark_service import env, problems, version
from spark_service.admin import add_admin
from spark_service.answers import AnswerCache, ReadyAnswers
from spark_service.api_document import UPLOAD_EXTRA, install_document
from spark_service.auth import Gate, actor_of
from spark_service.backup_routes import add_backups
from spark_service.canonical import read_upload
from spark_service.catalog import Catalog
from spark_service.credentials import Credentials
from spark_service.dashboard.context import Dashboard, Rules
from spark_service.dashboard.middleware import PageAnswers
from spark_service.dashboard.routes import dashboard_router
from spark_service.db.batch import KeyedUpload
from spark_service.db.history import ManifestHistory
from spark_service.db.migrate import available
from spark_service.db.store import Store
from spark_service.drift_routes import drift_router
from spark_service.errors import RequestError
from spark_service.executors import Executor
from spark_service.inflate import BodyLimits, inflate, is_small, read_body, require_encoding
from spark_service.ingest import require_idempotency_key, require_json
from spark_service.keyring import Keyring
from spark_service.manifest_routes import ManifestServices, manifest_router
from spark_service.rate_limit import Rates
from spark_service.served import ServedManifests
from spark_service.signing import Signer
from spark_service.single_keys import require_single_parameters
from spark_service.windows import Windows

__all__ = ["Alive", "Deleted", "Version", "create_app"]

PARALLEL_UPLOADS = 1
"""Uploads parsed at a time: each holds its body as Python numbers, many times its size, and the interpreter would not
parse two any faster.
"""

_PathSession = Annotated[SessionHash, Path()]


class Deleted(BaseModel):
    """Answer to a deletion."""

    session_hash: SessionHash
    removed: int
    """Stored histograms removed; sent again, they are ignored."""


class Version(BaseModel):
    """What is running."""

    version: str
    schema_version: int
    """Version of the database schema."""
    api: Literal["v1"] = "v1"


class Alive(BaseModel):
    """Answer of a probe."""

    status: Literal["ok"] = "ok"


def create_app(
    store: Store,
    *,
    token: str | None = None,
    open_access: bool = False,
    keyring: Keyring | None = None,
    limits: BodyLimits | None = None,
    rates: Rates | None = None,
    key_dir: FilePath | None = None,
    history_per_key: int = env.HISTORY_PER_KEY.default,
    cache_bytes: int = env.READ_CACHE_BYTES.default,
    executor: Executor | None = None,
    windows: Windows | None = None,
    min_sessions: int = 1,
    retention_days: int = 0,
    segment_after_days: int | None = None,
) -> FastAPI:
    """Make the API over an open store, which stays the caller's to close.

    Requests need a token of the store, or ``token``, which has admin scope, unless access is open to everybody.
    ``key_dir`` holds the key that signs manifests, by default the database's folder. ``executor`` builds profiles, from
    all sessions unless ``windows`` say otherwise; one of fewer calibration sessions than ``min_sessions`` is given to
    nobody. ``retention_days`` is what an administrator's retention keeps unless told otherwise; 0 is everything.
    ``segment_after_days`` is only told to people: whoever opened the store moves old histograms into files.
    ``app.state.dashboard.close()`` comes before closing the store.
    """
    windows = windows or Windows()
    catalog = Catalog(store, executor=executor, windows=windows, min_sessions=min_sessions)
    keyring = keyring or Keyring(store)
    signer = Signer(store.folder if key_dir is None else key_dir)
    answers = AnswerCache(lambda: (store.generation, (signer.stamp(), windows.today())), max_bytes=cache_bytes)
    history = ManifestHistory(store, kept=history_per_key)
    served = ServedManifests(store, catalog, signer, history, cache_bytes=cache_bytes)
    app = FastAPI(
        title="Spark calibration service",
        version=version(),
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(require_single_parameters)],
        responses={"default": {"description": "Problem details", "content": _schema(Problem, PROBLEM_MEDIA_TYPE)}},
    )
    problems.install(app)
    # Added first, so innermost: what decides who may ask comes before it.
    app.add_middleware(ReadyAnswers, cache=answers, prefix=f"{API_PREFIX}/")
    rates = rates or Rates()
    credentials = Credentials(keyring, token)
    own = windows.own()
    rules = Rules(min_sessions, own.days, int(own.half_life_days), retention_days, segment_after_days)
    dashboard = Dashboard.of(store, catalog, keyring, credentials, rules, open_access=open_access)
    app.state.dashboard = dashboard
    app.add_middleware(Gate, credentials=credentials, logins=dashboard.logins, open_access=open_access, rates=rates)
    app.add_middleware(PageAnswers, renderer=dashboard.renderer)
    _add_probes(app, store)
    _add_writes(app, store, limits or BodyLimits())
    services = ManifestServices(catalog, served, signer, answers, limits or BodyLimits(), windows)
    app.include_router(manifest_router(services))
    app.include_router(drift_router(store))
    add_admin(app, store, keyring, retention_days=retention_days)
    add_backups(app, store)
    app.include_router(dashboard_router(dashboard, rates))
    install_document(app)
    return app


def _add_probes(app: FastAPI, store: Store) -> None:
    @app.get("/healthz")
    async def healthz() -> Alive:
        """Whether the process answers; no I/O."""
        return Alive()

    @app.get("/readyz")
    def readyz() -> Alive:
        """Whether the database answers and is migrated; 503 otherwise."""
        store.require_ready()
        return Alive()

    known = Version(version=version(), schema_version=len(available()))

    @app.get("/version")
    async def service_version() -> Version:
        """What is running."""
        return known


def _add_writes(app: FastAPI, store: Store, limits: BodyLimits) -> None:
    slots = anyio.CapacityLimiter(PARALLEL_UPLOADS)

    def take(body: bytes, encoding: str, key: str, actor: str) -> Future[UploadReceipt]:
        raw = inflate(body, encoding, limits.inflated_bytes)
        return store.submit_upload(KeyedUpload(read_upload(raw), key, hashlib.sha256(raw).hexdigest(), actor))

    @app.post(
        f"{API_PREFIX}/histograms",
        status_code=202,
        response_model=UploadReceipt,
        openapi_extra=UPLOAD_EXTRA,
    )
    async def upload_histograms(request: Request) -> Response:
        """Store histograms; answered after commit. What must hold stands in the description of this API."""
        key = require_idempotency_key(request.headers.getlist("idempotency-key"))
        require_json(request.headers.get("content-type"))
        encoding = require_encoding(request.headers.get("content-encoding"))
        try:
            body = await read_body(request.stream(), request.headers.get("content-length"), limits.body_bytes)
        except ClientDisconnect as error:
            raise RequestError(400, "body_incomplete", "body: the connection ended before the body did") from error
        if is_small(body, encoding):
            # Handing it to a thread and back would take about as long as reading it does.
            committed = take(body, encoding, key, actor_of(request))
        else:
            committed = await run_sync(take, body, encoding, key, actor_of(request), limiter=slots)
        receipt = await asyncio.wrap_future(committed)
        return Response(receipt.model_dump_json(), 202, media_type="application/json")

    @app.delete(f"{API_PREFIX}/sessions/{{session_hash}}")
    def delete_session(session_hash: _PathSession, request: Request) -> Deleted:
        """Remove a session from every later profile, for good: sent again, it is ignored."""
        return Deleted(session_hash=session_hash, removed=store.delete_session(session_hash, actor_of(request)))


def _schema(model: type[BaseModel], media_type: str) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
