"""Keeping llama.cpp's headers: out of its archive, into the cache, into the virtual environment."""

from __future__ import annotations

import importlib
import io
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

WANTED = {
    "ggml/include/ggml.h": "tensors",
    "ggml/include/gguf.h": "files",
    "ggml/src/ggml-impl.h": "graphs",
    "ggml/src/ggml-backend-impl.h": "backends",
    "include/llama.h": "models",
}
OTHERS = ("ggml/include/deep/x.h", "ggml/src/ggml-cuda/common.cuh", "ggml/src/ggml-common.h", "src/llama.h")


@pytest.fixture
def llama_headers(on_setup_path: None) -> ModuleType:
    return importlib.import_module("llama_headers")


def write_archive(path: Path, names: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def vendored(names: dict[str, str]) -> dict[str, str]:
    return {f"llama_cpp_python-1/vendor/llama.cpp/{name}": text for name, text in names.items()}


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_headers_are_taken_out_of_the_archive(llama_headers: ModuleType, tmp_path: Path) -> None:
    others = vendored(dict.fromkeys(OTHERS, "other")) | dict.fromkeys(WANTED, "elsewhere")
    others["x/vendor/llama.cpp/include/../include/llama.h"] = "through another folder"
    archive = write_archive(tmp_path / "a.tar.gz", vendored(WANTED) | others)
    llama_headers.extract_headers(archive, tmp_path / "headers")
    assert contents(tmp_path / "headers") == WANTED
    assert llama_headers.are_whole(tmp_path / "headers")


@pytest.mark.parametrize("missing", [name for name in WANTED if "include/gg" not in name])
def test_an_archive_without_one_is_refused(
    llama_headers: ModuleType, console: ModuleType, tmp_path: Path, missing: str
) -> None:
    names = {name: text for name, text in WANTED.items() if name != missing}
    archive = write_archive(tmp_path / "a.tar.gz", vendored(names))
    with pytest.raises(console.SetupError, match=r"a\.tar\.gz lacks headers"):
        llama_headers.extract_headers(archive, tmp_path / "headers")


def test_older_headers_in_the_environment_are_replaced(llama_headers: ModuleType, tmp_path: Path) -> None:
    older = tmp_path / "venv" / llama_headers.PLACE
    older.mkdir(parents=True)
    (older / "older.h").touch()
    archive = write_archive(tmp_path / "a.tar.gz", vendored(WANTED))
    llama_headers.extract_headers(archive, tmp_path / "headers")
    for _ in range(2):
        llama_headers.place_headers(tmp_path / "headers", tmp_path / "venv")
        assert contents(older) == WANTED


def test_a_wheel_without_headers_gets_them_without_a_build(
    llama_wheel: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = llama_wheel.LlamaWheel(root)
    fetched = []

    def fetch(log: Path, *_: object) -> tuple[Path, dict[str, str]]:
        assert log.name == "headers.log", "the build's own log stays"
        (log.parent / "part/archive").mkdir(parents=True)
        fetched.append(write_archive(log.parent / "part/archive/a.tar.gz", vendored(WANTED)))
        return fetched[-1], {}

    monkeypatch.setattr(wheel, "_fetch", fetch)
    monkeypatch.setattr(wheel, "_build", None)
    for _ in range(2):
        assert contents(wheel.headers(Path("python"), {}, -1)) == WANTED
    assert len(fetched) == 1
    assert not fetched[0].exists()
    (wheel.headers(Path("python"), {}, -1) / "include/llama.h").unlink()
    assert contents(wheel.headers(Path("python"), {}, -1)) == WANTED
    assert len(fetched) == 2
