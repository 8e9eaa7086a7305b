"""The administrator's side of a running service: what the commands ask it over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from spark_schemas.api import API_PREFIX, PROBLEM_MEDIA_TYPE, Problem
from spark_schemas.drift import DriftList
from spark_schemas.ids import Count, SessionHash
from spark_schemas.local_address import is_loopback
from spark_schemas.manifest_api import Pin, PinRequest, ServedHistory
from spark_service import env
from spark_service.errors import RefusedError, ServiceCallError, UsageError

__all__ = ["AdminClient"]

TIMEOUT_SECONDS = 30.0
MAX_ANSWER_BYTES = 32 * 2**20
_MAX_SHOWN = 500
"""Characters of the peer's words repeated to a person."""
_M = TypeVar("_M", bound=BaseModel)


class _Removed(BaseModel):
    session_hash: SessionHash
    removed: Count


class AdminClient:
    """Calls to one service with the token of the environment. Every call raises :class:`ServiceCallError`."""

    def __init__(self, base_url: str, *, token_needed: bool = True) -> None:
        """Take the address; nothing is sent yet.

        What an open service answers needs no token. Raises :class:`UsageError` for what is no address and
        :class:`RefusedError` without a token that is needed, or where one would travel unencrypted.
        """
        self._base_url = _checked(base_url)
        token = env.TOKEN.read()
        if token is None and token_needed:
            raise RefusedError(
                f"not asking {self._base_url}: found no {env.TOKEN.name}, expected an admin token in it",
                f"set {env.TOKEN.name}, or stop the service and leave out --service",
            )
        local = is_loopback(urlsplit(self._base_url).hostname or "")
        if token is not None and urlsplit(self._base_url).scheme != "https" and not local:
            raise RefusedError(
                f"the token would travel unencrypted to {self._base_url}", "use an https:// address or a loopback one"
            )
        self._client = httpx.Client(
            headers={"Accept-Encoding": "identity", **({} if token is None else {"Authorization": f"Bearer {token}"})},
            follow_redirects=False,
            # A proxy has no business between this machine and itself.
            trust_env=not local,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def get(self, path: str, model: type[_M]) -> _M:
        """Get something under ``/api/v1/admin``."""
        return self._call("GET", f"/admin{path}", model)

    def post(self, path: str, body: BaseModel, model: type[_M], *, timeout_seconds: float = TIMEOUT_SECONDS) -> _M:
        """Post a body to something under ``/api/v1/admin``, which may think about it for so long."""
        return self._call("POST", f"/admin{path}", model, body.model_dump_json(), timeout_seconds)

    def delete(self, path: str, model: type[_M]) -> _M:
        """Delete something under ``/api/v1/admin``."""
        return self._call("DELETE", f"/admin{path}", model)

    def drift(self) -> DriftList:
        """What is known of every workload's traffic."""
        return self._call("GET", "/drift", DriftList)

    def manifest_history(self, fingerprint: str, workload: str, query: Mapping[str, str | int]) -> ServedHistory:
        """What was served for a question, the latest first; ``query`` has its phase, budget, context and reserve."""
        path = f"/manifests/{quote(fingerprint, safe='')}/{quote(workload, safe='')}/history"
        return self._call("GET", f"{path}?{urlencode(query)}", ServedHistory)

    def pin_manifest(self, fingerprint: str, workload: str, phase: str, revision: str) -> Pin:
        """Have a profile revision served, whatever is newer."""
        body = PinRequest.model_construct(revision=revision)  # the service says what is wrong with it
        return self.post(_pin_path(fingerprint, workload, phase), body, Pin)

    def unpin_manifest(self, fingerprint: str, workload: str, phase: str) -> Pin:
        """Have the newest served again."""
        return self.delete(_pin_path(fingerprint, workload, phase), Pin)

    def delete_session(self, session_hash: str) -> int:
        """Delete a session; return the number of parts removed."""
        return self._call("DELETE", f"/sessions/{session_hash}", _Removed).removed

    def _call(
        self,
        method: str,
        path: str,
        model: type[_M],
        body: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> _M:
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = self._base_url + API_PREFIX + path
        try:
            with self._client.stream(method, url, content=body, headers=headers, timeout=timeout_seconds) as response:
                content = bytearray()
                for chunk in response.iter_raw():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise self._bad_answer(f"more than {MAX_ANSWER_BYTES} bytes")
        except httpx.TransportError as error:
            raise ServiceCallError(
                f"no answer from {self._base_url}: {error or type(error).__name__}",
                "start the service or correct --service; with the service down, leave out --service",
            ) from error
        if response.status_code >= 400:
            raise self._refusal(response, bytes(content))
        try:
            return model.model_validate_json(bytes(content))
        except ValidationError as error:
            raise self._bad_answer(f"status {response.status_code} without a valid {model.__name__}") from error

    def _refusal(self, response: httpx.Response, content: bytes) -> ServiceCallError:
        if response.headers.get("content-type", "").partition(";")[0].strip().lower() != PROBLEM_MEDIA_TYPE:
            return self._bad_answer(f"status {response.status_code} without problem details")
        try:
            problem = Problem.model_validate_json(content)
        except ValidationError:
            return self._bad_answer(f"status {response.status_code} with unreadable problem details")
        hint = problem.hint
        if response.status_code in (401, 403) and problem.code != "open_service":
            hint = f"put a valid token with scope admin into {env.TOKEN.name}"
        return ServiceCallError(
            f"{self._base_url} answered {response.status_code}: {problem.detail[:_MAX_SHOWN]}",
            None if hint is None else hint[:_MAX_SHOWN],
        )

    def _bad_answer(self, found: str) -> ServiceCallError:
        return ServiceCallError(
            f"{self._base_url} does not answer as a calibration service: found {found}", "correct --service"
        )


def _pin_path(fingerprint: str, workload: str, phase: str) -> str:
    path = f"/manifests/{quote(fingerprint, safe='')}/{quote(workload, safe='')}/pin"
    return f"{path}?{urlencode({'phase': phase})}"


def _checked(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable or parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(f"--service: found {text[:_MAX_SHOWN]!r}, expected http://HOST[:PORT] or https://HOST[:PORT]")
    return text.rstrip("/")
