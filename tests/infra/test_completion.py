"""Completion of all three scripts, for every shell, without a network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPTS = {"spark-agent": "spark_agent.cli", "spark": "spark_agent.cli_spark", "spark-service": "spark_service.cli"}
SHELLS = ("bash", "zsh", "fish")


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv[0] = {script!r}; from {SCRIPTS[script]} import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_of_every_shell(script: str, shell: str) -> None:
    variable = f"_{script.replace('-', '_').upper()}_COMPLETE"
    shown = run(script, **{variable: f"source_{shell}"})
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{variable}=complete_{shell}" in shown.stdout
    assert script in shown.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_show_completion_knows_the_shell_it_runs_in(script: str) -> None:
    code = f"import sys; sys.argv[0] = '{script}'; from {SCRIPTS[script]} import main; main()"
    # A shell that has something to do afterwards stays the parent.
    shown = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}" --show-completion; exit $?'],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "complete_bash" in shown.stdout


@pytest.mark.parametrize(
    ("script", "words", "found"),
    [
        ("spark-agent", "spark-agent la", {"launch"}),
        ("spark-agent", "spark-agent models l", {"ls"}),
        ("spark-agent", "spark-agent launch o", {"opencode"}),
        ("spark", "spark pull", {"pull-profile"}),
        ("spark-service", "spark-service res", {"restore"}),
    ],
)
def test_words_are_completed(script: str, words: str, found: set[str]) -> None:
    variable = f"_{script.replace('-', '_').upper()}_COMPLETE"
    position = str(len(words.split()) - 1)
    answer = run(script, **{variable: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": position})
    assert set(answer.stdout.split()) == found, answer.stderr


def test_bash_takes_the_script() -> None:
    script = run("spark-agent", _SPARK_AGENT_COMPLETE="source_bash").stdout
    assert script
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
