"""Which profile a start takes, and why."""

from __future__ import annotations

import hashlib
import os
import time

import numpy as np
import pytest

from spark_agent.chosen_placement import FRESH_DAYS, choose_placement
from spark_agent.manifests import ManifestStore, PullKey
from spark_agent.own_counts import OwnCounts
from spark_agent.paths import manifests_dir, own_counts_path, service_keys_dir
from spark_agent.service_keys import KeyRing, PinnedKey
from spark_runtime.manifest_build import Basis, assemble_manifest, place_layers
from spark_runtime.tier_start import manifest_frequency
from spark_schemas.split import split_of

URL = "http://127.0.0.1:8710"
KEY = "A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg="


@pytest.fixture
def shape(make_model):
    return make_model()


@pytest.fixture
def pulled(shape):
    basis = Basis("chat", "decode", "c" * 64, 12, 4, "profile", "better")
    frequency = [np.array([0.1, 0.2, 0.3, 0.4])] * 2
    manifest = assemble_manifest(shape, basis, place_layers(shape, frequency, [4, 4]), None, n_ctx=100)
    path = ManifestStore(manifests_dir()).put(manifest, PullKey(URL, 10_000, 100, 0), None)
    return manifest, path


@pytest.fixture
def served(shape, make_session):
    with OwnCounts(own_counts_path(), pytest.fail) as own:
        for number in range(3):
            digest = next(
                found
                for found in (hashlib.sha256(f"{number} {tried}".encode()).hexdigest() for tried in range(50))
                if split_of(found) == "calibration"
            )
            changes = {"session_hash": digest, "split": "calibration"}
            own.add(shape, make_session(shape, seed=number, decode=100).model_copy(update=changes))


def choose(shape, warn=pytest.fail, given=None, workload="chat", no_profile=False):
    return choose_placement(shape, given=given, workload=workload, no_profile=no_profile, warn=warn)


def test_nothing_known(shape):
    found = choose(shape)
    assert (found.source, found.frequency, found.asked) == ("none", None, None)
    assert "no session of this model" in found.reason
    assert not own_counts_path().exists()


@pytest.mark.usefixtures("served")
def test_the_order(shape, pulled):
    manifest, path = pulled
    assert choose(shape, given="chat").asked == manifest
    fresh = choose(shape)
    assert (fresh.source, fresh.asked) == ("pulled", None)
    assert [layer.tolist() for layer in fresh.frequency] == [layer.tolist() for layer in manifest_frequency(manifest)]
    assert choose(shape, no_profile=True).source == "none"
    old_s = time.time() - (FRESH_DAYS + 2) * 86_400
    os.utime(path, (old_s, old_s))
    own = choose(shape)
    assert (own.source, own.manifest) == ("local", None)
    assert own.own.workload == "chat"
    assert choose(shape, workload="review").own.workload == "all-own-sessions"


def test_an_old_pulled_one_alone_is_said(shape, pulled):
    old_s = time.time() - (FRESH_DAYS + 2) * 86_400
    os.utime(pulled[1], (old_s, old_s))
    found = choose(shape)
    assert found.source == "none"
    assert f"{FRESH_DAYS + 2} days old" in found.reason


@pytest.mark.usefixtures("served", "pulled")
def test_one_that_must_not_be_believed_is_passed_over(shape):
    KeyRing(service_keys_dir()).put(PinnedKey(service_url=URL, key=KEY))
    said = []
    assert choose(shape, said.append).source == "local"
    assert "no signature" in said[0]


def test_a_broken_file_of_own_counts_costs_a_warning(shape):
    own_counts_path().parent.mkdir(parents=True)
    own_counts_path().write_bytes(b"no database" * 500)
    said = []
    assert choose(shape, said.append).source == "none"
    assert any("counting starts anew" in line for line in said)
