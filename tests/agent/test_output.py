from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest
import typer

from spark_agent.env import Environment
from spark_agent.errors import RefusedError, SparkError, UsageError
from spark_agent.output import Output, counted, report_fault, run_app


def test_data_to_stdout_the_rest_to_stderr(capsys):
    out = Output(environment=Environment())
    out.result({"pending": 3}, "3 pending")
    out.table(("name", "rate"), [("chat", 0.5), ("code-heavy", 12)])
    out.info("working")
    out.warning("old")
    out.error("it broke", "mend it")
    with out.progress("Counting", total=2) as advance:
        advance(1)
    shown = capsys.readouterr()
    assert shown.out == "3 pending\nname        rate\nchat         0.5\ncode-heavy    12\n"
    assert shown.err == "working\nwarning: old\nerror: it broke\nhint: mend it\n"


def test_json_mode_prints_exactly_one_object(capsys):
    out = Output(json_mode=True, environment=Environment())
    out.result({"rate": 0.5, "name": "ü"}, lambda: pytest.fail("for people only"))
    with out.progress("Counting") as advance:
        advance(1)
    with pytest.raises(RuntimeError, match="exactly one"):
        out.result({})
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"rate": 0.5, "name": "ü"}
    assert shown.err == ""
    with pytest.raises(ValueError):
        Output(json_mode=True).result({"rate": float("nan")})


def test_a_table_alone_is_an_object_too(capsys):
    Output(json_mode=True).table(("name", "rate"), [("chat", 0.5)])
    assert json.loads(capsys.readouterr().out) == {"rows": [{"name": "chat", "rate": 0.5}]}
    Output().table(("name",), [])
    assert capsys.readouterr().out == "name\n"


def test_a_peers_words_cannot_drive_the_terminal(capsys):
    Output().error("bad \x1b[2J\x9b title\r\nsecond line\u202e")
    assert capsys.readouterr().err == "error: bad �[2J� title�\nsecond line�\n"


class OtherError(Exception):
    """As another package raises it."""

    hint: str | None = "buy memory"
    exit_code = 3


@pytest.fixture(autouse=True)
def program_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["spark"])
    monkeypatch.delattr(sys.modules["__main__"], "__package__", raising=False)


def app_raising(error: BaseException) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def command(number: int = 0) -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (SparkError("it broke"), 1, "error: it broke\n"),
        (SparkError("it broke", exit_code=7), 7, "error: it broke\n"),
        (UsageError("not both", "choose one"), 2, "error: not both\nhint: choose one\n"),
        (RefusedError("no consent", "ask"), 3, "error: no consent\nhint: ask\n"),
        (OtherError("too large"), 3, "error: too large\nhint: buy memory\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
        (typer.Exit(5), 5, ""),
        (typer.BadParameter("not a size"), 2, "error: Invalid value: not a size\nhint: spark --help\n"),
    ],
)
def test_failures_are_told_without_a_traceback(capsys, error, code, expected):
    with pytest.raises(SystemExit) as caught:
        run_app(app_raising(error), [])
    assert caught.value.code == code
    assert capsys.readouterr().err.endswith(expected)


def test_a_wrong_command_line(capsys):
    with pytest.raises(SystemExit) as caught:
        run_app(app_raising(SparkError("unreached")), ["--number", "many"])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: Invalid value for '--number': ")
    assert "--help\n" in shown


def test_help_and_success_exit_zero(capsys):
    with pytest.raises(SystemExit) as caught:
        run_app(app_raising(SparkError("unreached")), ["--help"])
    assert caught.value.code == 0
    assert "--number" in capsys.readouterr().out
    app = typer.Typer()
    app.command()(lambda: None)
    with pytest.raises(SystemExit) as caught:
        run_app(app, [])
    assert caught.value.code == 0


def test_no_arguments_show_the_help(capsys):
    app = typer.Typer(no_args_is_help=True)
    for name in ("one", "two"):
        app.command(name)(lambda: None)
    with pytest.raises(SystemExit) as caught:
        run_app(app, [])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert "Usage" in shown.out + shown.err
    assert "error" not in shown.err


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_app(app_raising(ZeroDivisionError()), [])
    with pytest.raises(ZeroDivisionError):
        report_fault(ZeroDivisionError())


ENDLESS = """
import typer
from spark_agent.output import run_app, Output
app = typer.Typer()
@app.command()
def lines():
    out = Output()
    while True:
        out.result({}, "line " * 20)
run_app(app)
"""


def test_a_reader_that_goes_away_is_no_error():
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


TALK = """
from spark_agent.output import Output
out = Output()
with out.progress("Counting", total=2) as advance:
    advance(1)
out.warning("old")
"""


def on_a_terminal(code: str, **environment: str) -> str:
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "PYTHONWARNINGS": "error", **environment}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=variables, check=True)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # How Linux says that the other end is closed.
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    return shown.decode()


def test_a_terminal_gets_colour_and_progress_unless_refused():
    shown = on_a_terminal(TALK)
    assert "Counting" in shown
    assert "\x1b[33mwarning:\x1b[0m old" in shown
    shown = on_a_terminal(TALK, NO_COLOR="1", SPARKMOE_NO_PROGRESS="1")
    assert shown == "warning: old\r\n"
    assert "\x1b[33m" not in on_a_terminal(TALK, TERM="dumb")


@pytest.mark.parametrize(("number", "text"), [(0, "0 sessions"), (1, "1 session"), (2, "2 sessions")])
def test_numbers_agree_with_their_nouns(number: int, text: str) -> None:
    assert counted(number, "session") == text
