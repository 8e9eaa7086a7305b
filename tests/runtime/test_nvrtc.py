"""The CUDA kernels: compiled by both compilers for every card we name, and refused with a reason where they cannot."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from spark_runtime.errors import InstallationError
from spark_runtime.native import cache, nvrtc
from spark_runtime.native.nvrtc import Nvrtc, Version, kernels_path, nvrtc_version, ptx_path

CAPABILITIES = [(7, 5), (8, 6), (8, 9), (9, 0), (12, 0)]
SMALL = 'extern "C" __global__ void small(float * a) { a[0] = a[1] * a[2] + a[3]; }\n'


def capability_id(capability: Version) -> str:
    return f"{capability[0]}.{capability[1]}"


each_card = pytest.mark.parametrize("capability", CAPABILITIES, ids=capability_id)


@pytest.fixture(scope="module")
def kernels() -> Path:
    return cache.PACKAGE / nvrtc.KERNELS


@pytest.fixture(scope="module")
def entry_points(kernels: Path) -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in (kernels, kernels.with_name("kernel_early.h")))
    code = re.sub(r"//.*|__launch_bounds__\s*\([^)]*\)", "", text)
    names = set(re.findall(r"__global__\s+void\s+(\w+)\s*\(", code))
    assert len(names) == code.count("__global__")
    assert names
    return names


@pytest.fixture
def nvcc() -> Path:
    spec = importlib.util.find_spec("nvidia")
    assert spec is not None
    found = [Path(folder) / "cu13/bin/nvcc" for folder in spec.submodule_search_locations or []]
    return next(path for path in found if path.exists())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One small kernel in place of ours, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    path = tmp_path / nvrtc.KERNELS
    path.write_text(SMALL)
    return path


def entries(ptx: str) -> set[str]:
    return set(re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE))


def installed(monkeypatch: pytest.MonkeyPatch, *versions: Version) -> None:
    """Pretend that these are the installed NVRTCs."""
    real = nvrtc.find_nvrtc(13)
    assert real is not None
    found = {version[0]: Nvrtc(real.library, "here", version) for version in versions}
    monkeypatch.setattr(nvrtc, "find_nvrtc", found.get)


@each_card
def test_our_kernels_compile_as_users_compile_them(capability: Version, entry_points: set[str]) -> None:
    path = ptx_path(capability)
    digits = f"{capability[0]}{capability[1]}"
    assert path.name == f"kernels-{digits}.ptx"
    data = path.read_bytes()
    assert data.endswith(b"\0")
    ptx = data[:-1].decode()
    assert entries(ptx) == entry_points
    assert f".target sm_{digits}\n" in ptx


@each_card
def test_our_kernels_compile_to_machine_code(capability: Version, entry_points: set[str]) -> None:
    """Which also a driver runs that is older than NVRTC."""
    path = kernels_path(capability, (13, 0))
    assert path.name == f"kernels-{capability[0]}{capability[1]}.cubin"
    data = path.read_bytes()
    assert data.startswith(b"\x7fELF")
    assert [name for name in sorted(entry_points) if f".text.{name}".encode() not in data] == []


@each_card
@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_our_kernels_compile_with_nvcc(
    capability: Version, kind: str, kernels: Path, entry_points: set[str], nvcc: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arch = f"-arch=sm_{capability[0]}{capability[1]}"
    command = [str(nvcc), arch, f"-{kind}", *nvrtc.OPTIONS, "-Werror=all-warnings", "-o", str(out), str(kernels)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    if kind == "ptx":
        assert entries(out.read_text()) == entry_points
    else:
        assert out.read_bytes().startswith(b"\x7fELF")


def test_products_and_sums_are_rounded_as_on_the_host(small: Path) -> None:
    ptx = ptx_path((9, 0)).read_text()
    assert "fma." not in ptx
    assert "mul.rn.f32" in ptx
    assert "add.rn.f32" in ptx


def test_a_broken_source_gives_the_complaint(small: Path) -> None:
    small.write_text('extern "C" __global__ void small(int * a) {\n    a[0] = nowhere;\n}\n')
    with pytest.raises(
        InstallationError, match=r'kernels\.cu\(2\): error: identifier "nowhere" is undefined'
    ) as caught:
        ptx_path((9, 0))
    assert "for compute_90 (NVRTC_ERROR_COMPILATION)" in str(caught.value)
    assert caught.value.hint
    assert list((small.parent / "cache").rglob("kernels*")) == []


def test_it_is_compiled_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ptx_path((9, 0))
    monkeypatch.setattr(Nvrtc, "ptx", None)
    assert ptx_path((9, 0)) == path
    with pytest.raises(TypeError):
        ptx_path((8, 9))


def test_a_damaged_one_is_compiled_again(small: Path) -> None:
    path = ptx_path((9, 0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert ptx_path((9, 0)).read_bytes() == whole


def test_the_key_is_everything_the_result_depends_on(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {ptx_path((9, 0)).parent, ptx_path((8, 9)).parent, kernels_path((9, 0), (13, 0)).parent}
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--use_fast_math"))
        folders.add(ptx_path((9, 0)).parent)
    with monkeypatch.context() as patch:
        installed(patch, (13, 9))
        folders.add(ptx_path((9, 0)).parent)
    for name in (small.name, "used.h"):
        small.with_name(name).write_text(SMALL + "\n")
        folders.add(ptx_path((9, 0)).parent)
    assert len(folders) == 7


def test_it_includes_what_is_packaged_beside_it(small: Path) -> None:
    small.with_name("used.h").write_text("#define ANSWER 42\n")
    small.write_text('#include "used.h"\nextern "C" __global__ void small(int * a) { a[0] = ANSWER; }\n')
    assert ", 42;" in ptx_path((9, 0)).read_text()


# --- which NVRTC for which driver


def test_the_locked_one_is_found() -> None:
    assert nvrtc_version()[0] == 13
    assert nvrtc_version((13, 0)) == nvrtc_version()


@pytest.mark.parametrize(
    ("versions", "driver", "chosen"),
    [
        ([(13, 5), (12, 9)], (13, 5), (13, 5)),
        ([(13, 5), (12, 9)], (13, 0), (13, 5)),
        ([(13, 5), (12, 9)], (12, 4), (12, 9)),
        ([(12, 9)], (13, 0), (12, 9)),
        ([(13, 5)], (14, 1), (13, 5)),
    ],
)
def test_the_newest_that_the_driver_follows(
    versions: list[Version], driver: Version, chosen: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, *versions)
    assert nvrtc_version(driver) == chosen


@pytest.mark.parametrize(
    ("versions", "driver", "message", "hint"),
    [
        ([], None, "is not installed", r"^pip install 'spark-moe\[cuda\]'$"),
        ([], (13, 0), "is not installed", r"^pip install 'spark-moe\[cuda\]'$"),
        ([], (12, 4), "is not installed", "^pip install nvidia-cuda-nvrtc-cu12, or"),
        ([(13, 5)], (12, 4), r"driver supports CUDA 12\.4, NVRTC is 13\.5", "^pip install nvidia-cuda-nvrtc-cu12, or"),
        ([(13, 5), (12, 9)], (11, 8), r"driver supports CUDA 11\.8, NVRTC is 13\.5", "^install a newer driver$"),
    ],
)
def test_no_nvrtc_for_the_driver(
    versions: list[Version], driver: Version | None, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, *versions)
    with pytest.raises(InstallationError, match=message) as caught:
        nvrtc_version(driver)
    assert re.search(hint, str(caught.value.hint))


def test_a_card_newer_than_nvrtc(small: Path) -> None:
    """Its driver translates PTX of an older card; there is no machine code for it."""
    newest = nvrtc._chosen(None).capabilities()[-1]
    path = ptx_path((99, 1))
    assert path.name == "kernels-991.ptx"
    assert f".target sm_{newest[0]}{newest[1]}\n" in path.read_text()
    assert kernels_path((99, 1), nvrtc_version()) == path
    with pytest.raises(InstallationError, match=r"no machine code for compute capability 99\.1") as caught:
        kernels_path((99, 1), (13, 0))
    assert "nvidia-cuda-nvrtc<13.1" in str(caught.value.hint)


def test_a_card_too_old_for_nvrtc(small: Path) -> None:
    with pytest.raises(
        InstallationError, match=r"compute capability is 6\.1, NVRTC 13\.\d+ compiles for 7\.5"
    ) as caught:
        ptx_path((6, 1))
    assert "nvidia-cuda-nvrtc-cu12" in str(caught.value.hint)


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "_package_folders", lambda: [tmp_path])
    monkeypatch.setenv("CUDA_HOME", "/home-of-cuda")
    monkeypatch.setenv("CUDA_PATH", "/path-of-cuda")
    assert list(nvrtc._places(13)) == [
        str(tmp_path / "cu13/lib/libnvrtc.so.13"),
        "/home-of-cuda/lib64/libnvrtc.so.13",
        "/path-of-cuda/lib64/libnvrtc.so.13",
        "libnvrtc.so.13",
    ]
    assert next(nvrtc._places(12)) == str(tmp_path / "cuda_nvrtc/lib/libnvrtc.so.12")


def test_what_is_no_nvrtc_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "libnvrtc.so.13"
    assert nvrtc._load(str(path)) is None
    path.write_text("no library")
    assert nvrtc._load(str(path)) is None
    assert nvrtc._load("libc.so.6") is None
