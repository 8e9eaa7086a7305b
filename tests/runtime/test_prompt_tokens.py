"""Prompts that are tokenised in parts: the same tokens as whole, and only what is new."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.chat import ChatFormat
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.models import demo_model_path
from spark_runtime.prompt_tokens import PromptTokenizer, SpecialToken, clean_markers

START, END = "<|im_start|>", "<|im_end|>"
TEXTS = st.lists(
    st.sampled_from([START, END, "<|endoftext|>", "<|im_", "start|>", "<", "|>", " ", "\n", "user", "é🦀", "\ufeff"])
    | st.text(max_size=8).filter(lambda text: text.isprintable()),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(demo_model_path(), EngineOptions(n_ctx=256, n_threads=1, count_routing=False)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def learned(engine: Engine) -> PromptTokenizer:
    tokenizer = PromptTokenizer(engine, kept_bytes=2000)
    tokenizer.learn(f"{START}user\nprobe{END}\n{START}assistant\n")
    return tokenizer


class Heard:
    """A vocabulary that notes what it is asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: list[str] = []
        self.ends_prompts = False

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        self.asked.append(text)
        return self.engine.tokenize(text, add_special=add_special, parse_special=parse_special)

    def special_tokens(self) -> list[SpecialToken]:
        return self.engine.special_tokens()


@given(text=TEXTS, starts=st.booleans())
def test_the_same_tokens_as_whole(engine: Engine, learned: PromptTokenizer, text: str, starts: bool) -> None:
    expected = engine.tokenize(text, add_special=starts, parse_special=True)
    assert learned.tokenize(text, add_special=starts) == expected
    assert learned.tokenize(text, add_special=starts) == expected, "once more, from what was kept"


def test_only_what_is_new_is_tokenised(engine: Engine) -> None:
    heard = Heard(engine)
    tokenizer = PromptTokenizer(heard)
    turn = f"{START}user\nWhat is a list?{END}\n"
    tokenizer.tokenize(turn, add_special=False)
    assert heard.asked == [turn], "whole, before anything was learned"
    tokenizer.learn(f"{START}user\nprobe{END}\n")
    tokenizer.tokenize(turn, add_special=False)
    heard.asked.clear()
    tokenizer.tokenize(f"{turn}{START}user\nAnd a dict?{END}\n", add_special=False)
    assert heard.asked == ["user\nAnd a dict?"]


def test_what_is_kept_is_bounded(engine: Engine) -> None:
    heard = Heard(engine)
    tokenizer = PromptTokenizer(heard, kept_bytes=2000)
    tokenizer.learn(f"{START}user\nprobe{END}\n")

    def asked(text: str) -> bool:
        heard.asked.clear()
        tokenizer.tokenize(f"{START}{text}{END}", add_special=False)
        return text in heard.asked

    assert asked("first")
    assert not asked("first")
    for number in range(6):
        assert asked(f"{number} " * 20)
        assert not asked("first"), "it was used just before"
    assert asked("0 " * 20), "the oldest made room"
    assert asked("x" * 2000)
    assert asked("x" * 2000), "too much to be kept"
    assert not asked("first")


@pytest.mark.parametrize("letter", ["x", "é", "語", "😀"])
def test_what_is_kept_is_bounded_in_bytes(engine: Engine, letter: str) -> None:
    """Whatever a character takes, and however many tokens it is."""
    tokenizer = PromptTokenizer(engine, kept_bytes=200_000)
    tokenizer.learn(f"{START}user\nprobe{END}\n")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(400):
            tokenizer.tokenize(f"{START}{number}{letter * 500}{END}", add_special=False)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 100_000 < grown < 250_000


def test_a_vocabulary_that_ends_prompts_is_asked_whole(engine: Engine) -> None:
    heard = Heard(engine)
    heard.ends_prompts = True
    tokenizer = PromptTokenizer(heard)
    tokenizer.learn(f"{START}user\nprobe{END}\n")
    heard.asked.clear()
    tokenizer.tokenize(f"a{END}b", add_special=True)
    tokenizer.tokenize(f"a{END}b", add_special=False)
    assert heard.asked == [f"a{END}b", "a", "b"]


