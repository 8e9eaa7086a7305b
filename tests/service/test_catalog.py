from __future__ import annotations

from typing import Any

import pytest

from spark_service.catalog import Catalog
from spark_service.db.store import Store
from spark_service.errors import RequestError
from spark_service.manifests import Budget


def fill(store: Store, make: Any, sessions: list[Any], key: str = "key-1", shape: Any = None) -> None:
    store.add_upload(make.upload(shape or make.shape(), sessions), key, key)


def test_rebuilding_gives_the_same_bits(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape) + make.sessions(shape, workload="chat", taste=3))
    first = Catalog(store).profile(shape.fingerprint, "code", "decode")
    again = Catalog(store).profile(shape.fingerprint, "code", "decode")
    assert first is not again
    assert first.model_dump_json() == again.model_dump_json()


def test_a_profile_is_remembered_until_its_inputs_change(store: Store, make: Any) -> None:
    shape = make.shape()
    catalog = Catalog(store)
    fill(store, make, make.sessions(shape, 2, 2))

    def code() -> Any:
        return catalog.profile(shape.fingerprint, "code", "decode")

    first = code()
    assert code() is first
    fill(store, make, make.sessions(shape, 2, 2), "the same again")
    fill(store, make, make.sessions(shape, 0, 1, workload="chat"), "another workload's held-out session")
    assert code() is first
    fill(store, make, make.sessions(shape, 1, 0, workload="chat"), "another workload's calibration session")
    second = code()
    assert second.revision != first.revision
    assert "other" in {point.policy for point in second.curves}
    store.delete_session(make.hash(1))
    assert code().n_calibration == 1
    assert code().revision not in (first.revision, second.revision)


def test_only_so_many_are_remembered(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, [make.session(shape, make.hash(0), workload=f"w{n}", decode=10) for n in range(4)])
    catalog = Catalog(store, remembered=2)
    first = catalog.profile(shape.fingerprint, "w0", "decode")
    catalog.summaries(None, "decode")
    assert len(catalog._usual.built) == len(catalog._usual.latest) == 2
    assert catalog.profile(shape.fingerprint, "w0", "decode") is not first


def test_phases_are_apart(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape, 2, 1, prefill=40))
    catalog = Catalog(store)
    decode, prefill = (catalog.profile(shape.fingerprint, "code", phase) for phase in ("decode", "prefill"))
    assert (decode.tokens_calibration, prefill.tokens_calibration) == (600, 80)
    assert decode.revision != prefill.revision


def test_a_session_in_two_workloads_stays_on_its_side(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape, 2, 2) + make.sessions(shape, 2, 2, workload="chat"))
    catalog = Catalog(store)
    for workload in ("code", "chat"):
        profile = catalog.profile(shape.fingerprint, workload, "decode")
        assert (profile.n_calibration, profile.n_held_out) == (2, 2)


def test_summaries(store: Store, make: Any) -> None:
    one, two = make.shape(), make.shape(fingerprint="mf1-" + "0" * 31 + "2", name=None)
    fill(store, make, make.sessions(one) + make.sessions(one, 0, 2, workload="held-out-only"))
    fill(store, make, make.sessions(two, 1, 0, workload="chat"), "key-2", two)
    catalog = Catalog(store)
    found = catalog.summaries(None, "decode")
    assert [(s.fingerprint, s.model_name, s.workload, s.n_calibration, s.n_held_out) for s in found] == [
        (one.fingerprint, "Toy MoE", "code", 4, 4),
        (two.fingerprint, None, "chat", 1, 0),
    ]
    assert [s.workload for s in catalog.summaries(two.fingerprint, "decode")] == ["chat"]
    assert catalog.summaries(None, "prefill") == ()
    assert catalog.summaries("mf1-" + "f" * 32, "decode") == ()


