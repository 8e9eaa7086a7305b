"""One engine for everything that computes: serving, recording, measuring.

It owns the context's tokens (so a prompt that continues the last one computes only what is new), says which phase a
token belongs to, and hands every successful decode call to the collector.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from spark_runtime.collector import Collector
from spark_runtime.errors import ContextFullError, InstallationError
from spark_runtime.gguf_file import read_gguf
from spark_runtime.llama import LlamaContext, bindings
from spark_runtime.model_shape import shape_of
from spark_runtime.native_tap import NativeTap, native_library
from spark_runtime.sampling import Sampling
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tap import EvalTap
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape

__all__ = ["Engine", "EngineOptions", "context_for", "default_context"]

MAX_DEFAULT_CONTEXT = 8192
"""Models are trained for up to a million tokens; a context nobody asked for should not eat the memory of experts."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is opened."""

    n_ctx: int = 0
    """Context, tokens; 0 takes :func:`default_context`."""
    n_batch: int = 512
    n_threads: int = 0
    """0 takes the cores this process may use."""
    n_gpu_layers: int = -1
    """Layers on the GPU where llama.cpp has one; -1 is all of them."""
    count_routing: bool = True
    native: bool = True
    """Count in native code where it can be built, which costs next to nothing."""


class Engine:
    """A model that generates and counts its routing. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        context: LlamaContext,
        shape: ModelShape,
        collector: Collector | None,
        *,
        on_gpu: bool,
        native_fault: InstallationError | None,
    ) -> None:
        self.shape = shape
        self.n_ctx = context.n_ctx
        self.on_gpu = on_gpu
        self.native_fault = native_fault
        """Why counting goes through Python, which is slower; ``None`` when it does not."""
        self._context = context
        self._collector = collector
        self._tokens: list[int] = []

    @classmethod
    def load(cls, path: Path, options: EngineOptions | None = None) -> Self:
        """Read the shape, then load the model; errors as ``model_shape.shape_of`` and ``LlamaContext``."""
        options = options or EngineOptions()
        model = read_gguf(path)
        shape = shape_of(model)
        collector = Collector(shape) if options.count_routing else None
        tap, native_fault = _tap_for(collector, native=options.native)
        resolved = replace(
            options,
            n_ctx=context_for(shape, options.n_ctx),
            n_threads=options.n_threads or len(os.sched_getaffinity(0)),
        )
        on_gpu = resolved.n_gpu_layers != 0 and bool(bindings().llama_supports_gpu_offload())
        context = LlamaContext(
            model.path,  # the first file of a split model, whichever was named
            n_ctx=resolved.n_ctx,
            n_batch=min(resolved.n_batch, resolved.n_ctx),
            n_threads=resolved.n_threads,
            n_gpu_layers=resolved.n_gpu_layers if on_gpu else 0,
            tap=tap,
        )
        if tap is not None:
            _learn_graph(context, tap)
        return cls(context, shape, collector, on_gpu=on_gpu, native_fault=native_fault)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; safe to call twice."""
        self._context.close()

    @contextmanager
    def counting(self, session: SessionCounts | None) -> Iterator[None]:
        """Add what is selected inside the block to a session."""
        if self._collector is None:
            yield
            return
        previous, self._collector.session = self._collector.session, session
        try:
            yield
        finally:
            self._collector.session = previous

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; markers inside it are plain text unless ``parse_special``."""
        return self._context.tokenize(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int) -> bytes:
        """Bytes of one token; a character may be spread over several."""
        return self._context.piece(token)

    def is_end(self, token: int) -> bool:
        """Whether a token ends generation."""
        return self._context.is_end(token)

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template."""
        return self._context.chat_template()

    def special_text(self, which: str) -> str:
        """Text of the ``bos`` or ``eos`` token."""
        return self._context.special_text(which)

    @property
    def n_past(self) -> int:
        """Tokens in the context."""
        return len(self._tokens)

    def reset(self) -> None:
        """Forget the conversation."""
        self._context.forget_all()
        self._tokens.clear()

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
        if self.n_past + len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"{self.n_past + len(tokens)} tokens, but the context holds {self.n_ctx}",
                "shorten the conversation or raise --ctx",
            )
        step = min(batch or self._context.n_batch, self._context.n_batch)
        for start in range(0, len(tokens), step):
            before_step()
            self._decode(tokens[start : start + step], phase)

    def _decode(self, tokens: Sequence[int], phase: Phase) -> None:
        if self._collector is not None:
            self._collector.begin()
        try:
            self._context.decode(tokens, self.n_past, all_outputs=phase == "decode")
            if self._collector is not None:
                self._collector.commit(phase, len(tokens))
        except BaseException:
            # What the context holds beyond the known tokens is undefined after a failed call.
            if not self._context.forget_from(self.n_past):
                self.reset()
            raise
        self._tokens.extend(tokens)

    def prompt(self, tokens: Sequence[int], *, before_step: Callable[[], None] = lambda: None) -> int:
        """Make the context hold exactly ``tokens``, computing only what differs; return how many were reused.

        The last token is always computed, because its logits are needed. ``before_step`` as in :meth:`feed`.
        """
        if not tokens:
            raise ContextFullError("an empty prompt", "send at least one token")
        if len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"a prompt of {len(tokens)} tokens, but the context holds {self.n_ctx}",
                "shorten the conversation or raise --ctx",
            )
        common = 0
        for old, new in zip(self._tokens, tokens[:-1], strict=False):
            if old != new:
                break
            common += 1
        if common < self.n_past:
            if self._context.forget_from(common):
                del self._tokens[common:]
            else:
                self.reset()
                common = 0
        self.feed(tokens[common:], "prefill", before_step=before_step)
        return common

    def generate(self, sampling: Sampling, max_tokens: int) -> Iterator[int]:
        """Generate after :meth:`prompt`, at most ``max_tokens`` and to the end of the context.

        An ending token is yielded and not computed. Closing the iterator stops at once.
        """
        sampler = sampling.build(bindings())
        try:
            for _ in range(max_tokens):
                token = self._context.sample(sampler)
                yield token
                if self._context.is_end(token) or self.n_past >= self.n_ctx:
                    return
                self._decode([token], "decode")
        finally:
            bindings().llama_sampler_free(sampler)

    def logits(self) -> NDArray[np.float32]:
        """Logits after the last computed token, ``[n_vocab]``."""
        return self._context.logits()


