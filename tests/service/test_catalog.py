from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from spark_runtime.placement import frequencies
from spark_schemas.split import split_of
from spark_service.catalog import QUICK_SECONDS, Catalog
from spark_service.db.store import Store
from spark_service.errors import RequestError
from spark_service.manifests import Budget
from spark_service.windows import Windows


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
def test_long_builds_are_followed_by_a_rest(
    store: Store, make: Any, monkeypatch: pytest.MonkeyPatch, build_seconds: float, waits: bool
) -> None:
    """Unless something was deleted: that is out of what is given next."""
    monkeypatch.setattr("spark_service.catalog.QUICK_SECONDS", QUICK_SECONDS)
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


def fill_three(store: Store, make: Any, shape: Any) -> None:
    for workload, taste in (("code", 1), ("chat", 2), ("docs", 3)):
        fill(store, make, make.sessions(shape, workload=workload, taste=taste), workload)


def test_a_mix_counted_step_by_step_has_the_bits_of_a_mix_counted_anew(store: Store, make: Any) -> None:
    shape = make.shape()
    catalog = Catalog(store)
    fill_three(store, make, shape)

    def mix(of: Catalog) -> str:
        return of.profile(shape.fingerprint, "chat:3+code:7", "decode").model_dump_json()

    first = mix(catalog)
    fill(store, make, make.sessions(shape, 6, 5, workload="chat", taste=2)[4:], "more")
    fill(store, make, [make.session(shape, make.hash(0), workload="code", seed=9)], "a second part")
    store.delete_session(make.hash(1))
    store.delete_session(make.hash(1, "held_out"))
    stepwise = mix(catalog)
    assert stepwise != first
    with store.writing() as cursor:
        cursor.execute("DELETE FROM tallies")
    assert mix(Catalog(store)) == stepwise


def test_a_mix_is_remembered_until_one_of_its_workloads_changes(store: Store, make: Any) -> None:
    shape = make.shape()
    catalog = Catalog(store)
    fill_three(store, make, shape)

    def mix() -> Any:
        return catalog.profile(shape.fingerprint, "chat:3+code:7", "decode")

    first = mix()
    fill(store, make, make.sessions(shape, 0, 5, workload="docs", taste=3), "another workload's held-out session")
    assert mix() is first
    fill(store, make, make.sessions(shape, 0, 5, workload="chat", taste=2), "its own")
    assert mix().n_held_out == first.n_held_out + 1


def test_mixes_are_not_listed_and_are_nobodys_nearest(store: Store, make: Any) -> None:
    shape = make.shape()
    catalog = Catalog(store)
    fill_three(store, make, shape)
    catalog.profile(shape.fingerprint, "chat:1+code:1", "decode")
    assert [found.workload for found in catalog.summaries(None, "decode")] == ["chat", "code", "docs"]
    found = catalog.nearest(shape.fingerprint, "decode", make.session(shape, make.hash(90), taste=1))
    assert {one.workload for one in found.workloads} == {"chat", "code", "docs"}


def test_what_a_mix_lacks_is_named(store: Store, make: Any) -> None:
    shape = make.shape()
    fill_three(store, make, shape)
    fill(store, make, make.sessions(shape, 2, 4, workload="few"), "few")
    fill(store, make, make.sessions(shape, 0, 4, workload="unlearnt"), "unlearnt")
    catalog = Catalog(store, min_sessions=3)
    error = refusal(catalog, shape.fingerprint, "code:1+review:2", "decode")
    assert (error.code, error.found, error.field) == ("unknown_workload", "review", "path.workload")
    assert "until then use" in str(error.hint)
    error = refusal(catalog, shape.fingerprint, "code:1+few:1", "decode")
    assert (error.code, error.found, error.expected) == ("too_few_sessions", "2", "at least 3")
    assert error.message.startswith("few: ")
    error = refusal(catalog, shape.fingerprint, "code:1+unlearnt:1", "decode")
    assert error.code == "no_calibration_sessions"
    assert error.message.startswith("unlearnt: ")
    stranger = refusal(catalog, "mf1-" + "f" * 32, "chat:1+code:2", "decode")
    assert str(stranger.hint).endswith("--workload chat")


