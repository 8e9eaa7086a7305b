from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest


def today() -> date:
    return datetime.now(UTC).date()


def two(make: Any) -> list[Any]:
    shape = make.shape()
    return [*make.sessions(shape, 5, 5), *make.sessions(shape, 4, 4, workload="chat", taste=3)]


def test_an_empty_service_says_what_it_takes(pages: Any) -> None:
    shown = pages.json("/compare.json")
    assert (shown["model"], shown["workloads"], shown["page"]) == (None, [], None)
    html = pages.html("/compare")
    assert "Nothing to compare yet: no sessions were uploaded" in html
    assert "<form class" not in html


def test_the_two_busiest_are_compared_unless_asked(pages: Any, make: Any) -> None:
    pages.add(two(make))
    shown = pages.json("/compare.json")
    assert (shown["a"], shown["b"]) == ("code", "chat")
    assert [side["n_held_out"] for side in shown["page"]["sides"]] == [5, 4]
    html = pages.html("/compare")
    assert html.count('<option value="code" selected>') == 1
    assert "The profile of code misses" in html


def test_the_matrix_has_every_pair(pages: Any, make: Any) -> None:
    pages.add(two(make))
    matrix = pages.json("/compare.json")["page"]["matrix"]
    assert [[cell["profile"] for cell in row["cells"]] for row in matrix["rows"]] == [["chat", "code"]] * 2
    html = pages.html("/compare")
    assert len(re.findall(r'<td class="n heat-\d', html)) == 4


def test_one_workload_is_compared_with_its_latest_days(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 8, 5))
    old = (today() - timedelta(days=60)).isoformat()
    with pages.store.writing() as cursor:
        for index in range(4):
            cursor.execute("UPDATE parts SET received_day = ? WHERE session_hash = ?", [old, make.hash(index)])
    shown = pages.json("/compare.json")
    assert (shown["a"], shown["a_days"], shown["b"], shown["b_days"]) == ("code", "", "code", "30")
    assert [side["n_calibration"] for side in shown["page"]["sides"]] == [8, 4]
    assert shown["page"]["sides"][1]["label"] == "code, last 30 days"
    assert "Nothing to compare with" in pages.html("/compare")


def test_two_dates_of_one_workload(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 8, 5))
    old = (today() - timedelta(days=60)).isoformat()
    with pages.store.writing() as cursor:
        for side, count in (("calibration", 4), ("held_out", 2)):
            for index in range(count):
                name = make.hash(index, side)
                cursor.execute("UPDATE parts SET received_day = ? WHERE session_hash = ?", [old, name])
    sides = pages.json("/compare.json?a=code&b=code&b_days=before-30")["page"]["sides"]
    assert [(side["n_calibration"], side["n_held_out"]) for side in sides] == [(8, 5), (4, 2)]
    assert sides[1]["label"] == f"code, as of {today() - timedelta(days=30)}"
    assert '<option value="before-30" selected>' in pages.html("/compare?a=code&b=code&b_days=before-30")


@pytest.mark.parametrize(("before", "told"), [(2, "so few came until then"), (6, "so few came since")])
def test_a_date_that_would_show_single_sessions_is_refused(pages: Any, make: Any, before: int, told: str) -> None:
    pages.add(make.sessions(make.shape(), 8, 5))
    old = (today() - timedelta(days=60)).isoformat()
    with pages.store.writing() as cursor:
        for index in range(before):
            cursor.execute("UPDATE parts SET received_day = ? WHERE session_hash = ?", [old, make.hash(index)])
    page = pages.json("/compare.json?a=code&b=code&b_days=before-30")["page"]
    assert page["sides"] is None
    assert "1 more calibration session needed (2 of 3)." in page["sides_missing"]
    assert told in page["sides_missing"].lower()


def test_a_side_of_too_few_sessions_says_how_many_more(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 5, 5) + make.sessions(make.shape(), 1, 0, workload="chat"))
    page = pages.json("/compare.json")["page"]
    assert page["sides"] is None
    assert "chat: 2 more calibration sessions needed (1 of 3)." in page["sides_missing"]
    assert "These two cannot be put side by side" in pages.html("/compare")


def test_a_mix_is_answered(pages: Any, make: Any) -> None:
    pages.add(two(make))
    page = pages.json("/compare.json?mix=code:1%2Bchat:1")["page"]
    assert {one["profile"] for one in page["mix"]["rates"]} == {"chat:1+code:1", "chat", "code"}
    # A + that nobody encoded arrives as a blank.
    assert pages.json("/compare.json?mix=code:1+chat:1")["page"]["mix"] == page["mix"]
    assert page["mix"]["sentence"] in pages.html("/compare?mix=code:1%2Bchat:1").replace("&#39;", "'")


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("a=nobody", 404, "unknown_workload"),
        ("model=<b>", 404, "unknown_model"),
        ("a_days=8", 422, "invalid_parameter"),
        ("b_days=-1", 422, "invalid_parameter"),
        ("b_days=٣", 422, "invalid_parameter"),
        ("a=CODE", 422, "invalid_parameter"),
        ("mix=code:0", 422, "invalid_parameter"),
        ("phase=x", 422, "invalid_parameter"),
        ("c=1", 422, "invalid_parameter"),
        ("a=code&a=chat", 422, None),
    ],
)
def test_questions_that_mean_nothing(pages: Any, make: Any, query: str, status: int, code: str | None) -> None:
    pages.add(two(make))
    answer = pages.client.get(f"/compare.json?{query}")
    assert answer.status_code in (status, 400)
    assert code is None or answer.json()["code"] == code
    page = pages.client.get(f"/compare?{query}")
    assert page.status_code == answer.status_code
    assert "<b>" not in page.text
