from __future__ import annotations

from pathlib import Path

from spark_agent.paths import spool_path, state_dir


def test_every_folder(agent_cli):
    value = agent_cli("paths", "--json").json
    assert value["spool"] == str(spool_path())
    assert all(Path(path).is_absolute() for path in value.values())
    assert len(agent_cli("paths").out.splitlines()) == len(value)
    assert not state_dir().exists(), "asking creates nothing"
