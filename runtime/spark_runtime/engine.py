"""One engine for everything that computes: serving, recording, measuring.

It loads a model in any of the ways there are, and owns the conversations that share its context. Recording and
measuring go through the first of them, whose methods it has itself; serving goes through all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from spark_runtime.collector import Collector
from spark_runtime.conversation import Computing, Conversation
from spark_runtime.devices import registered_devices
from spark_runtime.early_fetch import NO_EARLY_FETCH, EarlyFetch
from spark_runtime.errors import ContextFullError, InstallationError, TierError
from spark_runtime.gguf_file import read_gguf
from spark_runtime.grammar import GrammarHost
from spark_runtime.heap import trim_heaps
from spark_runtime.hidden_kinds import HiddenKind
from spark_runtime.hidden_tap import HiddenTap
from spark_runtime.llama import ComputeOptions, LlamaContext, LoadOptions, bindings
from spark_runtime.model_shape import shape_of
from spark_runtime.native_tap import NativeTap, native_library
from spark_runtime.prompt_tokens import SpecialToken
from spark_runtime.sampling import Sampler, Sampling
from spark_runtime.sequences import Cached, choose_sequence
from spark_runtime.session_counts import SessionCounts
from spark_runtime.tap import EvalTap
from spark_runtime.tier import Tier
from spark_runtime.tier_counting import TierCounting, TierListener, TierTotals
from spark_runtime.tier_loader import load_tiered
from spark_runtime.tier_start import TierStart
from spark_schemas.ids import Phase
from spark_schemas.model import ModelShape

__all__ = ["Engine", "EngineOptions", "context_for", "default_context"]

MAX_DEFAULT_CONTEXT = 8192
"""Models are trained for up to a million tokens; a context nobody asked for should not eat the memory of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(ComputeOptions):
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
    tier: TierStart | None = None
    """Keep experts in slots and the rest in host memory; the slots count by themselves, without a callback."""
    early: EarlyFetch = NO_EARLY_FETCH
    """What of them is fetched before a router has chosen; the output does not depend on it."""
    proxy: bool = False
    """Compute through the tiers' proxy device with nothing tiered: what tiers are compared with."""
    devices: int = 0
    """Devices that llama.cpp spreads the blocks over; 0 takes every GPU, or one device over the CPU."""
    hidden: tuple[HiddenKind, ...] = ()
    """Hidden states that sessions with a trace keep as well, counted in Python. Not with tiers."""


class _ContextArguments(TypedDict):
    n_ctx: int
    n_batch: int
    n_threads: int


class _SequenceArguments(TypedDict):
    n_outputs_max: int
    n_seq_max: int


