"""However serving and recording overlap, each conversation is counted by one of them, and recordings miss nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from spark_agent.dialogue.messages import Message
from spark_agent.served import marks_of_served, marks_of_transcript
from spark_agent.server.conversations import Conversations
from spark_agent.spool import Spool
from spark_agent.transcripts import Transcript
from spark_agent.transcripts.lineage import RootFinder, to_second
from spark_agent.transcripts.model import Turn

KEY = b"k" * 16
LONG = "Write a function that reads a file of numbers, one a line, and gives their median"
# What the person writes: the first one has a root of its own, the others meet in a short one.
WORDS = [
    [LONG, "Go on.", "And in Rust?", "Thanks."],
    ["hi", f"Quickly: {LONG}.", "Go on.", "Thanks."],
    ["hi", "there", f"In C: {LONG}.", "Thanks."],
]
SHORT = [0, 1, 2]
"""Turns before what was written tells a conversation from others."""
which = st.integers(0, len(WORDS) - 1)


def test_each_conversation_is_counted_by_one(tmp_path_factory, make_model, make_session):  # noqa: C901 (the whole machine)
    model = make_model()

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.path: Path = tmp_path_factory.mktemp("machine") / "spool.db"
            self.spool = Spool.open(self.path)
            self.spool._connection.execute("PRAGMA synchronous = OFF")  # no power cut here
            self.seeds = itertools.count()
            self.now = 1_783_944_000.0
            self.length = [0] * len(WORDS)
            self.began: dict[int, float] = {}
            self.by_serving: dict[int, set[tuple[int, int]]] = {}  # turns by the histogram that counts them
            self.by_recording: dict[int, set[tuple[int, int]]] = {}
            self.uploaded: set[int] = set()
            self.recording: dict[int, int] = {}  # conversations that are being recorded, and how long they were
            self.start_agent()

        def start_agent(self) -> None:
            self.spool.forget_open(model.fingerprint)
            self.conversations = Conversations(wall=lambda: self.now)
            self.computed = [0] * len(WORDS)
            self.open: dict[str, set[tuple[int, int]]] = defaultdict(set)
            self.told: set[tuple[str, ...]] = set()
            self.to_tell: list[list[bytes]] = []

        def said(self, number: int) -> list[Message]:
            turns = [(Message("user", text), Message("assistant", "Yes.")) for text in WORDS[number]]
            return [message for turn in turns[: self.length[number]] for message in turn]

        def transcript(self, number: int, length: int) -> Transcript:
            root = RootFinder()
            at = to_second(datetime.fromtimestamp(self.began[number], UTC).isoformat())
            for text in WORDS[number][:length]:
                root.note(text, at)
            turn = Turn("user", WORDS[number][0])
            return Transcript(root.lineage(turn.text), (turn,), Path("x"), root.opened)

        def keep(self, counts: dict[int, set[tuple[int, int]]], turns: set[tuple[int, int]], **marks: object) -> bool:
            seed = next(self.seeds)
            kept = self.spool.add(model, make_session(model, seed, prefill=3, decode=2), **marks)
            if kept:
                counts[seed] = turns
            return kept

        @rule(number=which)
        def goes_on_elsewhere(self, number: int) -> None:
            if self.length[number] < len(WORDS[number]):
                self.began.setdefault(number, self.now)
                self.length[number] += 1

        @rule(number=which, told=st.booleans())
        def is_served(self, number: int, told: bool) -> None:
            if self.length[number] == len(WORDS[number]):
                return
            self.began.setdefault(number, self.now)
            asked = [*self.said(number), Message("user", WORDS[number][self.length[number]])]
            name = self.conversations.name_of(asked)
            roots, began_at = self.conversations.began(name)
            if roots not in self.told:
                self.told.add(roots)
                self.to_tell.append(marks_of_served(KEY, roots, began_at))
            self.length[number] += 1
            self.open[name] |= {(number, turn) for turn in range(self.computed[number], self.length[number])}
            self.computed[number] = self.length[number]
            if told:
                self.tell()

        @rule()
        def tell(self) -> None:
            for marks in self.to_tell:
                self.spool.note_open(model.fingerprint, marks)
            self.to_tell.clear()

        @precondition(lambda self: self.open)
        @rule(data=st.data())
        def closes(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(self.open)))
            roots, began_at = self.conversations.began(name)
            self.told.discard(roots)
            self.keep(self.by_serving, self.open.pop(name), served=marks_of_served(KEY, roots, began_at))

        @rule(number=which)
        def recording_begins(self, number: int) -> None:
            if self.length[number] and number not in self.recording:
                marks = marks_of_transcript(KEY, self.transcript(number, self.length[number]))
                if not self.spool.was_served(model.fingerprint, marks):
                    self.recording[number] = self.length[number]

        @rule(number=which)
        def recording_ends(self, number: int) -> None:
            length = self.recording.pop(number, 0)
            counted = set().union(*self.by_recording.values())
            new = {(number, turn) for turn in range(length)} - counted
            if new:
                marks = marks_of_transcript(KEY, self.transcript(number, length))
                self.keep(self.by_recording, new, transcribed=marks)

        @rule(number=which)
        def is_recorded(self, number: int) -> None:
            self.recording_begins(number)
            self.recording_ends(number)

        @rule(what=st.sampled_from(["killed", "uploaded", "purged", "an hour", "two days"]))
        def something_happens(self, what: str) -> None:
            if what == "killed":
                self.start_agent()
            elif what == "uploaded":
                self.spool.mark_uploaded([row.id for row in self.spool.pending()])
                self.uploaded |= {*self.by_serving, *self.by_recording}
            elif what == "purged":
                self.spool.purge()
                for counts in (self.by_serving, self.by_recording):
                    for seed in [seed for seed in counts if seed not in self.uploaded]:
                        del counts[seed]
            else:
                self.now += {"an hour": 3600, "two days": 2 * 86400}[what]

        def distinct(self, counts: dict[int, set[tuple[int, int]]]) -> set[tuple[int, int]]:
            """Counted turns, but those before which a conversation could be told from others."""
            return {(number, turn) for number, turn in set().union(*counts.values()) if turn >= SHORT[number]}

        @invariant()
        def one_counts_it(self) -> None:
            assert self.distinct(self.by_serving).isdisjoint(self.distinct(self.by_recording))

        def teardown(self) -> None:
            self.start_agent()
            for number, length in enumerate(self.length):
                marks = marks_of_transcript(KEY, self.transcript(number, length)) if length else []
                if length and not self.spool.was_served(model.fingerprint, marks):
                    self.recording[number] = length
                    self.recording_ends(number)
                    recorded = {turn for one, turn in set().union(*self.by_recording.values()) if one == number}
                    assert recorded == set(range(length)), "who was never served is recorded to its end"
                    self.one_counts_it()
            self.spool.close()

    run_state_machine_as_test(Machine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))
