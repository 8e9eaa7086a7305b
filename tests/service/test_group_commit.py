from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from spark_schemas.api import UploadReceipt
from spark_service.db.batch import KeyedUpload
from spark_service.errors import OverloadedError, RequestError, StorageError, StorageFullError
from spark_service.group_commit import GroupCommit, Limits, Queue, Waiting
from spark_service.packed import PackedSession, PackedUpload

NOW = Limits(due_seconds=0.0)
NEVER = Limits(due_rows=10**9, due_seconds=1e9, waiting_rows=4)


def upload(make: Any, key: str = "a", rows: int = 1) -> KeyedUpload:
    session = PackedSession("0" * 64, make.hash(0), "calibration", "code", ())
    return KeyedUpload(PackedUpload(make.shape(), (session,) * rows, "0.1.0"), key, key)


def receipt(keyed: KeyedUpload) -> UploadReceipt:
    return UploadReceipt(accepted=len(keyed.upload.sessions), duplicates=0)


class QueueMachine(RuleBasedStateMachine):
    """Any order of arrivals, ticks and commits, against a plain list."""

    make: Any = None

    @initialize(due=st.integers(1, 6), batch=st.integers(1, 8), most=st.integers(1, 12))
    def start(self, due: int, batch: int, most: int) -> None:
        self.limits = Limits(due_rows=due, due_seconds=3.0, batch_rows=batch, waiting_rows=most)
        self.queue = Queue(self.limits)
        self.model: list[Waiting] = []
        self.now = 0.0

    @rule(rows=st.integers(1, 10))
    def offer(self, rows: int) -> None:
        waiting = Waiting(upload(self.make, rows=rows), self.now)
        room = sum(one.rows for one in self.model) < self.limits.waiting_rows
        assert self.queue.offer(waiting) is room
        if room:
            self.model.append(waiting)

    @rule(eighths=st.integers(0, 32))
    def tick(self, eighths: int) -> None:
        # Exact in floating point, so that what follows can be compared exactly.
        self.now += eighths / 8

    @rule()
    def take(self) -> None:
        batch = self.queue.take()
        assert batch == self.model[: len(batch)]
        assert bool(batch) == bool(self.model)
        rest = self.model[len(batch) :]
        rows = sum(one.rows for one in batch)
        assert rows <= self.limits.batch_rows or len(batch) == 1
        # As many as fit: the next one would have been too many.
        assert not rest or rows + rest[0].rows > self.limits.batch_rows
        self.model = rest

    @invariant()
    def due_when_it_must_be(self) -> None:
        if not hasattr(self, "queue"):
            return
        rows = sum(one.rows for one in self.model)
        assert self.queue.rows == rows
        due = self.queue.due_in_seconds(self.now)
        if not self.model:
            assert due is None
            return
        assert due is not None
        waited = self.now - self.model[0].since_seconds
        assert 0 <= due <= self.limits.due_seconds
        if rows >= self.limits.due_rows or waited >= self.limits.due_seconds:
            assert due == 0
        else:
            assert due == self.limits.due_seconds - waited


def test_the_queue_against_a_list(make: Any) -> None:
    class Machine(QueueMachine):
        pass

    Machine.make = make
    run_state_machine_as_test(Machine, settings=settings(deadline=None, derandomize=True))


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Callable[..., GroupCommit]:
    """Make one that is closed in the end, whatever the test does."""

    def start(write: Callable[[Sequence[KeyedUpload]], Sequence[Any]], limits: Limits) -> GroupCommit:
        made = GroupCommit(write, limits)
        request.addfinalizer(made.close)
        return made

    return start


def test_answers_come_after_their_commit_and_in_order(make: Any, group: Any) -> None:
    committed: list[str] = []
    gate = threading.Event()

    def write(uploads: Sequence[KeyedUpload]) -> list[UploadReceipt]:
        assert gate.wait(60)
        committed.extend(keyed.idempotency_key for keyed in uploads)
        return [receipt(keyed) for keyed in uploads]

    commits = group(write, NOW)
    futures = [commits.submit(upload(make, str(number), number + 1)) for number in range(5)]
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.result(60).accepted for future in futures] == [1, 2, 3, 4, 5]
    assert committed == ["0", "1", "2", "3", "4"]


