"""The only module that speaks HTTP to the calibration service.

The peer is treated as hostile: answers are bounded in bytes and time, taken uncompressed, validated against the
schemas and against what was asked, and redirects are refused. httpx is imported on first use, to keep the commands
that need no network quick.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from spark_agent import __version__
from spark_agent.answer_cache import AnswerCache, KeptAnswer
from spark_agent.cutoff import CutOff
from spark_agent.errors import (
    ConfigError,
    RefusedError,
    ServiceAnswerError,
    ServiceRefusedError,
    ServiceUnreachableError,
    SparkError,
)
from spark_agent.service_url import normalise_service_url, protects_secrets
from spark_schemas.api import API_PREFIX, PROBLEM_MEDIA_TYPE, Problem, ProfileList, UploadReceipt
from spark_schemas.local_address import is_loopback_url
from spark_schemas.manifest import PlacementManifest
from spark_schemas.profile import Profile
from spark_schemas.signature import PINNED_HEADER, PINNED_SIGNATURE_HEADER, SIGNATURE_HEADER, SigningKeyInfo

if TYPE_CHECKING:
    import httpx

__all__ = ["ManifestAnswer", "ServiceClient", "is_away"]

MAX_ANSWER_BYTES = 32 * 2**20
"""A profile of a very large model is a few MiB."""
MAX_EXCHANGE_S = 120.0
"""From the connection to the last byte of the answer, however steadily it drips."""
_MAX_SHOWN = 500
"""Characters of a peer's words repeated to a person."""
_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class ManifestAnswer:
    """An answer to a question for a manifest; nothing of it is believed before its signature is checked."""

    manifest: PlacementManifest | None
    """``None``: still the same as what the client has."""
    content: bytes
    """Exactly the bytes that the signature is over."""
    etag: str | None
    signature: str | None
    """The header's text."""
    pinned: str | None
    """The profile revision, if an administrator has it served in place of the newest."""
    pin_signature: str | None = None
    """The header's text."""


