"""A model of a given MoE shape with random weights, written in seconds: for measuring speed where no trained model is.

Usage: big_model.py OUT.gguf [--layers 48] [--experts 128] … The defaults are the shape of Qwen3-30B-A3B in Q4_K_M's mix
of types (18.3 GB, a smaller vocabulary). Needs the ``gguf`` package.

Blocks of quantised weights are drawn from pools of random valid blocks. Each matrix of each expert is a stretch of a
pool that begins at an offset of its own, so no two experts are alike, and writing costs a copy.

The router prefers some experts, as trained ones do on one kind of traffic: all tokens share a direction, and each
router row holds some of it (its expert's popularity) beside its own noise. ``--skew`` is the size of popularity over
that of the noise: larger means fewer cold hits at every residency. A share ``--preferred`` of each layer's experts is
popular to different degrees, the others are all alike: larger means more cold hits where few experts are resident.
The defaults give about 2 cold hits a token with 60% of the experts resident and 5.5 with 31% (512-token prompt, 300
random tokens, scored policy with a calibrated prior). Trained models can have many more: this is a load for measuring
speed, and tier_speed.py reports the cold hits beside it.

With random routers nothing tells what the next layer selects. ``--router-share`` is the part of a router row's variance
that all blocks' routers have in common, expert by expert: since the stream changes little from block to block, what one
layer selects then tells something of the next, as in trained models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Types = gguf.GGMLQuantizationType

BLOCK = 256
"""Weights of one block, for all types used here."""
POOL_BLOCKS = 2**18
_Q4_K_BYTES, _Q6_K_BYTES = 144, 210
_Q4_K_UNIT = float(np.sqrt((np.arange(64.0) ** 2).mean() * ((np.arange(16) - 7.5) ** 2).mean()))
_Q6_K_UNIT = float(np.sqrt((np.arange(-8.0, 8.0) ** 2).mean() * ((np.arange(64.0) - 32) ** 2).mean()))
"""Standard deviations of a random block's weights whose super-block scale is 1."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and statistics of the model; every field is a command-line option."""

    layers: int = 48
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    expert_width: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_size: int = 128
    vocabulary: int = 32768
    context: int = 40960
    skew: float = 2.4
    preferred: float = 0.38
    shared_share: float = 0.5
    """Share of the embedding's variance that all tokens have in common."""
    attention_gain: float = 0.2
    expert_gain: float = 0.1
    """Root mean squares that one block's attention (of one token) and experts add to a stream of 1."""
    router_share: float = 0.0
    """Part of the routers' own variance that all blocks have in common."""
    seed: int = 0