def test_a_sibling_lends_a_mix_only_as_a_whole(store: Store, make: Any) -> None:
    one, two = make.shape(), make.shape(fingerprint="mf1-" + "0" * 31 + "2")
    fill_three(store, make, one)
    fill(store, make, make.sessions(two, 1, 0, workload="code"), "two", two)
    catalog = Catalog(store)
    own, lent = (catalog.profile(shape.fingerprint, "chat:1+code:1", "decode") for shape in (one, two))
    assert lent.layers == own.layers
    assert one.fingerprint in lent.warnings[0]
    assert catalog.profile(two.fingerprint, "code", "decode").warnings == ()
    fill(store, make, make.sessions(two, 1, 0, workload="own"), "own", two)
    # The other file has no sessions of one of them.
    assert refusal(catalog, two.fingerprint, "chat:1+own:1", "decode").found == "chat"


def received(store: Store, day: date, *sessions: str) -> None:
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = ? WHERE session_hash IN ?", [day, list(sessions)])
        cursor.execute("DELETE FROM tallies")


def test_a_reader_chooses_a_window(store: Store, make: Any) -> None:
    shape, windows = make.shape(), Windows()
    fill(store, make, make.sessions(shape, 6, 4))
    old = [make.hash(n) for n in range(2)] + [make.hash(n, "held_out") for n in range(2)]
    received(store, datetime.now(UTC).date() - timedelta(days=40), *old)
    catalog = Catalog(store, windows=windows, min_sessions=3)

    def profile(workload: str = "code", **bounds: Any) -> Any:
        window = windows.chosen(bounds.get("days"), bounds.get("half_life_days"))
        return catalog.profile(shape.fingerprint, workload, "decode", window=window)

    everything, recent, fading = profile(), profile(days=30), profile(half_life_days=7)
    assert [(one.n_calibration, one.n_held_out) for one in (everything, recent, fading)] == [(6, 4), (4, 2), (6, 4)]
    assert len({one.revision for one in (everything, recent, fading)}) == 3
    assert fading.layers != everything.layers
    assert profile(days=0, half_life_days=0) is everything
    assert profile(days=90).layers == everything.layers
    received(store, datetime.now(UTC).date() - timedelta(days=40), *(make.hash(n) for n in range(5)))
    catalog = Catalog(store, windows=windows, min_sessions=3)
    with pytest.raises(RequestError) as caught:
        profile(days=30)
    assert (caught.value.code, caught.value.found) == ("too_few_sessions", "1")
    assert "longer window_days" in str(caught.value.hint)


def test_the_services_own_window_is_what_nobody_asks_for(store: Store, make: Any) -> None:
    shape, windows = make.shape(), Windows(30)
    fill(store, make, make.sessions(shape, 4, 2))
    received(store, datetime.now(UTC).date() - timedelta(days=40), make.hash(0))
    catalog = Catalog(store, windows=windows)
    assert catalog.profile(shape.fingerprint, "code", "decode").n_calibration == 3
    everything = windows.chosen(0, None)
    assert catalog.profile(shape.fingerprint, "code", "decode", window=everything).n_calibration == 4


