from __future__ import annotations

import base64
import gzip
import re
import time
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

from spark_schemas.histogram import LayerCounts, PhaseHistogram, SessionHistogram
from spark_schemas.split import split_of
from spark_service.dashboard.heat_map import LEVELS
from spark_service.dashboard.render import visible_text

HOSTILE = (
    "<script>alert(1)</script>\"'&",
    "\u202etxt.exe\u202c مرحبا",
    "x" * 200,
    "{{ 7 * 7 }}{% raw %}",
)


def place(make: Any, workload: str = "code", ending: str = "") -> str:
    return f"/profiles/{make.fingerprint}/{workload}{ending}"


def test_an_empty_service_says_what_it_needs(pages: Any) -> None:
    assert pages.json("/profiles.json")["page"] == {"phase": "decode", "rows": []}
    html = pages.html("/profiles")
    assert "No sessions yet, so no profiles: the first needs 3" in html
    assert "spark-agent record" in html
    assert "<table" not in html


def test_one_session_is_no_profile_and_the_rest_is_counted(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 1, 0))
    [row] = pages.json("/profiles.json")["page"]["rows"]
    assert not row["has_profile"]
    assert row["missing"] == "2 more calibration sessions needed (1 of 3)"
    shown = pages.json(place(make, ending=".json"))
    assert shown["page"] is None
    assert "code: 2 more calibration sessions needed (1 of 3)." in shown["missing"]
    html = pages.html(place(make))
    assert "No profile yet" in html
    assert "<canvas" not in html


def test_sessions_without_judges_show_frequencies_and_claim_nothing(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 0))
    html = pages.html(place(make))
    assert "No held-out sessions yet: 3 more needed" in html
    assert 'data-chart="lines"' not in html
    assert "data-heat-canvas" in html
    [row] = pages.json("/profiles.json")["page"]["rows"]
    assert row["missing"] == "3 more held-out sessions needed (0 of 3)"
    assert row["own"] is None


def test_a_page_says_what_the_api_says(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 5, 5) + make.sessions(make.shape(), 4, 4, workload="chat", taste=3))
    profile = pages.client.get(f"/api/v1/profiles/{make.fingerprint}/code").json()
    page = pages.json(place(make, ending=".json"))["page"]
    assert page["revision"] == profile["revision"]
    assert (page["n_calibration"], page["n_held_out"]) == (5, 5)
    for curve in page["curves"]:
        if curve["basis"] == "held_out":
            expected = [one for one in profile["curves"] if one["policy"] == curve["policy"]]
            assert [(one["residency"], one["cold_hit_rate"], one["low"]) for one in curve["points"]] == [
                (one["residency"], one["cold_hit_rate"], one["low"]) for one in expected
            ]
    html = pages.html(place(make))
    [own] = [one for one in profile["curves"] if (one["policy"], one["residency"]) == ("own", 0.6)]
    assert f"{100 * own['cold_hit_rate']:.1f}%" in html
    assert page["verdict"]["verdict"] == profile["verdict"]


def test_a_page_works_as_tables_without_scripts(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 4))
    html = pages.html(place(make))
    assert len(re.findall(r'<tr><th scope="row" data-value=', html)) == 10
    links = re.findall(rf'<a href="({re.escape(place(make))}/layers/\d+)"', html)
    assert len(links) == 3
    layer = pages.html(links[1])
    assert layer.count("video memory</td>") + layer.count("host memory</td>") == 16
    assert " style=" not in html + layer
    assert not re.search(r"<script(?![^>]*\bsrc=)", html + layer)


def test_the_picture_is_that_of_the_profile(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 4))
    pages.json(place(make, ending=".json"))
    answer = pages.client.get(place(make, ending="/heat.json"))
    heat = answer.json()
    assert heat["n_experts"] == [12, 16, 8]
    levels = np.frombuffer(base64.b64decode(heat["levels"]), dtype=np.uint8)
    profile = pages.client.get(f"/api/v1/profiles/{make.fingerprint}/code").json()
    even = np.concatenate([np.array(layer["shares"]) * len(layer["shares"]) for layer in profile["layers"]])
    assert levels[even.argmax()] == levels.max() == LEVELS
    assert levels[even.argmin()] == levels.min() == 1
    again = pages.client.get(place(make, ending="/heat.json"), headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert answer.headers["cache-control"] == "private, no-cache"


def test_a_layer_that_is_not_there(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 4))
    pages.json(place(make, ending=".json"))
    answer = pages.client.get(place(make, ending="/layers/0.json"))
    assert answer.status_code == 404
    assert answer.json()["expected"] == "1, 2, 3"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/profiles/mf1-" + "f" * 32 + "/code.json", 404, "unknown_model"),
        ("/profiles/nonsense/code.json", 422, "invalid_parameter"),
        ("{}/nobody.json", 404, "unknown_workload"),
        ("{}/CODE!.json", 422, "invalid_parameter"),
        ("{}/code:1+nobody:1.json", 404, "unknown_workload"),
        ("{}/code.json?phase=both", 422, "invalid_parameter"),
        ("{}/code.json?fase=decode", 422, "invalid_parameter"),
        ("{}/code/heat.json?phase=both", 422, "invalid_parameter"),
        ("{}/code/layers/99999999999.json", 422, "invalid_parameter"),
    ],
)
def test_what_cannot_be_shown_says_why(pages: Any, make: Any, path: str, status: int, code: str) -> None:
    pages.add(make.sessions(make.shape(), 4, 4))
    answer = pages.client.get(path.format(f"/profiles/{make.fingerprint}"))
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    page = pages.client.get(path.format(f"/profiles/{make.fingerprint}").replace(".json", "", 1))
    assert page.status_code == (404 if "heat" in path else status)
    assert "<h1>" in page.text


