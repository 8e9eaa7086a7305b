"""Routes of profiles and manifests: the newest, those of the past, rollback, and the key that signs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from spark_runtime.calibration.tally import Window
from spark_schemas.api import API_PREFIX, ProfileList
from spark_schemas.ids import MAX_COUNT, Fingerprint, Phase, Revision, SiblingId
from spark_schemas.manifest import PlacementManifest
from spark_schemas.manifest_api import NearestWorkloads, Pin, PinRequest, ServedHistory, ServedManifest
from spark_schemas.manifest_diff import ManifestDiff
from spark_schemas.mix import MIX_EXPECTED, MIX_PATTERN, Mix, MixError
from spark_schemas.profile import Profile
from spark_schemas.signature import PINNED_HEADER, PINNED_SIGNATURE_HEADER, SIGNATURE_HEADER, SigningKeyInfo
from spark_service.answers import Answer, AnswerCache
from spark_service.catalog import Catalog
from spark_service.db.history import Question
from spark_service.errors import RequestError
from spark_service.inflate import BodyLimits, inflate, read_body, require_encoding
from spark_service.ingest import excerpt, parse_upload, require_json
from spark_service.served import ServedManifests
from spark_service.signing import Signer
from spark_service.windows import WINDOW_STEPS_DAYS, Windows

__all__ = ["ADMIN_PREFIX", "MAX_PIN_BYTES", "ManifestServices", "manifest_router"]

ADMIN_PREFIX = f"{API_PREFIX}/admin"
MAX_PIN_BYTES = 4096

_PathFingerprint = Annotated[Fingerprint, Path()]
_IfNoneMatch = Annotated[str | None, Header(description="Entity tags of answers that the client has.")]


async def _canonical_mix(
    workload: Annotated[
        str,
        Path(
            description=f"{MIX_EXPECTED[0].upper()}{MIX_EXPECTED[1:]}. Spellings that mean the same get the same "
            "answer, under the canonical one: names sorted, weights without a common divisor.",
            json_schema_extra={"pattern": MIX_PATTERN},
            examples=["code-heavy", "code-heavy:7+chat:3"],
        ),
    ],
) -> str:
    try:
        return str(Mix.parse(workload))
    except MixError as error:
        raise RequestError(
            422,
            "invalid_parameter",
            f"path.workload: found {error.found}, expected {error.expected}",
            field="path.workload",
            found=error.found,
            expected=error.expected,
            hint="e.g. code-heavy, or code-heavy:7+chat:3",
        ) from error


_PathWorkload = Annotated[str, Depends(_canonical_mix)]


class _Query(BaseModel):
    """Unknown parameters are errors: a misspelt one would be ignored silently."""

    model_config = ConfigDict(extra="forbid")

    phase: Phase = "decode"


class _ListQuery(_Query):
    fingerprint: Fingerprint | None = None


class _WindowQuery(BaseModel):
    window_days: int | None = Field(
        None,
        description="Only sessions received in so many days make and judge the profile; 0: all. The service's own "
        "setting if left out, which can be named too.",
        json_schema_extra={"enum": [None, *WINDOW_STEPS_DAYS]},
    )
    half_life_days: float | None = Field(
        None,
        description="A session is worth half after so many days; 0: always the same. As above if left out.",
        json_schema_extra={"enum": [None, *WINDOW_STEPS_DAYS]},
    )

    def chosen(self, windows: Windows) -> Window | None:
        return windows.chosen(self.window_days, self.half_life_days)


class _ProfileQuery(_Query, _WindowQuery):
    sibling: SiblingId | None = Field(None, description="Names the quantisations known of a model that is not.")


class _BudgetQuery(_Query):
    vram_bytes: int = Field(ge=1, le=MAX_COUNT, description="Video memory in total.")
    n_ctx: int = Field(ge=1, le=MAX_COUNT, description="Context to hold, tokens.")
    reserve_bytes: int = Field(0, ge=0, le=MAX_COUNT, description="Part of vram_bytes to leave alone.")

    def question(self, fingerprint: str, workload: str) -> Question:
        return Question(fingerprint, workload, self.phase, self.vram_bytes, self.n_ctx, self.reserve_bytes)


class _ManifestQuery(_BudgetQuery, _WindowQuery):
    sibling: SiblingId | None = Field(None, description="Names the quantisations known of a model that is not.")
    revision: Revision | None = Field(None, description="Profile revision of a manifest that was served before.")


class _DiffQuery(_BudgetQuery):
    before: Revision = Field(alias="from", description="Profile revision to compare with.")
    after: Revision = Field(alias="to", description="Profile revision to compare.")


@dataclass(frozen=True, slots=True)
class ManifestServices:
    """What the routes stand on."""

    catalog: Catalog
    served: ServedManifests
    signer: Signer
    answers: AnswerCache
    limits: BodyLimits
    windows: Windows


_SIGNED: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {
            SIGNATURE_HEADER: {
                "description": "ed25519;keyid=ID;sig=BASE64 over exactly the bytes of the body.",
                "schema": {"type": "string"},
            },
            PINNED_HEADER: {
                "description": "Present while an administrator has this profile revision served.",
                "schema": {"type": "string"},
            },
            PINNED_SIGNATURE_HEADER: {
                "description": "ed25519;keyid=ID;day=YYYY-MM-DD;sig=BASE64, beside the former: over the lines "
                "spark-pin-v1, fingerprint, workload, phase, revision and the UTC day, each ended by a newline. "
                "A pin lets an older revision pass, so do not believe one that is not signed, or two days old.",
                "schema": {"type": "string"},
            },
        }
    }
}


def manifest_router(services: ManifestServices) -> APIRouter:
    """Make the routes."""
    router = APIRouter()
    _add_reads(router, services)
    _add_history(router, services.served)
    _add_nearest(router, services)
    return router


def _add_reads(router: APIRouter, services: ManifestServices) -> None:
    def answer(request: Request, if_none_match: str | None, make: Callable[[], Answer]) -> Response:
        made = services.answers.answer(request.scope["path"], request.scope["query_string"], make)
        return made.response(if_none_match)

    @router.get(f"{API_PREFIX}/profiles", response_model=ProfileList)
    def list_profiles(
        request: Request, query: Annotated[_ListQuery, Query()], if_none_match: _IfNoneMatch = None
    ) -> Response:
        """All profiles that can be pulled."""

        def make() -> Answer:
            profiles = ProfileList(profiles=services.catalog.summaries(query.fingerprint, query.phase))
            return Answer.of(profiles.model_dump_json().encode())

        return answer(request, if_none_match, make)

    @router.get(f"{API_PREFIX}/profiles/{{fingerprint}}/{{workload}}", response_model=Profile)
    def get_profile(
        request: Request,
        fingerprint: _PathFingerprint,
        workload: _PathWorkload,
        query: Annotated[_ProfileQuery, Query()],
        if_none_match: _IfNoneMatch = None,
    ) -> Response:
        """The profile of a workload or a mix, with its held-out curves."""

        def make() -> Answer:
            window = query.chosen(services.windows)
            profile = services.catalog.profile(fingerprint, workload, query.phase, query.sibling, window=window)
            return Answer.of(profile.model_dump_json().encode())

        return answer(request, if_none_match, make)

    @router.get(
        f"{API_PREFIX}/manifests/{{fingerprint}}/{{workload}}", response_model=PlacementManifest, responses=_SIGNED
    )
    def get_manifest(
        request: Request,
        fingerprint: _PathFingerprint,
        workload: _PathWorkload,
        query: Annotated[_ManifestQuery, Query()],
        if_none_match: _IfNoneMatch = None,
    ) -> Response:
        """The placement for a memory budget: the newest, or the pinned one, or with ``revision`` one of the past.

        What is pinned, and what is kept of the past, is of the service's own window: with another one this is the
        newest of that window.
        """
        question = query.question(fingerprint, workload)
        window = query.chosen(services.windows)
        # Before the state is read, because the making of the first key changes it.
        services.signer.info()
        return answer(
            request,
            if_none_match,
            lambda: services.served.answer(question, sibling=query.sibling, revision=query.revision, window=window),
        )

    @router.get(f"{API_PREFIX}/signing-key")
    def signing_key() -> SigningKeyInfo:
        """The public key that manifests are signed with, and the statements that lead to it from earlier ones."""
        return services.signer.info()


def _add_history(router: APIRouter, served: ServedManifests) -> None:
    @router.get(f"{API_PREFIX}/manifests/{{fingerprint}}/{{workload}}/history")
    def history(
        fingerprint: _PathFingerprint, workload: _PathWorkload, query: Annotated[_BudgetQuery, Query()]
    ) -> ServedHistory:
        """Every distinct manifest that was served for a budget and is still kept, the latest first.

        What was asked for in a window that is not the service's own is not kept.
        """
        question = query.question(fingerprint, workload)
        manifests = tuple(
            ServedManifest(
                revision=one.revision,
                sha256=one.sha256,
                body_bytes=one.body_bytes,
                first_served_day=one.first_served_day.isoformat(),
            )
            for one in served.served(question)
        )
        return ServedHistory(manifests=manifests, pinned=served.pinned(question))

    @router.get(f"{API_PREFIX}/manifests/{{fingerprint}}/{{workload}}/diff")
    def diff(
        fingerprint: _PathFingerprint, workload: _PathWorkload, query: Annotated[_DiffQuery, Query()]
    ) -> ManifestDiff:
        """What changed between two revisions of a manifest."""
        return served.diff(query.question(fingerprint, workload), query.before, query.after)

    @router.post(
        f"{ADMIN_PREFIX}/manifests/{{fingerprint}}/{{workload}}/pin",
        response_model=Pin,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": PinRequest.model_json_schema()}},
            }
        },
    )
    async def pin(
        request: Request, fingerprint: _PathFingerprint, workload: _PathWorkload, query: Annotated[_Query, Query()]
    ) -> Response:
        """Roll back: serve this profile revision, whatever is newer, until it is unpinned.

        A pin of a workload is none of the mixes with it, and holds for who asks for no other window than the service's.
        """
        require_json(request.headers.get("content-type"))
        wanted = _pin_request(await _small_body(request))
        await run_sync(served.pin, fingerprint, workload, query.phase, wanted.revision)
        pinned = Pin(fingerprint=fingerprint, workload=workload, phase=query.phase, revision=wanted.revision)
        return Response(pinned.model_dump_json(), media_type="application/json")

    @router.delete(f"{ADMIN_PREFIX}/manifests/{{fingerprint}}/{{workload}}/pin")
    def unpin(fingerprint: _PathFingerprint, workload: _PathWorkload, query: Annotated[_Query, Query()]) -> Pin:
        """Serve the newest again. Nothing pinned is no error: the end is the same."""
        served.unpin(fingerprint, workload, query.phase)
        return Pin(fingerprint=fingerprint, workload=workload, phase=query.phase, revision=None)


async def _small_body(request: Request) -> bytes:
    """A body of at most :data:`MAX_PIN_BYTES`; raises :class:`RequestError` (413)."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_PIN_BYTES:
            raise RequestError(
                413,
                "body_too_large",
                f"body: found more than {MAX_PIN_BYTES} bytes, expected at most that",
                field="body",
                found=f"more than {MAX_PIN_BYTES} bytes",
                expected=f"at most {MAX_PIN_BYTES} bytes",
                hint='send {"revision": "64 hex digits"}',
            )
    return bytes(body)


