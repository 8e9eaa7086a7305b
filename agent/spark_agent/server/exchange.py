"""The middle of every dialect: what is asked becomes a generation, and the generation's output becomes events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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

__all__ = ["Answering", "Ask", "Ended", "Exchange", "Idle", "LineageOf", "Output", "Said", "WorkloadOf"]

LineageOf = Callable[[Sequence[Message]], str]
WorkloadOf = Callable[[Mapping[str, str], Sequence[Message], str | None], str | None]
_PER_MESSAGE = 64
"""What a template adds to a message, in characters."""
_GRAMMAR = 1 << 20
"""What building a grammar is worth, in characters."""
IDLE_S = 10.0
"""How long a stream may be silent: what stands between client and server closes connections that say nothing."""
FIRST_WAIT_S = 5.0
"""How long a stream's status waits for the first event, which decides it; later failures are events."""


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
    """Nothing happened for a while."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended."""

    reason: Literal["stop", "length", "tool_calls"]
    finished: Finished


Output = Said | Idle | Ended


class Answering:
    """One generation's output; the caller goes through it once."""

    def __init__(
        self,
        generation: Generation,
        parser: OutputParser,
        *,
        parallel: bool,
        streamed_calls: frozenset[str] = frozenset(),
    ) -> None:
        self._generation = generation
        self._parser = parser
        self._parallel = parallel
        self._streamed_calls = streamed_calls
        self._results = generation.results()
        self._next: asyncio.Task[Piece | Finished] | None = None
        self._held: Finished | Exception | None = None
        self._calls = 0
        self.prompt_tokens: tuple[int, ...] = tuple(generation.tokens)

    def cancel(self) -> None:
        """Stop computing."""
        self._generation.cancelled.set()

    async def close(self) -> None:
        """Stop computing, and let go of what waits for it."""
        self.cancel()
        if self._next is not None:
            self._next.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._next
            self._next = None

    async def wait(self, limit_s: float) -> bool:
        """Whether there is an event within the limit; raises what the engine raised instead of the first event."""
        task = self._pending()
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            task.result()
        return task.done()

    def _pending(self) -> asyncio.Task[Piece | Finished]:
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._results))
        return self._next

    def _ready(self) -> Piece | Finished | Exception | None:
        """What has come already: waiting for it would take a task."""
        if self._held is not None:
            event, self._held = self._held, None
            return event
        if self._next is not None or self._generation.events.empty():
            return None
        return self._generation.events.get_nowait()

    def _with_what_is_ready(self, piece: Piece) -> Piece:
        """Tokens that came while others were sent go out together; none waits for another."""
        texts, tokens = [piece.text], [*piece.tokens]
        while isinstance(more := self._ready(), Piece):
            texts.append(more.text)
            tokens.extend(more.tokens)
        self._held = more
        return Piece("".join(texts), tuple(tokens))

    async def outputs(self) -> AsyncIterator[Output]:
        """Everything until the end; raises what the engine raised.

        A call comes when it is whole, and what began as one and is none comes as text: a stream says what a whole
        answer does. But arguments of ``streamed_calls`` come as they are generated. If such a call breaks,
        :class:`ApiError` is raised, so that nobody takes it for one; if the token limit cuts it, the answer ends there.
        """
        held: list[Event] = []
        spoke_s = time.monotonic()
        try:
            while True:
                event = self._ready()
                if event is None:
                    if not await self.wait(IDLE_S):
                        spoke_s = time.monotonic()
                        yield Idle()
                        continue
                    event, self._next = self._pending().result(), None
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
                    spoke_s = time.monotonic()
                    yield Said(said, tokens)
                elif time.monotonic() - spoke_s >= IDLE_S:
                    # A long call on its way.
                    spoke_s = time.monotonic()
                    yield Idle()
                if finished is not None:
                    reason = "tool_calls" if self._calls and finished.reason == "stop" else finished.reason
                    yield Ended(reason, finished)
                    return
        finally:
            await self.close()

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

    def __init__(self, worker: Worker, prompting: Prompting, lineage_of: LineageOf, workload_of: WorkloadOf) -> None:
        self._worker = worker
        self._prompting = prompting
        self._lineage_of = lineage_of
        self._workload_of = workload_of

    async def count(self, ask: Ask) -> int:
        """Tokens of a prompt, also of one that does not fit."""
        try:
            prepared = await aside(self._prompting.prepare, ask, size=ask.size)
        except ContextExceededError as error:
            return error.prompt_tokens
        return len(prepared.tokens)

    async def start(self, ask: Ask, headers: Mapping[str, str], model: str | None) -> Answering:
        """Submit it; raise :class:`ApiError` for what cannot be asked of this model. ``model`` as it was named."""
        messages = ask.messages or (Message("user", ask.raw if isinstance(ask.raw, str) else ""),)
        workload = self._workload_of(headers, messages, model)
        prepared = await aside(self._prompting.prepare, ask, size=ask.size)
        generation = Generation(
            lineage=await aside(self._lineage_of, messages, size=ask.size),
            tokens=list(prepared.tokens),
            sampling=replace(ask.sampling, grammar=prepared.grammar),
            max_tokens=ask.max_tokens,
            stops=ask.stops,
            top_logprobs=ask.top_logprobs,
            workload=workload,
            thought_limit=prepared.thought_limit,
        )
        try:
            self._worker.submit(generation)
        except Exception as error:
            raise ApiError.of(error) from error
        parser = prepared.parser or PlainParser()
        return Answering(generation, parser, parallel=ask.choice.parallel, streamed_calls=ask.streamed_calls)
