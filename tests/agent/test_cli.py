from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from spark_agent import __version__, cli, cli_spark

HEAVY = ("ray", "duckdb", "fastapi", "llama_cpp", "httpx", "starlette", "uvicorn")


@pytest.mark.parametrize("module", ["spark_agent.cli", "spark_agent.cli_spark"])
def test_a_cli_loads_nothing_heavy(module):
    code = (
        f"import sys; sys.argv = ['x', '--help']; from {module} import main\n"
        "try:\n    main()\nfinally:\n"
        f"    sys.stderr.write(' '.join(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stderr == ""
    assert "pull-profile" in done.stdout


@pytest.mark.parametrize("app", [cli.app, cli_spark.app])
def test_commands(app):
    names = set(typer.main.get_command(app).commands)
    assert {"pull-profile", "profiles"} <= names
    assert app is not cli.app or {"run", "record", "bench", "doctor", "upload"} <= names


@pytest.mark.parametrize("main", [cli.main, cli_spark.main])
def test_version(main, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["spark-agent", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capfd.readouterr().out == f"{__version__}\n"
