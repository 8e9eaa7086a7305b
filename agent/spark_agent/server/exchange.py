"""The middle of every dialect: what is asked becomes a generation, and the generation's output becomes events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spark_agent.dialogue.events import CallBroken, CallEnd, Event, certain, joined
from spark_agent.dialogue.messages import Message, Tool, ToolChoice
from spark_agent.dialogue.output_parser import OutputParser, PlainParser
from spark_agent.server.api_error import ApiError, ContextExceededError
from spark_agent.server.aside import aside
from spark_agent.server.generation import Finished, Generation, Piece, TokenLogprob
from spark_agent.server.prompting import Prompting
from spark_agent.server.reasoning import ReasoningAsk
from spark_agent.server.worker import Worker
from spark_runtime.sampling import Sampling
from spark_runtime.templates import rendering

__all__ = ["Answering", "Ask", "Ended", "Exchange", "Idle", "LineageOf", "Opened", "Output", "Said", "WorkloadOf"]

LineageOf = Callable[[Sequence[Message]], Callable[[], str]]
"""Reads a conversation, and returns what tells its lineage: that may remember it, so only who is answered is asked."""
Opened = Callable[[str], None]
WorkloadOf = Callable[[Mapping[str, str], Sequence[Message], str | None], str | None]
_PER_MESSAGE = 64
"""What a template adds to a message, in characters."""
_GRAMMAR = 1 << 20
"""What building a grammar is worth, in characters."""
_OPENED_AFTER_S = 0.05
IDLE_S = 10.0
"""How long a stream may be silent: what stands between client and server closes connections that say nothing."""
FIRST_WAIT_S = 5.0
"""How long a stream's status waits for what comes first, which decides it; later failures are events."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, in no dialect."""

    sampling: Sampling
    messages: tuple[Message, ...] = ()
    raw: str | tuple[int, ...] | None = None
    """A prompt as it is, instead of messages."""
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    schema: object | None = None
    """The answer is JSON of this schema."""
    schema_strict: bool = False
    reasoning_in_text: bool = False
    """Leave the model's reasoning, and its tags, in the answer."""
    reasoning: ReasoningAsk = field(default_factory=ReasoningAsk)
    prefill: str | None = None
    """The answer begins with this, and goes on after it."""
    streamed_calls: frozenset[str] = frozenset()
    """Tools whose arguments a stream tells as they are generated, before it is certain that they are a call's."""

    @property
    def size(self) -> int:
        """How long preparing it may take, as characters of a prompt."""
        size = 0 if self.raw is None else len(self.raw)
        for message in self.messages:
            size += len(message.text) + len(message.reasoning) + _PER_MESSAGE
            size += sum(len(call.arguments) for call in message.calls)
        return size + (_GRAMMAR if self.tools or self.schema is not None else 0)


@dataclass(frozen=True, slots=True)
class Said:
    """What the model said by now, and the tokens that it took, where log probabilities are asked for."""

    events: list[Event]
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Idle:
    """There was nothing to say for a while."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended."""

    reason: Literal["stop", "length", "tool_calls"]
    finished: Finished


Output = Said | Idle | Ended


