from __future__ import annotations

import pytest
from signing_keys import KEYS, info, rotation

from spark_agent.paths import service_keys_dir
from spark_agent.service_keys import KeyRing, PinnedKey
from spark_schemas.signature import key_id_of

IDS = [key_id_of(key) for key in KEYS]


@pytest.fixture(autouse=True)
def address(service, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPARKMOE_SERVICE_URL", service.url)
    return service.url


@pytest.fixture
def shows(service, make_reply):
    def say(found) -> None:
        service.answers["/api/v1/signing-key"] = make_reply(200, found.model_dump_json().encode())

    return say


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(service_keys_dir())


def test_show(spark_cli, shows, ring, address, monkeypatch):
    assert spark_cli("service-key", "show", "--json").json == {"pinned": [], "offered": None, "given": None}
    ring.put(PinnedKey(service_url=address, key=KEYS[1], earlier=(KEYS[0],)))
    ring.put(PinnedKey(service_url="http://another:1", key=KEYS[2]))
    shows(info(3))
    found = spark_cli("service-key", "show", "--json").json
    assert [pin["key_id"] for pin in found["pinned"]] == [IDS[1], IDS[2]]
    assert found["pinned"][0] == {
        "service": address,
        "key_id": IDS[1],
        "key": KEYS[1],
        "earlier_key_ids": [IDS[0]],
    }
    found = spark_cli("service-key", "show", "--service", address, "--json").json
    assert [pin["key_id"] for pin in found["pinned"]] == [IDS[1]]
    assert found["offered"] == {"key_id": IDS[3], "key": KEYS[3]}
    people = spark_cli("service-key", "show", "--service", address)
    assert IDS[1] in people.out
    assert IDS[3] in people.out
    monkeypatch.setenv("SPARKMOE_SIGNING_KEY", KEYS[4])
    assert IDS[4] in spark_cli("service-key", "show").err


def test_trust_takes_the_key_that_was_named_and_no_other(spark_cli, shows, ring, address):
    shows(info(1))
    spark_cli("service-key", "trust", IDS[0]).failed(3, f"shows key {IDS[1]}, expected {IDS[0]}")
    assert ring.get(address) is None
    assert spark_cli("service-key", "trust", IDS[1].upper(), "--json").json == {
        "service": address,
        "key_id": IDS[1],
        "replaced": None,
    }
    shows(info(2))
    assert spark_cli("service-key", "trust", IDS[2], "--json").json["replaced"] == IDS[1]
    assert ring.get(address) == PinnedKey(service_url=address, key=KEYS[2])
    # One that the pinned key vouches for: what that one signed stays good.
    shows(info(3, rotation(2, 3)))
    spark_cli("service-key", "trust", IDS[3])
    assert ring.get(address) == PinnedKey(service_url=address, key=KEYS[3], earlier=(KEYS[2],))


@pytest.mark.parametrize("named", ["", "x", KEYS[0], IDS[0][:-1], IDS[0] + "0"])
def test_what_is_no_key_id(spark_cli, service, named):
    spark_cli("service-key", "trust", named).failed(2, "KEY_ID", "32 hex digits")
    assert service.requests == []


def test_a_lying_service(spark_cli, service, make_reply, ring, address):
    service.answers["/api/v1/signing-key"] = make_reply(200, b'{"key": "x"}')
    spark_cli("service-key", "trust", IDS[0]).failed(1, "no valid SigningKeyInfo")
    # The id is computed here, whatever is claimed.
    claimed = info(1).model_copy(update={"key_id": IDS[0]})
    service.answers["/api/v1/signing-key"] = make_reply(200, claimed.model_dump_json().encode())
    spark_cli("service-key", "trust", IDS[0]).failed(3, IDS[1])
    assert ring.get(address) is None


def test_forget(spark_cli, ring, address):
    assert spark_cli("service-key", "forget", "--json").json == {"service": address, "forgotten": False}
    ring.put(PinnedKey(service_url=address, key=KEYS[0]))
    ring.path(address).write_bytes(b"damaged")
    spark_cli("service-key", "show").failed(1, "cannot use the pinned key")
    assert spark_cli("service-key", "forget", "--json").json == {"service": address, "forgotten": True}
    assert ring.all() == []