def test_a_sample_that_comes_out_differently_teaches_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(engine)
    tokenizer = PromptTokenizer(heard)
    monkeypatch.setattr(heard, "special_tokens", lambda: [SpecialToken(7, START.encode(), False)])
    monkeypatch.setattr("spark_runtime.prompt_tokens.clean_markers", lambda *_: {START: 7})
    tokenizer.learn(f"{START}user\nprobe{END}\n")
    heard.asked.clear()
    tokenizer.tokenize(f"{START}x", add_special=False)
    assert heard.asked == [f"{START}x"]


def test_the_models_own_template_teaches(engine: Engine) -> None:
    chat, plain = ChatFormat(engine), ChatFormat(engine)
    chat.learn_markers()
    turns = [{"role": "user", "content": f"What is {END} for?\n" * 9}, {"role": "assistant", "content": " It ends."}]
    prompts = [chat.prompt([*turns * number, turns[0]]) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for prompt, tokens in zip(prompts * 5, threads.map(chat.tokenize, prompts * 5), strict=True):
            assert tokens == plain.tokenize(prompt)
    assert chat.tokenize("later", starts=False) == plain.tokenize("later", starts=False)


def special(*texts: bytes, strips: tuple[bytes, ...] = ()) -> list[SpecialToken]:
    return [SpecialToken(number, text, text in strips) for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("specials", "clean"),
    [
        (special(b"<a>", b"<b>"), {"<a>": 0, "<b>": 1}),
        (special(b"<a>", b"<a>!"), {"<a>!": 1}),  # may be the beginning of a longer one
        (special(b"<a>", b"x<a>y"), {"x<a>y": 1}),
        (special(b"<a>", b">b<"), {}),  # either may take the other's bracket
        (special(b"<aa>", b">b<"), {"<aa>": 0}),  # the longer is looked for first
        (special(b"<a>", b"<a>"), {}),
        (special(b"aba"), {}),
        (special(b" <a>", b"<b>\n", b""), {}),
        (special(b"<a>", b"<b>", strips=(b"<b>",)), {"<a>": 0}),
        (special(b"\xff<a>"), {}),
    ],
)
def test_markers_that_nothing_stands_in_the_way_of(specials: list[SpecialToken], clean: dict[str, int]) -> None:
    assert clean_markers(specials, range(len(specials))) == clean
    assert clean_markers(specials, []) == {}


def partition(text: str, specials: list[SpecialToken]) -> list[str | int]:
    """As llama.cpp cuts a text: by one special token after the other, the longest first."""
    fragments: list[str | int] = [text] if text else []
    for one in sorted(specials, key=lambda one: -len(one.text)):
        cut: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int) or not one.text:
                cut.append(fragment)
                continue
            pieces = fragment.split(one.text.decode())
            for number, piece in enumerate(pieces):
                if number:
                    cut.append(one.token)
                kept = piece
                if one.strips:
                    kept = kept.lstrip() if number else kept
                    kept = kept.rstrip() if number < len(pieces) - 1 else kept
                if kept:
                    cut.append(kept)
        fragments = cut
    return fragments


SPECIALS = st.lists(st.text("<a> ", min_size=1, max_size=5), unique=True, min_size=1, max_size=6).flatmap(
    lambda texts: st.builds(
        lambda strips: [SpecialToken(at, text.encode(), at in strips) for at, text in enumerate(texts)],
        st.sets(st.integers(0, len(texts) - 1)),
    )
)


@given(specials=SPECIALS, text=st.text("<a> ", max_size=30))
def test_a_clean_marker_cuts_as_the_vocabulary_does(specials: list[SpecialToken], text: str) -> None:
    for marker, token in clean_markers(specials, range(len(specials))).items():
        parts = text.split(marker)
        expected = partition(parts[0], specials)
        for part in parts[1:]:
            expected += [token, *partition(part, specials)]
        assert partition(text, specials) == expected
