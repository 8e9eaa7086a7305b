"""Metadata of small models of every mixture-of-experts architecture that llama.cpp can run as a generator of text.

One set of keys serves all: an architecture reads those that it knows. What it needs beyond them is listed here by name.
Left out are architectures whose experts never run (``refact``, whose graph is dense), that do not continue a text
(``llada-moe`` and ``rnd1`` fill texts in, ``llama-embed`` and ``nomic-bert-moe`` encode them, ``dflash`` drafts for
another model), and ``nemotron_h``, which has a loader for experts and no numbers for them: ``nemotron_h_moe`` has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ARCHITECTURES", "FUSED", "ModelSize", "metadata_of"]

HEAD = 64
"""Size of an attention head."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What all architectures share. Rows of 256 weights are what K-quants need, in both directions."""

    embedding: int = 256
    width: int = 256
    """Of one expert and of dense feed-forward blocks."""
    experts: int = 32
    """With 4 of them chosen, 60% and 31% of the experts and the fewest slots that can be are three numbers."""
    top_k: int = 4
    vocabulary: int = 128
    context: int = 1024
    latent: int = 512
    """Compressed keys and values; 512 is what GPU kernels are made for."""

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.embedding // HEAD


Changes = Callable[[ModelSize], Mapping[str, Any]]


def metadata_of(architecture: str, size: ModelSize) -> dict[str, Any]:
    """Metadata without the architecture's prefix; a list of 64-bit numbers comes as a pair with its type's name.

    An architecture that is not listed takes the common keys alone.
    """
    return _common(size) | dict(ARCHITECTURES.get(architecture, _plain)(size))


def _common(size: ModelSize) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "context_length": size.context,
        "embedding_length": size.embedding,
        "block_count": 3,
        "leading_dense_block_count": 1,
        "feed_forward_length": size.width,
        "logit_scale": 1.0,
        "full_attention_interval": 2,
        "attention.head_count": size.heads,
        "attention.head_count_kv": size.heads,
        "attention.clamp_kqv": 1.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": 2,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": size.latent,
        "attention.scale": 0.125,
        "attention.indexer.block_size": 4,
        "attention.indexer.local_blocks": 1,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "rope.dimension_sections": [HEAD // 4] * 4,
        "rope.freq_base_swa": 10000.0,
        "expert_feed_forward_length": size.width,
        "expert_shared_feed_forward_length": size.width // 2,
        "expert_chunk_feed_forward_length": size.width // 2,
        "expert_latent_length": size.width,
        "interleave_moe_layer_step": 2,
        "expert_count": size.experts,
        "expert_used_count": size.top_k,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_group_scale": 1.0,
        "expert_weights_scale": 1.0,
        "experts_per_group": 1,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "ssm.inner_size": 256,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 2,
        "ssm.group_count": 2,
        "kda.head_dim": 128,
        "kda.gate_lower_bound": -5.0,
        "shortconv.l_cache": 3,
    }


def _plain(_size: ModelSize) -> Mapping[str, Any]:
    return {}


def _latent(size: ModelSize) -> dict[str, Any]:
    """Attention with a compressed cache (MLA)."""
    rope, key, value = (64, 192, 128) if size.latent == 512 else (32, 64, 32)
    return {
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "attention.key_length": size.latent + rope,
        "attention.value_length": size.latent,
        "rope.dimension_count": rope,
        "attention.key_length_mla": key,
        "attention.value_length_mla": value,
    }


def _sparse(size: ModelSize) -> dict[str, Any]:
    """The same, and a cached index by which tokens are chosen (DSA): all of them, so that no tie decides a result."""
    return _latent(size) | {
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,
    }


def _hybrid(size: ModelSize) -> dict[str, Any]:
    """A block without heads is recurrent."""
    heads = [size.heads, 0, size.heads]
    inner = {"ssm.inner_size": 2 * size.embedding}
    return {"attention.head_count": heads, "attention.head_count_kv": heads} | inner


def _latent_hybrid(size: ModelSize) -> dict[str, Any]:
    return _latent(size) | {"attention.head_count": [1, 0, 1], "attention.head_count_kv": [1, 0, 1]}


def _windowed(_size: ModelSize) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": [0, 1, 0]}