def _tap_for(
    collector: Collector | None, *, native: bool
) -> tuple[EvalTap | NativeTap | None, InstallationError | None]:
    """The quickest source of selections that this machine can have, and why it is not the native one."""
    if collector is None:
        return None, None
    if not native:
        return EvalTap(collector), None
    try:
        return NativeTap(native_library(), collector), None
    except InstallationError as error:
        return EvalTap(collector), error


def _learn_graph(context: LlamaContext, tap: EvalTap | NativeTap) -> None:
    """Compute one token that nobody sees, so that the tap knows the graph before anything counts."""
    try:
        with tap.learning():
            context.decode([0], 0, all_outputs=False)
        context.forget_all()
    except BaseException:
        context.close()
        raise


def context_for(shape: ModelShape, asked: int) -> int:
    """The context asked for, or :func:`default_context` for 0; raise :class:`ContextFullError` for one too long."""
    if asked > shape.context_length:
        raise ContextFullError(
            f"a context of {asked} tokens, but the model was trained for {shape.context_length}",
            f"pass --ctx {shape.context_length} or less",
        )
    return asked or default_context(shape)


def default_context(shape: ModelShape) -> int:
    """Context when nobody asks for one: as trained, at most :data:`MAX_DEFAULT_CONTEXT` tokens."""
    return min(shape.context_length, MAX_DEFAULT_CONTEXT)
