"""Feeding transcripts through a model, so that yesterday's sessions calibrate today's placement.

What the assistant said is computed as decode, everything else as prefill, as it was when the session ran. A
conversation longer than the context goes on in an emptied one, the way coding tools compact theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spark_agent.transcripts import Transcript, Turn
from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine
from spark_runtime.errors import ChatTemplateError
from spark_runtime.session_counts import SessionCounts, TokenTrace
from spark_schemas.ids import Phase

__all__ = ["DECODE_BATCH", "Segment", "record", "segments_of", "tokens_of"]

DECODE_BATCH = 64
"""Known assistant tokens computed at once; bounds the logits to 64 rows, 39 MB for a vocabulary of 150,000."""
TRACE_PIECE_BYTES = 2**26
"""Of a trace that gathers before it is handed on."""
TEXT_PROMPT_SHARE = 0.25
"""Of a plain text, the share taken as prompt: the rest counts as if the model had written it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one phase, in the order of the conversation."""

    phase: Phase
    tokens: list[int]


def segments_of(engine: Engine, chat: ChatFormat, transcript: Transcript, max_tokens: int = 0) -> list[Segment]:
    """Tokens of a transcript by phase, cut after ``max_tokens`` (0: all)."""
    if transcript.turns[0].role == "text":
        tokens = engine.tokenize(transcript.turns[0].text)
        tokens = tokens[:max_tokens] if max_tokens else tokens
        return [segment for window in _windows(tokens, engine.n_ctx) for segment in _split_text(window)]
    segments = list(_conversation(engine, chat, transcript.turns))
    return _cut(segments, max_tokens) if max_tokens else segments


def tokens_of(segments: Sequence[Segment]) -> list[int]:
    """All tokens of a session's segments, in order."""
    return [token for segment in segments for token in segment.tokens]


def record(
    engine: Engine,
    segments: Sequence[Segment],
    *,
    only: Sequence[tuple[int, int]] | None = None,
    keep_trace: bool = False,
    on_trace: Callable[[TokenTrace], None] | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> SessionCounts:
    """Compute a session's segments in an empty context and return its counts.

    ``only`` names the ranges of tokens to count, in order (``None``: all); what they do not need is not computed.
    ``on_trace`` takes the trace piece by piece, so that hidden states of a long session need not fit in memory.
    ``before_step`` is called before every decode call; what it raises ends the recording.
    """
    session = SessionCounts(engine.shape, keep_trace=keep_trace or on_trace is not None)

    def before() -> None:
        before_step()
        if on_trace is not None and session.trace_bytes >= TRACE_PIECE_BYTES:
            on_trace(session.take_trace())

    ranges = [(0, sum(len(segment.tokens) for segment in segments))] if only is None else only
    engine.reset()
    for segment, counts in _pieces(segments, ranges, engine.n_ctx):
        left = segment.tokens
        with engine.counting(session if counts else None):
            while left:
                if engine.n_past == engine.n_ctx:
                    engine.reset()
                room = engine.n_ctx - engine.n_past
                batch = DECODE_BATCH if segment.phase == "decode" else None
                engine.feed(left[:room], segment.phase, batch=batch, before_step=before)
                left = left[room:]
    if on_trace is not None:
        on_trace(session.take_trace())
    return session


def _pieces(
    segments: Sequence[Segment], ranges: Sequence[tuple[int, int]], n_ctx: int
) -> Iterator[tuple[Segment, bool]]:
    """Cut segments where counting begins or ends, and say of each piece whether it counts.

    What comes before the context that the first range is in, or after the last range, is left out.
    """
    if not ranges:
        return
    first, last = ranges[0][0] // n_ctx * n_ctx, ranges[-1][1]
    bounds = sorted({first, last, *(bound for one in ranges for bound in one)})
    begin = 0
    for segment in segments:
        end = begin + len(segment.tokens)
        cuts = [begin, *(bound for bound in bounds if begin < bound < end), end]
        for start, stop in pairwise(cuts):
            if first <= start < stop <= last:
                counts = any(low <= start and stop <= high for low, high in ranges)
                yield Segment(segment.phase, segment.tokens[start - begin : stop - begin]), counts
        begin = end


def _windows(tokens: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(tokens), size):
        yield tokens[start : start + size]


def _split_text(tokens: list[int]) -> Iterator[Segment]:
    prompt = max(1, int(len(tokens) * TEXT_PROMPT_SHARE))
    yield Segment("prefill", tokens[:prompt])
    if tokens[prompt:]:
        yield Segment("decode", tokens[prompt:])


def _cut(segments: list[Segment], max_tokens: int) -> list[Segment]:
    kept: list[Segment] = []
    for segment in segments:
        tokens = segment.tokens[:max_tokens]
        if tokens:
            kept.append(Segment(segment.phase, tokens))
        max_tokens -= len(tokens)
    return kept


def _conversation(engine: Engine, chat: ChatFormat, turns: tuple[Turn, ...]) -> Iterator[Segment]:
    """Alternate what the assistant was given and what it said.

    The model's chat template is asked at each assistant turn what it would have been given; what it had been given
    before is cut off. Where a template rewrites history (some drop old reasoning) or refuses the order of roles, the
    texts of the turns since the last answer stand in.
    """
    messages: list[dict[str, str]] = []
    given = ""
    unanswered: list[str] = []
    for turn in turns:
        if turn.role != "assistant":
            role = turn.role if turn.role in {"system", "user"} else "user"
            messages.append({"role": role, "content": turn.text})
            unanswered.append(turn.text)
            continue
        prompt, prefill = _given(chat, messages, given, unanswered)
        if prefill:
            yield Segment("prefill", prefill)
        given = prompt + turn.text
        messages.append({"role": "assistant", "content": turn.text})
        unanswered.clear()
        if decode := engine.tokenize(turn.text, add_special=False):
            yield Segment("decode", decode)
    if unanswered and (prefill := _given(chat, messages, given, unanswered)[1]):
        yield Segment("prefill", prefill)


def _given(
    chat: ChatFormat, messages: list[dict[str, str]], given: str, unanswered: list[str]
) -> tuple[str, list[int]]:
    """The whole prompt of the next answer, and the tokens of what is new in it."""
    try:
        prompt = chat.prompt(messages)
        fresh = prompt[len(given) :] if prompt.startswith(given) else None
    except ChatTemplateError:
        prompt, fresh = "", None
    if fresh is None:
        fresh = "\n".join(unanswered)
        prompt = prompt or given + fresh
    return prompt, chat.tokenize(fresh, starts=not given)