def _bailingmoe3(size: ModelSize) -> dict[str, Any]:
    clamps = {"swiglu_clamp_exp": [0.0, 4.0, 4.0], "swiglu_clamp_shexp": [0.0, 5.0, 5.0]}
    rope = _latent(size)["rope.dimension_count"]
    sections = {"rope.dimension_sections": [rope // 8, 3 * rope // 16, 3 * rope // 16, 0]}
    return _latent_hybrid(size) | clamps | sections


def _deepseek4(size: ModelSize) -> dict[str, Any]:
    return {
        "block_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD // 2,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,
        "attention.output_group_count": size.heads,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 0, 4, 128],
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
    }


def _dots3note(size: ModelSize) -> dict[str, Any]:
    latent = _latent(size)
    window = {
        f"attention.{name}_swa": latent[f"attention.{name}"]
        for name in ("key_length", "value_length", "key_length_mla", "value_length_mla")
    }
    types = {"attention.kv_lora_rank_swa": size.latent, "attention.indexer.types": [1, 0, 1]}
    return _sparse(size) | _windowed(size) | window | types


def _gemma4(size: ModelSize) -> dict[str, Any]:
    return _windowed(size) | {
        "embedding_length_per_layer_input": size.embedding // 2,
        "attention.shared_kv_layers": 0,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.key_length_swa": HEAD,
        "attention.value_length_swa": HEAD,
    }


def _glm5_next(size: ModelSize) -> dict[str, Any]:
    heads = {"attention.head_count": 1, "attention.head_count_kv": [1, 0, 1]}
    pool = {"attention.indexer.kpool": 4, "attention.indexer.kpool_select_tail": True}
    # Nothing of a key is rotated here, so the cache holds the compressed part alone.
    no_rope = {"rope.dimension_count": 0, "attention.key_length": size.latent}
    return _sparse(size) | heads | pool | no_rope


def _hy_v4(size: ModelSize) -> dict[str, Any]:
    return _sparse(size) | {
        "hyper_connection.magnitude": 2.0,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_norm": True,
        "attention.indexer.types": [1, 0, 1],
    }


def _kimi_k3(size: ModelSize) -> dict[str, Any]:
    activation = {"activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0}
    return _latent_hybrid(size) | activation | {"attn_res.block_size": 12}


def _minimax_m3(size: ModelSize) -> dict[str, Any]:
    return {
        "rope.dimension_count": HEAD // 2,
        "attention.indexer.head_count": size.heads,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,
    }


def _nemotron_h_moe(size: ModelSize) -> dict[str, Any]:
    """One recurrent block, one with attention, two with experts that differ in how many are chosen."""
    heads = size.heads
    return {
        "block_count": 4,
        "attention.head_count": [heads, 0, heads, heads],
        "attention.head_count_kv": [heads, 0, 0, 0],
        "feed_forward_length": [0, 0, size.width, size.width],
        "expert_used_count": [0, 0, size.top_k, size.top_k + 1],
    }


def _qwen4exp(size: ModelSize) -> dict[str, Any]:
    ngram, heads_per_ngram = 3, 2
    heads = (ngram - 1) * heads_per_ngram
    return {
        "hyper_connection.low_rank": 8,
        "attention.compress_ratios": [4, 4, 4],
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": HEAD,
        "attention.indexer.top_k": 131072,
        "embedding_length_per_layer_input": size.embedding // heads,
        "ple.layers": [0],
        "ple.ngram_size": ngram,
        "ple.heads_per_ngram": heads_per_ngram,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 0,
        "ple.layer_multipliers": ("uint64", [1, 3, 5]),
        "ple.head_offsets": ("uint64", [size.vocabulary * head for head in range(heads)]),
        "ple.head_vocab_sizes": ("uint64", [size.vocabulary] * heads),
    }


_PLAIN = [
    "afmoe",
    "arctic",
    "bailingmoe",
    "bailingmoe2",
    "cohere2moe",
    "dbrx",
    "deepseek",
    "dots1",
    "exaone-moe",
    "glm4moe",
    "gpt-oss",
    "granite",
    "granitemoe",
    "grok",
    "grovemoe",
    "hunyuan-moe",
    "hy_v3",
    "laguna",
    "llama",
    "mellum",
    "minicpm",
    "minimax-01",
    "minimax-m2",
    "mistral3",
    "olmoe",
    "phimoe",
    "qwen2moe",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
    "smallthinker",
]

ARCHITECTURES: Mapping[str, Changes] = dict.fromkeys(_PLAIN, _plain) | {
    "bailingmoe3": _bailingmoe3,
    "deepseek2": _latent,
    "deepseek2-ocr": _plain,
    "deepseek32": _sparse,
    "deepseek4": _deepseek4,
    "dots3note": _dots3note,
    "ernie4_5-moe": lambda _size: {"interleave_moe_layer_step": 1},
    "gemma4": _gemma4,
    "glm-dsa": _sparse,
    "glm5-next": _glm5_next,
    "granite_swa": _windowed,
    "granitehybrid": _hybrid,
    "hy_v4": _hy_v4,
    "jamba": _hybrid,
    "kimi-k3": _kimi_k3,
    "kimi-linear": _latent_hybrid,
    "lfm2moe": _hybrid,
    "llama4": lambda _size: {"block_count": 4},
    "maple": lambda size: _windowed(size) | {"swiglu_clamp_exp": 7.0},
    "mimo2": _windowed,
    "minimax-m3": _minimax_m3,
    "mistral4": _latent,
    "nemotron_h_moe": _nemotron_h_moe,
    "qwen4exp": _qwen4exp,
    "step35": _windowed,
}
"""What each architecture needs beyond the common keys."""

FUSED = frozenset(
    [
        "cohere2moe",
        "deepseek2",
        "deepseek2-ocr",
        "gemma4",
        "granite_swa",
        "hy_v3",
        "mistral4",
        "qwen35moe",
        "qwen3next",
        "qwen4exp",
    ]
)
"""Those that read gate and up as one tensor, and as two from older files."""
