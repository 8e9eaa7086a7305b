"""Uploads read fast: those written the way this project's agents write them, without an object for every layer.

:mod:`spark_service.ingest` and :mod:`spark_schemas.invariants` define what an upload is. This module recognises most
of what they accept and gives the same result; whatever it does not recognise is theirs to accept or to refuse in words.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import from_json

from spark_schemas.histogram import (
    MAX_SESSIONS_PER_UPLOAD,
    HistogramUpload,
    LayerCounts,
    LayerReuse,
    PhaseHistogram,
    SessionHistogram,
)
from spark_schemas.ids import MAX_COUNT, Phase
from spark_schemas.live import LiveMisses, LiveProfile
from spark_schemas.model import ModelShape
from spark_schemas.split import split_of
from spark_service.errors import RequestError
from spark_service.ingest import parse_upload
from spark_service.packed import PackedPhase, PackedSession, PackedUpload, pack_counts, pack_upload
from spark_service.single_keys import require_single_keys

__all__ = ["read_canonical", "read_upload"]

MAX_HEAD_BYTES = 2**16
"""Models are remembered by the bytes that describe them; longer descriptions are not."""
SAFE_COUNT = 2**40
"""Largest count handled here: sums over 65,536 experts, and tokens x top_k, stay far below 2^63."""

_SESSIONS = b'"sessions":['
_SESSION = b'{"session_hash":'
_LIVE = b',"live":'
_NUMBERS = b"0123456789,"
_HASH = re.compile(r"[0-9a-f]{64}")
_WORKLOAD = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def read_upload(raw: bytes) -> PackedUpload:
    """Parse, check and pack an upload. Raises the :class:`RequestError` of :func:`parse_upload`."""
    upload = read_canonical(raw)
    return pack_upload(parse_upload(raw)) if upload is None else upload


def read_canonical(raw: bytes) -> PackedUpload | None:
    """Return what ``pack_upload(parse_upload(raw))`` would, or None where that is not certain."""
    head, mark, tail = raw.partition(_SESSIONS)
    if not mark or not tail.endswith(b"]}") or len(head) > MAX_HEAD_BYTES:
        return None
    model = _model_of(head)
    if model is None:
        return None
    try:
        # The head closes as an object whose last member is an empty list; this is a whole list: together they are
        # one whole document with these sessions.
        sessions = from_json(b"[" + tail[:-1], allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        return None
    if not 1 <= len(sessions) <= MAX_SESSIONS_PER_UPLOAD:
        return None
    if tail.translate(None, _NUMBERS) != _expected_skeleton(sessions, len(model.blocks)):
        return None
    try:
        phases = [_read_phases(session, model) for session in sessions]
        lives = [_read_live(session, model) for session in sessions]
    except (KeyError, OverflowError, ValidationError):
        # A digit or a comma inside a name, or a number beyond 64 bits or beyond what the schema takes.
        return None
    packed = []
    for session, text, read, live in zip(sessions, _session_texts(tail), phases, lives, strict=True):
        session_hash, split = session["session_hash"], split_of(session["session_hash"])
        if read is None or session.get("split") != split or (live is None) != ("live" not in session):
            return None
        # The content is that of the counts alone, which come first.
        counts = text if live is None else text[: text.index(_LIVE)] + b"}"
        content_id = hashlib.sha256(model.shape.fingerprint.encode() + b"\n" + counts).hexdigest()
        packed.append(PackedSession(content_id, session_hash, split, session["workload"], read, live))
    return PackedUpload(model.shape, tuple(packed), model.agent_version)


class _Head(HistogramUpload):
    """An upload up to its sessions."""

    sessions: tuple[()]


@dataclass(frozen=True)
class _Model:
    """A model's shape as arrays over its layers, and which versions of schema and agent described it."""

    shape: ModelShape
    schema_version: int
    agent_version: str

    @cached_property
    def blocks(self) -> list[int]:
        return [layer.block for layer in self.shape.layers]

    @cached_property
    def n_experts(self) -> NDArray[np.int64]:
        return np.array([layer.n_experts for layer in self.shape.layers], np.int64)

    @cached_property
    def top_k(self) -> NDArray[np.int64]:
        return np.array([layer.top_k for layer in self.shape.layers], np.int64)

    @cached_property
    def may_route_fewer(self) -> NDArray[np.bool_]:
        return np.array([self.shape.may_route_fewer(layer) for layer in self.shape.layers], np.bool_)


