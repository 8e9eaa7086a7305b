from __future__ import annotations

import pytest

from spark_agent.addresses import base_url_of, is_own_address, listening_address, reachable
from spark_agent.errors import UsageError


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("fd00::1", "http://[fd00::1]:1"),
        ("192.168.1.5", "http://192.168.1.5:1"),
        ("localhost", "http://localhost:1"),
    ],
)
def test_how_it_is_reached_from_here(host, url):
    assert base_url_of(host, 1) == url
    assert reachable(host) in url


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_addresses_of_this_machine(host):
    assert is_own_address(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "0.0.0.0", "::", "224.0.0.1", "example.org", ""])
def test_addresses_of_others_and_of_nobody(host):
    assert not is_own_address(host)


def test_what_is_listened_on():
    assert str(listening_address("localhost")) == "127.0.0.1"
    assert listening_address("::1").is_loopback
    with pytest.raises(UsageError, match="--host: found 'example'"):
        listening_address("example")
