"""The gate before anything leaves: no upload row stands for fewer than a minimum of tokens.

Sessions (or parts of sessions) below the minimum are merged with others of the same model, workload and side of the
split: counts add up, and the merged row carries the lowest session hash among its parts. That hash is itself one of
the parts', so the row's side, which is a pure function of its hash, is the side of every part: nothing that judges a
profile can slip into building one. What cannot reach the minimum stays here until more sessions come.

A merged row can be deleted from the service only by the hash it carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from spark_schemas.histogram import LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.live import LiveMisses

__all__ = ["MINIMUM_TOKENS", "Countable", "form_groups", "merge_sessions"]

MINIMUM_TOKENS = 2000
"""Tokens, decode and prefill together, that an uploaded row stands for at least."""


class Countable(Protocol):
    """What grouping needs to know about a session of one model."""

    @property
    def session_hash(self) -> str: ...  # noqa: D102

    @property
    def split(self) -> str: ...  # noqa: D102

    @property
    def workload(self) -> str: ...  # noqa: D102

    @property
    def tokens(self) -> int: ...  # noqa: D102


_C = TypeVar("_C", bound=Countable)


def form_groups(sessions: Iterable[_C], minimum_tokens: int) -> tuple[list[list[_C]], list[_C]]:
    """Divide sessions of one model into groups to merge and a rest to hold back.

    A session of at least ``minimum_tokens`` is a group of its own. Smaller ones of the same workload and split are
    taken by session hash, so that parts of one session meet first, until a group has enough.
    """
    groups: list[list[_C]] = []
    held_back: list[_C] = []
    small: dict[tuple[str, str], list[_C]] = {}
    for session in sessions:
        if session.tokens >= minimum_tokens:
            groups.append([session])
        else:
            small.setdefault((session.workload, session.split), []).append(session)
    for _, members in sorted(small.items()):
        group: list[_C] = []
        tokens = 0
        for session in sorted(members, key=lambda member: member.session_hash):
            group.append(session)
            tokens += session.tokens
            if tokens >= minimum_tokens:
                groups.append(group)
                group, tokens = [], 0
        held_back.extend(group)
    return groups, held_back


def merge_sessions(parts: Sequence[SessionHistogram]) -> SessionHistogram:
    """Return the sum of parts of one model, workload and split, whatever their order.

    Raises :class:`ValueError` when the parts do not belong together or there are none.
    """
    if not parts:
        raise ValueError("nothing to merge: found no parts, expected at least one")
    if len(parts) == 1:
        return parts[0]
    kinds = {(part.workload, part.split) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"parts of one merge must share workload and split, found {sorted(kinds)}")
    first = min(parts, key=lambda part: part.session_hash)
    reuse = [part.reuse for part in parts if part.reuse is not None]
    return SessionHistogram(
        session_hash=first.session_hash,
        split=first.split,
        workload=first.workload,
        prefill=_merge_phases([part.prefill for part in parts if part.prefill is not None]),
        decode=_merge_phases([part.decode for part in parts if part.decode is not None]),
        reuse=_merge_reuse(reuse) if reuse else None,
        live=_merge_live([part.live for part in parts if part.decode is not None]),
    )


def _merge_phases(phases: Sequence[PhaseHistogram]) -> PhaseHistogram | None:
    if not phases:
        return None
    return PhaseHistogram(
        tokens=sum(phase.tokens for phase in phases),
        layers=tuple(
            LayerCounts(
                block=_common_block([layer.block for layer in layers]),
                tokens=sum(layer.tokens for layer in layers),
                counts=_sums([layer.counts for layer in layers]),
            )
            for layers in zip(*(phase.layers for phase in phases), strict=True)
        ),
    )


def _merge_reuse(parts: Sequence[tuple[LayerReuse, ...]]) -> tuple[LayerReuse, ...]:
    return tuple(
        LayerReuse(
            block=_common_block([layer.block for layer in layers]),
            distances=_sums([layer.distances for layer in layers]),
        )
        for layers in zip(*parts, strict=True)
    )


def _merge_live(parts: Sequence[LiveMisses | None]) -> LiveMisses | None:
    """The sum where every part with decode was measured under the same placement; else a mean would mix placements."""
    measured = [part for part in parts if part is not None]
    if not measured or len(measured) < len(parts) or len({(one.resident_bytes, one.profile) for one in measured}) != 1:
        return None
    return LiveMisses(
        selections=sum(one.selections for one in measured),
        cold_hits=sum(one.cold_hits for one in measured),
        resident_bytes=measured[0].resident_bytes,
        profile=measured[0].profile,
    )


def _common_block(blocks: Sequence[int]) -> int:
    if len(set(blocks)) != 1:
        raise ValueError(f"parts of one merge must have the same blocks, found {sorted(set(blocks))} side by side")
    return blocks[0]


def _sums(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
