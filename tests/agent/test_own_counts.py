from __future__ import annotations

import datetime as dt
import hashlib
import os
import sqlite3
import stat

import pytest

from spark_agent.own_counts import Limits, OwnCounts, OwnCountsError, today
from spark_schemas.split import split_of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "own.db"


@pytest.fixture
def said():
    return []


@pytest.fixture
def own(path, said):
    with OwnCounts(path, said.append, Limits(max_sessions=5, young=2)) as opened:
        yield opened


def session(make_session, model, number: int, workload: str = "chat"):
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return make_session(model, seed=number).model_copy(
        update={"session_hash": digest, "split": split_of(digest), "workload": workload}
    )


def test_what_is_kept_comes_back(own, make_model, make_session, path):
    model = make_model()
    given = session(make_session, model, 1)
    assert own.add(model, given, day=20_000)
    assert not own.add(model, given, day=20_001), "the same counts"
    (part,) = own.parts(model, now=20_001)["chat"]
    assert part.session_hash == given.session_hash
    assert (part.tokens, part.day) == (given.decode.tokens, 20_000)
    assert [layer.tolist() for layer in part.counts] == [list(layer.counts) for layer in given.decode.layers]
    assert [layer.tolist() for layer in part.reuse] == [list(layer.distances) for layer in given.reuse]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_bounded_by_number_bytes_and_age(own, path, said, make_model, make_session):
    model = make_model()
    for number in range(8):
        own.add(model, session(make_session, model, number), day=20_000 + number)
    days = [part.day for part in own.parts(model, now=20_008)["chat"]]
    assert days == [20_003, 20_004, 20_005, 20_006, 20_007], "the newest"
    assert own.parts(model, now=20_007 + 180) == {}
    own.add(model, session(make_session, model, 20), day=30_000)
    assert own.workloads()[0].sessions == 5, "one day that is far off deletes nothing for its age"
    own.add(model, session(make_session, model, 21), day=30_000)
    assert own.workloads()[0].sessions == 2, "two do"
    with OwnCounts(path, said.append, Limits(max_bytes=1)) as tiny:
        tiny.add(model, session(make_session, model, 22))
        assert tiny.workloads() == []


def test_forgetting(own, make_model, make_session):
    one, other = make_model(1), make_model(2)
    own.add(one, session(make_session, one, 1))
    own.add(one, session(make_session, one, 2, "review"))
    own.add(other, session(make_session, other, 3))
    assert own.forget(one.fingerprint, "review") == 1
    assert own.forget(workload="chat") == 2
    assert own.workloads() == []
    assert own.forget() == 0


def test_asking_makes_no_file(own, path, make_model):
    assert own.parts(make_model()) == {}
    assert own.workloads() == []
    assert own.forget() == 0
    assert not path.exists()


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\x00" + b"\xff" * 4096])
def test_a_broken_file_is_moved_aside(own, path, said, content, make_model, make_session):
    path.parent.mkdir()
    path.write_bytes(content)
    model = make_model()
    with pytest.raises(OwnCountsError):
        own.add(model, session(make_session, model, 1))
    assert path.with_name("own.db.broken").read_bytes() == content
    assert "counting starts anew" in said[0]
    assert own.add(model, session(make_session, model, 1)), "and it does"


def test_a_newer_file_is_left_alone(own, path, said, make_model, make_session):
    model = make_model()
    own.add(model, session(make_session, model, 1))
    own.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(OwnCountsError, match="newer version"):
        own.add(model, session(make_session, model, 2))
    assert said == []
    assert path.exists()


def test_damaged_rows_do_not_count(own, path, said, make_model, make_session):
    model = make_model()
    for number in range(3):
        own.add(model, session(make_session, model, number))
    own.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE sessions SET counts = x'00' WHERE id = 1")
        connection.execute("UPDATE sessions SET tokens = tokens + 1 WHERE id = 2")
    connection.close()
    assert len(own.parts(model)["chat"]) == 1
    assert "2 of this machine's own sessions" in said[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(tmp_path, said, make_model, make_session):
    (tmp_path / "locked").mkdir(mode=0o500)
    model = make_model()
    with OwnCounts(tmp_path / "locked" / "in" / "own.db", said.append) as own, pytest.raises(OwnCountsError):
        own.add(model, session(make_session, model, 1))


def test_a_full_disk_keeps_what_was_there(own, path, make_model, make_session):
    model = make_model()
    own.add(model, session(make_session, model, 1))
    with own._using() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for number in range(2, 200):
            own.add(make_model(number), session(make_session, make_model(number), number))

    with pytest.raises(OwnCountsError, match="full"):
        fill()
    assert len(own.parts(model)["chat"]) == 1


def test_days_are_utc():
    before, day, after = dt.datetime.now(dt.UTC).date(), today(), dt.datetime.now(dt.UTC).date()
    assert before <= dt.date(1970, 1, 1) + dt.timedelta(days=day) <= after


def test_groups_hold_the_same_sessions_each_whole(path, said, make_model, make_session):
    model = make_model()
    with OwnCounts(path, said.append) as own:
        for number in range(80):
            own.add(model, session(make_session, model, number), day=20_000)
        for number in range(0, 80, 3):
            digest = session(make_session, model, number).session_hash
            further = make_session(model, seed=number, part=1).model_copy(
                update={"session_hash": digest, "split": split_of(digest), "workload": "chat"}
            )
            own.add(model, further, day=20_001)
        own.add(model, session(make_session, model, 100, "review"), day=20_000)
        groups = list(own.groups(model, "chat", now=20_001))
        assert max(map(len, groups)) <= 33
        flat = [part for group in groups for part in group]
        everything = own.parts(model, now=20_001)["chat"]
        assert sorted(part.content_id for part in flat) == sorted(part.content_id for part in everything)
        hashes = [{part.session_hash for part in group} for group in groups]
        assert len(set.union(*hashes)) == sum(map(len, hashes)) == 80, "no session is in two groups"
        assert list(own.groups(model, "none", now=20_001)) == []
        assert list(own.groups(model, "chat", now=30_000)) == []
    assert said == []


def test_what_is_deleted_meanwhile_is_left_out_of_groups(own, make_model, make_session):
    model = make_model()
    own.add(model, session(make_session, model, 1), day=20_000)
    found = own.groups(model, "chat", now=20_001)
    own.forget()
    assert list(found) == []
