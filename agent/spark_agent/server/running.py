"""One generation's way through the engine, step by step, so that others can compute between two of its steps."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal

from spark_agent.server.generation import AbandonedError, Finished, Generation, GenerationReport, Piece, TokenLogprob
from spark_agent.server.thought import ThoughtWatch
from spark_runtime.conversation import Conversation
from spark_runtime.engine import Engine
from spark_runtime.errors import ContextFullError
from spark_runtime.logprobs import likeliest, log_probabilities
from spark_runtime.sampling import Sampler
from spark_runtime.text_stream import TextStream

__all__ = ["Running"]


class Running:
    """A generation that was submitted. Everything but the constructor is the computing thread's."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.conversation: Conversation | None = None
        self.in_prompt = True
        self._submitted_s = time.monotonic()
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._spent_s = {"prompt": 0.0, "decode": 0.0}
        self.step_s = 0.0
        """What the last step took."""
        self._reused = self._produced = 0
        self._steps: Iterator[None] = iter(())
        self._sampler: Sampler | None = None
        self._waits = False
        self._stream = TextStream(generation.stops)
        self._thought = ThoughtWatch(generation.thought_limit) if generation.thought_limit is not None else None
        self._uncertain: deque[tuple[int, int, TokenLogprob]] = deque()
        self.finished: Finished | None = None

    def start(self, engine: Engine, conversation: Conversation) -> None:
        """Go on in a sequence; nothing is computed yet."""
        self.conversation = conversation
        self._started_s = time.monotonic()
        self._steps = self._run(engine, conversation)

    def step(self) -> bool:
        """Compute one batch or one token; ``False`` when that was the last one. Raises what the engine raises."""
        phase, before = "prompt" if self.in_prompt else "decode", time.monotonic()
        try:
            next(self._steps)
        except StopIteration:
            return False
        finally:
            self.step_s = time.monotonic() - before
            self._spent_s[phase] += self.step_s
        return True

    @property
    def in_wait(self) -> bool:
        """Whether the last step only waited for the request's grammar."""
        return self._waits

    @property
    def blocked(self) -> bool:
        """Whether the next step would do nothing either."""
        wanted = not self.generation.cancelled.is_set()
        return wanted and self._waits and self._sampler is not None and self._sampler.waits

    def close(self) -> None:
        """Free what the steps hold; safe to call twice."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()

    def check_wanted(self) -> None:
        """Raise :class:`AbandonedError` when the client has left, or does not read."""
        if self.generation.cancelled.is_set():
            raise AbandonedError
        self.generation.check_read()

    def report(self, error: Exception | None) -> GenerationReport:
        """What it took, with how it ended."""
        outcome: Literal["stop", "length", "cancelled", "error"] = "error"
        if isinstance(error, AbandonedError):
            outcome = "cancelled"
        elif error is None and self.finished is not None:
            outcome = self.finished.reason
        started = self._started_s if self._started_s is not None else time.monotonic()
        return GenerationReport(
            outcome=outcome,
            workload=self.generation.workload,
            queued_s=started - self._submitted_s,
            prompt_s=self._spent_s["prompt"],
            decode_s=self._spent_s["decode"],
            first_token_s=self._first_token_s,
            prompt_tokens=len(self.generation.tokens),
            reused_tokens=self._reused,
            completion_tokens=self._produced,
        )

    def _run(self, engine: Engine, conversation: Conversation) -> Iterator[None]:
        generation = self.generation
        tokens = generation.tokens
        if len(tokens) >= engine.n_ctx:
            raise ContextFullError(
                f"a prompt of {len(tokens)} tokens leaves no room in a context of {engine.n_ctx}",
                "shorten the conversation or start the agent with a larger --ctx",
            )
        room = engine.n_ctx - len(tokens)
        with contextlib.closing(engine.sampler(generation.sampling)) as sampler:
            self._sampler = sampler
            if generation.thought_limit is not None and generation.thought_limit.over:
                sampler.force(generation.thought_limit.ending)
            for _ in sampler.ready():
                yield from self._wait()
            self._reused = conversation.begin(tokens)
            for start in range(self._reused, len(tokens), engine.n_batch):
                if start > self._reused:
                    yield
                conversation.check_holds(start)
                conversation.feed(tokens[start : start + engine.n_batch], "prefill")
            # The first token is chosen in the same step: another conversation's step would take the logits' place.
            reason: Literal["stop", "length"] = "length"
            limit = min(generation.max_tokens or room, room)
            for token in conversation.steps(sampler, limit):
                if token is None:
                    yield from self._wait()
                    continue
                self.in_prompt = False
                self._produced += 1
                if self._first_token_s is None:
                    self._first_token_s = time.monotonic() - self._submitted_s
                ends = engine.is_end(token)
                self._emit(engine, sampler, token, ends=ends)
                if ends or self._stream.stopped:
                    reason = "stop"
                    break
                yield
        rest = self._stream.push(b"", final=True)
        left = self._certain(final=True)
        if rest or left:
            generation.events.tell(Piece(rest, left))
        self.finished = Finished(reason, len(tokens), self._reused, self._produced, self._stream.stop)

    def _wait(self) -> Iterator[None]:
        self._waits = True
        yield
        self._waits = False

    def _emit(self, engine: Engine, sampler: Sampler, token: int, *, ends: bool) -> None:
        piece = b"" if ends else engine.piece(token)
        limit = self.generation.thought_limit
        if limit is not None and self._thought is not None and self._thought.is_over(piece):
            sampler.force(limit.ending)
        before = self._stream.end
        text = self._stream.push(piece)
        if self.generation.top_logprobs is None:
            if text:
                self.generation.events.tell(Piece(text))
            return
        if not ends:
            logprobs = log_probabilities(sampler.logits())
            top = likeliest(logprobs, self.generation.top_logprobs)
            chosen = TokenLogprob(
                token, piece, float(logprobs[token]), tuple((one, engine.piece(one), value) for one, value in top)
            )
            self._uncertain.append((before, self._stream.end, chosen))
        tokens = self._certain(final=False)
        if text or tokens:
            self.generation.events.tell(Piece(text, tokens))

    def _certain(self, *, final: bool) -> tuple[TokenLogprob, ...]:
        """Tokens whose whole text was given out; in the end also one that a stop string cut, and none beyond it."""
        found, certain = [], self._stream.certain
        while self._uncertain:
            start, end, token = self._uncertain[0]
            if end > certain and not (final and start < certain):
                break
            found.append(token)
            self._uncertain.popleft()
        return tuple(found)
