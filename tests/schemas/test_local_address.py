from __future__ import annotations

import pytest

from spark_schemas.local_address import foreign_header, is_loopback, is_loopback_url

HERE = ["127.0.0.1", "127.9.9.9", "::1", "localhost"]
ELSEWHERE = ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.example.org", "127.0.0.1.example.org", ""]


@pytest.mark.parametrize("host", HERE)
def test_this_machine(host: str) -> None:
    assert is_loopback(host)
    assert is_loopback_url(f"http://[{host}]:80/a" if ":" in host else f"https://{host}:80")


@pytest.mark.parametrize("host", ELSEWHERE)
def test_any_other(host: str) -> None:
    assert not is_loopback(host)
    assert not is_loopback_url(f"http://{host}")


@pytest.mark.parametrize("url", ["http://a@127.0.0.1", "http://a:b@[::1]", "http://[::1", "null", "127.0.0.1", ""])
def test_urls_that_name_something_else_or_nothing(url: str) -> None:
    assert not is_loopback_url(url)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"host": "127.0.0.1:11711"}, None),
        ({"host": "LOCALHOST"}, None),
        ({"host": "localhost", "origin": "http://[::1]:3000"}, None),
        ({"host": "evil.example"}, "Host"),
        ({}, "Host"),
        ({"host": "127.0.0.1", "origin": "https://evil.example"}, "Origin"),
        ({"host": "127.0.0.1", "origin": "null"}, "Origin"),
        ({"host": "evil.example", "origin": "https://evil.example"}, "Host"),
    ],
)
def test_what_a_foreign_page_cannot_hide(headers: dict[str, str], found: str | None) -> None:
    assert foreign_header(headers) == found
