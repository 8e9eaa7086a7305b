"""A loaded llama.cpp model with one context: tokens in, logits out.

Thin over llama-cpp-python's low-level bindings, because its high-level class owns the context parameters that the
collector and the tiered backend have to set.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_runtime.errors import ContextFullError, DecodeError, UnsupportedModelError
from spark_runtime.ggml import LOG_CALLBACK, complaints, ggml_base
from spark_runtime.tap import Tap

__all__ = ["LlamaContext", "bindings"]

_PIECE_BYTES = 256
_DECODE_NO_SLOT = 1


@functools.cache
def bindings() -> ModuleType:
    """Import llama-cpp-python's low-level module, with its log going to ours."""
    ggml_base()  # refuses any version whose structures we do not know, before anything of it runs
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(ctypes.cast(LOG_CALLBACK, llama_cpp.llama_log_callback), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


class LlamaContext:
    """One model and one context of one sequence. Not thread-safe."""

    def __init__(self, path: Path, *, n_ctx: int, n_batch: int, n_threads: int, n_gpu_layers: int, tap: Tap | None):
        """Load ``path``; raise :class:`UnsupportedModelError` with llama.cpp's own reason when it refuses."""
        self._llama = bindings()
        self._tap = tap  # the context calls into it until it is freed
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        self.n_batch = n_batch
        self._load(path, n_gpu_layers)
        self._open(path, n_ctx, n_batch, n_threads)
        self._vocab = self._llama.llama_model_get_vocab(self._model)
        self.n_vocab: int = self._llama.llama_vocab_n_tokens(self._vocab)
        # llama.cpp rounds up; what was asked for is what placement and memory were planned with.
        self.n_ctx: int = min(n_ctx, self._llama.llama_n_ctx(self._context))

    def _load(self, path: Path, n_gpu_layers: int) -> None:
        params = self._llama.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        with complaints() as log:
            self._model = self._llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise UnsupportedModelError(
                f"llama.cpp cannot load {path.name}: {_reason(log)}",
                "the installed llama-cpp-python may be older than this model's architecture, or the file is damaged",
            )

    def _open(self, path: Path, n_ctx: int, n_batch: int, n_threads: int) -> None:
        params = self._llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_batch, 1
        params.n_threads = params.n_threads_batch = n_threads
        params.no_perf = True
        if self._tap is not None:
            params.cb_eval = ctypes.cast(self._tap.callback, type(params.cb_eval))
            params.cb_eval_user_data = self._tap.user_data
        with complaints() as log:
            self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise UnsupportedModelError(
                f"llama.cpp cannot open {path.name} with a context of {n_ctx} tokens: {_reason(log)}",
                "try a smaller context",
            )
        if not self._llama.llama_get_memory(self._context):
            self.close()
            raise UnsupportedModelError(
                f"{path.name} does not write one token after another: it encodes texts or fills them in",
                "Spark runs models that generate text; use llama.cpp's own tools for this one",
            )
        self._batch = self._llama.llama_batch_init(n_batch, 0, 1)
        for index in range(n_batch):
            self._batch.n_seq_id[index] = 1
            self._batch.seq_id[index][0] = 0
        # Views of the batch's own memory, made once: making one takes longer than filling it for a single token.
        self._batch_tokens = np.ctypeslib.as_array(self._batch.token, (n_batch,))
        self._batch_positions = np.ctypeslib.as_array(self._batch.pos, (n_batch,))
        self._batch_outputs = np.ctypeslib.as_array(self._batch.logits, (n_batch,))

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if self._batch is not None:
            self._llama.llama_batch_free(self._batch)
        if self._context:
            self._llama.llama_free(self._context)
        if self._model:
            self._llama.llama_model_free(self._model)
        self._batch = self._context = self._model = None

    def decode(self, tokens: Sequence[int], position: int, *, all_outputs: bool) -> None:
        """Compute up to ``n_batch`` tokens from ``position`` on; logits for the last one, or for all of them."""
        count = len(tokens)
        self._batch.n_tokens = count
        self._batch_tokens[:count] = tokens
        self._batch_positions[:count] = np.arange(position, position + count)
        self._batch_outputs[:count] = all_outputs
        self._batch_outputs[count - 1] = 1
        with complaints() as log:
            status = self._llama.llama_decode(self._context, self._batch)
        if self._tap is not None:
            self._tap.check()
        if status == _DECODE_NO_SLOT:
            raise ContextFullError(
                f"{position + count} tokens do not fit the context of {self.n_ctx}", "shorten it or raise --ctx"
            )
        if status != 0:
            raise DecodeError(f"llama.cpp failed with status {status} at token {position}: {_reason(log)}")

    def logits(self) -> NDArray[np.float32]:
        """A copy of the last token's logits, ``[n_vocab]``."""
        pointer = self._llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def sample(self, sampler: Any) -> int:
        """Draw a token from the last logits."""
        return int(self._llama.llama_sampler_sample(sampler, self._context, -1))

    def forget_from(self, position: int) -> bool:
        """Drop the memory from a position on; ``False`` when this kind of memory cannot be cut there."""
        memory = self._llama.llama_get_memory(self._context)
        return bool(self._llama.llama_memory_seq_rm(memory, 0, position, -1))

    def forget_all(self) -> None:
        """Empty the memory."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), False)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text; ``parse_special`` reads markers such as ``<|im_start|>`` as tokens."""
        raw = text.encode()
        capacity = len(raw) + 8
        for _ in range(2):
            buffer = (self._llama.llama_token * capacity)()
            count = self._llama.llama_tokenize(self._vocab, raw, len(raw), buffer, capacity, add_special, parse_special)
            if count >= 0:
                return list(buffer[:count])
            capacity = -count
        raise DecodeError(f"llama.cpp cannot tokenise a text of {len(raw)} bytes")

    def piece(self, token: int) -> bytes:
        """Bytes of a token, empty for control tokens."""
        capacity = _PIECE_BYTES
        for _ in range(2):
            buffer = ctypes.create_string_buffer(capacity)
            count = self._llama.llama_token_to_piece(self._vocab, token, buffer, capacity, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            capacity = -count
        raise DecodeError(f"llama.cpp cannot spell token {token}")

    def is_end(self, token: int) -> bool:
        """Whether a token ends generation (end of text, end of turn)."""
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    def special_text(self, which: str) -> str:
        """Text of the vocabulary's ``bos`` or ``eos`` token, empty if it has none."""
        token = getattr(self._llama, f"llama_vocab_{which}")(self._vocab)
        if token < 0:
            return ""
        text: bytes = self._llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    def chat_template(self) -> str | None:
        """The chat template stored in the model, if any."""
        template: bytes | None = self._llama.llama_model_chat_template(self._model, None)
        return template.decode(errors="replace") if template else None


def _reason(log: Sequence[str]) -> str:
    return log[0].split(": ", 1)[-1] if log else "it gives no reason"
