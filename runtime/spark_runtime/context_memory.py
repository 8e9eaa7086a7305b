"""What a context costs in memory: keys and values per token, and the state of recurrent blocks.

The sizes follow llama.cpp's own caches: 16-bit keys and values over the whole context, 32-bit states. They are upper
bounds: a sliding window may keep less.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from spark_runtime.gguf_file import GgufModel

__all__ = ["kv_bytes_per_token", "state_bytes"]

_KV_BYTES_PER_VALUE = 2
_STATE_BYTES_PER_VALUE = 4
_SHORT_RATIO = 4
"""Tokens to a cached key in those DeepSeek V4 blocks that also choose among keys."""
_BLOCK_PART = re.compile(r"^blk\.(\d+)\.(.+)$")


def kv_bytes_per_token(model: GgufModel, architecture: str, n_blocks: int) -> int:
    """Bytes of keys and values that one token adds, over all blocks that keep them."""
    prefix = f"{architecture}.attention"
    heads = max(model.get_int_per_block(f"{prefix}.head_count", n_blocks, 0))
    heads_kv = model.get_int_per_block(f"{prefix}.head_count_kv", n_blocks, heads)
    head_size = model.get_int(f"{architecture}.embedding_length", 0) // heads if heads else 0
    key = model.get_int(f"{prefix}.key_length", head_size)
    value = model.get_int(f"{prefix}.value_length", head_size)
    if model.get_int(f"{prefix}.key_length_mla", 0):
        value = 0  # multi-head latent attention: values are a part of the cached keys
    # Sparse attention caches one more key per block, by which it chooses tokens.
    indexer = model.get_int(f"{prefix}.indexer.key_length", 0)
    if model.get_int(f"{prefix}.indexer.kpool", 0):
        indexer *= 3  # a gate and a pooled key beside the key itself
    recurrent = _recurrent_values(model, architecture, n_blocks)
    cached = [count for block, count in enumerate(heads_kv) if block not in recurrent]
    return (sum(cached) * (key + value) + len(cached) * indexer) * _KV_BYTES_PER_VALUE


def state_bytes(model: GgufModel, architecture: str, n_blocks: int) -> int:
    """Bytes of one sequence's states in recurrent blocks, however long it is."""
    values = sum(_recurrent_values(model, architecture, n_blocks).values())
    values += _ngram_history(model, architecture) + _compressors(model, architecture, n_blocks)
    return values * _STATE_BYTES_PER_VALUE


def _ngram_history(model: GgufModel, architecture: str) -> int:
    """Convolutions over embeddings of n-grams, in the blocks that add them."""
    prefix = f"{architecture}.ple"
    blocks = model.metadata.get(f"{prefix}.layers", ())
    if not isinstance(blocks, tuple) or not model.get_int(f"{prefix}.heads_per_ngram", 0):
        return 0
    streams = model.get_int(f"{architecture}.hyper_connection.count", 1)
    width = streams * model.get_int(f"{architecture}.embedding_length", 0)
    steps = max(0, model.get_int(f"{prefix}.conv_kernel", 0) - 1)
    # The convolution's steps are as far apart as an n-gram is long.
    return len(blocks) * steps * model.get_int(f"{prefix}.ngram_size", 1) * width


def _compressors(model: GgufModel, architecture: str, n_blocks: int) -> int:
    """Tokens that wait to become one cached key, with their scores: DeepSeek V4 has two kinds of such blocks."""
    if architecture != "deepseek4":
        return 0
    prefix = f"{architecture}.attention"
    key, indexer = model.get_int(f"{prefix}.key_length", 0), model.get_int(f"{prefix}.indexer.key_length", 0)
    ratios = model.get_int_per_block(f"{prefix}.compress_ratios", n_blocks, 0)
    # Of the short kind two groups overlap, each with a key of twice the width, and the index has the same.
    short = 2 * (2 * _SHORT_RATIO) * 2 * (key + indexer)
    return sum(short if ratio == _SHORT_RATIO else 2 * ratio * key for ratio in ratios)


def _recurrent_values(model: GgufModel, architecture: str, n_blocks: int) -> Mapping[int, int]:
    """Numbers that each recurrent block remembers; blocks with a cache of keys are absent."""
    heads_kv = model.get_int_per_block(f"{architecture}.attention.head_count_kv", n_blocks, 1)
    parts_of = _parts_by_block(model)
    sizes: dict[int, int] = {}
    for block in range(n_blocks):
        parts = parts_of.get(block, set())
        if heads_kv[block] and "attn_k.weight" in parts:
            continue
        if "shortconv.conv.weight" in parts:
            sizes[block] = _short_convolution(model, architecture)
        elif "ssm_conv1d_q.weight" in parts:
            sizes[block] = _delta_attention(model, architecture)
        elif any(part.startswith("ssm_") for part in parts):
            sizes[block] = _state_space(model, architecture)
        elif {"attn_qkv.weight", "attn_gate.weight"} <= parts and _is_linear(model, architecture, block):
            sizes[block] = _linear_attention(model, architecture)
    return sizes


def _parts_by_block(model: GgufModel) -> dict[int, set[str]]:
    parts: defaultdict[int, set[str]] = defaultdict(set)
    for name in model.tensors:
        if match := _BLOCK_PART.match(name):
            parts[int(match[1])].add(match[2])
    return dict(parts)


def _is_linear(model: GgufModel, architecture: str, block: int) -> bool:
    """Every n-th block attends fully, the others keep a state; other models fuse queries, keys and values as well."""
    interval = model.get_int(f"{architecture}.full_attention_interval", 0)
    return interval > 0 and (block + 1) % interval != 0


def _short_convolution(model: GgufModel, architecture: str) -> int:
    length = model.get_int(f"{architecture}.shortconv.l_cache", 1)
    return model.get_int(f"{architecture}.embedding_length", 0) * max(0, length - 1)


def _state_space(model: GgufModel, architecture: str) -> int:
    prefix = f"{architecture}.ssm"
    inner, state = model.get_int(f"{prefix}.inner_size", 0), model.get_int(f"{prefix}.state_size", 0)
    convolution = max(0, model.get_int(f"{prefix}.conv_kernel", 0) - 1)
    return convolution * (inner + 2 * model.get_int(f"{prefix}.group_count", 0) * state) + state * inner


def _delta_attention(model: GgufModel, architecture: str) -> int:
    """Kimi delta attention: a matrix per head, and the convolutions of queries, keys and values."""
    size = model.get_int(f"{architecture}.kda.head_dim", 0)
    convolution = max(0, model.get_int(f"{architecture}.ssm.conv_kernel", 4) - 1)
    return _heads(model, architecture) * size * (size + 3 * convolution)


def _linear_attention(model: GgufModel, architecture: str) -> int:
    heads = _heads(model, architecture)
    width = model.get_int(f"{architecture}.embedding_length", 0)
    size = model.get_int(f"{architecture}.attention.key_length", width // heads if heads else 0)
    return heads * size * size


def _heads(model: GgufModel, architecture: str) -> int:
    # llama.cpp sizes states by its first block's heads.
    return model.get_int_per_block(f"{architecture}.attention.head_count", 1, 0)[0]
