"""What pages are sent with: policy, compression, caching, errors for people."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from spark_service.dashboard.assets import Asset, Assets
from spark_service.dashboard.middleware import HEADERS


def test_every_answer_has_the_policy(admin: Any, visit: Callable[..., Any]) -> None:
    asset = re.search(r'/static/[^"]+', admin.get("/").text)
    assert asset is not None
    paths = ("/", "/index.json", "/privacy", "/privacy/tokens/nothing", "/profiles/nothing", asset[0], "/login")
    answers = [admin.get(path) for path in paths] + [visit().get("/"), admin.post("/privacy/delete", {})]
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert {"default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy.split("; "))


def test_pages_hold_nothing_inline(admin: Any) -> None:
    for path in ("/", "/privacy", "/privacy/tokens", "/privacy/audit"):
        html = admin.get(path).text
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", html)
        # Whatever is loaded is of this site, and its hash is named.
        for tag in re.findall(r"<(?:script|link)[^>]*>", html):
            assert re.search(r'(?:src|href)="/static/[0-9a-f]{16}/', tag)
            assert "integrity=" in tag or 'rel="icon"' in tag


def test_assets_are_for_good(admin: Any) -> None:
    html = admin.get("/").text
    for url in re.findall(r'"(/static/[^"]+)"', html):
        answer = admin.client.get(url)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-encoding"] == "gzip"
    assert admin.client.get("/static/0000000000000000/spark.css").status_code == 404
    assert admin.client.get("/static/x/%2e%2e%2fapp.py").status_code == 404


def test_an_asset_is_named_by_its_content(tmp_path: Path) -> None:
    one, other = Asset.of("a.js", b"1"), Asset.of("a.js", b"2")
    assert one.url != other.url
    assert gzip.decompress(one.body_gzip) == b"1"
    (tmp_path / "a.js").write_bytes(b"1")
    (tmp_path / "LICENSE.txt").write_bytes(b"text")
    assets = Assets([tmp_path, tmp_path / "absent"])
    found = assets.get("a.js")
    assert found == one
    assert (assets.at(one.url), assets.at(other.url), assets.get("LICENSE.txt")) == (one, None, None)


@pytest.mark.parametrize(
    ("accepted", "coded"), [("gzip", True), ("br, *;q=0.5", True), ("gzip;q=0", False), ("", False)]
)
def test_compression_is_asked_for(admin: Any, accepted: str, coded: bool) -> None:
    answer = admin.client.get("/", headers={"Accept-Encoding": accepted})
    assert ("content-encoding" in answer.headers) == coded
    assert "<h1>Team</h1>" in answer.text


def test_people_get_pages_and_programs_problems(admin: Any) -> None:
    for path in ("/nothing", "/privacy/nothing", "/docs"):
        answer = admin.get(path)
        assert answer.status_code == 404
        assert "<h1>Not Found</h1>" in answer.text
        assert answer.headers["content-security-policy"]
    answer = admin.client.get("/api/v1/nothing", headers={"Accept": "text/html"})
    assert answer.headers["content-type"] == "application/problem+json"
    assert admin.client.get("/privacy/nothing.json").headers["content-type"] == "application/problem+json"


def test_a_bug_is_a_page_too(visit: Callable[..., Any], admin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("spark_service.dashboard.team.team_of", fail)
    answer = admin.get("/")
    assert answer.status_code == 500
    assert "the service failed at this request" in answer.text
    loud = TestClient(admin.client.app, cookies=admin.client.cookies)
    with pytest.raises(ZeroDivisionError):
        loud.get("/")  # so that the server logs it
