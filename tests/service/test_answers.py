from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from spark_service.answers import ENTRY_BYTES, MAX_AGE_SECONDS, Answer, AnswerCache, ByteCache, ReadyAnswers


class World:
    """What answers depend on, and the clock."""

    def __init__(self) -> None:
        self.generation = 0
        self.stamp = "key"
        self.seconds = 0.0
        self.asked = 0

    def cache(self, max_bytes: int = 10**6) -> AnswerCache:
        return AnswerCache(lambda: (self.generation, self.stamp), max_bytes=max_bytes, clock=lambda: self.seconds)


@pytest.fixture
def world() -> World:
    return World()


def served(cache: AnswerCache, world: World) -> TestClient:
    """An app that counts what reaches it and lets the cache hold its answers."""

    async def endpoint(request: Request) -> Response:
        world.asked += 1
        state = cache.state()
        answer = Answer.of(f"{world.asked}".encode(), Spark_Signature="s")
        cache.put(request.scope["path"], request.scope["query_string"], state, answer)
        return answer.response(request.headers.get("if-none-match"))

    async def other(request: Request) -> Response:
        world.asked += 1
        return PlainTextResponse("other")

    app = Starlette(
        routes=[
            Route("/api/x", endpoint, methods=["GET", "POST"]),
            Route("/api/y", endpoint),
            Route("/elsewhere", endpoint),
            Route("/api/other", other),
        ]
    )
    app.add_middleware(ReadyAnswers, cache=cache, prefix="/api/")
    return TestClient(app)


def test_a_question_is_answered_once_per_state(world: World) -> None:
    client = served(world.cache(), world)
    first = client.get("/api/x?a=1")
    again = client.get("/api/x?a=1")
    assert (world.asked, again.content, dict(again.headers)) == (1, first.content, dict(first.headers))
    assert again.headers["spark-signature"] == "s"
    assert again.headers["content-type"] == "application/json"
    assert client.get("/api/x?a=2").text == "2"
    assert client.get("/api/y?a=1").text == "3"
    world.generation += 1
    assert client.get("/api/x?a=1").text == "4"
    world.stamp = "another key"
    assert client.get("/api/x?a=1").text == "5"
    world.seconds += MAX_AGE_SECONDS + 1
    assert client.get("/api/x?a=1").text == "6"
    assert client.get("/api/x?a=1").text == "6"


def test_only_reads_under_the_prefix_are_answered(world: World) -> None:
    client = served(world.cache(), world)
    assert client.get("/api/x").text == "1"
    assert client.post("/api/x").text == "2"
    assert client.get("/elsewhere").text == "3"
    assert client.get("/elsewhere").text == "4"
    assert client.get("/api/other").text == client.get("/api/other").text == "other"
    assert client.get("/api/nowhere").status_code == 404


@pytest.mark.parametrize("header", [None, '"x"', "W/{etag}", "{etag}", '"x", {etag}', "*", "", "{etag}x"])
def test_conditions_mean_the_same_ready_or_not(world: World, header: str | None) -> None:
    etag = Answer.of(b"1").etag
    headers = {} if header is None else {"If-None-Match": header.format(etag=etag)}
    fresh, ready = world.cache(), world.cache()
    one = served(fresh, world).get("/api/x", headers=headers)
    world.asked = 0
    client = served(ready, world)
    client.get("/api/x")
    other = client.get("/api/x", headers=headers)
    assert world.asked == 1
    assert (one.status_code, one.content, dict(one.headers)) == (
        other.status_code,
        other.content,
        dict(other.headers),
    )
    assert one.headers["etag"] == etag


def test_what_changes_while_an_answer_is_made_is_not_missed(world: World) -> None:
    cache = world.cache()
    state = cache.state()
    world.generation += 1
    cache.put("/api/x", b"", state, Answer.of(b"old"))
    assert cache.get("/api/x", b"") is None


def test_of_all_who_ask_at_once_one_does_the_work(world: World) -> None:
    cache = world.cache()
    asked, answers = [], []
    entered, release = threading.Event(), threading.Event()

    def make() -> Answer:
        asked.append(1)
        entered.set()
        release.wait(20)
        return Answer.of(f"{world.generation}".encode())

    threads = [
        threading.Thread(target=lambda: answers.append(cache.answer("/api/x", b"", make).body)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(20)
    release.set()
    for thread in threads:
        thread.join()
    assert (len(asked), answers) == (1, [b"0"] * 8)
    world.generation += 1
    assert cache.answer("/api/x", b"", make).body == b"1"


def test_a_failure_is_everyones_own(world: World) -> None:
    cache = world.cache()

    def fail() -> Answer:
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        cache.answer("/api/x", b"", fail)
    assert cache.answer("/api/x", b"", lambda: Answer.of(b"1")).body == b"1"


OPERATIONS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=60)


@given(OPERATIONS, st.integers(0, 30))
def test_the_cache_is_bounded_and_forgets_what_was_used_longest_ago(
    operations: list[tuple[str, int]], limit: int
) -> None:
    cache: ByteCache[str, int] = ByteCache(limit)
    model: dict[str, int] = {}
    for name, cost in operations:
        if cost == 0:
            assert cache.get(name) == model.get(name)
            if name in model:
                model[name] = model.pop(name)
            continue
        cache.put(name, cost, cost)
        model.pop(name, None)
        model[name] = cost
        while sum(model.values()) > limit:
            del model[next(iter(model))]
        assert cache.held_bytes == sum(model.values()) <= limit
    assert {name: cache.get(name) for name in "abcdef"} == {name: model.get(name) for name in "abcdef"}


def test_ever_new_questions_do_not_fill_the_memory(world: World) -> None:
    cache = world.cache(max_bytes=10 * ENTRY_BYTES)
    for number in range(1000):
        cache.put("/api/x", str(number).encode(), cache.state(), Answer.of(b"body"))
    assert cache.get("/api/x", b"999") is not None
    assert sum(cache.get("/api/x", str(number).encode()) is not None for number in range(1000)) == 9


def test_many_threads(world: World) -> None:
    cache: ByteCache[int, int] = ByteCache(50)
    faults: list[Any] = []

    def work(seed: int) -> None:
        for number in range(2000):
            key = (number * seed) % 20
            cache.put(key, key, 5)
            if cache.get(key) not in (None, key):
                faults.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert cache.held_bytes == 50
