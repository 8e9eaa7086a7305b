"""The cable is pulled at every point of an upload, against the real service: every session arrives exactly once."""

from __future__ import annotations

import datetime as dt
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import raw_peers

from spark_agent.config import Consent
from spark_agent.env import Environment
from spark_agent.http import ServiceClient
from spark_agent.spool import Spool
from spark_agent.upload import RetryPolicy, flush

ONCE = RetryPolicy(attempts=1)
SHARES = (0.0, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 1.0)


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    """Of a real service in a process of its own."""
    command = [sys.executable, "-c", "from spark_service.cli import main; main()"]
    data = str(tmp_path_factory.mktemp("service"))
    with subprocess.Popen(
        [*command, "run", "--open", "-p", "0", "--json", "--data-dir", data], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(json.loads(process.stdout.readline())["base_url"].rpartition(":")[2])
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


@pytest.fixture
def cable(port: int) -> Iterator[tuple[raw_peers.Cable, str]]:
    made = raw_peers.Cable(port)
    with raw_peers.raw_peer(made.talk) as url:
        yield made, url


class Sender:
    """An agent whose sessions are all under one workload, so that the service tells their sum."""

    def __init__(self, path: Path, url: str, workload: str, make_model, make_session) -> None:
        self.path, self.url, self.workload = path, url, workload
        self._model = make_model()
        self._make = make_session
        self.tokens = 0
        self.seeds = 0

    def count(self, sessions: int) -> None:
        with Spool.open(self.path) as spool:
            for _ in range(sessions):
                session = self._make(self._model, self.seeds, workload=self.workload)
                assert spool.add(self._model, session)
                self.tokens += session.tokens
                self.seeds += 1

    def flush(self) -> str | None:
        """As a process of its own would: everything is opened anew."""
        consent = Consent(True, dt.datetime.now(dt.UTC), self.url)
        with Spool.open(self.path) as spool, ServiceClient(self.url, timeout_s=120) as client:
            report = flush(
                spool,
                client,
                consent,
                environment=Environment(),
                minimum_tokens=120,
                ignore_waits=True,
                max_body_bytes=4096,
                retry=ONCE,
            )
            assert report.rejected == 0
            return report.last_error

    def waiting(self) -> int:
        with Spool.open(self.path) as spool:
            assert (spool.stats().dropped, spool.stats().rejected) == (0, 0)
            return sum(row.tokens for row in spool.pending())

    def arrived(self) -> int:
        with ServiceClient(self.url, timeout_s=120) as client:
            profile = client.profile(self._model.fingerprint, self.workload, "decode")
            prompt = client.profile(self._model.fingerprint, self.workload, "prefill")
        return sum(one.tokens_calibration + one.tokens_held_out for one in (profile, prompt))


@pytest.fixture
def sizes(cable, tmp_path, make_model, make_session, request) -> tuple[int, int]:
    """Bytes of one undisturbed upload in both directions."""
    wire, url = cable
    name = request.node.name.replace("[", "-").replace("]", "").replace("_", "-").replace(".", "-").lower()
    sender = Sender(tmp_path / "measure.db", url, f"measure-{name}"[:60], make_model, make_session)
    sender.count(6)
    assert sender.flush() is None
    there, back = wire.passed
    assert there > 500
    assert back > 50
    return there, back


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("way", [0, 1], ids=["request", "answer"])
def test_every_session_arrives_exactly_once(cable, sizes, way, share, tmp_path, make_model, make_session) -> None:
    wire, url = cable
    workload = f"cut-{way}-{share}".replace(".", "-")
    sender = Sender(tmp_path / "spool.db", url, workload, make_model, make_session)
    sender.count(12)
    limits: list[int | None] = [None, None]
    limits[way] = int(sizes[way] * share)
    wire.limits = (limits[0], limits[1])
    for _ in range(3):
        before = sender.waiting()
        error = sender.flush()
        assert error is None or "no answer" in error
        assert sender.waiting() <= before
        sender.count(2)  # which must not be mixed into what may have been sent
    wire.limits = (None, None)
    assert sender.flush() is None
    assert sender.arrived() + sender.waiting() == sender.tokens
    assert sender.waiting() < 4 * 120, "less than one parcel of each side is held back"
    sender.flush()
    assert sender.arrived() + sender.waiting() == sender.tokens


def test_a_cut_for_every_byte_of_the_answer(cable, sizes, tmp_path, make_model, make_session) -> None:
    """One agent, one spool, all cuts in a row: nothing is lost or counted twice on the way."""
    wire, url = cable
    sender = Sender(tmp_path / "spool.db", url, "every-byte", make_model, make_session)
    for length in range(0, sizes[1] + 1, 7):
        sender.count(1)
        wire.limits = (None, length)
        sender.flush()
    wire.limits = (None, None)
    assert sender.flush() is None
    assert sender.arrived() + sender.waiting() == sender.tokens


KILLED = """
import datetime as dt, pathlib, sys
from spark_agent.config import Consent
from spark_agent.env import Environment
from spark_agent.http import ServiceClient
from spark_agent.spool import Spool
from spark_agent.upload import flush
path, url = sys.argv[1:]
with Spool.open(pathlib.Path(path)) as spool, ServiceClient(url) as client:
    consent = Consent(True, dt.datetime.now(dt.UTC), url)
    flush(spool, client, consent, environment=Environment(), minimum_tokens=120, ignore_waits=True, max_body_bytes=4096)
"""


@pytest.mark.parametrize(("way", "share"), [(0, 0.0), (0, 0.3), (0, 1.0), (1, 0.0), (1, 0.5), (1, 1.0)])
def test_an_agent_killed_in_the_middle_loses_and_doubles_nothing(
    cable, sizes, way, share, tmp_path, make_model, make_session
) -> None:
    wire, url = cable
    workload = f"killed-{way}-{share}".replace(".", "-")
    sender = Sender(tmp_path / "spool.db", url, workload, make_model, make_session)
    sender.count(12)
    limits: list[int | None] = [None, None]
    limits[way] = int(sizes[way] * share)
    wire.limits = (limits[0], limits[1])
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(sender.path), url]) as process:
            wire.on_limit = process.kill
        # 0: the end of the answer was there before the signal.
        assert process.returncode in {0, -signal.SIGKILL}
        sender.count(2)
    wire.limits, wire.on_limit = (None, None), lambda: None
    assert sender.flush() is None
    assert sender.arrived() + sender.waiting() == sender.tokens


def test_several_agents_on_one_spool_send_everything_once(port, tmp_path, make_model, make_session) -> None:
    url = f"http://127.0.0.1:{port}"
    sender = Sender(tmp_path / "spool.db", url, "several", make_model, make_session)
    sender.count(10)
    errors: list[str | None] = []
    threads = [threading.Thread(target=lambda: errors.extend(sender.flush() for _ in range(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    sender.count(20)
    for thread in threads:
        thread.join()
    assert errors == [None] * 12
    assert sender.flush() is None
    assert sender.arrived() + sender.waiting() == sender.tokens
