"""First use, a changed key, a rotation, a key named up front: what is believed and what is kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from signing_keys import KEYS, info, rotation, sign

from spark_agent.errors import ConfigError, RefusedError
from spark_agent.service_keys import KeyRing, PinnedKey
from spark_agent.signatures import SignedBy
from spark_agent.trust import ManifestTrust
from spark_schemas.signature import SigningKeyInfo, key_id_of

URL = "http://team:8710"
BODY = b'{"a": 1}'


class Service:
    """What a service shows; asking for its key is counted."""

    base_url = URL

    def __init__(self, shown: SigningKeyInfo) -> None:
        self.shown = shown
        self.asked = 0

    def signing_key(self) -> SigningKeyInfo:
        self.asked += 1
        return self.shown


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys")


@pytest.fixture
def said() -> list[str]:
    return []


def header(number: int, body: bytes = BODY) -> str:
    return sign(number, body).header()


def test_first_use_pins_and_says_so(ring: KeyRing, said: list[str]) -> None:
    service, trust = Service(info(0)), ManifestTrust(ring)
    signed = trust.check_answer(service, BODY, header(0), said.append)
    assert signed == SignedBy(service_url=URL, key=KEYS[0], signature=header(0))
    assert ring.get(URL) == PinnedKey(service_url=URL, key=KEYS[0])
    assert key_id_of(KEYS[0]) in said[0]
    assert trust.check_answer(service, BODY, header(0), said.append) == signed
    assert (len(said), service.asked) == (1, 1), "a pinned key asks and says nothing"
    assert ring.get("http://other") is None


def test_a_dry_run_pins_nothing(ring: KeyRing, said: list[str]) -> None:
    assert ManifestTrust(ring).check_answer(Service(info(0)), BODY, header(0), said.append, pin=False)
    assert "would pin" in said[0]
    assert ring.all() == []


@pytest.mark.parametrize(
    ("shown", "signature", "word"),
    [
        (info(0), header(0, b"other"), "altered"),
        (info(1), header(0), "but the service shows"),
        (info(0).model_copy(update={"key_id": key_id_of(KEYS[1])}), header(1), "but the service shows"),
        (info(0), "nonsense", "cannot be read"),
    ],
)
@pytest.mark.parametrize("pinned", [None, 0, 5])
def test_a_bad_answer_is_refused_whatever_is_pinned(
    ring: KeyRing, said: list[str], shown: SigningKeyInfo, signature: str, word: str, pinned: int | None
) -> None:
    if pinned is not None:
        ring.put(PinnedKey(service_url=URL, key=KEYS[pinned]))
    before = ring.all()
    if pinned == 0 and signature == header(0):
        assert ManifestTrust(ring).check_answer(Service(shown), BODY, signature, said.append)
        return
    with pytest.raises(RefusedError, match=word) as caught:
        ManifestTrust(ring).check_answer(Service(shown), BODY, signature, said.append)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert ring.all() == before


def test_unsigned_is_refused_once_a_service_has_signed(ring: KeyRing, said: list[str]) -> None:
    service, trust = Service(info(0)), ManifestTrust(ring)
    assert trust.check_answer(service, BODY, None, said.append) is None
    assert "does not sign" in said[0]
    trust.check_answer(service, BODY, header(0), said.append)
    with pytest.raises(RefusedError, match="is not signed"):
        trust.check_answer(service, BODY, None, said.append)
    with pytest.raises(RefusedError, match="is not signed"):
        ManifestTrust(KeyRing(ring.path(URL).parent / "empty"), KEYS[0]).check_answer(service, BODY, None, said.append)


def test_a_changed_key_is_refused_with_what_to_do(ring: KeyRing, said: list[str]) -> None:
    ring.put(PinnedKey(service_url=URL, key=KEYS[0]))
    for shown in (info(1), info(1, rotation(0, 1, by=1)), info(1, rotation(2, 1))):
        with pytest.raises(RefusedError, match="does not vouch") as caught:
            ManifestTrust(ring).check_answer(Service(shown), BODY, header(1), said.append)
        assert f"spark service-key trust {key_id_of(KEYS[1])} --service {URL}" in str(caught.value.hint)
    assert ring.get(URL) == PinnedKey(service_url=URL, key=KEYS[0])


def test_rotations_are_followed_and_earlier_keys_kept_for_what_they_signed(ring: KeyRing, said: list[str]) -> None:
    trust = ManifestTrust(ring)
    first = trust.check_answer(Service(info(0)), BODY, header(0), said.append)
    assert first is not None
    chain = [rotation(0, 1)]
    trust.check_answer(Service(info(1, *chain)), BODY, header(1), said.append)
    chain += [rotation(1, 2), rotation(2, 3)]
    trust.check_answer(Service(info(3, *chain)), BODY, header(3), said.append)
    assert ring.get(URL) == PinnedKey(service_url=URL, key=KEYS[3], earlier=tuple(KEYS[:3]))
    trust.check_stored(BODY, first)
    # But no new answer may be signed by them.
    with pytest.raises(RefusedError):
        trust.check_answer(Service(info(0)), BODY, header(0), said.append)


def test_a_key_named_up_front_counts_alone(ring: KeyRing, said: list[str]) -> None:
    ring.put(PinnedKey(service_url=URL, key=KEYS[0]))
    trust = ManifestTrust(ring, KEYS[1])
    with pytest.raises(RefusedError):
        trust.check_answer(Service(info(0)), BODY, header(0), said.append)
    assert trust.check_answer(Service(info(1)), BODY, header(1), said.append)
    assert trust.check_answer(Service(info(2, rotation(1, 2))), BODY, header(2), said.append)
    assert f"set SPARKMOE_SIGNING_KEY to {KEYS[2]}" in said
    assert ring.get(URL) == PinnedKey(service_url=URL, key=KEYS[0]), "nothing is pinned"


def test_kept_manifests(ring: KeyRing) -> None:
    signed = SignedBy(service_url=URL, key=KEYS[0], signature=header(0))
    trust = ManifestTrust(ring)
    trust.check_stored(BODY, signed)
    trust.check_unsigned(URL)
    with pytest.raises(RefusedError, match="altered"):
        trust.check_stored(BODY + b" ", signed)
    ring.put(PinnedKey(service_url=URL, key=KEYS[1]))
    for check in (lambda: trust.check_stored(BODY, signed), lambda: trust.check_unsigned(URL)):
        with pytest.raises(RefusedError, match=key_id_of(KEYS[1])):
            check()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"service_url": "http://team:8710", "key": "x"}'])
def test_a_damaged_pin_is_no_first_use(ring: KeyRing, said: list[str], content: bytes) -> None:
    ring.put(PinnedKey(service_url=URL, key=KEYS[0]))
    assert stat.S_IMODE(ring.path(URL).stat().st_mode) == 0o600
    ring.path(URL).write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged") as caught:
        ManifestTrust(ring).check_answer(Service(info(0)), BODY, header(0), said.append)
    assert "service-key forget" in str(caught.value.hint)
    assert ring.path(URL).read_bytes() == content
    with pytest.raises(ConfigError):
        ring.all()
    assert ring.forget(URL)
    assert not ring.forget(URL)
    assert ring.get(URL) is None


def test_a_pin_of_another_service_is_none(ring: KeyRing) -> None:
    ring.put(PinnedKey(service_url="http://other", key=KEYS[0]))
    ring.path("http://other").rename(ring.path(URL))
    with pytest.raises(ConfigError, match="expected that of"):
        ring.get(URL)
