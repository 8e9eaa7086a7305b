"""One sequence of a context: its tokens, what of a prompt is computed already, and how it goes on.

Several conversations share a context, and each has its own part of its memory. They compute one after another, never in
one call, so that what one of them gets does not depend on the others, and so that counts can be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from spark_runtime.errors import ContextFullError, DecodeError, TierError
from spark_runtime.sampling import FollowedGrammar, Sampler, Sampling
from spark_runtime.sequences import common_length

if TYPE_CHECKING:
    from spark_runtime.collector import Collector
    from spark_runtime.llama import LlamaContext
    from spark_runtime.tier import Tier
    from spark_runtime.tier_counting import TierCounting
    from spark_schemas.ids import Phase

__all__ = ["Computing", "Conversation"]


POLL_S = 0.001
"""Between two looks whether a grammar has answered."""


class Computing:
    """Decode calls of all conversations: told to who counts, and checked."""

    def __init__(
        self, context: LlamaContext, collector: Collector | TierCounting | None, tier: Tier | None, n_outputs_max: int
    ) -> None:
        self.context = context
        self.collector = collector
        self.tier = tier
        self.most = {"prefill": context.n_batch, "decode": min(n_outputs_max or context.n_batch, context.n_batch)}
        """Most tokens of one call, by phase."""
        self.conversations: list[Conversation] = []

    def decode(self, conversation: Conversation, tokens: Sequence[int], phase: Phase) -> None:
        """Compute tokens at a conversation's end; after an error it holds what it did before, or nothing."""
        if self.collector is not None:
            self.collector.begin()
        if self.tier is not None:
            self.tier.set_phase(phase)
        n_past, sequence = conversation.n_past, conversation.index
        try:
            self.context.decode(tokens, n_past, all_outputs=phase == "decode", sequence=sequence)
            self.check_tier()
            if self.collector is not None:
                self.collector.commit(phase, len(tokens))
        except BaseException:
            # What the context holds beyond the known tokens is undefined after a failed call.
            if not self.context.forget_from(conversation.n_past, sequence):
                conversation.forget()
            self.check_tier()  # knows more of why than llama.cpp's status
            raise

    def check_tier(self) -> None:
        """Raise :class:`TierError` if a step failed, with every conversation forgotten."""
        if self.tier is None:
            return
        try:
            self.tier.check()
        except TierError:
            # A GPU says so when later steps have been taken, of whichever conversation: what they left is undefined.
            self.forget_all()
            raise

    def forget_all(self) -> None:
        """Empty the context."""
        self.context.forget_all()
        for conversation in self.conversations:
            conversation.tokens.clear()


class Conversation:
    """One sequence. Not thread-safe, and only one conversation of a context computes at a time."""

    def __init__(self, computing: Computing, index: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        """What the context holds of it."""
        self.last_use = 0
        """Larger is later."""
        self._computing = computing
        self._context = computing.context

    @property
    def n_past(self) -> int:
        """Tokens in the context."""
        return len(self.tokens)

    def forget(self) -> None:
        """Forget this conversation alone."""
        self._context.forget(self.index)
        self.tokens.clear()

    def copy_of(self, other: Conversation) -> None:
        """Hold what another conversation does."""
        self.forget()
        self._context.copy(other.index, self.index)
        self.tokens = list(other.tokens)

    def check_holds(self, n_past: int) -> None:
        """Raise :class:`DecodeError` if it was forgotten, because another one's step failed."""
        if self.n_past != n_past:
            raise DecodeError("the conversation was forgotten when a step failed", "send it again")

    def feed(
        self,
        tokens: Sequence[int],
        phase: Phase,
        *,
        batch: int | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute tokens that are already known, counted as ``phase``.

        In decode every token's experts are computed in every block, as if each had been generated alone; ``batch``
        tokens go at once. ``before_step`` is called before each of these steps; what it raises ends the call with the
        steps so far computed and counted. Raises :class:`ContextFullError` before computing what does not fit.
        """
        if self.n_past + len(tokens) > self._context.n_ctx:
            raise ContextFullError(
                f"{self.n_past + len(tokens)} tokens, but the context holds {self._context.n_ctx}",
                "shorten the conversation or raise --ctx",
            )
        most = self._computing.most[phase]
        step = min(batch or most, most)
        for start in range(0, len(tokens), step):
            before_step()
            part = tokens[start : start + step]
            self._computing.decode(self, part, phase)
            self.tokens.extend(part)

    def begin(self, tokens: Sequence[int]) -> int:
        """Keep what a prompt begins with and forget the rest; return how many tokens that is.

        Fewer than the prompt has, because the last one's logits are needed. Raises :class:`ContextFullError` for a
        prompt that is empty or too long.
        """
        if not tokens:
            raise ContextFullError("an empty prompt", "send at least one token")
        if len(tokens) > self._context.n_ctx:
            raise ContextFullError(
                f"a prompt of {len(tokens)} tokens, but the context holds {self._context.n_ctx}",
                "shorten the conversation or raise --ctx",
            )
        common = min(common_length(self.tokens, tokens), len(tokens) - 1)
        if common < self.n_past:
            if self._context.forget_from(common, self.index):
                del self.tokens[common:]
            else:
                self.forget()
                common = 0
        return common

    def prompt(self, tokens: Sequence[int], *, before_step: Callable[[], None] = lambda: None) -> int:
        """Make the context hold exactly ``tokens``, computing only what differs; return how many were reused.

        The last token is always computed, because its logits are needed. ``before_step`` as in :meth:`feed`.
        """
        common = self.begin(tokens)
        self.feed(tokens[common:], "prefill", before_step=before_step)
        return common

    def sampler(self, sampling: Sampling, grammar: FollowedGrammar | None = None) -> Sampler:
        """Chooses this conversation's tokens; penalties look at all that it generates. The caller closes it."""
        return Sampler(self._context, sampling, penalty_tokens=self._context.n_ctx, grammar=grammar)

    def advance(self, token: int) -> None:
        """Compute a token that was chosen."""
        self._computing.decode(self, (token,), "decode")
        self.tokens.append(token)

    def steps(self, sampler: Sampler, max_tokens: int) -> Iterator[int | None]:
        """Generate after :meth:`prompt`, at most ``max_tokens`` and to the end of the context.

        ``None`` is no token: a grammar is waited for. An ending token is yielded and not computed. Closing the iterator
        stops at once. Between two steps other conversations may compute; raises :class:`DecodeError` when this one was
        forgotten meanwhile.
        """
        for _ in range(max_tokens):
            n_past = self.n_past
            token = yield from sampler.choosing()
            self._computing.check_tier()
            yield token
            if self._context.is_end(token) or n_past >= self._context.n_ctx:
                return
            self.check_holds(n_past)
            self.advance(token)

    def generate(self, sampler: Sampler, max_tokens: int) -> Iterator[int]:
        """:meth:`steps` without those that are no token: a grammar is waited for."""
        for token in self.steps(sampler, max_tokens):
            if token is None:
                time.sleep(POLL_S)
            else:
                yield token
