"""Ctrl-C before `spark-agent run` serves."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from agent_process import END_S

from spark_runtime.models import demo_model_path

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


@pytest.mark.parametrize("options", [(), ("--residency", "0.5")])
def test_ctrl_c_while_loading(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", SLOWLY, "run", "-p", "0", "--json", *options, str(demo_model_path())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while (line := process.stderr.readline()) != "a tensor\n":
                assert line, "it ended before it loaded"
            process.send_signal(signal.SIGINT)
            said, more = process.communicate(timeout=END_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert said == "", "it did not serve"
    assert "Traceback" not in more
    assert "error" not in more
