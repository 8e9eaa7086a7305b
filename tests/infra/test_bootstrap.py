"""The set-up's own logic: keys, stamps, progress, locks. No test installs or builds anything."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def bootstrap(on_setup_path: None) -> ModuleType:
    return importlib.import_module("bootstrap")


# --- the wheel's key


INGREDIENTS = {"version": "1", "options": "-DA=ON", "include": "x", "C++ compiler": "g++ 12", "processor": "avx2"}


@pytest.mark.parametrize("changed", INGREDIENTS)
def test_wheel_key_depends_on_each_ingredient(llama_wheel: ModuleType, changed: str) -> None:
    assert llama_wheel.wheel_key(INGREDIENTS) != llama_wheel.wheel_key({**INGREDIENTS, changed: "other"})


def test_wheel_key_does_not_depend_on_their_order(llama_wheel: ModuleType) -> None:
    assert llama_wheel.wheel_key(INGREDIENTS) == llama_wheel.wheel_key(dict(reversed(INGREDIENTS.items())))


def test_ingredients_follow_the_machine(llama_wheel: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CMAKE_ARGS", "CC", "CXX", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    plain = llama_wheel.LlamaWheel(root)
    assert plain.version in (root / "pyproject.toml").read_text(encoding="utf-8")
    keys = {plain.key}
    for name, value in {"CMAKE_ARGS": "-DGGML_CUDA=ON", "CXXFLAGS": "-O1", "CXX": "no-such-compiler"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            keys.add(llama_wheel.LlamaWheel(root).key)
    assert len(keys) == 4
    assert llama_wheel.LlamaWheel(root).key == plain.key


def test_comments_of_the_include_file_do_not_count(llama_wheel: ModuleType) -> None:
    assert llama_wheel.without_comments("# why\nset(A OFF)\n") == "set(A OFF)"


def test_users_options_come_last(llama_wheel: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DLLAVA_BUILD=ON")
    arguments = llama_wheel.LlamaWheel(root)._cmake_arguments()
    assert arguments.index("-DLLAVA_BUILD=OFF") < arguments.index("-DLLAVA_BUILD=ON")


def test_missing_compiler_is_named(
    llama_wheel: ModuleType, console: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(console.SetupError, match=r"no C\+\+ compiler found \(CXX=no-such-compiler\)") as caught:
        llama_wheel.LlamaWheel(root).require_compilers()
    assert "apt-get install g++" in caught.value.hint


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        ("processor\t: 0\nflags\t\t: sse avx\n\nprocessor\t: 1\nflags\t\t: sse avx\n", "avx sse"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", "asimd fp"),
        ("", ""),
    ],
)
def test_processor_features(llama_wheel: ModuleType, cpuinfo: str, features: str) -> None:
    assert llama_wheel.processor_features(cpuinfo) == features


def test_lock_must_name_one_hash(llama_wheel: ModuleType, console: ModuleType) -> None:
    line = f"    --hash=sha256:{'a' * 64}"
    assert llama_wheel.parse_lock(f"llama-cpp-python==1.2 \\\n{line}\n") == ("1.2", "a" * 64)
    for text in ("", "llama-cpp-python==1.2\n", f"llama-cpp-python==1.2 \\\n{line} \\\n{line}\n"):
        with pytest.raises(console.SetupError):
            llama_wheel.parse_lock(text)


# --- the wheel's cache


def write_wheel(path: Path, member: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "content" * 1000)


def test_damaged_wheel_is_not_used(llama_wheel: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    write_wheel(wheel, "llama_cpp/lib/libllama.so")
    assert llama_wheel.is_whole(wheel)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:-10])
    assert not llama_wheel.is_whole(wheel)
    wheel.write_bytes(whole.replace(b"contentcontent", b"contenTcontent", 1))
    assert not llama_wheel.is_whole(wheel)
    write_wheel(wheel, "llama_cpp/llama.py")
    assert not llama_wheel.is_whole(wheel)


def test_cache_follows_xdg(llama_wheel: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert llama_wheel.cache_root() == tmp_path / "spark"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert llama_wheel.cache_root() == tmp_path / "home/.cache/spark"


# --- progress


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("  [12/83] /usr/bin/c++ -DX -c a.cpp\n", (12, 83)),
        ("[83/83] linking\n", (83, 83)),
        ("  note: see [1/2] above\n", None),
        ("  [1/x] \n", None),
        ("", None),
    ],
)
def test_ninja_steps(llama_wheel: ModuleType, line: str, step: tuple[int, int] | None) -> None:
    assert llama_wheel.parse_ninja_step(line) == step


def test_package_steps(bootstrap: ModuleType) -> None:
    lock = "a-b==1 \\\n    --hash=sha256:00\n    # via x==1\nc==2 ; python_version < '4' \\\n    --hash=sha256:00\n"
    assert bootstrap.count_requirements(lock) == 2
    read = bootstrap.package_counter(2)
    lines = ["Ignoring c: markers\n", "Downloading a\n", "Collecting a-b\n", "Collecting more\n"]
    assert [read(line) for line in lines] == [(1, 2), None, (2, 2), (2, 2)]


def test_progress_outside_a_terminal(console: ModuleType) -> None:
    now = [0.0]
    stream = io.StringIO()
    progress = console.Progress("building", stream, lambda: now[0])
    for done in range(1, 84):
        now[0] += 1
        progress.update(done, 83)
    progress.close("done")
    lines = stream.getvalue().splitlines()
    assert 8 <= len(lines) <= 12
    assert lines[0] == "setup: building 9/83 (0:09)"
    assert lines[-1] == "setup: building done (1:23)"


def test_slow_progress_is_shown_by_time(console: ModuleType) -> None:
    now = [0.0]
    stream = io.StringIO()
    progress = console.Progress("building", stream, lambda: now[0])
    for done in (1, 2, 3):
        now[0] += 10
        progress.update(done, 1000)
    assert stream.getvalue() == "setup: building 2/1000 (0:20)\n"


# --- running programs


def test_failure_shows_the_end_of_its_log(
    console: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    script = "print('first'); print('No space left on device'); raise SystemExit(3)"
    with pytest.raises(console.SetupError, match=r"trying failed with exit status 3") as caught:
        console.run_logged([sys.executable, "-c", script], label="trying", log=log)
    assert "| No space left on device" in str(caught.value)
    assert str(log) in str(caught.value)
    assert "disk space" in caught.value.hint
    assert "first" in log.read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ("NewConnectionError: Failed to establish a new connection: [Errno 111]", "network"),
        ("ReadTimeoutError: Read timed out.", "network"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "lock"),
        ("No CMAKE_CXX_COMPILER could be found.", "g++"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "memory"),
        ("something new", "log"),
    ],
)
def test_hints(console: ModuleType, log: str, word: str) -> None:
    assert word in console.hint_for(log)


def test_lock_makes_a_second_process_wait(console: ModuleType, root: Path, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(root / 'infra/dev')!r})\n"
        "from pathlib import Path; from setup_console import exclusive\n"
        f"with exclusive(Path({str(tmp_path / 'lock')!r}), 'setting up'): print('got it')\n"
    )
    with console.exclusive(tmp_path / "lock", "setting up"):
        second = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert second.stderr is not None
        assert "waiting" in second.stderr.readline()
        assert second.poll() is None
    out, _ = second.communicate(timeout=120)
    assert (second.returncode, out) == (0, "got it\n")


# --- the stamp


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the two files that the keys are made of."""
    root = tmp_path / "clone"
    (root / "infra/lock").mkdir(parents=True)
    (root / "infra/lock/requirements.txt").write_text("numpy==1\n", encoding="utf-8")
    (root / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    return root


@pytest.fixture
def venv(clone: Path) -> Path:
    """A folder that looks like a venv to the stamp."""
    folder = clone / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").touch()
    return folder


def test_nothing_to_do_after_all_steps(bootstrap: ModuleType, clone: Path, venv: Path) -> None:
    wanted = bootstrap.wanted_keys(clone, venv, "wheel", "assets", "cpython-311")
    assert bootstrap.missing_steps(bootstrap.read_stamp(venv), wanted) == bootstrap.STEPS
    bootstrap.write_stamp(venv, wanted)
    assert bootstrap.missing_steps(bootstrap.read_stamp(venv), wanted) == ()


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("lock", "environment"),
        ("python", "environment"),
        ("copied clone", "environment"),
        ("base Python removed", "environment"),
        ("wheel", "llama"),
        ("pyproject", "project"),
        ("assets", "assets"),
    ],
)
def test_a_change_repeats_its_step_and_the_later_ones(
    bootstrap: ModuleType, clone: Path, venv: Path, change: str, first: str
) -> None:
    bootstrap.write_stamp(venv, bootstrap.wanted_keys(clone, venv, "wheel", "assets", "cpython-311"))
    wheel, assets, python = "wheel", "assets", "cpython-311"
    if change == "lock":
        (clone / "infra/lock/requirements.txt").write_text("numpy==2\n", encoding="utf-8")
    elif change == "python":
        python = "cpython-312"
    elif change == "copied clone":
        clone = clone.rename(clone.with_name("copy"))
        venv = clone / ".venv"
    elif change == "base Python removed":
        (venv / "bin/python").unlink()
        (venv / "bin/python").symlink_to("nowhere")
    elif change == "wheel":
        wheel = "other"
    elif change == "pyproject":
        (clone / "pyproject.toml").write_text("[project] # more\n", encoding="utf-8")
    elif change == "assets":
        assets = "other"
    wanted = bootstrap.wanted_keys(clone, venv, wheel, assets, python)
    steps = bootstrap.missing_steps(bootstrap.read_stamp(venv), wanted)
    assert steps == bootstrap.STEPS[bootstrap.STEPS.index(first) :]


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_unreadable_stamp_counts_as_none(bootstrap: ModuleType, venv: Path, text: str) -> None:
    (venv / bootstrap.STAMP).write_text(text, encoding="utf-8")
    assert bootstrap.read_stamp(venv) == {}