class Pools:
    """Random valid blocks of each type, scaled to a standard deviation on the way out."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._blocks = {Types.Q4_K: _q4_k_blocks(rng), Types.Q6_K: _q6_k_blocks(rng)}
        self._scaled: dict[tuple[Types, float], Bytes] = {}
        self._used: dict[Types, set[int]] = {kind: set() for kind in self._blocks}

    def matrices(self, kind: Types, count: int, rows: int, columns: int, deviation: float) -> Bytes:
        """``count`` different matrices, ``[count, rows, bytes of a row]``."""
        if (kind, deviation) not in self._scaled:
            self._scaled[kind, deviation] = _with_scale(self._blocks[kind], kind, deviation)
        blocks = self._scaled[kind, deviation]
        needed = rows * columns // BLOCK
        size = blocks.shape[1]
        result = np.empty((count, needed, size), dtype=np.uint8)
        for matrix in result:
            at, start = 0, self._fresh_offset(kind)
            while at < needed:  # a matrix longer than the pool repeats it
                part = blocks[start : start + needed - at]
                matrix[at : at + len(part)] = part
                at, start = at + len(part), 0
        return result.reshape(count, rows, columns // BLOCK * size)

    def _fresh_offset(self, kind: Types) -> int:
        used = self._used[kind]
        if len(used) >= POOL_BLOCKS // 2:
            raise SystemExit(f"error: more than {POOL_BLOCKS // 2} matrices of one type, make POOL_BLOCKS larger")
        while (offset := int(self._rng.integers(POOL_BLOCKS))) in used:
            pass
        used.add(offset)
        return offset


def _q4_k_blocks(rng: np.random.Generator) -> Bytes:
    """Blocks of 16-bit d and dmin, 12 bytes of 6-bit scales and minima, 128 bytes of 4-bit weights.

    Every minimum equals its scale; with dmin = 7.5 d the weights of each 32 then have mean zero.
    """
    blocks = np.frombuffer(rng.bytes(POOL_BLOCKS * _Q4_K_BYTES), np.uint8).reshape(POOL_BLOCKS, _Q4_K_BYTES).copy()
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    return blocks


def _q6_k_blocks(rng: np.random.Generator) -> Bytes:
    """Blocks of 192 bytes of 6-bit weights, 16 signed 8-bit scales (here -8 to 7), 16-bit d."""
    blocks = np.frombuffer(rng.bytes(POOL_BLOCKS * _Q6_K_BYTES), np.uint8).reshape(POOL_BLOCKS, _Q6_K_BYTES).copy()
    blocks[:, 192:208] = ((blocks[:, 192:208] & 15).astype(np.int8) - 8).view(np.uint8)
    return blocks


def _with_scale(blocks: Bytes, kind: Types, deviation: float) -> Bytes:
    blocks = blocks.copy()
    if kind == Types.Q4_K:
        scale = np.float16(deviation / _Q4_K_UNIT)
        blocks[:, 0:4] = np.frombuffer(np.array([scale, np.float16(7.5) * scale], np.float16).tobytes(), np.uint8)
    else:
        blocks[:, 208:210] = np.frombuffer(np.float16(deviation / _Q6_K_UNIT).tobytes(), np.uint8)
    return blocks


def type_of_more(block: int, n_blocks: int) -> Types:
    """Type of a block's attn_v and down projections in Q4_K_M: six bits in the outer eighths and in every third."""
    eighth = n_blocks // 8
    outer = block < eighth or block >= 7 * n_blocks // 8
    return Types.Q6_K if outer or (block - eighth) % 3 == 2 else Types.Q4_K


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor and how to make its data, made only when it is written. ``shape`` is in weights, slowest first."""

    name: str
    shape: tuple[int, ...]
    kind: Types
    make: Callable[[], NDArray[np.generic]]


def tensors_of(recipe: Recipe) -> Iterator[Tensor]:
    """The tensors of a qwen3moe in the order of the file."""
    rng = np.random.default_rng(recipe.seed)
    pools = Pools(rng)
    common, damping = common_direction(recipe.hidden, rng)
    in_common = np.random.default_rng([recipe.seed, 1]).standard_normal((recipe.experts, recipe.hidden))

    def vector(name: str, values: NDArray[np.float32]) -> Tensor:
        return Tensor(name, values.shape, Types.F32, lambda: values)

    def ones(name: str, size: int) -> Tensor:
        return vector(name, np.ones(size, np.float32))

    def quantised(name: str, kind: Types, rows: int, columns: int, gain: float = 1.0, count: int = 1) -> Tensor:
        shape = (count, rows, columns) if count > 1 else (rows, columns)
        deviation = float(gain / np.sqrt(columns))

        def make() -> Bytes:
            data = pools.matrices(kind, count, rows, columns, deviation)
            return data if count > 1 else data[0]

        return Tensor(name, shape, kind, make)

    def embedding() -> NDArray[np.float16]:
        own = rng.standard_normal((recipe.vocabulary, recipe.hidden), dtype=np.float32)
        own *= np.float32(np.sqrt(1 - recipe.shared_share))
        own += np.float32(np.sqrt(recipe.shared_share)) * common
        return own.astype(np.float16)

    def router(block: int) -> NDArray[np.float32]:
        popularity = rng.permutation(popularities(recipe.experts, recipe.preferred))
        noise = rng.standard_normal((recipe.experts, recipe.hidden))
        if recipe.router_share:
            noise = np.sqrt(1 - recipe.router_share) * noise + np.sqrt(recipe.router_share) * in_common
        noise -= np.outer(noise @ common, common) / recipe.hidden
        # Of one length, or experts that are meant to be alike would not be.
        noise *= np.sqrt(recipe.hidden) / np.linalg.norm(noise, axis=1, keepdims=True)
        strength = recipe.skew * own_over_common(recipe, block) / np.sqrt(recipe.hidden)
        rows: NDArray[np.float64] = (noise + strength * np.outer(popularity, common)) / np.sqrt(recipe.hidden)
        return (rows / damping).astype(np.float32)

    hidden, width, experts = recipe.hidden, recipe.expert_width, recipe.experts
    queries, keys = recipe.heads * recipe.head_size, recipe.kv_heads * recipe.head_size
    yield Tensor("token_embd.weight", (recipe.vocabulary, hidden), Types.F16, embedding)
    yield ones("output_norm.weight", hidden)
    yield quantised("output.weight", Types.Q6_K, recipe.vocabulary, hidden)
    for block in range(recipe.layers):
        prefix, more = f"blk.{block}.", type_of_more(block, recipe.layers)
        yield vector(f"{prefix}attn_norm.weight", damping)
        yield vector(f"{prefix}ffn_norm.weight", damping)
        yield ones(f"{prefix}attn_q_norm.weight", recipe.head_size)
        yield ones(f"{prefix}attn_k_norm.weight", recipe.head_size)
        yield quantised(f"{prefix}attn_q.weight", Types.Q4_K, queries, hidden)
        yield quantised(f"{prefix}attn_k.weight", Types.Q4_K, keys, hidden)
        yield quantised(f"{prefix}attn_v.weight", more, keys, hidden)
        yield quantised(f"{prefix}attn_output.weight", Types.Q4_K, hidden, queries, recipe.attention_gain)
        yield Tensor(f"{prefix}ffn_gate_inp.weight", (experts, hidden), Types.F32, partial(router, block))
        yield quantised(f"{prefix}ffn_gate_exps.weight", Types.Q4_K, width, hidden, count=experts)
        yield quantised(f"{prefix}ffn_up_exps.weight", Types.Q4_K, width, hidden, count=experts)
        # silu(gate) * up of unit inputs has a root mean square of 0.6; top-k experts are averaged.
        gain = recipe.expert_gain * recipe.top_k**0.5 / 0.6
        yield quantised(f"{prefix}ffn_down_exps.weight", more, hidden, width, gain, count=experts)


def common_direction(hidden: int, rng: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What all tokens share, ``[hidden]`` with a root mean square of 1, and the weights of the norms that hide it.

    It lies in a few large dimensions, as in trained models. Norms damp these, and the router's weights undo that: so
    attention and experts see a token's own part, and what they add does not shift the popularity of later experts.
    """
    few = hidden // 16
    common = np.zeros(hidden, np.float32)
    common[:few] = rng.choice([-4.0, 4.0], few)
    damping = np.ones(hidden, np.float32)
    damping[:few] = 1 / 32
    return common, damping


