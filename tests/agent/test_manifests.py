from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signing_keys import KEYS, sign

from spark_agent.errors import RefusedError, SparkError
from spark_agent.manifests import ManifestStore, PullKey, find_manifest, load_manifest, save_manifest
from spark_agent.paths import manifests_dir, service_keys_dir
from spark_agent.service_keys import KeyRing, PinnedKey
from spark_agent.signatures import SignedBy
from spark_schemas.ids import WORKLOAD_PATTERN
from spark_schemas.manifest import PlacementManifest
from spark_schemas.mix import MAX_WEIGHT, MAX_WORKLOADS, Mix

KEY = PullKey("http://team:8710", 1000, 64, 7)


@pytest.fixture
def manifest(make_manifest) -> PlacementManifest:
    return make_manifest()


@pytest.fixture
def store(tmp_path) -> ManifestStore:
    return ManifestStore(tmp_path / "manifests")


def test_the_latest_answer_is_kept(store, manifest):
    assert store.get(manifest.fingerprint, "chat") is None
    store.put(manifest, KEY, '"1"')
    newer = manifest.model_copy(update={"n_calibration": 2})
    path = store.put(newer, KEY, '"2"')
    assert store.get(manifest.fingerprint, "chat") == newer
    known = store.known(manifest.fingerprint, "chat", KEY)
    assert (known.manifest, known.etag, known.content) == (newer, '"2"', newer.model_dump_json().encode())
    assert [entry.name for entry in path.parent.iterdir()] == ["chat.json"]


@pytest.mark.parametrize(
    "other",
    [
        PullKey("http://other:8710", 1000, 64, 7),
        PullKey("http://team:8710", 1001, 64, 7),
        PullKey("http://team:8710", 1000, 65, 7),
        PullKey("http://team:8710", 1000, 64, 8),
        PullKey("http://team:8710", 1000, 64, 7, window_days=0),
        PullKey("http://team:8710", 1000, 64, 7, half_life_days=7.0),
    ],
)
def test_an_etag_is_for_one_question(store, manifest, other):
    store.put(manifest, KEY, '"1"')
    assert store.known(manifest.fingerprint, "chat", other) is None


def test_a_file_from_before_there_were_windows_is_the_services_own(store, manifest):
    path = store.put(manifest, KEY, '"1"')
    fields = json.loads(path.read_text())
    for name in ("window_days", "half_life_days"):
        assert fields.pop(name) is None
    path.write_text(json.dumps(fields))
    known = store.known(manifest.fingerprint, "chat", KEY)
    assert (known.manifest, known.key) == (manifest, KEY)


NAMES = st.from_regex(WORKLOAD_PATTERN, fullmatch=True)
MIXES = st.dictionaries(NAMES, st.integers(1, MAX_WEIGHT), min_size=1, max_size=MAX_WORKLOADS).map(
    lambda weights: str(Mix.parse("+".join(f"{name}:{weight}" for name, weight in weights.items())))
)


@given(one=MIXES, other=MIXES)
def test_every_mix_has_a_file_name_of_its_own_that_any_system_takes(one, other):
    store = ManifestStore(Path("kept"))
    paths = [store.path("mf1-x", name) for name in (one, other)]
    assert (paths[0] == paths[1]) == (one == other)
    for path in paths:
        assert path.parent == Path("kept/mf1-x")
        assert re.fullmatch(r"[a-z0-9][a-z0-9+_-]*\.json", path.name)
        assert len(path.name) <= 205


def test_the_longest_mix_can_be_kept(store, manifest):
    longest = ["+".join(f"{letter * 63}:{997 + (letter == last)}" for letter in "abcdefgh") for last in "gh"]
    kept = [manifest.model_copy(update={"workload": str(Mix.parse(name))}) for name in longest]
    for one in kept:
        store.put(one, KEY, None)
    for one in kept:
        assert store.get(manifest.fingerprint, one.workload) == one


@pytest.mark.parametrize("etag", [None, '"\xe9"', '"\n"', '"\x7f"'])
def test_what_is_no_etag_is_not_kept(store, manifest, etag):
    store.put(manifest, KEY, etag)
    assert store.known(manifest.fingerprint, "chat", KEY) is None
    assert store.get(manifest.fingerprint, "chat") == manifest


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{}", b"[]", b'{"service_url": "x", "manifest": {}}'])
def test_a_damaged_file_is_as_good_as_none(store, manifest, content):
    path = store.put(manifest, KEY, '"1"')
    path.write_bytes(content)
    assert store.get(manifest.fingerprint, "chat") is None
    assert store.known(manifest.fingerprint, "chat", KEY) is None
    store.put(manifest, KEY, '"1"')
    assert store.get(manifest.fingerprint, "chat") == manifest