def test_an_interrupted_step_is_not_done(
    bootstrap: ModuleType, clone: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of a step and of those after it are gone while it runs; the next run starts with it."""
    wanted = bootstrap.wanted_keys(clone, venv, "wheel", "assets", "cpython-311")
    bootstrap.write_stamp(venv, {**wanted, "llama": "older"})
    setup = bootstrap.Setup(clone, venv, _NoWheel(), _Assets())
    ran: list[str] = []

    def interrupted() -> None:
        ran.append("llama")
        assert bootstrap.read_stamp(venv) == {"environment": wanted["environment"]}
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "_make_environment", lambda: ran.append("environment"))
    monkeypatch.setattr(setup, "_make_llama", interrupted)
    monkeypatch.setattr(setup, "_make_project", lambda: ran.append("project"))
    monkeypatch.setattr(setup, "_make_assets", lambda: ran.append("assets"))
    with pytest.raises(KeyboardInterrupt):
        setup.run(wanted)
    monkeypatch.setattr(setup, "_make_llama", lambda: ran.append("llama again"))
    setup.run(wanted)
    assert ran == ["llama", "llama again", "project", "assets"]
    assert bootstrap.read_stamp(venv) == wanted


def test_assets_that_cannot_be_had_are_tried_again(
    bootstrap: ModuleType, clone: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no reason to fail: the dashboard is plain tables without them."""
    wanted = bootstrap.wanted_keys(clone, venv, "wheel", "assets", "cpython-311")
    bootstrap.write_stamp(venv, {**wanted, "assets": "older"})
    setup = bootstrap.Setup(clone, venv, _NoWheel(), _Assets())
    outcomes = [False, True]
    monkeypatch.setattr(bootstrap, "place_if_possible", lambda *_: outcomes.pop(0))
    setup.run(wanted)
    assert bootstrap.missing_steps(bootstrap.read_stamp(venv), wanted) == ("assets",)
    setup.run(wanted)
    assert bootstrap.read_stamp(venv) == wanted
    assert bootstrap.missing_steps(bootstrap.current_steps(venv, _Assets(in_place=False)), wanted) == ("assets",)


class _Assets:
    """Stands for the dashboard's libraries, in their place or not."""

    def __init__(self, *, in_place: bool = True) -> None:
        self._in_place = in_place

    def in_place(self) -> bool:
        return self._in_place


class _NoWheel:
    """Stands for a wheel that needs no compiler."""

    def require_compilers(self) -> None:
        """There is nothing to compile."""


def test_foreign_folder_is_left_alone(bootstrap: ModuleType, console: ModuleType, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    bootstrap.require_own_folder(tmp_path / "absent")
    bootstrap.require_own_folder(foreign)
    (foreign / bootstrap.LOCK).touch()
    bootstrap.require_own_folder(foreign)  # interrupted before its first stamp
    (foreign / "thesis.tex").touch()
    with pytest.raises(console.SetupError, match="was not made by this set-up"):
        bootstrap.require_own_folder(foreign)
    (foreign / bootstrap.STAMP).touch()
    bootstrap.require_own_folder(foreign)


def test_clearing_keeps_the_lock_and_stamp(console: ModuleType, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    folder = tmp_path / "venv"
    (folder / "lib/deep").mkdir(parents=True)
    (folder / "lib64").symlink_to(outside)
    (folder / "stamp").touch()
    console.clear_folder(folder, keep=("stamp",))
    assert [path.name for path in folder.iterdir()] == ["stamp"]
    assert (outside / "file").exists()


def test_venv_folder(bootstrap: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.venv_folder(clone) == clone / ".venv"
    monkeypatch.setenv("SPARKMOE_VENV", "other")
    assert bootstrap.venv_folder(clone) == clone / "other"
    monkeypatch.setenv("SPARKMOE_VENV", os.sep + "elsewhere")
    assert bootstrap.venv_folder(clone) == Path(os.sep, "elsewhere")


def test_pip_is_not_sent_elsewhere(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TARGET", "elsewhere")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "7")
    environment = bootstrap.child_environment()
    assert "elsewhere" not in environment.values()
    assert environment["PIP_DEFAULT_TIMEOUT"] == "7"


def test_old_python_gets_a_plain_answer(root: Path) -> None:
    """The first lines must run on an old Python; here they are run with an old version number."""
    source = (root / "infra/dev/bootstrap.py").read_text(encoding="utf-8")
    head = source[: source.index("\nimport hashlib")]
    script = re.sub(r"^import sys$", "import sys; sys.version_info = (3, 9)", head, flags=re.MULTILINE)
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: Spark needs Python 3.11 or newer")
    assert "hint: " in answer.stderr
