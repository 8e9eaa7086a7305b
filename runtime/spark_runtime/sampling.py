"""How the next token is chosen, as llama.cpp's sampler chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with the OpenAI API's meanings; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def build(self, llama: Any) -> Any:
        """A new sampler chain; the caller frees it with ``llama_sampler_free``."""
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if self.temperature <= 0.0:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_greedy())
            return chain
        if self.top_p < 1.0:
            llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(self.top_p, 1))
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(self.temperature))
        seed = llama.LLAMA_DEFAULT_SEED if self.seed is None else self.seed & 0xFFFFFFFF
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(seed))
        return chain