class ServiceClient:
    """Calls to one calibration service. Every method raises :class:`~spark_agent.errors.ServiceError` subclasses."""

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        *,
        offline: bool = False,
        cache: AnswerCache | None = None,
    ) -> None:
        """Take the address and a token; nothing is sent yet.

        Raises :class:`ConfigError` for an address that is none, :class:`RefusedError` for a token that would travel
        unencrypted. ``offline`` turns every call into a :class:`RefusedError`, but for what ``cache`` has of profiles.
        """
        try:
            self.base_url = normalise_service_url(base_url)
        except ValueError as error:
            raise ConfigError(f"service address: found {base_url!r}, {error}") from error
        if token is not None and not protects_secrets(self.base_url):
            raise RefusedError(
                f"the token would travel unencrypted to {self.base_url}",
                hint="use an https:// address, or remove the token",
            )
        self._token = token
        self._timeout_s = timeout_s
        self._offline = offline
        self._client: httpx.Client | None = None
        self._cut_off = CutOff()
        self._cache = cache
        self.kept_age_s: float | None = None
        """Seconds since the service gave the latest answer about profiles, if it is away and the answer a kept one."""
        self.away_because: str | None = None
        self.last_date: str | None = None
        """What time the last answer said it is, as its header has it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def abort(self) -> None:
        """End the call under way, and fail every later one with :class:`ServiceUnreachableError`; from any thread."""
        self._cut_off.cut()

    def upload(self, body: bytes, content_encoding: str | None, idempotency_key: str) -> UploadReceipt:
        """Send a (compressed) ``HistogramUpload``; returns once the service has committed it."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        if content_encoding is not None:
            headers["Content-Encoding"] = content_encoding
        answer = self._call("POST", "/histograms", headers=headers, content=body)
        return self._parse(UploadReceipt, answer, expected_status=202)

    def manifest(
        self,
        fingerprint: str,
        workload: str,
        *,
        vram_bytes: int,
        n_ctx: int,
        reserve_bytes: int,
        phase: str,
        sibling: str | None = None,
        revision: str | None = None,
        window_days: int | None = None,
        half_life_days: float | None = None,
        etag: str | None = None,
    ) -> ManifestAnswer:
        """Return the placement for a budget of ``vram_bytes``, of an earlier profile revision if one is named.

        ``workload`` may be a mix, in its canonical spelling. ``sibling`` lets the service name other quantisations of
        an unknown model. Bounds of the window that are left out are the service's own. With ``etag`` the answer may be
        that nothing has changed.
        """
        params = {
            "vram_bytes": str(vram_bytes),
            "n_ctx": str(n_ctx),
            "reserve_bytes": str(reserve_bytes),
            "phase": phase,
        }
        params |= {name: value for name, value in (("sibling", sibling), ("revision", revision)) if value is not None}
        params |= _window_params(window_days, half_life_days)
        headers = {} if etag is None else {"If-None-Match": etag}
        path = f"/manifests/{quote(fingerprint, safe='')}/{quote(workload, safe='')}"
        answer = self._call("GET", path, params=params, headers=headers)
        signature, pinned, pin_signature = (
            answer.headers.get(name.lower()) for name in (SIGNATURE_HEADER, PINNED_HEADER, PINNED_SIGNATURE_HEADER)
        )
        if answer.status == 304 and etag is not None:
            return ManifestAnswer(None, b"", etag, signature, pinned, pin_signature)
        found = self._parse(PlacementManifest, answer)
        asked = (fingerprint, workload, phase, vram_bytes, n_ctx, reserve_bytes)
        got = (
            found.fingerprint,
            found.workload,
            found.phase,
            found.vram_budget_bytes,
            found.n_ctx,
            found.bytes.vram_reserve,
        )
        if got != asked or revision not in (None, found.profile_revision):
            raise self._bad_answer(f"a manifest for {got}, expected one for {asked}")
        return ManifestAnswer(found, answer.content, answer.headers.get("etag"), signature, pinned, pin_signature)

    def signing_key(self) -> SigningKeyInfo:
        """Return the public key that the service signs with, as it says."""
        return self._parse(SigningKeyInfo, self._call("GET", "/signing-key"))

    def profiles(self, fingerprint: str | None = None) -> ProfileList:
        """Return all profiles, or those of one model."""
        params = {} if fingerprint is None else {"fingerprint": fingerprint}
        return self._kept(ProfileList, "/profiles", params)

    def profile(
        self,
        fingerprint: str,
        workload: str,
        phase: str,
        *,
        window_days: int | None = None,
        half_life_days: float | None = None,
    ) -> Profile:
        """Return one profile with its held-out curves; names and windows as for manifests."""
        path = f"/profiles/{quote(fingerprint, safe='')}/{quote(workload, safe='')}"
        params = {"phase": phase} | _window_params(window_days, half_life_days)
        found = self._kept(Profile, path, params)
        got, asked = (found.fingerprint, found.workload, found.phase), (fingerprint, workload, phase)
        if got != asked:
            raise self._bad_answer(f"a profile for {got}, expected one for {asked}")
        return found

    def _kept(self, schema: type[_M], path: str, params: Mapping[str, str]) -> _M:
        """Ask for what may be used again: only for what changed, and not at all while the service is away."""
        url = f"{self.base_url}{path}?{urlencode(sorted(params.items()))}"
        kept = None if self._cache is None else self._cache.get(url)
        self.kept_age_s = self.away_because = None
        headers = {} if kept is None or kept.etag is None else {"If-None-Match": kept.etag}
        try:
            answer = self._call("GET", path, params=params, headers=headers)
        except (ServiceUnreachableError, ServiceRefusedError, RefusedError) as error:
            if kept is None or not is_away(error):
                raise
            found = self._parse(schema, _Answer(200, {"content-type": "application/json"}, kept.content))
            self.kept_age_s, self.away_because = time.time() - kept.at, str(error)
            return found
        etag = answer.headers.get("etag")
        if answer.status == 304 and kept is not None and headers:
            answer = _Answer(200, {"content-type": "application/json"}, kept.content)
            etag = kept.etag
        found = self._parse(schema, answer)
        if self._cache is not None:
            self._cache.put(url, KeptAnswer(answer.content, etag, time.time()))
        return found

    def _connected(self) -> httpx.Client:
        from http.cookiejar import CookieJar, DefaultCookiePolicy

        import httpx

        if self._client is None:
            headers = {
                "User-Agent": f"spark-agent/{__version__}",
                "Accept": f"application/json, {PROBLEM_MEDIA_TYPE}",
                # A small compressed answer could unfold into any number of bytes.
                "Accept-Encoding": "identity",
            }
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            self._client = httpx.Client(
                base_url=self.base_url + API_PREFIX,
                headers=headers,
                timeout=httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, 5.0)),
                follow_redirects=False,
                # A service could tell machines apart by them, whatever is left out of bodies.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                # A proxy has no business between this machine and itself.
                trust_env=not is_loopback_url(self.base_url),
            )
        return self._client

    def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> _Answer:
        if self._offline:
            raise RefusedError(
                f"not contacting {self.base_url}: SPARKMOE_OFFLINE is set", hint="unset SPARKMOE_OFFLINE"
            )
        client = self._connected()
        import httpx

        cut_off = self._cut_off
        try:
            with (
                cut_off.within(MAX_EXCHANGE_S),
                client.stream(
                    method, path, params=params, headers=headers, content=content, extensions={"trace": cut_off.trace}
                ) as response,
            ):
                body = self._read(response)
                answer = _Answer(response.status_code, dict(response.headers), body)
            if cut_off.expired or cut_off.was_cut:
                # An answer that ends with the connection looks whole wherever it was cut.
                raise httpx.ReadError("the connection was cut")
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            if cut_off.was_cut:
                reason = "given up, because this process is ending"
            elif cut_off.expired:
                reason = f"it did not finish its answer in {MAX_EXCHANGE_S:g} s"
            raise ServiceUnreachableError(
                f"no answer from the calibration service at {self.base_url}: {reason[:_MAX_SHOWN]}",
                hint="start one with `spark-service run --open`, or correct SPARKMOE_SERVICE_URL",
            ) from error
        self.last_date = answer.headers.get("date")
        if answer.status >= 400:
            raise self._refusal(answer)
        if 300 <= answer.status < 400 and answer.status != 304:
            target = answer.headers.get("location", "nowhere")[:_MAX_SHOWN]
            raise self._bad_answer(f"a redirect to {target}, which is not followed", hint="configure the final address")
        return answer

    def _read(self, response: httpx.Response) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self._bad_answer("a compressed answer, expected it plain as asked")
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise self._bad_answer(f"more than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)

    def _parse(self, schema: type[_M], answer: _Answer, expected_status: int = 200) -> _M:
        if answer.status != expected_status:
            raise self._bad_answer(f"status {answer.status}, expected {expected_status}")
        media_type = answer.headers.get("content-type", "nothing").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise self._bad_answer(f"{media_type[:_MAX_SHOWN]}, expected application/json")
        try:
            return schema.model_validate_json(answer.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the whole"
            raise self._bad_answer(
                f"no valid {schema.__name__}: {where}: {first['msg']}"[:_MAX_SHOWN],
                hint="update the older of agent and service",
            ) from error

    def _refusal(self, answer: _Answer) -> ServiceRefusedError:
        problem = _problem(answer)
        retry_after_s = _retry_after_s(answer.headers.get("retry-after"), answer.headers.get("date"))
        message = f"the calibration service at {self.base_url} answered {answer.status}"
        if problem is None:
            return ServiceRefusedError(
                f"{message} without a reason it could be asked for",
                hint="check that the address is a calibration service",
                status=answer.status,
                retry_after_s=retry_after_s,
            )
        message = f"{message}: {problem.title[:_MAX_SHOWN]}: {problem.detail[:_MAX_SHOWN]}"
        told = problem.found is None or problem.found in problem.detail
        if problem.field is not None and problem.expected is not None and not told:
            message += f" ({problem.field}: found {problem.found}, expected {problem.expected})"[:_MAX_SHOWN]
        return ServiceRefusedError(
            message,
            hint=None if problem.hint is None else problem.hint[:_MAX_SHOWN],
            status=answer.status,
            problem=problem,
            retry_after_s=retry_after_s,
        )

    def _bad_answer(self, found: str, hint: str | None = None) -> ServiceAnswerError:
        return ServiceAnswerError(
            f"the peer at {self.base_url} does not answer as a calibration service: found {found}",
            hint=hint or "check that the address is a calibration service",
        )


def is_away(error: SparkError) -> bool:
    """Whether a failure says nothing about the question: no connection, offline, a service in trouble."""
    if isinstance(error, ServiceRefusedError):
        return error.status >= 500 or error.status == 429
    return isinstance(error, ServiceUnreachableError | RefusedError)


def _window_params(window_days: int | None, half_life_days: float | None) -> dict[str, str]:
    bounds = (("window_days", window_days), ("half_life_days", half_life_days))
    return {name: f"{days:.15g}" for name, days in bounds if days is not None}


def _problem(answer: _Answer) -> Problem | None:
    if answer.headers.get("content-type", "").partition(";")[0].strip().lower() != PROBLEM_MEDIA_TYPE:
        return None
    try:
        return Problem.model_validate_json(answer.content)
    except ValidationError:
        # The status alone still says enough to act on.
        return None


def _retry_after_s(value: str | None, sent: str | None) -> float | None:
    """Read either form of ``Retry-After``, seconds or an HTTP date; an unreadable one is as good as none.

    ``sent`` is the answer's own ``Date``: a date is meant by the service's clock, which may be years from this one's.
    """
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        return float(min(int(value[:12]), 10**9))
    moment = _moment(value)
    if moment is None:
        return None
    now = (None if sent is None else _moment(sent)) or dt.datetime.now(dt.UTC)
    return max(0.0, (moment - now).total_seconds())


def _moment(text: str) -> dt.datetime | None:
    try:
        moment = parsedate_to_datetime(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)).astimezone(dt.UTC)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None
