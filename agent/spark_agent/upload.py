"""From the spool to the calibration service, after a yes, and only the bytes a preview shows.

Nothing is sent twice for the service to count twice: parcels are sealed before the first connection, so after a
crash the same histograms are built again, and the service knows them by content id.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from spark_agent.batch import (
    LONGEST_WAIT_S,
    MAX_BODY_BYTES,
    Batch,
    Parcel,
    Unreadable,
    build_batches,
    form_parcels,
    idempotency_key,
    plan,
)
from spark_agent.config import Consent
from spark_agent.env import Environment
from spark_agent.errors import (
    RefusedError,
    ServiceAnswerError,
    ServiceError,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from spark_agent.http import ServiceClient
from spark_agent.privacy import MINIMUM_TOKENS
from spark_agent.spool import PendingRow, Spool
from spark_schemas.api import UploadReceipt

__all__ = ["FlushReport", "RetryPolicy", "flush", "preview", "require_permission"]

_PASSING = frozenset({429, 502, 503, 504})
"""Statuses that are worth another attempt at once."""
_BLAMES_DATA = frozenset({400, 409, 413, 422})
"""Statuses that blame the body; any other (a token that expired, a wrong address) says nothing about it."""
_MAX_REFUSED_ALONE = 8
"""Histograms refused one by one in a flush before it stops: then the fault is hardly theirs."""
_FIRST_WAIT_S = 30.0
_MAX_WAIT_S = 3600.0
_SPREAD = LONGEST_WAIT_S / _MAX_WAIT_S - 1.0
"""Share by which a wait is drawn out at random: a team's machines must not come back all at once."""


@dataclass(frozen=True)
class RetryPolicy:
    """Attempts within one flush; later flushes try again."""

    attempts: int = 4
    timeout_s: float = 45.0
    max_wait_s: float = 10.0
    """Longest pause between two attempts; a service that asks for more is left for a later flush."""


@dataclass(frozen=True)
class FlushReport:
    """What a flush did. Histograms are what the service counts; rows are what the spool keeps."""

    uploaded: int
    """Histograms new to the service."""
    duplicates: int
    """Histograms the service had already."""
    pending: int
    """Rows still in the spool, those held back included."""
    held_back: int
    """Rows that wait for enough others to be merged with."""
    rejected: int
    """Rows moved aside by this flush."""
    last_error: str | None
    requests: int
    """Batches that the service was asked to take, whatever came of it; 0 where nothing was due."""


def require_permission(
    environment: Environment, consent: Consent | None, service_url: str, *, paused: bool = False
) -> None:
    """Raise :class:`RefusedError` unless counts may be sent to this service now."""
    if environment.offline:
        raise RefusedError("nothing is uploaded: SPARKMOE_OFFLINE is set", hint="unset SPARKMOE_OFFLINE")
    if environment.do_not_track:
        raise RefusedError("nothing is uploaded: DO_NOT_TRACK is set", hint="unset DO_NOT_TRACK")
    ask = f"see the bytes with `spark-agent upload show`, then decide: `spark-agent upload consent` ({service_url})"
    if consent is None:
        raise RefusedError("nothing is uploaded: nobody has consented yet", hint=ask)
    if not consent.granted:
        raise RefusedError(f"nothing is uploaded: consent was refused on {consent.at:%Y-%m-%d}", hint=ask)
    if consent.service_url != service_url:
        raise RefusedError(f"nothing is uploaded: consent was given for {consent.service_url} only", hint=ask)
    if paused:
        raise RefusedError("nothing is uploaded: uploads are paused", hint="spark-agent upload pause --off")