def test_readers_cannot_keep_the_service_building(store: Store, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor take anything from those who ask for what everybody asks for."""
    monkeypatch.setattr("spark_service.catalog.QUICK_SECONDS", QUICK_SECONDS)
    shape, now = make.shape(), [0.0]

    def clock() -> float:
        now[0] += 25.0
        return now[0]

    fill_three(store, make, shape)
    windows = Windows()
    catalog = Catalog(store, windows=windows, clock=clock, remembered=2)
    usual = [catalog.profile(shape.fingerprint, name, "decode") for name in ("code", "chat")]
    known, refused = None, None
    for weight in range(2, 30):
        try:
            known = f"chat:1+code:{weight}"
            found = catalog.profile(shape.fingerprint, known, "decode")
        except RequestError as error:
            refused = error
            break
    assert refused is not None
    assert (refused.status, refused.code) == (429, "too_many_builds")
    assert int((refused.headers or {})["Retry-After"]) > 0
    assert weight > 3, "some at once are built"
    with pytest.raises(RequestError, match="mixes and windows"):
        catalog.profile(shape.fingerprint, "code", "decode", window=windows.chosen(30, None))
    # What was built is given, even where something was uploaded since; and single workloads are always built.
    before = f"chat:1+code:{weight - 1}"
    assert catalog.profile(shape.fingerprint, before, "decode") is found
    fill(store, make, make.sessions(shape, 5, 0, workload="code", taste=1)[4:], "more")
    now[0] += 600
    catalog._budget.spend(1000)
    assert catalog.profile(shape.fingerprint, before, "decode") is found
    store.delete_session(make.hash(2))
    with pytest.raises(RequestError, match="mixes and windows"):
        catalog.profile(shape.fingerprint, before, "decode")
    assert [len(memory.built) for memory in (catalog._usual, catalog._chosen)] == [2, 2]
    assert catalog.profile(shape.fingerprint, "code", "decode").revision != usual[0].revision
    now[0] += 10**6
    assert catalog.profile(shape.fingerprint, before, "decode").n_calibration == 7


def test_no_session_of_a_mix_is_on_both_sides(store: Store, make: Any) -> None:
    """From the stored rows, though the same lineages are in all workloads."""
    shape = make.shape()
    fill_three(store, make, shape)
    catalog = Catalog(store)
    profile = catalog.profile(shape.fingerprint, "chat:3+code:7", "decode")
    ids = [key.content_id for key in store.part_keys(shape.fingerprint, "decode")]
    parts = store.parts(ids, "decode")
    alone = {}
    for name in ("chat", "code"):
        own = [part for part in parts if part.workload == name and split_of(part.session_hash) == "calibration"]
        alone[name] = frequencies([part.counts for part in own], [part.tokens for part in own])
    for layer, chat, code in zip(profile.layers, alone["chat"], alone["code"], strict=True):
        assert list(layer.shares) == ((3 * chat + 7 * code) / 10).tolist()
    [built] = catalog._chosen.built.values()
    for name, judges in zip(("chat", "code"), built.judges, strict=True):
        hashes = sorted(one for batch in judges.held_out() for one in batch.hashes)
        own = [part.session_hash for part in parts if part.workload == name]
        assert hashes == sorted(one for one in own if split_of(one) == "held_out")
        assert len(hashes) == 4


def test_as_of_a_day_is_what_was_served_then(store: Store, make: Any) -> None:
    shape = make.shape()
    sessions = make.sessions(shape, 7, 6)
    old = [one for one in sessions if one.session_hash not in {make.hash(index) for index in range(4, 7)}]
    fill(store, make, old)
    then = Catalog(store, min_sessions=3).profile(shape.fingerprint, "code", "decode")
    fill(store, make, sessions, "key-2")
    today = Windows().today()
    with store.writing() as cursor:
        for one in old:
            cursor.execute(
                "UPDATE parts SET received_day = current_date - 40 WHERE session_hash = ?", [one.session_hash]
            )
        cursor.execute("DELETE FROM tallies")
    catalog = Catalog(store, min_sessions=3)
    found = catalog.profile_as_of(shape.fingerprint, "code", "decode", today - 30)
    assert (found.n_calibration, found.n_held_out) == (4, 6)
    assert found.layers == then.layers
    assert found.curves == then.curves
    assert catalog.profile(shape.fingerprint, "code", "decode").n_calibration == 7
    assert catalog.profile_as_of(shape.fingerprint, "code", "decode", today).n_calibration == 7


@pytest.mark.parametrize(("days", "told"), [(50, "until then"), (30, "since")])
def test_a_day_with_few_sessions_on_either_side_is_refused(store: Store, make: Any, days: int, told: str) -> None:
    shape = make.shape()
    fill(store, make, make.sessions(shape, 8, 4))
    with store.writing() as cursor:
        for index in range(7):
            cursor.execute(
                "UPDATE parts SET received_day = current_date - 40 WHERE session_hash = ?", [make.hash(index)]
            )
    with pytest.raises(RequestError) as caught:
        Catalog(store, min_sessions=3).profile_as_of(shape.fingerprint, "code", "decode", Windows().today() - days)
    assert caught.value.code == "too_few_sessions"
    assert told in str(caught.value.hint)
