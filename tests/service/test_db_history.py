from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spark_service.db.history import MAX_OF_MIXES, MAX_PER_PROFILE, ManifestHistory, Question, forget_session
from spark_service.db.store import Store
from spark_service.errors import StorageError

MODEL = "mf1-" + "0" * 31 + "1"
QUESTION = Question(MODEL, "code", "decode", 4000, 100, 0)
OTHER = dataclasses.replace(QUESTION, vram_bytes=5000)


def revision(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def history(store: Store) -> ManifestHistory:
    return ManifestHistory(store, kept=3)


def record(history: ManifestHistory, number: int, body: bytes | None = None, question: Question = QUESTION) -> bool:
    content = f'{{"body": {number}}}'.encode() if body is None else body
    return history.record(question, revision(number), content, deletions=history.deletions())


def test_what_was_served_comes_back(history: ManifestHistory) -> None:
    body = b"\x00\xff" * 5000
    assert record(history, 1, body)
    assert history.body(QUESTION, revision(1)) == body
    (one,) = history.served(QUESTION)
    assert (one.revision, one.sha256, one.body_bytes) == (revision(1), hashlib.sha256(body).hexdigest(), 10000)
    assert abs(one.first_served_day - dt.datetime.now(dt.UTC).date()) <= dt.timedelta(days=1)
    assert history.body(QUESTION, revision(2)) is None
    assert history.body(OTHER, revision(1)) is None
    assert history.body_of_any_budget(MODEL, "code", "decode", revision(1)) == body


def test_what_is_known_writes_nothing(store: Store, history: ManifestHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record(history, 1)

    def refuse(**_: object) -> None:
        raise AssertionError("a write")

    monkeypatch.setattr(store, "writing", refuse)
    assert not record(history, 1)


def test_recording_changes_no_answer_and_pinning_does(store: Store, history: ManifestHistory) -> None:
    before = store.generation
    record(history, 1)
    assert store.generation == before
    assert history.pin(MODEL, "code", "decode", revision(1))
    assert store.generation > before
    before = store.generation
    assert history.unpin(MODEL, "code", "decode") == revision(1)
    assert store.generation > before


def test_the_latest_are_kept_and_a_pinned_one(history: ManifestHistory) -> None:
    record(history, 0)
    history.pin(MODEL, "code", "decode", revision(0))
    for number in range(1, 7):
        record(history, number)
        record(history, number, question=OTHER)
    assert [one.revision for one in history.served(QUESTION)] == [revision(number) for number in (6, 5, 4, 0)]
    assert [one.revision for one in history.served(OTHER)] == [revision(number) for number in (6, 5, 4)]
    history.unpin(MODEL, "code", "decode")
    record(history, 7)
    assert [one.revision for one in history.served(QUESTION)] == [revision(number) for number in (7, 6, 5)]


def test_ever_new_budgets_are_bounded(history: ManifestHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PER_PROFILE >= 100
    monkeypatch.setattr("spark_service.db.history.MAX_PER_PROFILE", 5)
    questions = [dataclasses.replace(QUESTION, n_ctx=n_ctx) for n_ctx in range(1, 20)]
    for question in questions:
        record(history, 1, question=question)
    assert [question.n_ctx for question in questions if history.served(question)] == [15, 16, 17, 18, 19]


def test_only_what_was_served_can_be_pinned(history: ManifestHistory) -> None:
    record(history, 1)
    assert not history.pin(MODEL, "code", "decode", revision(2))
    assert not history.pin(MODEL, "code", "prefill", revision(1))
    assert history.pinned(MODEL, "code", "decode") is None
    assert history.unpin(MODEL, "code", "decode") is None
    assert history.revisions(MODEL, "code", "decode") == [revision(1)]


def test_a_deleted_sessions_manifests_are_forgotten(store: Store, history: ManifestHistory, make: Any) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 2, 1) + make.sessions(shape, 1, 0, workload="chat")
    store.add_upload(make.upload(shape, sessions), "a", "a")
    chat = dataclasses.replace(QUESTION, workload="chat")
    elsewhere = dataclasses.replace(QUESTION, fingerprint="mf1-" + "0" * 31 + "2")
    for question in (QUESTION, OTHER, chat, elsewhere):
        record(history, 1, question=question)
    history.pin(MODEL, "code", "decode", revision(1))
    counted = history.deletions()
    # The session at index 1 is in one workload, that at index 0 in both.
    store.delete_session(make.hash(1))
    assert history.served(QUESTION) == history.served(OTHER) == []
    assert history.pinned(MODEL, "code", "decode") is None
    assert history.served(chat)
    assert history.served(elsewhere)
    # One that was built before the deletion comes too late.
    assert not history.record(QUESTION, revision(1), b"late", deletions=counted)
    assert history.served(QUESTION) == []
    assert record(history, 2)
    store.delete_session(make.hash(0))
    assert history.served(chat) == history.served(QUESTION) == []


def test_what_was_lent_to_another_quantisation_is_forgotten_too(
    store: Store, history: ManifestHistory, make: Any
) -> None:
    own = make.shape()
    lent, foreign = "mf1-" + "0" * 31 + "2", "mf1-" + "0" * 31 + "3"
    for key, shape in (
        ("a", own),
        ("b", make.shape(fingerprint=lent)),
        ("c", make.shape(fingerprint=foreign, sibling="ms1-" + "0" * 31 + "9")),
    ):
        workload = "code" if shape is own else "chat"
        store.add_upload(make.upload(shape, make.sessions(shape, 2, 0, workload=workload)), key, key)
    kept = [dataclasses.replace(QUESTION, fingerprint=lent, workload="docs")]
    kept.append(dataclasses.replace(QUESTION, fingerprint=foreign))
    gone = [QUESTION, dataclasses.replace(QUESTION, fingerprint=lent)]
    for question in (*kept, *gone):
        record(history, 1, question=question)
        assert history.pin(question.fingerprint, question.workload, "decode", revision(1))
    with store.writing() as cursor:
        forget_session(cursor, make.hash(1))
    # The hash is in all three models, in code and in chat: what is left is of other workloads or of another model.
    left = [question for question in (*kept, *gone) if history.served(question)]
    assert left == kept
    pinned = [q for q in (*kept, *gone) if history.pinned(q.fingerprint, q.workload, "decode")]
    assert pinned == kept


def test_ever_new_mixes_are_bounded(history: ManifestHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a model and phase together; single workloads and what is pinned stay."""
    assert MAX_OF_MIXES >= 100
    monkeypatch.setattr("spark_service.db.history.MAX_OF_MIXES", 3)
    mixes = [dataclasses.replace(QUESTION, workload=f"chat:1+code:{weight}") for weight in range(1, 9)]
    plain = [dataclasses.replace(QUESTION, workload=name) for name in ("chat", "code", "docs", "review")]
    elsewhere = [dataclasses.replace(mixes[0], phase="prefill"), dataclasses.replace(mixes[0], fingerprint="mf1-other")]
    for question in (*plain, *elsewhere, mixes[0]):
        record(history, 1, question=question)
    assert history.pin(MODEL, mixes[0].workload, "decode", revision(1))
    # Of another mix, which is not pinned, the same revision is no reason to stay.
    for question in mixes[1:]:
        record(history, 1, question=question)
    kept = [question.workload for question in mixes if history.served(question)]
    assert kept == [mixes[index].workload for index in (0, 5, 6, 7)]
    assert all(history.served(question) for question in (*plain, *elsewhere))


def test_a_deleted_session_ends_every_mix_with_its_workloads(store: Store, history: ManifestHistory, make: Any) -> None:
    shape = make.shape()
    sessions = [make.session(shape, make.hash(0), workload=name) for name in ("code", "chat")]
    store.add_upload(make.upload(shape, [*sessions, make.session(shape, make.hash(1), workload="docs")]), "a", "a")
    names = ("chat:1+docs:2", "code:3+docs:1+review:1", "docs", "docs:1+review:1", "code-heavy:1+docs:1", "my-chat")
    questions = {name: dataclasses.replace(QUESTION, workload=name) for name in names}
    for name, question in questions.items():
        record(history, 1, question=question)
        assert history.pin(MODEL, name, "decode", revision(1))
    store.delete_session(make.hash(0))
    assert [name for name in names if history.served(questions[name])] == list(names[2:])
    assert [name for name in names if history.pinned(MODEL, name, "decode")] == list(names[2:])


@pytest.mark.parametrize("column", ["body_zstd = 'x'::BLOB", "sha256 = 'x'"])
def test_damaged_bytes_are_never_served(store: Store, history: ManifestHistory, column: str) -> None:
    record(history, 1, b"a body of some length")
    with store.writing() as cursor:
        cursor.execute(f"UPDATE manifests SET {column}")
    with pytest.raises(StorageError, match="manifest"):
        history.body(QUESTION, revision(1))


def test_it_outlives_the_process(tmp_path: Path) -> None:
    for number in (1, 2):
        store = Store.open(tmp_path / "a.duckdb", threads=1)
        history = ManifestHistory(store, kept=3)
        record(history, number)
        history.pin(MODEL, "code", "decode", revision(1))
        store.close()
    store = Store.open(tmp_path / "a.duckdb", threads=1)
    history = ManifestHistory(store, kept=3)
    assert [one.revision for one in history.served(QUESTION)] == [revision(2), revision(1)]
    assert history.pinned(MODEL, "code", "decode") == revision(1)
    store.close()


def test_a_refused_write_is_a_storage_error(
    store: Store, history: ManifestHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise duckdb.IOException("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("spark_service.db.history._is_known", fail)
        with pytest.raises(StorageError, match="no room left"):
            record(history, 1)
    assert record(history, 1)


class _Cursors:
    """The history's two tables in memory, as the store gives access to them."""

    def __init__(self) -> None:
        self.connection = duckdb.connect()
        sql = Path(__file__).parents[2] / "service/spark_service/db/migrations"
        for path in sorted(sql.glob("*.sql")):
            self.connection.execute(path.read_text())

    def reading(self) -> Any:
        return self.connection.cursor()

    def writing(self, *, counted: bool = True) -> Any:
        return self.connection.cursor()


class HistoryMachine(RuleBasedStateMachine):
    """Against a list in memory: whatever is recorded, pinned and unpinned, in any order."""

    KEPT = 2

    def __init__(self) -> None:
        super().__init__()
        self.cursors = _Cursors()
        self.history = ManifestHistory(self.cursors, kept=self.KEPT)
        self.model: dict[Question, list[int]] = {QUESTION: [], OTHER: []}
        self.pinned: int | None = None

    @rule(number=st.integers(0, 5), question=st.sampled_from([QUESTION, OTHER]))
    def record(self, number: int, question: Question) -> None:
        kept = self.model[question]
        assert record(self.history, number, question=question) == (number not in kept)
        if number in kept:
            return
        kept.insert(0, number)
        kept[:] = [one for index, one in enumerate(kept) if index < self.KEPT or one == self.pinned]

    @rule(number=st.integers(0, 5))
    def pin(self, number: int) -> None:
        known = any(number in kept for kept in self.model.values())
        assert self.history.pin(MODEL, "code", "decode", revision(number)) == known
        if known:
            self.pinned = number

    @rule()
    def unpin(self) -> None:
        found = self.history.unpin(MODEL, "code", "decode")
        assert found == (None if self.pinned is None else revision(self.pinned))
        self.pinned = None

    @invariant()
    def agrees(self) -> None:
        for question, kept in self.model.items():
            assert [one.revision for one in self.history.served(question)] == [revision(number) for number in kept]
        found = self.history.pinned(MODEL, "code", "decode")
        assert found == (None if self.pinned is None else revision(self.pinned))

    def teardown(self) -> None:
        self.cursors.connection.close()


TestHistoryMachine = HistoryMachine.TestCase
# Every example opens a database.
TestHistoryMachine.settings = settings(max_examples=20, stateful_step_count=25)
