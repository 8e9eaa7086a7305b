"""Building the native library: once, whole, and refused with a reason where it cannot be."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_runtime import native_tap
from spark_runtime.collector import Collector
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import InstallationError, RoutingReadError
from spark_runtime.ggml import ggml_base
from spark_runtime.model_shape import read_model_shape
from spark_runtime.native import build, cache
from spark_runtime.native_tap import NativeTap, native_library

BUILD = "from spark_runtime.native.build import library_path; print(library_path()[0])"


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "spark" / "native"


@pytest.fixture
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with one small source in place of ours, to build fast."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.cpp").write_text("int small() { return 1; }\n")
    monkeypatch.setattr(cache, "PACKAGE", folder)
    return folder


@pytest.fixture
def forgotten() -> Iterator[None]:
    """A process remembers its library; these tests want another."""
    native_library.cache_clear()
    yield
    native_library.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    def make(script: str) -> Path:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


def test_processes_that_start_at_once_build_once(
    own_cache: Path, compiler: Callable[[str], Path], tmp_path: Path
) -> None:
    log, real = tmp_path / "log", shutil.which("c++")
    compiler(f'case "$*" in *-shared*) echo built >> {log};; esac; exec {real} "$@"')
    builders = [
        subprocess.Popen([sys.executable, "-c", BUILD], env=dict(os.environ), stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {builder.communicate(timeout=600)[0].strip() for builder in builders}
    assert len(paths) == 1
    [path] = map(Path, paths)
    assert log.read_text() == "built\n"
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "libspark-native.sha256",
        build.LIBRARY_NAME,
        "lock",
    ]


def test_the_key_is_everything_the_binary_depends_on(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = {build._stamp("c++")}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    stamps.add(build._stamp("c++"))
    monkeypatch.setattr(build, "LLAMA_CPP_PYTHON_VERSION", "0.0.0")
    stamps.add(build._stamp("c++"))
    monkeypatch.setattr(build, "_compiler_version", lambda _: "another")
    stamps.add(build._stamp("c++"))
    monkeypatch.setattr(build, "LINK_FLAGS", (*build.LINK_FLAGS, "-s"))
    stamps.add(build._stamp("c++"))
    monkeypatch.setattr(build, "LIBRARIES", ())
    stamps.add(build._stamp("c++"))
    assert len(stamps) == 6


@pytest.mark.parametrize("change", ["edited.h", "edited.cpp", "new.h", "new.cpp", "renamed"])
def test_every_source_counts(small_source: Path, change: str) -> None:
    for name in ("edited.h", "edited.cpp", "renamed.h", "other.py"):
        (small_source / name).write_text("// first\n")
    before = build._stamp("c++")
    (small_source / "other.py").write_text("# second\n")
    assert build._stamp("c++") == before
    if change == "renamed":
        (small_source / "renamed.h").rename(small_source / "another.h")
    else:
        (small_source / change).write_text("// second\n")
    assert build._stamp("c++") != before


def test_several_sources_become_one_library(own_cache: Path, small_source: Path) -> None:
    shown = 'extern "C" __attribute__((visibility("default"))) int shown()'
    (small_source / "small.h").write_text("int small();\n")
    (small_source / "other.cpp").write_text(f'#include "small.h"\n{shown} {{ return 6 + small(); }}\n')
    library = ctypes.CDLL(str(build.library_path()[0]))
    assert library.shown() == 7
    with pytest.raises(AttributeError):
        library._Z5smallv  # noqa: B018


def test_the_library_shows_only_its_interface() -> None:
    """Anything else could take the place of another library's function of the same name, or be taken for it."""
    path, _ = build.library_path()
    answer = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    # Weak symbols are the standard library's templates, which every C++ library shows.
    strong = {line.split()[2] for line in answer.stdout.splitlines() if line.split()[1] in "TDBR"}
    assert "spark_native_stamp" in strong
    assert {name for name in strong if not name.startswith(("spark_", "ggml_backend_"))} == set()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('case "$*" in --version) echo 1;; *) echo "tap.cpp:1: no such luck" >&2; exit 1;; esac', "no such luck"),
        ('case "$*" in --version) echo 3;; *-shared*) echo "ld: nor here" >&2; exit 1;; esac', "nor here"),
        ('case "$*" in --version) echo 2;; *) exit 0;; esac', "wrote no library"),
    ],
    ids=["complains", "cannot-link", "writes-nothing"],
)
def test_a_compiler_that_fails_leaves_nothing(
    own_cache: Path, compiler: Callable[[str], Path], script: str, reason: str
) -> None:
    compiler(script)
    with pytest.raises(InstallationError, match=reason) as caught:
        build.library_path()
    assert caught.value.hint
    assert list(own_cache.rglob(build.LIBRARY_NAME)) == []


def test_without_a_compiler_python_counts_and_says_why(
    own_cache: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch, demo_model: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with Engine.load(demo_model, EngineOptions(n_ctx=64, n_threads=1)) as engine:
        assert "no C++ compiler" in str(engine.native_fault)
        engine.prompt([1, 2, 3])


def test_a_cache_that_cannot_be_written(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("in the way")
    with pytest.raises(InstallationError, match=r"cannot build libspark-native\.so in"):
        build.library_path()


@pytest.mark.parametrize("damage", [lambda whole: whole[:1000], lambda whole: b"", lambda whole: whole[:-1] + b"x"])
def test_a_damaged_library_is_built_again(
    own_cache: Path, small_source: Path, damage: Callable[[bytes], bytes]
) -> None:
    path, _ = build.library_path()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert build.library_path()[0].read_bytes() == whole


def test_what_is_no_library_is_refused(forgotten: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / build.LIBRARY_NAME
    path.write_text("no library")
    monkeypatch.setattr(native_tap, "library_path", lambda: (path, "0" * 32))
    with pytest.raises(InstallationError, match="is not Spark's native library") as caught:
        native_library()
    assert str(tmp_path) in str(caught.value.hint)


def test_a_library_of_another_build_is_refused(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = build.library_path()
    monkeypatch.setattr(native_tap, "library_path", lambda: (path, "0" * 32))
    with pytest.raises(InstallationError, match="expected 0000"):
        native_library()


def test_another_layout_of_tensors_is_refused(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_tap, "_READ_MEMBERS", ("type", "nb", "ne", "op", "src", "data", "name"))
    with pytest.raises(InstallationError, match="lays out ggml's tensors as"):
        native_library()


def test_malformed_ids_are_an_error_and_not_a_count(demo_model: Path) -> None:
    """Ids of a type that no router gives, as a tensor that only exists here."""
    from spark_runtime.ggml import GgmlTensor, op_number

    tap = NativeTap(native_library(), Collector(read_model_shape(demo_model)))
    weights = GgmlTensor(name=b"blk.0.ffn_up_exps.weight")
    ids = GgmlTensor(type=0, ne=(8, 1, 1, 1), nb=(4, 32, 32, 32))
    node = GgmlTensor(op=op_number("MUL_MAT_ID"))
    node.src[0], node.src[2] = ctypes.addressof(weights), ctypes.addressof(ids)
    call = native_library().spark_tap_call
    call.restype = ctypes.c_bool
    assert not call(ctypes.byref(node), ctypes.c_bool(False), ctypes.c_void_p(tap.user_data))
    with pytest.raises(RoutingReadError, match=r"extent \[8, 1, 1, 1\] and strides \[4, 32, 32, 32\]"):
        tap.check()
    tap.check()
    assert ggml_base() is not None