def _pin_request(body: bytes) -> PinRequest:
    try:
        return PinRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(["body", *(str(part) for part in first["loc"])])
        found = "nothing" if first["type"] == "missing" else excerpt(first["input"])
        raise RequestError(
            422,
            "invalid_pin",
            f"{field}: found {found}, expected: {first['msg']}",
            field=field,
            found=found,
            expected=first["msg"],
            hint='send {"revision": "64 hex digits"}; GET …/history lists revisions',
        ) from error


def _add_nearest(router: APIRouter, services: ManifestServices) -> None:
    @router.post(
        f"{API_PREFIX}/workloads/nearest",
        response_model=NearestWorkloads,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/HistogramUpload"}}},
            },
            "parameters": [
                {"name": "Content-Encoding", "in": "header", "required": False, "schema": {"type": "string"}}
            ],
        },
    )
    async def nearest(request: Request, query: Annotated[_Query, Query()]) -> Response:
        """Rank the model's workloads by how well they would have served one session; nothing of it is kept."""
        require_json(request.headers.get("content-type"))
        encoding = require_encoding(request.headers.get("content-encoding"))
        limits = services.limits
        try:
            body = await read_body(request.stream(), request.headers.get("content-length"), limits.body_bytes)
        except ClientDisconnect as error:
            raise RequestError(400, "body_incomplete", "body: the connection ended before the body did") from error

        def rank() -> NearestWorkloads:
            upload = parse_upload(inflate(body, encoding, limits.inflated_bytes))
            if len(upload.sessions) != 1:
                raise RequestError(
                    422,
                    "one_session_expected",
                    f"sessions: found {len(upload.sessions)}, expected 1",
                    field="sessions",
                    found=str(len(upload.sessions)),
                    expected="1",
                    hint="ask about one session at a time",
                )
            return services.catalog.nearest(upload.model.fingerprint, query.phase, upload.sessions[0])

        return Response((await run_sync(rank)).model_dump_json(), media_type="application/json")
