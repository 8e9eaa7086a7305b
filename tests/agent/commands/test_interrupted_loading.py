"""Ctrl-C while a command reads a model: it ends at the next tensor."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_process import END_S

from spark_runtime.models import demo_model_path
from spark_runtime.native.build import library_path

SLOWLY = """
import sys, time
from spark_runtime.engine import Engine
from spark_agent.cli import main

load = Engine.load
def slowly(path, options, *, wanted):
    def next_tensor():
        print("a tensor", file=sys.stderr, flush=True)
        time.sleep(0.5)
        return wanted()
    return load(path, options, wanted=next_tensor)

Engine.load = slowly
main()
"""
MODEL = str(demo_model_path())
COMMANDS = {
    "run": ["run", "-p", "0", "--json", MODEL],
    "run with tiers": ["run", "-p", "0", "--json", "--residency", "0.5", MODEL],
    "record": ["record", "--json", "--workload", "chat", MODEL, "--sessions", "{sessions}"],
    "record with a trace": [
        "record",
        "--json",
        "--workload",
        "chat",
        MODEL,
        "--sessions",
        "{sessions}",
        "--trace",
        "{trace}",
    ],
    "bench": ["bench", "--json", "--threads", "1", MODEL],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_loading(command: str, tmp_path: Path) -> None:
    library_path()  # what would be built first is waited for
    (tmp_path / "session.txt").write_text("How are you today?")
    places = {"sessions": tmp_path / "session.txt", "trace": tmp_path / "trace"}
    arguments = [each.format(**places) for each in COMMANDS[command]]
    with subprocess.Popen(
        [sys.executable, "-c", SLOWLY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            before = []
            while not before or before[-1] != "a tensor\n":
                before.append(process.stderr.readline())
                assert before[-1], before
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=END_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, ""), err
    assert err.splitlines()[-1] == "interrupted"
    assert err.count("a tensor\n") <= 1, "it was read to the end, or nearly"
    assert "Traceback" not in err
    assert "Exception ignored" not in err
