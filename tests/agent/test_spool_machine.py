"""Any order of adding, sealing, failing, rejecting, uploading, dropping and reopening keeps the accounts right."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from spark_agent.batch import form_parcels, plan
from spark_agent.spool import Spool

SEEDS = range(12)
MINIMUM = 100


def test_accounts_stay_right(tmp_path_factory, make_model, make_session):  # noqa: C901 (the whole machine is in it)
    model = make_model()
    sessions = {seed: make_session(model, seed) for seed in SEEDS}
    sizes = {seed: len(session.model_dump_json()) for seed, session in sessions.items()}
    seed_of = {session.content_id(model.fingerprint): seed for seed, session in sessions.items()}
    max_bytes = 6 * max(sizes.values())

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.path: Path = tmp_path_factory.mktemp("machine") / "spool.db"
            self.spool = Spool.open(self.path, max_bytes=max_bytes)
            self.pending: dict[int, int | None] = {}  # seed -> parcel (a seed), in order of arrival
            self.rejected: list[int] = []
            self.row_ids: dict[int, int] = {}  # seed -> row id, of rejected rows
            self.uploaded: set[int] = set()
            self.dropped = 0
            self.last_error: str | None = None

        @rule(seed=st.sampled_from(SEEDS))
        def add(self, seed: int) -> None:
            known = seed in self.pending or seed in self.rejected or seed in self.uploaded
            assert self.spool.add(model, sessions[seed]) is not known
            if known:
                return
            self.pending[seed] = None
            while sum(sizes[kept] for kept in (*self.pending, *self.rejected)) > max_bytes:
                if self.rejected:
                    self.rejected.pop(0)
                    self.dropped += 1
                    continue
                oldest = next(iter(self.pending))
                self.forget(self.members(oldest))

        def members(self, seed: int) -> list[int]:
            parcel = self.pending[seed]
            return [seed] if parcel is None else [other for other, its in self.pending.items() if its == parcel]

        def forget(self, seeds: list[int]) -> None:
            for seed in seeds:
                del self.pending[seed]
                self.dropped += 1

        @rule()
        def seal(self) -> None:
            free = [row for row in self.spool.pending() if row.parcel is None]
            parcels, _ = form_parcels(free, MINIMUM)
            self.spool.seal(lambda rows: [parcel.rows for parcel in form_parcels(rows, MINIMUM)[0]])
            for parcel in parcels:
                members = [seed_of[row.content_id] for row in parcel.rows]
                for seed in members:
                    self.pending[seed] = members[0]

        def a_parcel(self, data: st.DataObject) -> tuple[list[int], list[int]]:
            ready, _ = plan([row for row in self.spool.pending() if row.parcel is not None], MINIMUM)
            if not ready:
                return [], []
            parcel = data.draw(st.sampled_from(ready))
            return list(parcel.ids), [seed_of[row.content_id] for row in parcel.rows]

        @rule(data=st.data())
        def upload(self, data: st.DataObject) -> None:
            ids, seeds = self.a_parcel(data)
            self.spool.mark_uploaded(ids)
            self.last_error = None
            for seed in seeds:
                del self.pending[seed]
                self.uploaded.add(seed)

        @rule(data=st.data())
        def fail(self, data: st.DataObject) -> None:
            ids, seeds = self.a_parcel(data)
            self.spool.mark_failed(ids, "no route", 5.0)
            self.last_error = "no route"
            assert {seed_of[row.content_id] for row in self.spool.pending() if row.next_try == 5.0} >= set(seeds)

        @rule(data=st.data())
        def reject(self, data: st.DataObject) -> None:
            ids, seeds = self.a_parcel(data)
            self.spool.mark_rejected(ids, "bad")
            self.last_error = "bad"
            for seed in seeds:
                del self.pending[seed]
            self.row_ids.update(zip(seeds, ids, strict=True))
            self.rejected = sorted([*self.rejected, *seeds], key=self.row_ids.__getitem__)

        @rule()
        def purge(self) -> None:
            assert self.spool.purge() == len(self.pending) + len(self.rejected)
            self.pending, self.rejected, self.last_error = {}, [], None

        @rule()
        def reopen(self) -> None:
            self.spool.close()
            self.spool = Spool.open(self.path, max_bytes=max_bytes)

        @invariant()
        def accounts(self) -> None:
            rows = self.spool.pending()
            assert [seed_of[row.content_id] for row in rows] == list(self.pending)
            first_of = {row.id: seed_of[row.content_id] for row in rows}
            found = {seed_of[row.content_id]: None if row.parcel is None else first_of[row.parcel] for row in rows}
            assert found == self.pending
            stats = self.spool.stats()
            assert stats.pending == len(self.pending)
            assert stats.rejected == len(self.rejected) == len(self.spool.rejected())
            assert stats.dropped == self.dropped
            assert stats.last_error == self.last_error
            assert stats.bytes == sum(sizes[seed] for seed in (*self.pending, *self.rejected)) <= max_bytes

        def teardown(self) -> None:
            self.spool.close()

    run_state_machine_as_test(Machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))
