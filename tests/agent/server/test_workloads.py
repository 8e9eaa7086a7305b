"""Which workload a request is counted under."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_agent.dialogue.messages import Message
from spark_agent.errors import ConfigError
from spark_agent.server.api_error import ApiError
from spark_agent.server.workload_rules import MAX_RULES, find_workload, load_rules, parse_rules
from spark_agent.server.workloads import WorkloadNames, Workloads

RULES = """
[[rule]]
workload = "review"
user_agent = "Aider"
system = ["/src/api", "Code Reviewer"]

[[rule]]
workload = "chat"
model = "gpt-4*"

[[rule]]
workload = "batch"
header = { X-Job = ["nightly-*", "weekly"], x-team = "a" }
"""


def found(headers: dict[str, str] | None = None, system: str = "", model: str | None = None) -> str | None:
    return find_workload(parse_rules(RULES, "rules"), headers or {}, system, model)


def test_the_first_rule_whose_every_condition_holds():
    aider = {"user-agent": "litellm AIDER/0.86"}
    assert found(aider, "you are a CODE reviewer") == "review"
    assert found(aider, "in /src/api") == "review"
    assert found(aider, "in /src/web") is None
    assert found({}, "code reviewer") is None
    assert found(aider, "code reviewer", "gpt-4o") == "review"
    assert found({}, "", "gpt-4o") == "chat"
    assert found({}, "", "a-gpt-4") is None
    assert found({"x-job": "nightly-7", "x-team": "a"}) == "batch"
    assert found({"x-job": "weekly", "x-team": "a"}) == "batch"
    assert found({"x-job": "weekly"}) is None
    assert found({"x-job": "daily", "x-team": "a"}) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[rule]\n", ["line 1"]),
        ('a = 1\n\n[[rule]]\nworkload = "x\nmodel = 1', ["line 4"]),
        ("rules = []", ["'rules'", "[[rule]]"]),
        ("[rule]\nworkload = 'a'", ["[[rule]]"]),
        ("rule = [1]", ["[[rule]]"]),
        ("[[rule]]\nmodel = 'a'", ["line 1: rule 1", "workload"]),
        ("[[rule]]\nworkload = 'Not Good'\nmodel = 'a'", ["line 2: rule 1", "Not Good"]),
        ("[[rule]]\nworkload = 'a:1+b:2'\nmodel = 'a'", ["rule 1"]),
        ("[[rule]]\nworkload = 'a'", ["line 1: rule 1 (a)", "no condition"]),
        (
            "[[rule]]\nworkload = 'a'\nmodel = 'x'\n[[rule]]\nworkload = 'b'\npath = 'x'",
            ["line 6: rule 2 (b)", "'path'"],
        ),
        ("[[rule]]\nworkload = 'a'\nmodel = ''", ["line 3: rule 1 (a)", "model"]),
        ("[[rule]]\nworkload = 'a'\nmodel = []", ["model"]),
        ("[[rule]]\nworkload = 'a'\nsystem = ['x', 5]", ["system"]),
        ("[[rule]]\nworkload = 'a'\nheader = 'x'", ["header"]),
        ("[[rule]]\nworkload = 'a'\nheader = { 'a b' = 'x' }", ["header", "a b"]),
        ("[[rule]]\nworkload = 'a'\nheader = { a = 'x', A = 'y' }", ["header", "once"]),
        ("[[rule]]\nworkload = 'a'\nmodel = 'x'\n" * (MAX_RULES + 1), [str(MAX_RULES)]),
        ("[[rule]]\nworkload = 'a'\n[rule.header]\n'a b' = 'x'", ["line 3: rule 1 (a): header", "a b"]),
        ("[[rule]]\nworkload = 'a'\nheader.x-job = 5", ["line 3: rule 1 (a): header: x-job: found 5"]),
        ("[[rule]]\nworkload = 'a'\n\n'model' = ['']", ["line 4: rule 1 (a): model"]),
        ("rule = [{ workload = 'a', model = 5 }]", ["the file: rule 1 (a): model"]),
        ('[[rule]]\nworkload = \'a\'\nsystem = """\n[[rule]]\n"""\nmodel = 5', ["the file: rule 1 (a): model"]),
        ("a = " + "[" * 5000, ["TOML"]),
    ],
)
def test_a_rule_that_is_wrong_is_named(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_rules(text, "the file")
    assert caught.value.hint
    for word in ("the file", *words):
        assert word in str(caught.value)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text(max_size=200))
def test_any_text_is_rules_or_a_clear_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_rules(text, "rules"), tuple)


def test_files_that_are_none(tmp_path):
    for content in (b"\xff\xfe", b"#" * 2_000_000):
        (tmp_path / "rules").write_bytes(content)
        with pytest.raises(ConfigError, match="rules"):
            load_rules(tmp_path / "rules")
    with pytest.raises(ConfigError, match="cannot read"):
        load_rules(tmp_path)


def say(text: str = "You are a code reviewer in /src/api") -> list[Message]:
    return [Message("system", text), Message("user", "hello")]


@pytest.fixture
def warnings() -> list[str]:
    return []


def write(path: Path, text: str, mtime: int) -> None:
    path.write_text(text)
    os.utime(path, (mtime, mtime))


def test_a_header_goes_before_rules_and_rules_before_nothing(tmp_path, warnings):
    write(tmp_path / "rules", RULES, 1)
    workloads = Workloads(tmp_path / "rules", warnings.append)
    agent = {"user-agent": "aider"}
    assert workloads({**agent, "x-spark-workload": " mine "}, say()) == "mine"
    assert workloads(agent, say()) == "review"
    assert workloads(agent, say("other")) is None
    # A message of the person is no system prompt.
    assert workloads(agent, [Message("user", "code reviewer")]) is None
    assert Workloads(None, warnings.append)(agent, say()) is None


@pytest.mark.parametrize("name", ["", "Not Good", "a" * 64, "a:7+b:3", "-a", "ü", "x" * 5000])
def test_a_header_that_is_no_name(name, warnings):
    with pytest.raises(ApiError) as caught:
        Workloads(None, warnings.append)({"x-spark-workload": f"{name}"}, say())
    assert (caught.value.status, caught.value.code) == (400, "invalid_workload")
    assert len(str(caught.value)) < 300


def test_a_changed_file_is_read_again_and_a_broken_one_is_said_once(tmp_path, warnings):
    path = tmp_path / "rules"
    workloads = Workloads(path, warnings.append)
    assert workloads({}, say(), "m") is None, "no file yet"
    write(path, "[[rule]]\nworkload = 'one'\nmodel = 'm'", 1)
    assert workloads({}, say(), "m") == "one"
    write(path, "[[rule]]\nworkload = 'two'\nmodel = 'm'", 2)
    assert workloads({}, say(), "m") == "two"
    write(path, "[[rule\nworkload", 3)
    assert [workloads({}, say(), "m") for _ in range(3)] == ["two"] * 3
    (warning,) = warnings
    assert "line 1" in warning
    assert "stay" in warning
    path.unlink()
    assert workloads({}, say(), "m") is None


def test_a_file_that_is_broken_at_the_start(tmp_path, warnings):
    write(tmp_path / "rules", "nothing", 1)
    with pytest.raises(ConfigError):
        Workloads(tmp_path / "rules", warnings.append)


def test_labels_are_bounded():
    names = WorkloadNames("unlabelled", limit=3)
    assert [names.label(name) for name in ("a", "b", "c", None, "a", "d")] == [
        "a",
        "b",
        "other",
        "unlabelled",
        "a",
        "other",
    ]