def test_what_waits_is_committed_and_answered_at_the_end(make: Any, group: Any) -> None:
    batches: list[int] = []

    def write(uploads: Sequence[KeyedUpload]) -> list[UploadReceipt]:
        batches.append(len(uploads))
        return [receipt(keyed) for keyed in uploads]

    commits = group(write, NEVER)
    futures = [commits.submit(upload(make, str(number))) for number in range(3)]
    assert not any(future.done() for future in futures)
    commits.close()
    assert [future.result(0).accepted for future in futures] == [1, 1, 1]
    assert batches == [3]
    commits.close()
    with pytest.raises(StorageError, match="stopping"):
        commits.submit(upload(make))


def test_a_full_queue_refuses_with_a_time_to_retry(make: Any, group: Any) -> None:
    commits = group(lambda uploads: [receipt(keyed) for keyed in uploads], NEVER)
    kept: list[Future[UploadReceipt]] = [commits.submit(upload(make, rows=2)) for _ in range(2)]
    with pytest.raises(OverloadedError) as caught:
        commits.submit(upload(make))
    assert (caught.value.status, caught.value.code, caught.value.headers) == (503, "overloaded", {"Retry-After": "1"})
    commits.close()
    assert [future.result(0).accepted for future in kept] == [2, 2]


def test_a_refused_upload_is_its_own_affair(make: Any, group: Any) -> None:
    refusal = RequestError(409, "model_mismatch", "no")
    commits = group(lambda uploads: [refusal if u.idempotency_key == "1" else receipt(u) for u in uploads], NEVER)
    futures = [commits.submit(upload(make, str(number))) for number in range(3)]
    commits.close()
    assert [future.exception(0) for future in futures] == [None, refusal, None]


def test_a_poisonous_upload_fails_alone(make: Any, group: Any) -> None:
    stored: list[str] = []

    def write(uploads: Sequence[KeyedUpload]) -> list[UploadReceipt]:
        if any(keyed.idempotency_key == "1" for keyed in uploads):
            raise ValueError("poison")
        stored.extend(keyed.idempotency_key for keyed in uploads)
        return [receipt(keyed) for keyed in uploads]

    commits = group(write, NEVER)
    futures = [commits.submit(upload(make, str(number))) for number in range(3)]
    commits.close()
    assert [type(future.exception(0)) for future in futures] == [type(None), ValueError, type(None)]
    assert stored == ["0", "2"]


def test_a_failing_database_answers_each_with_an_error_of_its_own(make: Any, group: Any) -> None:
    def write(uploads: Sequence[KeyedUpload]) -> list[UploadReceipt]:
        raise StorageFullError(f"no room for {len(uploads)}")

    commits = group(write, NEVER)
    futures = [commits.submit(upload(make, str(number))) for number in range(3)]
    commits.close()
    errors = [future.exception(0) for future in futures]
    assert [str(error) for error in errors] == ["no room for 1"] * 3
    assert len({id(error) for error in errors}) == 3


def test_the_thread_outlives_failures(make: Any, group: Any) -> None:
    fail = True

    def write(uploads: Sequence[KeyedUpload]) -> list[UploadReceipt]:
        if fail:
            raise StorageError("no")
        return [receipt(keyed) for keyed in uploads]

    commits = group(write, NOW)
    assert isinstance(commits.submit(upload(make)).exception(60), StorageError)
    fail = False
    assert commits.submit(upload(make)).result(60) == UploadReceipt(accepted=1, duplicates=0)


def test_an_upload_that_is_queued_cannot_be_taken_back(make: Any, group: Any) -> None:
    commits = group(lambda uploads: [receipt(keyed) for keyed in uploads], NEVER)
    future = commits.submit(upload(make))
    assert not future.cancel()
    commits.close()
    assert future.result(0).accepted == 1
