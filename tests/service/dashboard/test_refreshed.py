"""What is made in the background: once at a time, not too often, never from before a deletion."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from spark_service.dashboard.refreshed import MAX_AGE_SECONDS, MAX_ENTRIES, RESTS_PER_MAKING, Refreshed
from spark_service.db.store import Store
from spark_service.errors import StorageError

PATIENT = 30.0


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refreshed(store: Store, clock: Clock) -> Iterator[Refreshed]:
    made = Refreshed(store, clock)
    yield made
    made.close()


def write(store: Store, make: Any, index: int) -> None:
    shape = make.shape()
    store.add_upload(
        make.upload(shape, [make.session(shape, make.hash(index), seed=index, decode=5)]), f"k{index}", "x"
    )


def test_it_is_made_anew_after_a_write(store: Store, make: Any, refreshed: Refreshed) -> None:
    made: list[int] = []

    def work() -> int:
        made.append(1)
        return len(made)

    for _ in range(3):
        found = refreshed.get("key", work, PATIENT)
        assert found is not None
        assert (found.value, found.is_current) == (1, True)
    write(store, make, 0)
    found = refreshed.get("key", work, PATIENT)
    assert found is not None
    assert found.value == 2


def test_who_does_not_wait_gets_the_last_one(store: Store, make: Any, refreshed: Refreshed) -> None:
    ready = threading.Event()
    assert refreshed.get("key", lambda: ready.wait(PATIENT) and 1, 0.0) is None
    ready.set()
    first = refreshed.get("key", lambda: 1, PATIENT)
    assert first is not None
    write(store, make, 0)
    ready.clear()
    stale = refreshed.get("key", lambda: ready.wait(PATIENT) and 2, 0.0)
    assert stale is not None
    assert (stale.value, stale.is_current) == (1, False)
    ready.set()


def test_it_rests_from_what_takes_long(store: Store, make: Any, refreshed: Refreshed, clock: Clock) -> None:
    made: list[int] = []

    def work() -> int:
        made.append(1)
        clock.seconds += 10
        return len(made)

    refreshed.get("key", work, PATIENT)
    write(store, make, 0)
    resting = refreshed.get("key", work, PATIENT)
    assert resting is not None
    assert (resting.value, resting.is_current) == (1, False)
    clock.seconds += 10 * RESTS_PER_MAKING
    again = refreshed.get("key", work, PATIENT)
    assert again is not None
    assert again.value == 2


def test_nothing_from_before_a_deletion_is_given(store: Store, make: Any, refreshed: Refreshed, clock: Clock) -> None:
    write(store, make, 0)

    def slow() -> int:
        clock.seconds += 1000  # would rest for long
        return 1

    assert refreshed.get("key", slow, PATIENT) is not None
    store.delete_session(make.hash(0))
    ready = threading.Event()
    assert refreshed.get("key", lambda: ready.wait(PATIENT) and 2, 0.0) is None
    ready.set()
    found = refreshed.get("key", lambda: 2, PATIENT)
    assert found is not None
    assert found.value == 2


def test_what_was_being_made_at_a_deletion_is_not_given(store: Store, make: Any, refreshed: Refreshed) -> None:
    write(store, make, 0)

    def work() -> str:
        store.delete_session(make.hash(0))
        return "with the session"

    assert refreshed.get("key", work, PATIENT) is None


def test_what_goes_wrong_is_raised_and_tried_again(refreshed: Refreshed) -> None:
    def fail() -> int:
        raise StorageError("no")

    for _ in range(2):
        with pytest.raises(StorageError, match="no"):
            refreshed.get("key", fail, PATIENT)
    found = refreshed.get("key", lambda: 1, PATIENT)
    assert found is not None


def test_it_grows_old_without_a_write(refreshed: Refreshed, clock: Clock) -> None:
    refreshed.get("key", lambda: 1, PATIENT)
    clock.seconds += MAX_AGE_SECONDS + 1
    found = refreshed.get("key", lambda: 2, PATIENT)
    assert found is not None
    assert found.value == 2


def test_few_are_kept(refreshed: Refreshed) -> None:
    made: list[int] = []
    for number in [*range(MAX_ENTRIES + 1), 0]:
        refreshed.get(number, lambda: made.append(1), PATIENT)
    assert len(made) == MAX_ENTRIES + 2
