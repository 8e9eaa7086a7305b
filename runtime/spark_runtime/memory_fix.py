"""The smallest change that makes a plan fit. Pure.

Each fix alone is enough and was tried. What the command itself can change comes first, ordered by how much of it is
given up; more memory comes last, because only the person can find it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["CONTEXT_STEP", "SMALLEST_UBATCH", "Fix", "Shortage", "context_and_batch_fixes", "memory_fix", "memory_text"]

CONTEXT_STEP = 256
"""llama.cpp rounds contexts up to this many tokens."""
SMALLEST_UBATCH = 32
"""Below it a prompt is computed hardly faster than one token after another."""

_MIB = 2**20


class Shortage(NamedTuple):
    """What one device, or the host, lacks."""

    device: str
    free_bytes: int
    """To be freed; 0 where only the budget is too small."""
    budget_bytes: int = 0
    """The budget that is needed; 0 where it is large enough, or there is none."""


@dataclass(frozen=True, slots=True)
class Fix:
    """One change. Only the fields of its kind are set."""

    kind: Literal["slots", "n_ctx", "n_ubatch", "n_ctx and n_ubatch", "memory"]
    text: str
    """For a person, as an order."""
    n_ctx: int = 0
    n_ubatch: int = 0
    slots: tuple[int, ...] = ()
    """Slots of every layer."""
    shortages: tuple[Shortage, ...] = ()


def memory_fix(shortages: Sequence[Shortage]) -> Fix:
    """More memory, wherever some is missing."""
    orders: list[str] = []
    for shortage in shortages:
        if shortage.budget_bytes:
            orders.append(f"allow {memory_text(shortage.budget_bytes)} on {shortage.device}")
        if shortage.free_bytes:
            orders.append(f"free {memory_text(shortage.free_bytes)} on {shortage.device}")
    return Fix("memory", " and ".join(orders), shortages=tuple(shortages))


def context_and_batch_fixes(fits: Callable[[int, int], bool], n_ctx: int, n_ubatch: int) -> list[Fix]:
    """Shorter contexts and smaller batches that fit; both at once only where neither alone does.

    ``fits(n_ctx, n_ubatch)`` may be slow: it is asked about ten times, never twice the same.
    """
    ask = functools.cache(fits)
    batches = _smaller_batches(n_ubatch)
    context = _longest_context(lambda tokens: ask(tokens, n_ubatch), n_ctx)
    batch = next((size for size in batches if ask(n_ctx, size)), None)
    fixes: list[tuple[float, Fix]] = []
    if context is not None:
        fixes.append((n_ctx / context, Fix("n_ctx", f"use a context of {context} tokens", n_ctx=context)))
    if batch is not None:
        fixes.append((n_ubatch / batch, Fix("n_ubatch", f"use a batch of {batch} tokens", n_ubatch=batch)))
    if not fixes and batches:
        context = _longest_context(lambda tokens: ask(tokens, batches[-1]), n_ctx)
        if context is not None:
            text = f"use a context of {context} tokens and a batch of {batches[-1]}"
            return [Fix("n_ctx and n_ubatch", text, n_ctx=context, n_ubatch=batches[-1])]
    return [fix for _, fix in sorted(fixes, key=lambda entry: entry[0])]


def memory_text(n_bytes: int) -> str:
    """A size for a message, rounded up, so that so much is enough."""
    if n_bytes < _MIB:
        return f"{-(-n_bytes // 1024)} KiB"
    if n_bytes < 10 * 1024 * _MIB:
        return f"{-(-n_bytes // _MIB)} MiB"
    return f"{math.ceil(n_bytes / (1024 * _MIB) * 10) / 10:.1f} GiB"


def _smaller_batches(n_ubatch: int) -> list[int]:
    """Powers of two below a batch, the largest first."""
    exponents = range((n_ubatch - 1).bit_length() - 1, SMALLEST_UBATCH.bit_length() - 2, -1)
    return [1 << exponent for exponent in exponents]


def _longest_context(fits: Callable[[int], bool], n_ctx: int) -> int | None:
    """The longest shorter context that fits, by bisection: what fits, fits shorter as well."""
    low, high = 0, (n_ctx - 1) // CONTEXT_STEP  # in steps; none of them is known to fit yet
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * CONTEXT_STEP):
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP or None
