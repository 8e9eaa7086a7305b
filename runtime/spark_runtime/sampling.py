"""How the next token is chosen: parameters, and llama.cpp's sampler chain that follows them."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spark_runtime.errors import GrammarError, SamplingError

if TYPE_CHECKING:
    from spark_runtime.llama import LlamaContext

__all__ = ["FollowedGrammar", "Sampler", "Sampling"]

MIN_TEMPERATURE = 1e-4
"""Below it logits divided by the temperature may leave the range of floats, and the likeliest token wins anyway."""
_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp takes a seed of its own for this one."""
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with the OpenAI API's meanings; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    """The so many likeliest tokens alone; 0 is all of them."""
    min_p: float = 0.0
    """Tokens at least so likely, compared with the likeliest."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for every time it was generated."""
    presence_penalty: float = 0.0
    """Taken from a token's logit once it was generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens, by id."""
    grammar: str | None = None
    """GBNF with the root rule ``root``, which the text has to follow."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, after biases and penalties."""
        return self.temperature < MIN_TEMPERATURE

    def check(self, n_vocab: int) -> None:
        """Raise :class:`SamplingError` for what llama.cpp could not sample with."""
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise SamplingError(f"{name}: found {value}, expected a finite number")
        for token, bias in self.logit_bias:
            if not 0 <= token < n_vocab:
                raise SamplingError(f"logit_bias: found token {token}, expected 0 to {n_vocab - 1}")
            if math.isnan(bias) or bias == math.inf:
                raise SamplingError(f"logit_bias: found {bias} for token {token}, expected a finite number")


class FollowedGrammar(Protocol):
    """A grammar on its way through a text.

    Its methods are generators that yield while they wait; each may raise :class:`GrammarError`.
    """

    @property
    def waits(self) -> bool:
        """Whether going on would only yield again."""

    def opened(self) -> Generator[None, None, None]:
        """Wait until it can be followed."""

    def allows(self, token: int) -> Generator[None, None, bool]:
        """Whether a token may come next."""

    def allowed(self) -> Generator[None, None, NDArray[np.bool_]]:
        """Whether each token of the vocabulary may come next."""

    def accept(self, token: int) -> Generator[None, None, None]:
        """Go on by a token that may come next."""

    def close(self) -> None:
        """Free it."""


class Sampler:
    """Chooses the tokens of one generation. The caller closes it."""

    def __init__(
        self, context: LlamaContext, sampling: Sampling, *, penalty_tokens: int, grammar: FollowedGrammar | None = None
    ) -> None:
        """``penalty_tokens``: how many of the newest tokens penalties look at.

        Raises :class:`SamplingError` for parameters that make no sense.
        """
        sampling.check(context.n_vocab)
        self._context = context
        self._grammar = grammar
        self._chain = _chain(context.llama, sampling, context.n_vocab, penalty_tokens)
        self._logits: NDArray[np.float32] | None = None
        self._forced: deque[int] = deque()
        self._begun = False
        """Whether the first of what was forced has been chosen."""
        self._candidates = np.zeros(context.n_vocab if grammar is not None else 0, dtype=_CANDIDATE)

    @property
    def waits(self) -> bool:
        """Whether a grammar has not answered yet: going on with a generator of this one would only yield again."""
        return self._grammar is not None and self._grammar.waits

    def ready(self) -> Generator[None, None, None]:
        """Yields until the first token can be chosen; raises :class:`GrammarError`."""
        if self._grammar is not None:
            yield from self._grammar.opened()

    def choosing(self) -> Generator[None, None, int]:
        """Choose the next token by the logits of the last computed one, as they are at the first step.

        Yields while a grammar is waited for; others may compute meanwhile.
        """
        accept = self._context.llama.llama_sampler_accept
        if self._grammar is None:
            if not self._forced:
                return self._context.sample(self._chain)
            token = self._forced.popleft()
            accept(self._chain, token)
            return token
        # As a first try may well follow the grammar, it alone is looked at; the distribution is the same.
        self._logits = logits = self._context.logits()
        token = self._forced[0] if self._forced else self._drawn(logits)
        if self._forced and (yield from self._grammar.allows(token)):
            self._forced.popleft()
            self._begun = True
        elif self._forced:
            # Not here: what has begun is left as it is, what has not is tried again after the next token.
            if self._begun:
                self._forced.clear()
            token = self._drawn(logits)
        if not (yield from self._grammar.allows(token)):
            logits = np.where((yield from self._grammar.allowed()), logits, -np.inf)
            if not np.isfinite(logits.max()):
                raise GrammarError("the grammar allows no token to go on with", "check that its rules can be completed")
            token = self._drawn(logits)
        yield from self._grammar.accept(token)
        accept(self._chain, token)
        return token

    def force(self, tokens: Sequence[int]) -> None:
        """Choose these next, as far as a grammar allows them, whatever the logits say."""
        self._forced, self._begun = deque(tokens), False

    def logits(self) -> NDArray[np.float32]:
        """What the last token was chosen by, ``[n_vocab]``, before any parameter and any grammar."""
        return self._context.logits() if self._logits is None else self._logits

    def _drawn(self, logits: NDArray[np.float32]) -> int:
        llama, found = self._context.llama, self._candidates
        found["id"], found["logit"], found["p"] = np.arange(len(found)), logits, 0
        array = llama.llama_token_data_array(
            data=ctypes.cast(found.ctypes.data, ctypes.POINTER(llama.llama_token_data)),
            size=len(found),
            selected=-1,
            sorted=False,
        )
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(found["id"][array.selected])

    def close(self) -> None:
        """Free it; safe to call twice."""
        if self._chain is not None:
            self._context.llama.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar is not None:
            self._grammar.close()


def _chain(llama: Any, sampling: Sampling, n_vocab: int, penalty_tokens: int) -> Any:
    """In the order of llama.cpp's own tools: biases, penalties, top_k, top_p, min_p, temperature."""
    params = llama.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = llama.llama_sampler_chain_init(params)

    def add(sampler: Any) -> None:
        llama.llama_sampler_chain_add(chain, sampler)

    if sampling.logit_bias:
        biases = (llama.llama_logit_bias * len(sampling.logit_bias))(*sampling.logit_bias)
        add(llama.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
    if sampling.frequency_penalty or sampling.presence_penalty:
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        add(llama.llama_sampler_init_penalties(n_vocab, penalty_tokens, 1.0, frequency, presence))
    if sampling.is_greedy:
        add(llama.llama_sampler_init_greedy())
        return chain
    if sampling.top_k > 0:
        add(llama.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1.0:
        add(llama.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        add(llama.llama_sampler_init_min_p(sampling.min_p, 1))
    add(llama.llama_sampler_init_temp(sampling.temperature))
    seed = _RANDOM_SEED if sampling.seed is None else sampling.seed % _RANDOM_SEED
    add(llama.llama_sampler_init_dist(seed))
    return chain
