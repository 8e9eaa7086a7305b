"""Which hidden states of a layer are kept beside its selections."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["HIDDEN_KINDS", "HiddenKind"]

HiddenKind = Literal["input", "router"]
"""``input``: the residual stream where the block starts, before its attention norm. ``router``: what the router reads,
after attention."""
HIDDEN_KINDS: tuple[HiddenKind, ...] = get_args(HiddenKind)