def test_a_folder_in_its_place_is_as_good_as_none(store, manifest):
    path = store.path(manifest.fingerprint, "chat")
    path.mkdir(parents=True)
    assert store.get(manifest.fingerprint, "chat") is None
    with pytest.raises(SparkError, match="cannot write"):
        store.put(manifest, KEY, None)
    assert [entry.name for entry in path.parent.iterdir()] == ["chat.json"]


def test_both_files_load(store, manifest, tmp_path):
    """What ``--output`` writes, and what the store keeps (``pull-profile`` prints its path)."""
    written = tmp_path / "manifest.json"
    save_manifest(written, manifest.model_dump_json().encode(), None)
    assert written.stat().st_mode & 0o777 == 0o644, "it is meant to be passed on"
    assert load_manifest(written) == manifest
    assert load_manifest(store.put(manifest, KEY, '"1"')) == manifest


def test_the_wrong_field_is_named(tmp_path, manifest):
    path = tmp_path / "manifest.json"
    path.write_text(manifest.model_copy(update={"n_ctx": 0}).model_dump_json())
    with pytest.raises(SparkError, match="n_ctx: Input should be greater") as caught:
        load_manifest(path)
    assert "pull-profile" in caught.value.hint
    with pytest.raises(SparkError, match="cannot read"):
        load_manifest(tmp_path)
    with pytest.raises(SparkError, match="cannot read"):
        load_manifest(tmp_path / "absent")


@pytest.fixture
def signed(manifest) -> SignedBy:
    return SignedBy(service_url=KEY.service_url, key=KEYS[0], signature=sign(0, pretty(manifest)).header())


def pretty(manifest: PlacementManifest) -> bytes:
    """Other bytes than this program would write."""
    return manifest.model_dump_json(indent=3).encode()


def test_the_signed_bytes_are_kept_as_they_came(store, manifest, signed, tmp_path):
    path = store.put(manifest, KEY, '"1"', content=pretty(manifest), signed=signed)
    found = store.find(manifest.fingerprint, "chat")
    assert (found.content, found.signed) == (pretty(manifest), signed)
    assert load_manifest(path) == manifest
    written = tmp_path / "m.json"
    save_manifest(written, pretty(manifest), signed)
    assert written.read_bytes() == pretty(manifest)
    assert load_manifest(written) == manifest
    assert (tmp_path / "m.json.sig").stat().st_mode & 0o777 == 0o644


def test_a_file_and_its_signature_belong_together(manifest, signed, tmp_path):
    written, beside = tmp_path / "m.json", tmp_path / "m.json.sig"
    save_manifest(written, pretty(manifest), signed)
    written.write_bytes(pretty(manifest.model_copy(update={"n_calibration": 2})))
    with pytest.raises(RefusedError, match="altered"):
        load_manifest(written)
    save_manifest(written, pretty(manifest), signed)
    for content in (b"", b"{}", b"\xff"):
        beside.write_bytes(content)
        with pytest.raises(RefusedError, match="is not a manifest's signature") as caught:
            load_manifest(written)
        assert caught.value.hint
    # An unsigned one takes the earlier one's signature away.
    save_manifest(written, manifest.model_dump_json().encode(), None)
    assert not beside.exists()
    assert load_manifest(written) == manifest


def test_a_pinned_key_decides_over_files_too(store, manifest, signed, tmp_path):
    written = tmp_path / "m.json"
    save_manifest(written, pretty(manifest), signed)
    path = store.put(manifest, KEY, '"1"')
    assert load_manifest(path) == manifest
    KeyRing(service_keys_dir()).put(PinnedKey(service_url=KEY.service_url, key=KEYS[1]))
    with pytest.raises(RefusedError, match="which is pinned for http://team:8710"):
        load_manifest(written)
    with pytest.raises(RefusedError, match="has no signature"):
        load_manifest(path)


def test_a_pulled_name_is_checked(manifest, signed):
    kept = ManifestStore(manifests_dir())
    path = kept.put(manifest, KEY, '"1"', content=pretty(manifest), signed=signed)
    assert find_manifest("chat", manifest.fingerprint) == manifest
    path.write_text(path.read_text().replace('n_calibration\\": 1', 'n_calibration\\": 2'))
    assert kept.get(manifest.fingerprint, "chat").n_calibration == 2
    with pytest.raises(RefusedError, match="altered"):
        find_manifest("chat", manifest.fingerprint)
