"""The files by which running agents are found."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.paths import agents_dir
from spark_agent.running import MAX_FILE_BYTES, RunningAgent, RunningAgents, process_started


def agent(pid: int = 0, **changes: object) -> RunningAgent:
    pid = pid or os.getpid()
    values = {
        "pid": pid,
        "process_started": process_started(pid),
        "host": "127.0.0.1",
        "port": 11711,
        "base_url": "http://127.0.0.1:11711",
        "model": "nano",
        "fingerprint": "mf1-0",
        "started_s": 5.0,
        **changes,
    }
    return RunningAgent.model_validate(values)


@pytest.fixture
def agents(tmp_path) -> RunningAgents:
    return RunningAgents(tmp_path / "agents")


@pytest.fixture
def warnings() -> list[str]:
    return []


def test_an_agent_is_there_until_it_is_removed(agents, warnings):
    assert agents.find(warnings.append) == []
    agents.add(agent(token="secret"))
    (path,) = agents.folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(agents.folder.stat().st_mode) == 0o700
    (found,) = agents.find(warnings.append)
    assert found == agent(token="secret")
    assert "secret" not in repr(found)
    assert agents.listening_on("127.0.0.1", 11711) == found
    assert agents.listening_on("127.0.0.2", 11711) is None
    assert agents.listening_on("127.0.0.1", 11712) is None
    assert agents.listening_on("0.0.0.0", 11711) == found
    agents.remove(found.pid)
    agents.remove(found.pid)
    assert (agents.find(warnings.append), warnings) == ([], [])


def test_one_that_ended_is_forgotten(agents, warnings):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        agents.add(agent(process.pid))
        agents.add(agent(started_s=1.0))
        assert [found.pid for found in agents.find(warnings.append)] == [os.getpid(), process.pid]
    finally:
        process.communicate()
    assert [found.pid for found in agents.find(warnings.append)] == [os.getpid()]
    assert len(list(agents.folder.iterdir())) == 1
    assert warnings == []


@pytest.mark.skipif(process_started(os.getpid()) is None, reason="no /proc")
def test_a_number_that_another_process_has_now(agents, warnings):
    agents.add(agent(process_started="another boot 5"))
    assert agents.find(warnings.append) == []
    assert list(agents.folder.iterdir()) == []


def test_without_a_start_the_number_must_do(agents, warnings):
    agents.add(agent(process_started=None))
    agents.add(agent(2**31 - 1, process_started=None))
    assert [found.pid for found in agents.find(warnings.append)] == [os.getpid()]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[]", b"null", b"[" * 10_000, b"{}", b"x" * (MAX_FILE_BYTES + 1)],
)
def test_a_file_that_is_something_else_is_said_and_left(agents, warnings, content):
    agents.add(agent())
    path = agents.folder / "7.json"
    path.write_bytes(content)
    path.chmod(0o600)
    assert [found.pid for found in agents.find(warnings.append)] == [os.getpid()]
    (warning,) = warnings
    assert "7.json" in warning
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "changes", [{"pid": 1}, {"port": 0}, {"port": 70000}, {"host": "example.com"}, {"host": ""}, {"started_s": -1.0}]
)
def test_a_file_with_wrong_values(agents, warnings, changes):
    agents.add(agent())
    (path,) = agents.folder.iterdir()
    path.write_text(agent().model_copy(update=changes).model_dump_json())
    assert agents.find(warnings.append) == []
    assert len(warnings) == 1


def test_a_file_that_others_may_read_or_that_is_none(agents, warnings, tmp_path):
    agents.add(agent())
    (path,) = agents.folder.iterdir()
    path.chmod(0o644)
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    (agents.folder / "8.json").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(agents.folder / "9.json", 0o600)
    assert agents.find(warnings.append) == []
    assert len(warnings) == 3


def test_every_address_is_asked_on_loopback():
    assert agent(host="0.0.0.0").address == "127.0.0.1"
    assert agent(host="::").address == "::1"
    assert agent(host="127.0.0.2").address == "127.0.0.2"


def test_all_addresses_hold_each(agents):
    agents.add(agent(host="0.0.0.0"))
    assert agents.listening_on("127.0.0.2", 11711) is not None


def test_where_they_are(tmp_path):
    assert RunningAgents.of_this_machine().folder == agents_dir()


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("agents")
    path = folder / "5.json"
    path.touch(0o600)
    path.write_bytes(content)
    warnings: list[str] = []
    assert RunningAgents(folder).find(warnings.append) == []
    assert len(warnings) == 1