def test_a_mix_has_a_page_under_any_spelling(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 4) + make.sessions(make.shape(), 4, 4, workload="chat", taste=3))
    shown = pages.json(place(make, "code:2+chat:2", ".json"))
    assert shown["workload"] == "chat:1+code:1"
    assert shown["page"]["is_mix"]
    assert shown["page"]["shift"] is None
    assert "chat alone" in pages.html(place(make, "chat+code"))


def test_prompts_have_pages_of_their_own(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 4, prefill=100))
    page = pages.json(place(make, ending=".json?phase=prefill"))["page"]
    assert page["phase"] == "prefill"
    html = pages.html(place(make) + "?phase=prefill")
    assert f"{place(make)}/heat.json?phase=prefill" in html


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(pages: Any, make: Any, name: str) -> None:
    shape = make.shape(name=name)
    pages.add(make.sessions(shape, 4, 4), shape)
    for path in (place(make), "/profiles", place(make) + "/layers/1", "/compare", "/budget"):
        html = pages.html(path)
        assert "<script>alert" not in html
        # A list of choices shows the start of a long name.
        assert str(escape(visible_text(name)[:70])) in html or "/layers/" in path
        assert "\u202e" not in html
    assert pages.json("/profiles.json")["page"]["rows"][0]["model"]["name"] == name


def test_what_was_deleted_is_never_shown_again(pages: Any, make: Any) -> None:
    pages.add(make.sessions(make.shape(), 4, 4))
    assert pages.json(place(make, ending=".json"))["page"]["n_calibration"] == 4
    pages.store.delete_session(make.hash(0))
    assert pages.json(place(make, ending=".json"))["page"]["n_calibration"] == 3


def test_new_sessions_are_shown_soon(pages: Any, make: Any) -> None:
    sessions = make.sessions(make.shape(), 6, 4)
    pages.add(sessions[:4] + sessions[6:])
    assert pages.json(place(make, ending=".json"))["page"]["n_calibration"] == 4
    pages.add(sessions[4:6], key="key-2")
    deadline = time.monotonic() + 120
    while (shown := pages.json(place(make, ending=".json")))["page"]["n_calibration"] != 6:
        # What was made before is shown as such while making rests.
        assert not shown["is_current"]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert shown["is_current"]


def large_session(shape: Any, number: int, session_hash: str) -> SessionHistogram:
    rng = np.random.default_rng(number)
    tokens, layers = 2000, []
    for layer in shape.layers:
        share = np.random.default_rng(layer.block).dirichlet(np.full(layer.n_experts, 0.5))
        counts = np.minimum(rng.multinomial(tokens * layer.top_k, share), tokens)
        missing = tokens * layer.top_k - int(counts.sum())
        for expert in np.argsort(counts):
            more = min(missing, tokens - int(counts[expert]))
            counts[expert] += more
            missing -= more
        layers.append(LayerCounts(block=layer.block, tokens=tokens, counts=tuple(counts.tolist())))
    return SessionHistogram(
        session_hash=session_hash,
        split=split_of(session_hash),
        workload="code",
        decode=PhaseHistogram(tokens=tokens, layers=tuple(layers)),
    )


def test_pages_of_a_large_model_are_small_on_the_wire(pages: Any, make: Any) -> None:
    """60 layers of 512 experts: every page and what it fetches is below 150 kB as sent."""
    shape = make.shape([(512, 10, 1000)] * 60)
    hashes = [make.hash(index) for index in range(3)] + [make.hash(index, "held_out") for index in range(3)]
    pages.add([large_session(shape, number, one) for number, one in enumerate(hashes)], shape)
    for path in (place(make), place(make) + "/layers/7", "/compare", "/budget", "/profiles"):
        body = len(gzip.compress(pages.html(path).encode(), 5))
        if path == place(make):
            body += len(gzip.compress(pages.client.get(f"{path}/heat.json").content, 5))
        assert body < 60_000, path
    sent = pages.client.get(place(make), headers={"Accept-Encoding": "gzip"})
    assert sent.headers["content-encoding"] == "gzip"