def refusal(catalog: Catalog, *args: Any, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        catalog.profile(*args, **more)
    assert caught.value.status == 404
    assert caught.value.hint
    return caught.value


def test_what_is_unknown_is_said(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape, 1, 0) + make.sessions(shape, 0, 2, workload="chat"))
    other = make.shape([(12, 2, 100), (16, 2, 100), (8, 2, 50)], fingerprint="mf1-" + "0" * 31 + "2")
    fill(store, make, make.sessions(other, 1, 0, workload="review"), "key-2", other)
    catalog = Catalog(store)
    stranger = "mf1-" + "f" * 32

    error = refusal(catalog, stranger, "code", "decode")
    assert error.code == "unknown_model"
    assert "record sessions" in str(error.hint)
    assert "quantisations" not in str(error.hint)
    error = refusal(catalog, stranger, "code", "decode", sibling=shape.sibling)
    assert f"other quantisations of it are known, but placement does not carry over: {shape.fingerprint}" in (
        error.hint or ""
    )
    error = refusal(catalog, shape.fingerprint, "review", "decode")
    assert (error.code, error.expected) == ("unknown_workload", "chat, code")
    assert other.fingerprint in str(error.hint)
    error = refusal(catalog, shape.fingerprint, "chat", "decode")
    assert error.code == "no_calibration_sessions"
    assert "2 held-out" in error.message
    assert refusal(catalog, shape.fingerprint, "code", "prefill").code == "no_calibration_sessions"


def test_everything_deleted(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape, 1, 0))
    store.delete_session(make.hash(0))
    assert refusal(Catalog(store), shape.fingerprint, "code", "decode").expected == "none yet"


def test_a_session_deleted_while_it_is_counted(store: Store, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape, 3, 1))
    keep = store.keep_tally

    def delete_first(*args: Any) -> Any:
        store.delete_session(make.hash(0))
        return keep(*args)

    monkeypatch.setattr(store, "keep_tally", delete_first)
    assert Catalog(store).profile(shape.fingerprint, "code", "decode").n_calibration == 2


def test_a_sibling_lends_its_profile_with_a_warning(store: Store, make: Any) -> None:
    one, two = make.shape(), make.shape(fingerprint="mf1-" + "0" * 31 + "2", core_bytes=900)
    other = make.shape([(12, 2, 100), (16, 4, 100), (8, 1, 50)], fingerprint="mf1-" + "0" * 31 + "3")
    fill(store, make, make.sessions(one, 3, 1))
    fill(store, make, make.sessions(two, 1, 0, workload="chat"), "key-2", two)
    fill(store, make, make.sessions(other, 1, 0, workload="chat"), "key-3", other)
    catalog = Catalog(store)
    own, lent = (catalog.profile(shape.fingerprint, "code", "decode") for shape in (one, two))
    assert (own.warnings, lent.fingerprint, lent.n_calibration) == ((), two.fingerprint, 3)
    assert lent.layers == own.layers
    assert lent.revision != own.revision
    [warning] = lent.warnings
    assert one.fingerprint in warning
    assert catalog.manifest(two.fingerprint, "code", "decode", Budget(4000, 100)).bytes.vram_core == 900
    # Other experts, though it says to be the same model.
    assert refusal(catalog, other.fingerprint, "code", "decode").code == "unknown_workload"


def test_a_manifest_names_its_profile(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape))
    catalog = Catalog(store)
    manifest = catalog.manifest(shape.fingerprint, "code", "decode", Budget(4000, 100))
    assert manifest.profile_revision == catalog.profile(shape.fingerprint, "code", "decode").revision
    assert manifest.expected is not None


def test_a_profile_of_too_few_sessions_is_given_to_nobody(store: Store, make: Any) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape, 2, 4) + make.sessions(shape, 3, 0, workload="chat"))
    catalog = Catalog(store, min_sessions=3)
    error = refusal(catalog, shape.fingerprint, "code", "decode")
    assert (error.code, error.found, error.expected) == ("too_few_sessions", "2", "at least 3")
    assert [summary.workload for summary in catalog.summaries(None, "decode")] == ["chat"]
    fill(store, make, make.sessions(shape, 3, 0)[2:], "one more")
    assert catalog.profile(shape.fingerprint, "code", "decode").n_calibration == 3


@pytest.mark.parametrize(("build_seconds", "waits"), [(0.5, False), (3.0, True)])
def test_long_builds_are_followed_by_a_rest(store: Store, make: Any, build_seconds: float, waits: bool) -> None:
    """Unless something was deleted: that is out of what is given next."""
    shape, now = make.shape(), [0.0]

    def clock() -> float:
        now[0] += build_seconds
        return now[0]

    catalog = Catalog(store, clock=clock)

    def code() -> Any:
        return catalog.profile(shape.fingerprint, "code", "decode")

    fill(store, make, make.sessions(shape, 3, 1))
    assert code().n_calibration == 3
    fill(store, make, make.sessions(shape, 4, 0)[3:], "one more")
    assert code().n_calibration == (3 if waits else 4)
    now[0] += 20 * build_seconds
    assert code().n_calibration == 4
    store.delete_session(make.hash(0))
    assert code().n_calibration == 3