@lru_cache(maxsize=32)
def _model_of(head: bytes) -> _Model | None:
    """The model that an upload's first bytes describe, if they are in order."""
    raw = head + _SESSIONS + b"]}"
    try:
        parsed = _Head.model_validate_json(raw)
        require_single_keys(raw, parsed)
    except (ValidationError, RequestError):
        return None
    shape = parsed.model
    if shape.core_bytes + shape.expert_bytes_total > MAX_COUNT:
        return None
    return _Model(shape, parsed.schema_version, parsed.agent_version)


def _expected_skeleton(sessions: Sequence[Any], n_layers: int) -> bytes | None:
    """What remains of canonical sessions without digits and commas, or None where no such sessions could be meant.

    A valid JSON text with this skeleton has the canonical members in the canonical order, each once, no white space,
    no escapes, no sign, fraction or exponent, no true or false: it is the canonical text, byte for byte, and every
    number in it is a whole one of at least 0.
    """
    skeletons = []
    for session in sessions:
        if not isinstance(session, dict):
            return None
        session_hash, workload = session.get("session_hash"), session.get("workload")
        if not isinstance(session_hash, str) or not _HASH.fullmatch(session_hash):
            return None
        if not isinstance(workload, str) or not _WORKLOAD.fullmatch(workload):
            return None
        names = [session_hash, workload]
        live = session.get("live")
        profile = live.get("profile") if isinstance(live, dict) else None
        if isinstance(profile, dict):
            of, revision = profile.get("workload"), profile.get("revision")
            if not isinstance(of, str) or not _WORKLOAD.fullmatch(of):
                return None
            if not isinstance(revision, str) or not _HASH.fullmatch(revision):
                return None
            names += [of, revision]
        kind = _Kind(
            n_layers=n_layers,
            prefill=session.get("prefill") is not None,
            decode=session.get("decode") is not None,
            held_out=split_of(session_hash) == "held_out",
            live=live is not None,
            profile=isinstance(profile, dict),
        )
        first, *others = _skeleton(kind)
        skeletons.append(first)
        for name, skeleton in zip(names, others, strict=True):
            skeletons += [_without_numbers(name), skeleton]
    return b"".join([*skeletons, b"]}"])


