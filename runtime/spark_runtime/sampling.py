"""How the next token is chosen, as llama.cpp's sampler chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spark_runtime.errors import GrammarError

__all__ = ["Sampling"]


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

    def build(self, llama: Any, vocabulary: Any) -> Any:
        """A new sampler chain; the caller frees it with ``llama_sampler_free``."""
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if self.grammar is not None:
            follower = llama.llama_sampler_init_grammar(vocabulary, self.grammar.encode(), b"root")
            if not follower:
                llama.llama_sampler_free(chain)
                raise GrammarError("llama.cpp cannot read the grammar")
            llama.llama_sampler_chain_add(chain, follower)
        if self.temperature <= 0.0:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_greedy())
            return chain
        if self.top_p < 1.0:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(self.top_p, 1))
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(self.temperature))
        seed = llama.LLAMA_DEFAULT_SEED if self.seed is None else self.seed & 0xFFFFFFFF
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(seed))
        return chain
