"""What a session missed while it ran with its experts in tiers: measured, where a histogram alone can only predict."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spark_schemas.base import Schema
from spark_schemas.ids import MAX_COUNT, Count, Revision
from spark_schemas.mix import ProfileName

__all__ = ["LiveMisses", "LiveProfile"]


class LiveProfile(Schema):
    """The placement manifest that a session's slots were started from and primed by."""

    workload: ProfileName
    """What its profile is of, a workload or a mix; the session itself may be counted under another."""
    revision: Revision
    """Of the profile."""
    vram_budget_bytes: Count
    """That the manifest was asked for."""


class LiveMisses(Schema):
    """Cold hits of a histogram's decode selections, all of them under one placement and the scored policy.

    The slots held at the session's start whatever earlier sessions had left there: what is measured is how an agent
    runs, not a fresh start.
    """

    selections: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Equal to the sum of the decode counts beside it."""
    cold_hits: Count
    """Selections whose expert was not in video memory."""
    resident_bytes: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Of the experts that the slots have room for; at most all of the model's."""
    profile: LiveProfile | None
    """``None``: started from the first experts of each layer, without a prior."""
