from __future__ import annotations

import re
from typing import Any

import pytest

from spark_agent.sizes import parse_size


def test_an_empty_service_says_so(pages: Any) -> None:
    assert pages.json("/budget.json")["model"] is None
    assert "Nothing to plan with yet: no sessions were uploaded" in pages.html("/budget")


def test_the_page_starts_at_most_of_the_experts(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    shown = pages.json("/budget.json")
    page = shown["page"]
    assert shown["workload"] == "code"
    assert page["residency"] == pytest.approx(0.6, abs=0.03)
    assert shown["least_bytes"] <= shown["vram_bytes"] <= shown["most_bytes"]
    html = pages.html("/budget")
    [value] = re.findall(r'type="range"[^>]* value="(\d+)"', html)
    assert int(value) == shown["vram_bytes"]
    assert page["command"] in html.replace("&#34;", '"')


def test_a_form_answers_without_scripts(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    shown = pages.json("/budget.json")
    [action] = re.findall(r'<form class="budget-form" method="(\w+)" action="/budget"', pages.html("/budget"))
    assert action == "get"
    more = shown["vram_bytes"] + 4 * shown["step_bytes"]
    page = pages.json(f"/budget.json?of={make.fingerprint}&model={make.fingerprint}&vram_bytes={more}&gpu=h200")["page"]
    assert page["vram_bytes"] == more
    assert page["gpu_basis"] == "measured"
    assert page["rates"][0]["cold_hit_rate"] < shown["page"]["rates"][0]["cold_hit_rate"]


def test_the_manifest_of_the_command_is_that_of_the_page(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    page = pages.json("/budget.json")["page"]
    words = page["command"].split()
    vram = parse_size(words[words.index("--vram") + 1], "--vram")
    query = f"vram_bytes={vram}&n_ctx={page['n_ctx']}"
    manifest = pages.client.get(f"/api/v1/manifests/{make.fingerprint}/code?{query}").json()
    assert [tier["n_bytes"] for tier in page["tiers"]] == [
        manifest["bytes"][name]
        for name in ("vram_core", "vram_kv", "vram_slots", "vram_reserve", "vram_total", "host_experts")
    ]
    # Between two points of a curve, so near what was judged for exactly this.
    assert page["rates"][0]["cold_hit_rate"] == pytest.approx(manifest["expected"]["cold_hit_rate"], abs=0.03)


def test_a_budget_that_cannot_work_says_what_would(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    html = pages.html("/budget?vram_bytes=5")
    assert "5 B is too little: the smallest placement takes" in html
    assert 'role="alert"' in html


def test_a_workload_of_one_session_says_how_many_more(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 1, 0))
    shown = pages.json("/budget.json")
    assert shown["page"] is None
    assert "code: 2 more calibration sessions needed (1 of 3)." in shown["missing"]
    assert "No profile yet" in pages.html("/budget")


def test_without_judges_bytes_are_told_and_nothing_is_promised(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 0))
    html = pages.html("/budget")
    assert "No held-out sessions yet: 3 more needed" in html
    assert "Bytes by tier" in html
    assert "tok/s</span>" not in html


def test_another_model_starts_anew(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    other = make.shape(fingerprint="mf1-" + "0" * 31 + "2", core_bytes=10**9)
    pages.add(make.sessions(other, 4, 4, workload="chat"), other, "key-2")
    shown = pages.json(f"/budget.json?of={make.fingerprint}&model={other.fingerprint}&workload=code&vram_bytes=3000")
    assert shown["workload"] == "chat"
    assert shown["page"]["problem"] is None
    assert shown["vram_bytes"] > 10**9


@pytest.mark.parametrize("host", ["evil.example", "[::1]:8710", "127.0.0.1:8710"])
def test_the_command_names_the_service_as_it_was_reached(pages: Any, make: Any, host: str) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    pages.json("/budget.json")
    page = pages.client.get("/budget.json", headers={"Host": host}).json()["page"]
    assert page["command"].endswith(f"--service http://{host}")


@pytest.mark.parametrize("host", ["a;rm -rf", "$(x)", "a b", '"', "a/../b", "x" * 400])
def test_a_host_that_is_none_is_left_out_of_the_command(pages: Any, make: Any, host: str) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    pages.json("/budget.json")
    page = pages.client.get("/budget.json", headers={"Host": host}).json()["page"]
    assert "--service" not in page["command"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("gpu=abacus", 422),
        ("vram_bytes=-1", 422),
        ("vram_bytes=1e9", 422),
        ("n_ctx=0", 422),
        ("model=x", 404),
        ("workload=nobody", 404),
        ("what=1", 422),
    ],
)
def test_questions_that_mean_nothing(pages: Any, make: Any, query: str, status: int) -> None:
    pages.add(make.sessions(make.shape(), 5, 5))
    assert pages.client.get(f"/budget.json?{query}").status_code == status
    assert pages.client.get(f"/budget?{query}").status_code == status
