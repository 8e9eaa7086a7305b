"""A person is asked once, on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spark_agent.config import Config, load_config, save_config
from spark_agent.consent import ask_once
from spark_agent.context import AgentContext
from spark_agent.paths import config_path

QUESTION = "Send these counts? [y/N]"
ASK = (
    "from spark_agent.context import AgentContext as C; from spark_agent.consent import ask_once; ask_once(C.create())"
)


def on_a_terminal(
    typed: bytes, environment: dict[str, str] | None = None, command: tuple[str, ...] = (ASK,)
) -> tuple[str, int]:
    """Start a process on a terminal of its own, type, and return what it showed and how it ended."""
    here, there = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", *command],
        stdin=there,
        stdout=there,
        stderr=there,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        # Ctrl-C goes to whoever has the terminal.
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    ) as process:
        os.close(there)
        shown, again = b"", b""
        while True:
            # A Ctrl-C that comes just before the read is noticed after it: a person presses again.
            if again and not select.select([here], [], [], 2.0)[0]:
                os.write(here, again)
                continue
            try:
                data = os.read(here, 65536)
            except OSError:
                break  # Linux's way of saying that nobody has the other end any more
            if not data:
                break
            shown += data
            if typed and QUESTION.encode() in shown:
                os.write(here, typed)
                typed, again = b"", typed if typed == b"\x03" else b""
        code = process.wait(120)
    os.close(here)
    return shown.decode(), code


@pytest.mark.parametrize(
    ("typed", "granted"), [(b"y\n", True), (b"YES\n", True), (b"n\n", False), (b"\n", False), (b"what?\nno\n", False)]
)
def test_an_answer_is_kept_and_nobody_is_asked_again(typed: bytes, granted: bool) -> None:
    shown, code = on_a_terminal(typed)
    assert code == 0, shown
    assert QUESTION in shown
    for word in ("http://127.0.0.1:8710", "how often each expert was chosen", "Never sent: text", "upload show"):
        assert word in shown
    consent = load_config(config_path()).consent
    assert consent is not None
    assert consent.granted is granted
    again, _ = on_a_terminal(b"")
    assert again == ""


@pytest.mark.parametrize(
    "typed", [b"\x04", b"\x03", b"what?\nwhat?\nwhat?\n"], ids=["end of input", "ctrl-c", "riddles"]
)
def test_who_leaves_the_question_was_not_asked(typed: bytes) -> None:
    shown, code = on_a_terminal(typed)
    assert QUESTION in shown
    assert code == (-signal.SIGINT if typed == b"\x03" else 0)
    assert not config_path().exists()
    assert QUESTION in on_a_terminal(b"n\n")[0]


@pytest.mark.parametrize("name", ["DO_NOT_TRACK", "SPARKMOE_OFFLINE"])
def test_a_wish_not_to_be_tracked_is_not_questioned(name: str) -> None:
    assert on_a_terminal(b"y\n", {name: "1"}) == ("", 0)
    assert not config_path().exists()


@pytest.mark.parametrize("granted", [True, False])
def test_an_answer_for_another_service_is_an_answer(granted: bool) -> None:
    save_config(config_path(), Config().with_consent(granted, "https://elsewhere.example"))
    assert on_a_terminal(b"y\n") == ("", 0)


AGENT = "from spark_agent.cli import main; main()"


def test_record_asks_before_it_works(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def mean(values):\n    return sum(values) / len(values)\n")
    command = (AGENT, "record", "--sessions", str(tmp_path / "text.txt"), "--workload", "chat", "--threads", "1")
    shown, code = on_a_terminal(b"n\n", command=command)
    assert code == 0, shown
    assert shown.index(QUESTION) < shown.index("recorded 1 session")
    assert QUESTION not in on_a_terminal(b"", command=command)[0]


def test_run_asks_before_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = (AGENT, "run", "--threads", "1", "-p", str(taken.getsockname()[1]))
        shown, code = on_a_terminal(b"y\n", command=command)
    assert code == 1, shown
    assert shown.index(QUESTION) < shown.index("cannot listen on")
    consent = load_config(config_path()).consent
    assert consent is not None
    assert consent.granted


def test_a_dry_run_asks_nothing() -> None:
    shown, code = on_a_terminal(b"", command=(AGENT, "run", "--dry-run"))
    assert (code, QUESTION in shown) == (0, False), shown


def test_without_a_terminal_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    context = AgentContext.create()
    assert ask_once(context) is context
    assert capsys.readouterr() == ("", "")
    assert not config_path().exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_machines_that_read_json_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    monkeypatch.setattr("sys.stderr", Terminal())
    context = AgentContext.create(json_mode=True)
    assert ask_once(context) is context


def test_an_answer_that_cannot_be_kept_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    # A file where the folder should be.
    config_path().parent.parent.mkdir(parents=True, exist_ok=True)
    context = AgentContext.create()
    Path(config_path().parent).write_text("")
    assert ask_once(context).config.consent is None
    assert "could not be kept, so nothing is sent" in shown.getvalue()