class Answering:
    """One generation's output, which the caller goes through once; only then it is put in line."""

    def __init__(
        self,
        generation: Generation,
        parser: OutputParser,
        submit: Callable[[Generation], None],
        *,
        parallel: bool,
        streamed_calls: frozenset[str] = frozenset(),
    ) -> None:
        self._generation = generation
        self._events = generation.events
        self._parser = parser
        self._submit = submit
        self._parallel = parallel
        self._streamed_calls = streamed_calls
        self._next: Piece | Finished | Exception | None = None
        self._calls = 0
        self.prompt_tokens: tuple[int, ...] = tuple(generation.tokens)

    def cancel(self) -> None:
        """Stop computing."""
        self._generation.cancelled.set()

    def leave(self, error: Exception) -> None:
        """Stop computing, and raise ``error`` where the output is waited for: nobody wants it any more."""
        self.cancel()
        self._events.tell(error)

    def _with_what_is_ready(self, piece: Piece) -> Piece:
        """Tokens that came while others were sent go out together; none waits for another."""
        more = self._events.take()
        if more is None:
            return piece
        texts, tokens = [piece.text], [*piece.tokens]
        while isinstance(more, Piece):
            texts.append(more.text)
            tokens.extend(more.tokens)
            more = self._events.take()
        self._next = more
        return Piece("".join(texts), tuple(tokens))

    async def outputs(self, *, before_waiting: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[Output]:
        """Everything until the end; raises what the engine raised, and :class:`ApiError` where the line is full.

        A call comes when it is whole, and what began as one and is none comes as text: a stream says what a whole
        answer does. But arguments of ``streamed_calls`` come as they are generated. If such a call breaks,
        :class:`ApiError` is raised, so that nobody takes it for one; if the token limit cuts it, the answer ends there.
        ``before_waiting`` is called whenever all that has come was given out.
        """
        clock = asyncio.get_running_loop().time
        silent_until = clock() + FIRST_WAIT_S
        held: list[Event] = []
        try:
            event: Piece | Finished | Exception | None = None
            submitted = False
            while True:
                if event is None:
                    if before_waiting is not None:
                        await before_waiting()
                    if not submitted:
                        # Not sooner: the computing thread needs the interpreter, which is free from here on.
                        submitted = True
                        self._submit(self._generation)
                    if not await self._events.wait(max(silent_until - clock(), 0.0)):
                        yield Idle()
                        silent_until = clock() + IDLE_S
                    event = self._events.take()
                    continue
                if isinstance(event, Exception):
                    raise event
                finished = event if isinstance(event, Finished) else None
                if isinstance(event, Piece):
                    piece = self._with_what_is_ready(event)
                    events, tokens = self._parser.push(piece.text), piece.tokens
                else:
                    events, tokens = self._parser.end(cut=event.reason == "length"), ()
                said, held = certain([*held, *self._wanted(events)], self._streamed_calls)
                said = _heard(said, finished)
                if said or tokens:
                    yield Said(said, tokens)
                    silent_until = clock() + IDLE_S
                elif clock() >= silent_until:
                    # A long call on its way.
                    yield Idle()
                    silent_until = clock() + IDLE_S
                if finished is not None:
                    reason = "tool_calls" if self._calls and finished.reason == "stop" else finished.reason
                    yield Ended(reason, finished)
                    return
                event, self._next = self._next, None
        finally:
            self.cancel()

    async def whole(self) -> tuple[list[Event], list[TokenLogprob], Ended]:
        """Everything at once."""
        events: list[Event] = []
        tokens: list[TokenLogprob] = []
        self._streamed_calls = frozenset()
        async for output in self.outputs():
            if isinstance(output, Ended):
                return events, tokens, output
            if isinstance(output, Said):
                events.extend(output.events)
                tokens.extend(output.tokens)
        raise RuntimeError("the generation ended without a result")

    def _wanted(self, events: list[Event]) -> list[Event]:
        """Without what follows the first call, where only one is wanted."""
        wanted: list[Event] = []
        for event in events:
            if self._calls and not self._parallel:
                break
            self._calls += isinstance(event, CallEnd)
            wanted.append(event)
        return joined(wanted)


def _heard(events: list[Event], finished: Finished | None) -> list[Event]:
    """The events, if none takes back what was streamed."""
    if CallBroken() not in events:
        return events
    if finished is None or finished.reason != "length":
        message = "the model began a tool call and did not write it to its end: ask again"
        raise ApiError(502, message, "malformed_tool_call")
    return events[: events.index(CallBroken())]


class Exchange:
    """Puts what is asked in line."""

    def __init__(
        self,
        worker: Worker,
        prompting: Prompting,
        lineage_of: LineageOf,
        workload_of: WorkloadOf,
        opened: Opened = lambda _: None,
    ) -> None:
        """``opened`` is told a lineage soon after each of its requests was submitted, on the loop."""
        self._worker = worker
        self._opened = opened
        self._prompting = prompting
        self._lineage_of = lineage_of
        self._workload_of = workload_of

    async def count(self, ask: Ask) -> int:
        """Tokens of a prompt, also of one that does not fit."""
        try:
            prepared = await aside(self._prompting.prepare, ask, size=ask.size, waits=rendering())
        except ContextExceededError as error:
            return error.prompt_tokens
        return len(prepared.tokens)

    async def prepare(self, ask: Ask, headers: Callable[[], Mapping[str, str]], model: str | None) -> Answering:
        """Make it ready; raise :class:`ApiError` for what cannot be asked of this model. ``model`` as it was named.

        The headers are asked for while the prompt is rendered. Nothing is computed before the output is asked for.
        """
        messages = ask.messages or (Message("user", ask.raw if isinstance(ask.raw, str) else ""),)
        found: list[tuple[Callable[[], str], str | None]] = []

        def find() -> None:
            found.append((self._lineage_of(messages), self._workload_of(headers(), messages, model)))

        prepared = await aside(self._prompting.prepare, ask, find, size=ask.size, waits=rendering())
        [(lineage, workload)] = found
        generation = Generation(
            lineage=lineage(),
            tokens=prepared.tokens,
            sampling=ask.sampling if prepared.grammar is None else replace(ask.sampling, grammar=prepared.grammar),
            max_tokens=ask.max_tokens,
            stops=ask.stops,
            top_logprobs=ask.top_logprobs,
            workload=workload,
            thought_limit=prepared.thought_limit,
        )
        return Answering(
            generation,
            prepared.parser or PlainParser(),
            self._submit,
            parallel=ask.choice.parallel,
            streamed_calls=ask.streamed_calls,
        )

    def _submit(self, generation: Generation) -> None:
        try:
            self._worker.submit(generation)
        except Exception as error:
            raise ApiError.of(error) from error
        # Not at once: what it takes would delay the first token.
        asyncio.get_running_loop().call_later(_OPENED_AFTER_S, self._opened, generation.lineage)