def preview(
    spool: Spool,
    *,
    minimum_tokens: int = MINIMUM_TOKENS,
    now: float | None = None,
    ignore_waits: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Iterator[bytes]:
    """Yield the exact uncompressed bodies, one per request, that :func:`flush` with the same arguments would send."""
    parcels, _ = _due(spool, minimum_tokens, now, ignore_waits=ignore_waits)
    for item in build_batches(spool, parcels, max_body_bytes):
        if isinstance(item, Batch):
            yield item.body()


def flush(
    spool: Spool,
    client: ServiceClient,
    consent: Consent | None,
    *,
    environment: Environment,
    paused: bool = False,
    minimum_tokens: int = MINIMUM_TOKENS,
    now: float | None = None,
    ignore_waits: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
    retry: RetryPolicy | None = None,
) -> FlushReport:
    """Send what is due (``now`` in seconds since the epoch; ``ignore_waits`` sends what still has to wait too).

    A service that fails ends the flush, is reported as ``last_error``, and costs nothing: the rows stay. Raises
    :class:`RefusedError` before any connection when nothing may leave, :class:`SpoolError` when the spool fails.
    """
    require_permission(environment, consent, client.base_url, paused=paused)

    def form(rows: list[PendingRow]) -> list[tuple[PendingRow, ...]]:
        return [parcel.rows for parcel in form_parcels(rows, minimum_tokens)[0]]

    spool.seal(form)
    parcels, held_back = _due(spool, minimum_tokens, now, ignore_waits=ignore_waits)
    delivery = _Delivery(spool, client, RetryPolicy() if retry is None else retry, now)
    for item in build_batches(spool, parcels, max_body_bytes):
        if isinstance(item, Unreadable):
            delivery.put_aside(item.ids, item.reason)
        elif not delivery.deliver(item):
            break
    return FlushReport(
        uploaded=delivery.uploaded,
        duplicates=delivery.duplicates,
        pending=spool.stats().pending,
        held_back=len(held_back),
        rejected=delivery.rejected,
        last_error=delivery.last_error,
        requests=delivery.requests,
    )


def _due(
    spool: Spool, minimum_tokens: int, now: float | None, *, ignore_waits: bool
) -> tuple[list[Parcel], list[PendingRow]]:
    parcels, held_back = plan(spool.pending(), minimum_tokens)
    moment = time.time() if now is None else now
    return [parcel for parcel in parcels if ignore_waits or parcel.is_due(moment)], held_back


class _Delivery:
    """One flush's dealings with the service, and what came of them."""

    def __init__(self, spool: Spool, client: ServiceClient, retry: RetryPolicy, now: float | None) -> None:
        self.uploaded = 0
        self.duplicates = 0
        self.rejected = 0
        self.last_error: str | None = None
        self.requests = 0
        self._refused_alone = 0
        self._takes_measurements = True
        self._spool = spool
        self._client = client
        self._retry = retry
        self._now = now

    def deliver(self, batch: Batch) -> bool:
        """Send a batch, in ever smaller halves if its data is refused; ``False`` when the flush should end."""
        waiting = [batch]
        while waiting:
            part = waiting.pop()
            if not self._takes_measurements:
                part = part.without_measurements()
            try:
                receipt = self._send(part)
            except ServiceError as error:
                if part.is_measured and _knows_no_measurements(error):
                    self._takes_measurements = False
                    waiting.append(part)
                    continue
                if not _blames_data(error):
                    self._postpone([part, *waiting], error)
                    return False
                if len(part.parcels) > 1:
                    waiting.extend(reversed(part.halves()))
                    continue
                if not _is_services_own(error):
                    # Something between here and the service: it cannot know what is wrong with a histogram.
                    self._postpone([part, *waiting], error)
                    return False
                self.put_aside(part.ids, str(error))
                self._refused_alone += 1
                if self._refused_alone >= _MAX_REFUSED_ALONE:
                    self._postpone(waiting, error)
                    return False
            else:
                self._spool.mark_uploaded(part.ids)
                self.uploaded += receipt.accepted
                self.duplicates += receipt.duplicates
        return True

    def put_aside(self, ids: tuple[int, ...], reason: str) -> None:
        """Move rows out of the way for good."""
        self._spool.mark_rejected(ids, reason)
        self.rejected += len(ids)
        self.last_error = reason

    def _postpone(self, batches: list[Batch], error: ServiceError) -> None:
        self.last_error = str(error)
        asked = error.retry_after_s if isinstance(error, ServiceRefusedError) else None
        drawn_out = 1.0 + random.uniform(0.0, _SPREAD)  # noqa: S311 (no secret)
        for batch in batches:
            wait = min(max(_FIRST_WAIT_S * 2.0 ** min(batch.attempts, 20), asked or 0.0), _MAX_WAIT_S)
            moment = time.time() if self._now is None else self._now
            self._spool.mark_failed(batch.ids, self.last_error, moment + wait * drawn_out)

    def _send(self, batch: Batch) -> UploadReceipt:
        # Together they cost 100 ms to import; most commands send nothing.
        import stamina
        import stamina.instrumentation
        import zstandard

        # Its default hooks log to whatever is installed, structlog's to stdout, where data belongs.
        stamina.instrumentation.set_on_retry_hooks([])
        body = batch.body()
        key = idempotency_key(body)
        self.requests += 1
        compressed = zstandard.ZstdCompressor(level=10).compress(body)
        receipt: UploadReceipt | None = None
        for attempt in stamina.retry_context(
            on=self._wait_before_retry,
            attempts=self._retry.attempts,
            timeout=self._retry.timeout_s,
            wait_max=self._retry.max_wait_s,
        ):
            with attempt:
                receipt = self._client.upload(compressed, "zstd", key)
        answered = None if receipt is None else receipt.accepted + receipt.duplicates
        if receipt is None or answered != len(batch.sessions):
            raise ServiceAnswerError(
                f"the service at {self._client.base_url} accounts for {answered} histograms, "
                f"expected the {len(batch.sessions)} that were sent"
            )
        return receipt

    def _wait_before_retry(self, error: Exception) -> bool | float:
        """Say whether to try again: ``True`` with the usual growing pause, or after so many seconds."""
        if isinstance(error, ServiceUnreachableError):
            return True
        if not isinstance(error, ServiceRefusedError) or error.status not in _PASSING:
            return False
        if error.retry_after_s is None:
            return True
        return error.retry_after_s if error.retry_after_s <= self._retry.max_wait_s else False


def _knows_no_measurements(error: ServiceError) -> bool:
    """Whether a service is from before version 2 of uploads: it names the version before anything else."""
    problem = error.problem if isinstance(error, ServiceRefusedError) else None
    return problem is not None and problem.field == "schema_version"


def _is_services_own(error: ServiceError) -> bool:
    return isinstance(error, ServiceRefusedError) and error.problem is not None


def _blames_data(error: ServiceError) -> bool:
    return isinstance(error, ServiceRefusedError) and error.status in _BLAMES_DATA