def _without_numbers(text: str) -> bytes:
    return text.encode().translate(None, _NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What of a session is there."""

    n_layers: int
    prefill: bool
    decode: bool
    held_out: bool
    live: bool
    profile: bool


@lru_cache(maxsize=256)
def _skeleton(kind: _Kind) -> tuple[bytes, ...]:
    """A session's skeleton, from the schema itself, in pieces.

    Between them belong its hash, its workload, and the workload and revision of the profile that it ran with.
    """
    phase = PhaseHistogram.model_construct(
        tokens=0, layers=(LayerCounts.model_construct(block=0, tokens=0, counts=()),) * kind.n_layers
    )
    profile = LiveProfile.model_construct(workload="%", revision="%", vram_budget_bytes=0) if kind.profile else None
    live = LiveMisses.model_construct(selections=0, cold_hits=0, resident_bytes=0, profile=profile)
    session = SessionHistogram.model_construct(
        session_hash="%",
        split="held_out" if kind.held_out else "calibration",
        workload="%",
        prefill=phase if kind.prefill else None,
        decode=phase if kind.decode else None,
        reuse=(LayerReuse.model_construct(block=0, distances=()),) * kind.n_layers if kind.decode else None,
        live=live if kind.live else None,
    )
    return tuple(_without_numbers(session.model_dump_json()).split(b"%"))


def _session_texts(tail: bytes) -> list[bytes]:
    """The canonical bytes of each session, of sessions whose skeleton was found to be canonical."""
    starts = [match.start() for match in re.finditer(re.escape(_SESSION), tail)]
    # A comma separates two sessions, and "]}" ends the last.
    return [tail[start:end] for start, end in zip(starts, [start - 1 for start in starts[1:]] + [-2], strict=True)]


def _read_phases(session: dict[str, Any], model: _Model) -> tuple[PackedPhase, ...] | None:
    phases = []
    for phase in ("prefill", "decode"):
        if session[phase] is None:
            continue
        read = _read_phase(phase, session, model)
        if read is None:
            return None
        phases.append(read)
    return tuple(phases) or None


def _read_live(session: dict[str, Any], model: _Model) -> LiveMisses | None:
    """What was measured, or None unless every invariant holds; raises as the schema does."""
    if "live" not in session or model.schema_version == 1 or session["decode"] is None:
        return None
    live = LiveMisses.model_validate(session["live"])
    selections = sum(sum(layer["counts"]) for layer in session["decode"]["layers"])
    fits = live.resident_bytes <= model.shape.expert_bytes_total
    return live if live.selections == selections and live.cold_hits <= selections and fits else None


def _read_phase(phase: Phase, session: dict[str, Any], model: _Model) -> PackedPhase | None:
    """One phase, or None unless every invariant of :func:`spark_schemas.invariants.check_session` holds."""
    tokens, layers = session[phase]["tokens"], session[phase]["layers"]
    if not 1 <= tokens <= SAFE_COUNT or [layer["block"] for layer in layers] != model.blocks:
        return None
    layer_tokens = np.array([layer["tokens"] for layer in layers], np.int64)
    fewer = model.may_route_fewer if phase == "prefill" else np.zeros_like(model.may_route_fewer)
    if np.any(layer_tokens > tokens) or np.any((layer_tokens < tokens) & ~fewer):
        return None
    counts = _flat([layer["counts"] for layer in layers], model.n_experts)
    if counts is None:
        return None
    starts = np.cumsum(model.n_experts) - model.n_experts
    # The largest first: then no sum can overflow.
    if np.any(np.maximum.reduceat(counts, starts) > layer_tokens):
        return None
    selections = np.add.reduceat(counts, starts)
    if np.any(selections != layer_tokens * model.top_k):
        return None
    reuse = None
    if phase == "decode":
        distances = _read_reuse(session["reuse"], counts, selections, model)
        if distances is None:
            return None
        reuse = pack_counts(distances)
    return PackedPhase(phase, tokens, tuple(layer_tokens.tolist()), pack_counts(counts), reuse)


def _read_reuse(
    layers: Sequence[dict[str, Any]], counts: NDArray[np.int64], selections: NDArray[np.int64], model: _Model
) -> NDArray[np.int64] | None:
    if [layer["block"] for layer in layers] != model.blocks:
        return None
    lengths = model.n_experts + 1
    distances = _flat([layer["distances"] for layer in layers], lengths)
    if distances is None or distances.max() > SAFE_COUNT:
        return None
    ends = np.cumsum(lengths)
    touched = np.add.reduceat((counts > 0).astype(np.int64), np.cumsum(model.n_experts) - model.n_experts)
    if np.any(np.add.reduceat(distances, ends - lengths) != selections) or np.any(distances[ends - 1] < touched):
        return None
    return distances


def _flat(layers: Sequence[list[int]], lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if [len(layer) for layer in layers] != lengths.tolist():
        return None
    return np.fromiter(chain.from_iterable(layers), np.int64, int(lengths.sum()))