def popularities(experts: int, preferred: float) -> NDArray[np.float64]:
    """Evenly spread normal values, of which the lower share is raised to the lowest of the ``preferred``."""
    normal = NormalDist()
    values = np.array([normal.inv_cdf((expert + 0.5) / experts) for expert in range(experts)])
    return np.maximum(values, normal.inv_cdf(1 - preferred)) if preferred < 1 else values


def own_over_common(recipe: Recipe, block: int) -> float:
    """Deviation of a token's own part of the stream over that of the common part, as it enters a block's router.

    Blocks add to the own part only, so popularity has to grow with depth for all layers to be alike.
    """
    own, common = 1 - recipe.shared_share, recipe.shared_share
    for _ in range(block):
        # An expert's output is about quadratic in its input, which norms make the own part's share of the stream.
        own += (recipe.expert_gain * own / (own + common)) ** 2
    return float(np.sqrt(own / common))


def write_model(path: Path, recipe: Recipe, tokenizer_of: Path | None = None) -> None:
    """Write the model, one tensor in memory at a time, with the tokenizer and chat template of another file if any."""
    for size in (recipe.hidden, recipe.expert_width, recipe.heads * recipe.head_size):
        if size % BLOCK:
            raise SystemExit(f"error: a row of {size} weights, expected a multiple of {BLOCK}")
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name(f"random {recipe.layers}x{recipe.experts} skew {recipe.skew}")
    writer.add_context_length(recipe.context)
    writer.add_embedding_length(recipe.hidden)
    writer.add_block_count(recipe.layers)
    writer.add_feed_forward_length(recipe.expert_width)
    writer.add_expert_feed_forward_length(recipe.expert_width)
    writer.add_head_count(recipe.heads)
    writer.add_head_count_kv(recipe.kv_heads)
    writer.add_key_length(recipe.head_size)
    writer.add_value_length(recipe.head_size)
    writer.add_expert_count(recipe.experts)
    writer.add_expert_used_count(recipe.top_k)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(recipe.vocabulary)
    if tokenizer_of is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        copy_tokenizer(writer, tokenizer_of, recipe.vocabulary)
    tensors = list(tensors_of(recipe))
    for tensor in tensors:
        n_bytes = _n_bytes(tensor)
        raw = tensor.kind if tensor.kind in {Types.Q4_K, Types.Q6_K} else None
        dtype = np.dtype({Types.F32: np.float32, Types.F16: np.float16}.get(tensor.kind, np.uint8))
        shape = (*tensor.shape[:-1], n_bytes // int(np.prod(tensor.shape[:-1]))) if raw else tensor.shape
        writer.add_tensor_info(tensor.name, shape, dtype, n_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
    writer.close()


def copy_tokenizer(writer: gguf.GGUFWriter, source: Path, vocabulary: int) -> None:
    """Copy what a model file says of text; its vocabulary must have the size that the weights are written for."""
    known = gguf.GGUFReader(source).fields
    n_tokens = len(known["tokenizer.ggml.tokens"].data)
    if n_tokens != vocabulary:
        raise SystemExit(
            f"error: {source.name} has {n_tokens} tokens, expected {vocabulary}: pass --vocabulary {n_tokens}"
        )
    for key, value in known.items():
        if key.startswith("tokenizer."):
            inner = value.types[1] if len(value.types) > 1 else None
            writer.add_key_value(key, value.contents(), value.types[0], inner)


def _n_bytes(tensor: Tensor) -> int:
    block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
    return int(np.prod(tensor.shape)) // block * size


def main() -> None:
    """Write the model that the options describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--tokenizer-of", type=Path, help="a model file whose tokenizer and chat template to copy")
    options = vars(parser.parse_args())
    out: Path = options.pop("out")
    tokenizer_of: Path | None = options.pop("tokenizer_of")
    start = time.perf_counter()
    write_model(out, Recipe(**options), tokenizer_of)
    print(f"{out}: {out.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
