"""A loaded llama.cpp model with one context: tokens in, logits out.

Thin over llama-cpp-python's low-level bindings, because its high-level class owns the context parameters that the
collector and the tiered backend have to set.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from spark_runtime.errors import ClosedError, ContextFullError, DecodeError, GivenUpError, UnsupportedModelError
from spark_runtime.ggml import LOG_CALLBACK, complaints, ggml_base
from spark_runtime.huge_pages import HugePages
from spark_runtime.prompt_tokens import SpecialToken
from spark_runtime.tap import Tap

__all__ = ["ComputeOptions", "LlamaContext", "LoadOptions", "bindings", "context_tokens"]

_PIECE_BYTES = 256
_KEPT_TOKENS = 8192
"""Of which the text, and whether they end an answer, are remembered, 2 MB: asking llama.cpp each time takes longer."""
_DECODE_NO_SLOT = 1
_LOAD_MODE_NONE = 0
_CONTEXT_GRAIN = 256
"""llama.cpp rounds each sequence's tokens up to a multiple."""


@functools.cache
def bindings() -> ModuleType:
    """Import llama-cpp-python's low-level module, with its log going to ours."""
    ggml_base()  # refuses any version whose structures we do not know, before anything of it runs
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(ctypes.cast(LOG_CALLBACK, llama_cpp.llama_log_callback), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


def context_tokens(n_ctx: int, n_seq_max: int) -> int:
    """What to ask llama.cpp for, which divides it among the sequences, so that each has ``n_ctx`` tokens."""
    return n_ctx if n_seq_max == 1 else (n_ctx + -n_ctx % _CONTEXT_GRAIN) * n_seq_max


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """In what portions a model computes, and what becomes of its weights: what every way of loading one has."""

    n_ubatch: int = 0
    """Tokens of a prompt that are computed at once, at most ``n_batch``; 0 takes that."""
    n_seq_max: int = 1
    """Sequences (conversations) that the context holds at once, each of ``n_ctx`` tokens with their own memory."""
    n_outputs_max: int = 0
    """Most logits that one call asks for, which bounds the memory for them; 0 takes ``n_batch``."""
    repack: bool = True
    """Let the CPU rearrange weights for faster kernels, which round differently; never where a proxy computes."""
    mapped: bool = True
    """Use weights that stay in host memory from the mapped file; else copy them (pinned, beside a GPU)."""
    cpu_expert_blocks: int = 0
    """The experts of so many first blocks stay with the CPU: llama.cpp's own ``--n-cpu-moe``. Not with tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(ComputeOptions):
    """Where llama.cpp puts a model, and how it computes."""

    n_gpu_layers: int = 0
    devices: Sequence[int] = ()
    """Addresses of ggml devices to use in place of llama.cpp's choice."""
    loaded: Callable[[], None] = lambda: None
    """Called between the model and its context, to take memory before the context does."""
    wanted: Callable[[], bool] | None = None
    """Asked while weights are read, tensor by tensor, and before each later step: whether to go on. What it raises ends
    the loading."""

    @classmethod
    def of(cls, options: ComputeOptions, n_gpu_layers: int) -> Self:
        """What loads a model so that it computes as ``options`` say."""
        shared = {field.name: getattr(options, field.name) for field in fields(ComputeOptions)}
        return cls(n_gpu_layers=n_gpu_layers, **shared)


def _check_wanted(path: Path, options: LoadOptions) -> None:
    if options.wanted is not None and not options.wanted():
        raise GivenUpError(f"loading {path.name} was given up")


class _BufferOverride(ctypes.Structure):
    """``struct llama_model_tensor_buft_override``: where tensors go whose names match."""

    _fields_: ClassVar = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def _experts_on_cpu(blocks: int) -> ctypes.Array[_BufferOverride]:
    """The list, which ends with an empty entry and has to live until the model is loaded."""
    cpu = ggml_base().ggml_backend_cpu_buffer_type
    cpu.restype = ctypes.c_void_p
    numbers = "|".join(map(str, range(blocks)))
    pattern = rf"blk\.({numbers})\.ffn_(up|down|gate|gate_up)_(ch|)exps".encode()
    return (_BufferOverride * 2)(_BufferOverride(pattern, cpu()))


class LlamaContext:
    """One model and one context. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int,
        n_batch: int,
        n_threads: int,
        n_gpu_layers: int = 0,
        tap: Tap | None = None,
        options: LoadOptions | None = None,
    ):
        """Load ``path``; raise :class:`UnsupportedModelError` with llama.cpp's own reason when it refuses."""
        self._llama = bindings()
        self._tap = tap  # the context calls into it until it is freed
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None
        self._pieces = functools.lru_cache(_KEPT_TOKENS)(self._piece)
        self._ends = functools.lru_cache(_KEPT_TOKENS)(self._is_end)
        self.n_batch = n_batch
        self._n_outputs = 0
        options = options or LoadOptions(n_gpu_layers=n_gpu_layers)
        # Tiers and drivers see to their own memory.
        memory = HugePages() if not options.n_gpu_layers and not options.devices else None
        self._load(path, options, memory)
        try:
            _check_wanted(path, options)
            options.loaded()
            _check_wanted(path, options)
        except BaseException:
            self.close()
            raise
        self._open(path, n_ctx, n_batch, n_threads, options)
        if memory is not None:
            memory.ask()
        self._open_vocab = self._llama.llama_model_get_vocab(self._model)
        self.n_vocab: int = self._llama.llama_vocab_n_tokens(self._vocab)
        # llama.cpp rounds up; what was asked for is what placement and memory were planned with.
        self.n_ctx: int = min(n_ctx, self._llama.llama_n_ctx_seq(self._context))

    def _load(self, path: Path, options: LoadOptions, memory: HugePages | None) -> None:
        params = self._llama.llama_model_default_params()
        waiting = [memory] if memory is not None else []
        faults: list[BaseException] = []

        def loads(_share: float, _data: object) -> bool:
            try:
                # Called first when there is memory for all weights, and nothing in it.
                while waiting:
                    waiting.pop().ask()
                _check_wanted(path, options)
                return True
            except BaseException as error:
                faults.append(error)  # llama.cpp, who called, knows no exceptions
                return False

        if memory is not None or options.wanted is not None:
            params.progress_callback = type(params.progress_callback)(loads)
        params.n_gpu_layers = options.n_gpu_layers
        params.use_extra_bufts = options.repack
        if not options.mapped:
            params.load_mode = _LOAD_MODE_NONE
        overrides = _experts_on_cpu(options.cpu_expert_blocks)
        if options.cpu_expert_blocks:
            params.tensor_buft_overrides = ctypes.addressof(overrides)
        # The list ends with a null pointer and is read before the call returns.
        devices = (ctypes.c_void_p * (len(options.devices) + 1))(*options.devices, None)
        if options.devices:
            params.devices = ctypes.cast(devices, ctypes.c_void_p)
        with complaints() as log:
            self._model = self._llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            if faults:
                raise faults[0]
            raise UnsupportedModelError(f"llama.cpp cannot load {path.name}: {_reason(log)}", _hint(log))

    def _open(self, path: Path, n_ctx: int, n_batch: int, n_threads: int, options: LoadOptions) -> None:
        params = self._llama.llama_context_default_params()
        params.n_ctx, params.n_batch = context_tokens(n_ctx, options.n_seq_max), n_batch
        params.n_ubatch = min(options.n_ubatch or n_batch, n_batch)
        params.n_seq_max = options.n_seq_max
        # Apart from each other, what one sequence computes does not depend on what others hold.
        params.kv_unified = False
        # llama.cpp reserves for a token of every sequence, at least.
        outputs = max(options.n_outputs_max, options.n_seq_max) if options.n_outputs_max else 0
        params.n_outputs_max = min(outputs, n_batch)
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
                "try a smaller context, or keep fewer experts resident",
            )
        if not self._llama.llama_get_memory(self._context):
            self.close()
            raise UnsupportedModelError(
                f"{path.name} does not write one token after another: it encodes texts or fills them in",
                "Spark runs models that generate text; use llama.cpp's own tools for this one",
            )
        self._make_batch(n_batch)

    def _make_batch(self, n_batch: int) -> None:
        """A batch over arrays, as filling those takes less time than going through ctypes."""
        self._batch_tokens = np.zeros(n_batch, dtype=np.int32)
        self._batch_positions = np.zeros(n_batch, dtype=np.int32)
        self._batch_sequences = np.zeros(n_batch, dtype=np.int32)
        self._batch_outputs = np.zeros(n_batch, dtype=np.int8)
        self._batch_ones = np.ones(n_batch, dtype=np.int32)
        first = self._batch_sequences.ctypes.data
        self._batch_pointers = np.arange(first, first + 4 * n_batch, 4, dtype=np.uintp)
        kinds = dict(self._llama.llama_batch._fields_)

        def pointer(name: str, array: NDArray[Any]) -> Any:
            return ctypes.cast(array.ctypes.data, kinds[name])

        self._batch = self._llama.llama_batch(
            token=pointer("token", self._batch_tokens),
            pos=pointer("pos", self._batch_positions),
            n_seq_id=pointer("n_seq_id", self._batch_ones),
            seq_id=pointer("seq_id", self._batch_pointers),
            logits=pointer("logits", self._batch_outputs),
        )

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if self._context:
            self._llama.llama_free(self._context)
        if self._model:
            self._llama.llama_model_free(self._model)
        self._batch = self._context = self._model = None
        self._pieces.cache_clear()
        self._ends.cache_clear()

    def _require_open(self) -> None:
        if self._context is None:
            raise ClosedError("the model is closed", "load it again")

    @property
    def _alive(self) -> Any:
        self._require_open()
        return self._context

    @property
    def llama(self) -> ModuleType:
        """llama.cpp's functions, for what works on this context."""
        return self._llama

    @property
    def _vocab(self) -> Any:
        return self._open_vocab if self._alive else None

    def decode(self, tokens: Sequence[int], position: int, *, all_outputs: bool, sequence: int = 0) -> None:
        """Compute up to ``n_batch`` tokens from ``position`` on; logits for the last one, or for all of them."""
        self._require_open()  # the batch is gone with it
        count = len(tokens)
        self._batch.n_tokens = count
        self._batch_tokens[:count] = tokens
        self._batch_positions[:count] = np.arange(position, position + count)
        self._batch_sequences[:count] = sequence
        self._batch_outputs[:count] = all_outputs
        self._batch_outputs[count - 1] = 1
        self._n_outputs = count if all_outputs else 1
        self._run(count, position)

    def decode_sequences(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Compute tokens of several sequences in one batch: ``(token, position, sequence)`` each; logits for all."""
        self._require_open()
        self._batch.n_tokens = self._n_outputs = len(rows)
        count = len(rows)
        self._batch_tokens[:count] = [row[0] for row in rows]
        self._batch_positions[:count] = [row[1] for row in rows]
        self._batch_sequences[:count] = [row[2] for row in rows]
        self._batch_outputs[:count] = 1
        self._run(count, rows[0][1])

    def _run(self, count: int, position: int) -> None:
        with complaints() as log:
            status = self._llama.llama_decode(self._alive, self._batch)
        if self._tap is not None:
            self._tap.check()
        if status == _DECODE_NO_SLOT:
            raise ContextFullError(
                f"{position + count} tokens do not fit the context of {self.n_ctx}", "shorten it or raise --ctx"
            )
        if status != 0:
            raise DecodeError(f"llama.cpp failed with status {status} at token {position}: {_reason(log)}")

    def synchronize(self) -> None:
        """Wait until everything asked for is computed."""
        self._llama.llama_synchronize(self._alive)

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """A copy of a token's logits, ``[n_vocab]``: of the last one, or by its place in the last call."""
        pointer = self._llama.llama_get_logits_ith(self._alive, index)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def all_logits(self) -> NDArray[np.float32]:
        """A copy of all logits of the last call, ``[n_tokens, n_vocab]``, or ``[1, n_vocab]`` if it asked for one."""
        pointer = self._llama.llama_get_logits(self._alive)
        return np.ctypeslib.as_array(pointer, (self._n_outputs, self.n_vocab)).copy()

    def sample(self, sampler: Any) -> int:
        """Draw a token from the last logits."""
        return int(self._llama.llama_sampler_sample(sampler, self._alive, -1))

    def forget_from(self, position: int, sequence: int = 0) -> bool:
        """Drop a sequence from a position on; ``False`` when this kind of memory cannot be cut there."""
        memory = self._llama.llama_get_memory(self._alive)
        return bool(self._llama.llama_memory_seq_rm(memory, sequence, position, -1))

    def forget(self, sequence: int) -> None:
        """Drop a whole sequence."""
        self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._alive), sequence, -1, -1)

    def copy(self, source: int, target: int) -> None:
        """Make a sequence, which must be empty, hold what another one does. Done with the next decode call."""
        memory = self._llama.llama_get_memory(self._alive)
        self._llama.llama_memory_seq_cp(memory, source, target, -1, -1)

    def forget_all(self) -> None:
        """Empty the memory."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._alive), False)

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

    def special_tokens(self) -> list[SpecialToken]:
        """Every token that is looked for as text; see :class:`spark_runtime.prompt_tokens.Vocabulary`."""
        llama, vocab = self._llama, self._vocab
        if llama.llama_vocab_type(vocab) not in {llama.LLAMA_VOCAB_TYPE_SPM, llama.LLAMA_VOCAB_TYPE_BPE}:
            return []
        special = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_USER_DEFINED | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        strips = llama.LLAMA_TOKEN_ATTR_LSTRIP | llama.LLAMA_TOKEN_ATTR_RSTRIP
        attributes = map(llama.llama_vocab_get_attr, itertools.repeat(vocab), range(self.n_vocab))
        return [
            SpecialToken(token, llama.llama_vocab_get_text(vocab, token), bool(attribute & strips))
            for token, attribute in enumerate(attributes)
            if attribute & special
        ]

    @property
    def ends_prompts(self) -> bool:
        """Whether ``add_special`` adds a token at the end of a text."""
        return bool(
            self._llama.llama_vocab_get_add_eos(self._vocab) or self._llama.llama_vocab_get_add_sep(self._vocab)
        )

    def piece(self, token: int) -> bytes:
        """Bytes of a token, empty for control tokens."""
        return self._pieces(token)

    def _piece(self, token: int) -> bytes:
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
        return self._ends(token)

    def _is_end(self, token: int) -> bool:
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    def special_text(self, which: str) -> str:
        """Text of the vocabulary's ``bos`` or ``eos`` token, empty if it has none."""
        token = getattr(self._llama, f"llama_vocab_{which}")(self._vocab)
        if token < 0:
            return ""
        text: bytes = self._llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    def chat_template(self, name: str | None = None) -> str | None:
        """The chat template stored in the model, if any; some models have further ones, by name."""
        which = None if name is None else name.encode()
        template: bytes | None = self._llama.llama_model_chat_template(self._model, which) if self._alive else None
        return template.decode(errors="replace") if template else None


def _hint(log: Sequence[str]) -> str:
    if any("alloc" in line for line in log):
        return "there is not enough memory for it: free some, try a smaller context, or keep fewer experts resident"
    return "the installed llama-cpp-python may be older than this model's architecture, or the file is damaged"


def _reason(log: Sequence[str]) -> str:
    return log[0].split(": ", 1)[-1] if log else "it gives no reason"
