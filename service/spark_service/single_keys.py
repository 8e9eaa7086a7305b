"""Refusing what says one thing twice: readers of JSON and of query strings differ about which one counts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from starlette.requests import Request

from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram
from spark_service.errors import RequestError

__all__ = ["require_single_keys", "require_single_parameters"]


def require_single_keys(raw: bytes, upload: HistogramUpload) -> None:
    """Raise :class:`RequestError` (400) where an object of an upload's text has a key twice.

    ``upload`` is what the text was read as, and so has every key once.
    """
    # Each key is followed by a colon, and nothing but keys and texts holds one: no more colons, no key twice.
    if raw.count(b":") > _keys(upload):
        json.loads(raw, object_pairs_hook=_require_single)


def _keys(upload: HistogramUpload) -> int:
    count = len(upload.model_fields_set) + len(upload.model.model_fields_set)
    count += sum(len(layer.model_fields_set) + len(layer.tensor_types) for layer in upload.model.layers)
    # Objects of counts have no optional fields, and there are many of them.
    per_phase, per_layer, per_reuse = (len(kind.model_fields) for kind in (PhaseHistogram, LayerCounts, LayerReuse))
    for session in upload.sessions:
        count += len(session.model_fields_set) + per_reuse * len(session.reuse or ())
        if session.live is not None:
            profile = session.live.profile
            count += len(session.live.model_fields_set) + (0 if profile is None else len(profile.model_fields_set))
        for phase in (session.prefill, session.decode):
            if phase is not None:
                count += per_phase + per_layer * len(phase.layers)
    return count


def _require_single(pairs: list[tuple[str, Any]]) -> None:
    name, times = max(Counter(key for key, _ in pairs).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise RequestError(
            400,
            "duplicate_key",
            f"body: found the key {name!r} {times} times in one object, expected every key once",
            field="body",
            found=name,
            expected="every key once",
            hint="send every field once",
        )


async def require_single_parameters(request: Request) -> None:
    """Raise :class:`RequestError` (422) where a query has a parameter twice."""
    times = Counter(name for name, _ in request.query_params.multi_items())
    name = next((name for name, count in times.items() if count > 1), None)
    if name is not None:
        shown = name if len(name) <= 80 else name[:79] + "…"
        raise RequestError(
            422,
            "invalid_parameter",
            f"query.{shown}: found {times[name]} values, expected one",
            field=f"query.{shown}",
            found=f"{times[name]} values",
            expected="one value",
            hint="send every parameter once",
        )