class Engine:
    """A model that generates and counts its routing. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        path: Path,
        context: LlamaContext,
        shape: ModelShape,
        collector: Collector | TierCounting | None,
        *,
        on_gpu: bool,
        native_fault: InstallationError | None,
        tier: Tier | None = None,
        n_outputs_max: int = 0,
        n_seq_max: int = 1,
    ) -> None:
        self.shape = shape
        self._spelled: dict[int, bytes] = {}
        self.n_ctx = context.n_ctx
        self.n_batch = context.n_batch
        """Most tokens of one decode call."""
        self.n_vocab = context.n_vocab
        self.on_gpu = on_gpu
        self.native_fault = native_fault
        """Why counting goes through Python, which is slower; ``None`` when it does not."""
        self.tier = tier
        """The model's slots; ``None`` when every expert is resident."""
        self.hidden_widths: dict[HiddenKind, list[int]] = {}
        """Values of a token in each layer, by kind of hidden states that are kept."""
        self._context = context
        self._collector = collector
        self._computing = Computing(context, collector, tier, n_outputs_max)
        self.conversations = tuple(Conversation(self._computing, index) for index in range(n_seq_max))
        self._computing.conversations.extend(self.conversations)
        self._first = self.conversations[0]
        self._uses = 0
        self._grammars = GrammarHost(path, context.n_vocab)

    @classmethod
    def load(
        cls, path: Path, options: EngineOptions | None = None, *, wanted: Callable[[], bool] | None = None
    ) -> Self:
        """Read the shape, then load the model; errors as ``model_shape.shape_of`` and ``LlamaContext``.

        ``wanted`` is asked whenever a tensor has been read, and between later steps, on this thread; once it says no,
        that is a :class:`GivenUpError`, and what it raises is raised here.
        """
        options = options or EngineOptions()
        if options.hidden and (options.tier is not None or not options.count_routing):
            raise TierError("hidden states are read while routing is counted without tiers", "load with neither")
        model = read_gguf(path)
        shape = shape_of(model)
        resolved = replace(
            options,
            n_ctx=context_for(shape, options.n_ctx),
            n_threads=options.n_threads or len(os.sched_getaffinity(0)),
        )
        on_gpu = resolved.n_gpu_layers != 0 and bool(bindings().llama_supports_gpu_offload())
        load = replace(LoadOptions.of(resolved, resolved.n_gpu_layers if on_gpu else 0), wanted=wanted)
        of_context: _SequenceArguments = {"n_outputs_max": resolved.n_outputs_max, "n_seq_max": resolved.n_seq_max}
        found = [device.address for device in registered_devices() if device.is_card]
        n_devices = resolved.devices or len(found) or 1
        arguments: _ContextArguments = {
            "n_ctx": resolved.n_ctx,
            "n_batch": min(resolved.n_batch, resolved.n_ctx),
            "n_threads": resolved.n_threads,
        }
        # A split model is loaded by its first file, whichever was named.
        if options.tier is not None:
            context, tier = load_tiered(model.path, shape, options.tier, load, devices=n_devices, **arguments)
            if tier is not None and resolved.early.experts:
                try:
                    tier.set_early(resolved.early)
                except BaseException:
                    tier.close()
                    context.close()
                    raise
            counting = TierCounting(tier) if tier is not None and options.count_routing else None
            return cls(model.path, context, shape, counting, on_gpu=on_gpu, native_fault=None, tier=tier, **of_context)
        collector = Collector(shape) if options.count_routing else None
        tap, native_fault = _tap_for(collector, native=options.native, hidden=options.hidden)
        if options.proxy:
            context, _ = load_tiered(model.path, shape, None, load, devices=n_devices, tap=tap, **arguments)
        else:
            if on_gpu and resolved.devices:
                load = replace(load, devices=found[: resolved.devices])
            context = LlamaContext(model.path, options=load, tap=tap, **arguments)
        if tap is not None:
            _learn_graph(context, tap)
        engine = cls(model.path, context, shape, collector, on_gpu=on_gpu, native_fault=native_fault, **of_context)
        if isinstance(tap, HiddenTap):
            engine.hidden_widths = dict(tap.widths)
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; safe to call twice. A session that is being counted gets what it has so far."""
        try:
            self.count_into(None)
        finally:
            self._grammars.close()
            if self.tier is not None:
                self.tier.close()
            self._context.close()

    def tidy(self) -> None:
        """Give back what is not used: now and then, on the thread that computes, between two steps."""
        self._grammars.tidy()
        trim_heaps()

    def count_into(self, session: SessionCounts | None) -> None:
        """Add what is selected from now on to a session; ``None`` drops it.

        Another session first gets what it has so far, which with tiers reads the devices. That raises
        :class:`RoutingReadError` when it does not add up: its counts are dropped, and counting can go on.
        """
        if self._collector is not None:
            self._collector.session = session

    @contextmanager
    def counting(self, session: SessionCounts | None) -> Iterator[None]:
        """Add what is selected inside the block to a session."""
        if self._collector is None:
            yield
            return
        previous = self._collector.session
        self.count_into(session)
        try:
            yield
        finally:
            self.count_into(previous)

    @property
    def tier_totals(self) -> TierTotals | None:
        """What the slots did for all counted sessions, as of the last one's end; ``None`` when nothing is tiered.

        May be read by any thread.
        """
        return self._collector.totals if isinstance(self._collector, TierCounting) else None

    def on_tier_counts(self, listener: TierListener) -> None:
        """Let ``listener`` hear what the slots counted, whenever a session is given it; without tiers, never."""
        if isinstance(self._collector, TierCounting):
            self._collector.listener = listener

    def place(self, start: TierStart) -> None:
        """Place the experts anew, between two steps; the output does not change.

        Raises :class:`TierError` as ``Tier.place``, and where nothing is tiered.
        """
        if self.tier is None:
            raise TierError("every expert is resident", "load the model with tiers to place its experts")
        if isinstance(self._collector, TierCounting):
            self._collector.place(start)
        else:
            self.tier.place(start)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text; markers inside it are plain text unless ``parse_special``."""
        return self._context.tokenize(text, add_special=add_special, parse_special=parse_special)

    def special_tokens(self) -> list[SpecialToken]:
        """Every token that is looked for as text; see :class:`spark_runtime.prompt_tokens.Vocabulary`."""
        return self._context.special_tokens()

    @property
    def ends_prompts(self) -> bool:
        """Whether ``add_special`` adds a token at the end of a text."""
        return self._context.ends_prompts

    def piece(self, token: int) -> bytes:
        """Bytes of one token; a character may be spread over several. Control tokens have none, unless spelled."""
        return self._spelled.get(token) or self._context.piece(token)

    def spell(self, token: int, text: bytes) -> None:
        """Give a control token a text: that of markup which somebody reads."""
        self._spelled[token] = text
        self._grammars.spelled.add(token)

    def is_end(self, token: int) -> bool:
        """Whether a token ends generation."""
        return self._context.is_end(token)

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template."""
        return self._context.chat_template()

    @property
    def tool_template(self) -> str | None:
        """The chat template that some models have beside their own, for conversations with tools."""
        return self._context.chat_template("tool_use")

    def special_text(self, which: str) -> str:
        """Text of the ``bos`` or ``eos`` token."""
        return self._context.special_text(which)

    def conversation_for(self, tokens: Sequence[int], busy: Collection[Conversation] = ()) -> Conversation:
        """The conversation that a prompt goes on with, or begins in; ``busy`` ones are not taken.

        It may begin as a copy of another one. See :func:`spark_runtime.sequences.choose_sequence`.
        """
        choice = choose_sequence(tokens, [Cached(one.tokens, one.last_use, one in busy) for one in self.conversations])
        chosen = self.conversations[choice.sequence]
        if choice.copy_from is not None:
            chosen.copy_of(self.conversations[choice.copy_from])
        self._uses += 1
        chosen.last_use = self._uses
        return chosen

    def sampler(self, sampling: Sampling) -> Sampler:
        """Chooses the tokens of one generation, in any conversation; the caller closes it.

        Raises :class:`SamplingError` for parameters that make no sense, and :class:`GrammarError`.
        """
        sampling.check(self.n_vocab)
        grammar = None if sampling.grammar is None else self._grammars.follow(sampling.grammar)
        return self._first.sampler(sampling, grammar)

    @property
    def n_past(self) -> int:
        """Tokens in the context."""
        return self._first.n_past

    def reset(self) -> None:
        """Forget every conversation."""
        self._computing.forget_all()

    def feed(
        self,
        tokens: Sequence[int],
        phase: Phase,
        *,
        batch: int | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        """:meth:`Conversation.feed` of the first conversation."""
        self._first.feed(tokens, phase, batch=batch, before_step=before_step)

    def prompt(self, tokens: Sequence[int], *, before_step: Callable[[], None] = lambda: None) -> int:
        """:meth:`Conversation.prompt` of the first conversation."""
        return self._first.prompt(tokens, before_step=before_step)

    def generate(self, sampling: Sampling, max_tokens: int) -> Iterator[int]:
        """:meth:`Conversation.generate` of the first conversation."""
        sampler = self.sampler(sampling)
        try:
            yield from self._first.generate(sampler, max_tokens)
        finally:
            sampler.close()

    def logits(self) -> NDArray[np.float32]:
        """Logits after the last computed token, ``[n_vocab]``."""
        logits = self._context.logits()
        self._computing.check_tier()
        return logits

    def all_logits(self) -> NDArray[np.float32]:
        """Logits of the last decode call's tokens, ``[n_tokens, n_vocab]``; of a prefill's last one alone."""
        logits = self._context.all_logits()
        self._computing.check_tier()
        return logits

    def feed_sequences(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Compute ``(token, position, sequence)`` of several sequences in one call, as a server of many would.

        Beside the engine's own conversation: nothing is counted, and :meth:`reset` must come before and after.
        """
        if self.tier is not None:
            self.tier.set_phase("decode")
        self._context.decode_sequences(rows)
        self._computing.check_tier()

    def synchronize(self) -> None:
        """Wait until everything asked for is computed."""
        self._context.synchronize()
        self._computing.check_tier()


def _tap_for(
    collector: Collector | None, *, native: bool, hidden: tuple[HiddenKind, ...] = ()
) -> tuple[EvalTap | NativeTap | None, InstallationError | None]:
    """The quickest source of selections that this machine can have, and why it is not the native one."""
    if collector is None:
        return None, None
    if hidden:
        return HiddenTap(collector, hidden), None
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
        if isinstance(tap, HiddenTap):
            tap.check_learned()
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
