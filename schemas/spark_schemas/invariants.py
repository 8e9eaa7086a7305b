"""What must hold for every histogram, checked by the agent before it keeps one and by the service at the door."""

from __future__ import annotations

from collections.abc import Sequence

from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.live import LiveMisses
from spark_schemas.model import ExpertLayer, ModelShape
from spark_schemas.split import split_of

__all__ = ["InvariantError", "check_session", "check_upload"]


class InvariantError(ValueError):
    """A histogram that cannot be true: names the field, what was found and what was expected."""

    def __init__(self, field: str, found: str, expected: str) -> None:
        super().__init__(f"{field}: found {found}, expected {expected}")
        self.field = field
        self.found = found
        self.expected = expected


def check_upload(upload: HistogramUpload) -> None:
    """Check every session of an upload against its model; raise :class:`InvariantError` at the first fault."""
    for index, session in enumerate(upload.sessions):
        field = f"sessions[{index}]"
        if session.live is not None and upload.schema_version == 1:
            raise InvariantError(f"{field}.live", "present in schema_version 1", "absent, or schema_version 2")
        check_session(session, upload.model, field=field)


def check_session(session: SessionHistogram, model: ModelShape, field: str = "session") -> None:
    """Check one session's counts against the model's shape.

    Every block's sum is its routed tokens times its top-k; ids are in range; no expert is chosen more often than
    there were tokens; all blocks route all tokens (the last one may route fewer in prefill).
    """
    expected_split = split_of(session.session_hash)
    if session.split != expected_split:
        raise InvariantError(f"{field}.split", session.split, f"{expected_split}, the split of this session hash")
    if session.prefill is None and session.decode is None:
        raise InvariantError(field, "neither prefill nor decode", "at least one phase")
    if session.prefill is not None:
        _check_phase(session.prefill, model, f"{field}.prefill", last_may_route_fewer=True)
    if session.decode is not None:
        _check_phase(session.decode, model, f"{field}.decode", last_may_route_fewer=False)
    if (session.reuse is None) != (session.decode is None):
        found = "absent" if session.reuse is None else "present"
        raise InvariantError(f"{field}.reuse", found, "present exactly when decode is")
    if session.reuse is not None and session.decode is not None:
        _check_reuse(session.reuse, session.decode, model, f"{field}.reuse")
    if session.live is not None:
        _check_live(session.live, session.decode, model, f"{field}.live")


def _check_blocks(parts: Sequence[LayerCounts] | Sequence[LayerReuse], model: ModelShape, field: str) -> None:
    found = [part.block for part in parts]
    expected = [layer.block for layer in model.layers]
    if found != expected:
        raise InvariantError(field, f"blocks {found}", f"the model's blocks with experts, in order: {expected}")


def _check_phase(phase: PhaseHistogram, model: ModelShape, field: str, *, last_may_route_fewer: bool) -> None:
    _check_blocks(phase.layers, model, f"{field}.layers")
    if phase.tokens == 0:
        raise InvariantError(f"{field}.tokens", "0", "at least 1, or the phase left out")
    for index, (part, layer) in enumerate(zip(phase.layers, model.layers, strict=True)):
        where = f"{field}.layers[{index}]"
        fewer_allowed = last_may_route_fewer and model.may_route_fewer(layer)
        if part.tokens > phase.tokens or (part.tokens < phase.tokens and not fewer_allowed):
            bound = "at most" if fewer_allowed else "exactly"
            raise InvariantError(f"{where}.tokens", str(part.tokens), f"{bound} the phase's {phase.tokens}")
        _check_counts(part, layer, where)


def _check_counts(part: LayerCounts, layer: ExpertLayer, where: str) -> None:
    if len(part.counts) != layer.n_experts:
        raise InvariantError(f"{where}.counts", f"{len(part.counts)} entries", f"n_experts = {layer.n_experts}")
    total = sum(part.counts)
    if total != part.tokens * layer.top_k:
        raise InvariantError(f"{where}.counts", f"sum {total}", f"tokens x top_k = {part.tokens} x {layer.top_k}")
    highest = max(part.counts)
    if highest > part.tokens:
        expert = part.counts.index(highest)
        raise InvariantError(f"{where}.counts[{expert}]", str(highest), f"at most the {part.tokens} routed tokens")


def _check_reuse(reuse: Sequence[LayerReuse], decode: PhaseHistogram, model: ModelShape, field: str) -> None:
    _check_blocks(reuse, model, field)
    for index, (part, counts, layer) in enumerate(zip(reuse, decode.layers, model.layers, strict=True)):
        where = f"{field}[{index}].distances"
        if len(part.distances) != layer.n_experts + 1:
            raise InvariantError(where, f"{len(part.distances)} entries", f"n_experts + 1 = {layer.n_experts + 1}")
        total, selections = sum(part.distances), sum(counts.counts)
        if total != selections:
            raise InvariantError(where, f"sum {total}", f"the block's {selections} decode selections")
        touched = sum(1 for count in counts.counts if count)
        # More than that in a merged histogram: each of its parts started with an empty memory.
        if part.distances[-1] < touched:
            found = f"{part.distances[-1]} first selections"
            raise InvariantError(f"{where}[-1]", found, f"at least one for each of the {touched} experts seen")


def _check_live(live: LiveMisses, decode: PhaseHistogram | None, model: ModelShape, field: str) -> None:
    if decode is None:
        raise InvariantError(field, "present", "absent without decode")
    selections = sum(sum(layer.counts) for layer in decode.layers)
    if live.selections != selections:
        raise InvariantError(f"{field}.selections", str(live.selections), f"the session's {selections} in decode")
    if live.cold_hits > live.selections:
        raise InvariantError(f"{field}.cold_hits", str(live.cold_hits), f"at most the {live.selections} selections")
    if live.resident_bytes > model.expert_bytes_total:
        expected = f"at most the {model.expert_bytes_total} of all experts"
        raise InvariantError(f"{field}.resident_bytes", str(live.resident_bytes), expected)
