"""The library as a backend of any program on ggml, which finds it by ``GGML_BACKEND_PATH``: llama-server, for one.

Each test is a process of its own that knows nothing of Spark's Python but the library's path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import write_small_model
from tier_runs import SIZE

from spark_runtime.ggml import library_dir
from spark_runtime.native.build import library_path

LIST = """
import ctypes, os, sys
folder, path, how = sys.argv[1:4]
for name in ("libstdc++.so.6", f"{folder}/libggml-base.so", f"{folder}/libggml.so"):
    ggml = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
said = []
callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
log = callback(lambda _level, text, _data: said.append(text.decode()))
ggml.ggml_log_set(log, None)
for name in ("ggml_backend_load", "ggml_backend_dev_get", "ggml_backend_dev_by_name", "ggml_backend_reg_by_name"):
    getattr(ggml, name).restype = ctypes.c_void_p
for name in ("ggml_backend_dev_name", "ggml_backend_dev_description"):
    getattr(ggml, name).restype, getattr(ggml, name).argtypes = ctypes.c_char_p, [ctypes.c_void_p]
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
if how == "path":
    loaded = ggml.ggml_backend_load(path.encode()) is not None
else:
    os.environ["GGML_BACKEND_PATH"] = path
    ggml.ggml_backend_load_all_from_path(None)
    loaded = ggml.ggml_backend_reg_by_name(b"SPARK") is not None
print("loaded", loaded)
devices = [ggml.ggml_backend_dev_get(index) for index in range(ggml.ggml_backend_dev_count())]
for device in devices:
    print(ggml.ggml_backend_dev_name(device).decode(), "-", ggml.ggml_backend_dev_description(device).decode())
print("".join(said), file=sys.stderr)
"""

RUN = """
import ctypes, hashlib, os, sys
from pathlib import Path
folder, path, model = sys.argv[1:4]
from spark_runtime.ggml import ggml_base, share_registry
from spark_runtime.llama import LlamaContext, LoadOptions, bindings
share_registry()
ggml = ctypes.CDLL(f"{folder}/libggml.so")
for name in ("ggml_backend_load", "ggml_backend_dev_by_name"):
    getattr(ggml, name).restype = ctypes.c_void_p
def digest(options):
    context = LlamaContext(Path(model), n_ctx=128, n_batch=32, n_threads=1, options=options)
    found = hashlib.sha256()
    for start, count in ((0, 30), (30, 1), (31, 1), (32, 4), (36, 8), (44, 32), *((76 + i, 1) for i in range(20))):
        context.decode([(7 * token) % 64 for token in range(start, start + count)], start, all_outputs=True)
        for index in range(count):
            found.update(context.logits(index).tobytes())
    context.close()
    return found.hexdigest()
# Before there is another device, or llama.cpp would use that for a part of it.
print(digest(LoadOptions(n_gpu_layers=-1, repack=False)))
assert ggml.ggml_backend_load(path.encode())
device = ggml.ggml_backend_dev_by_name(b"SPARK0")
for _ in range(2):
    print(digest(LoadOptions(n_gpu_layers=-1, devices=[device], repack=False)))
"""


def run(code: str, *arguments: str, residency: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in {"GGML_BACKEND_PATH", "SPARKMOE_RESIDENCY"}}
    if residency is not None:
        env["SPARKMOE_RESIDENCY"] = residency
    command = [sys.executable, "-c", code, str(library_dir()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)


@pytest.fixture
def library() -> str:
    return str(library_path()[0])


@pytest.mark.parametrize("how", ["path", "environment"])
def test_ggml_lists_the_devices(library: str, how: str) -> None:
    answer = run(LIST, library, how, residency="0.5")
    assert answer.returncode == 0, answer.stderr
    loaded, *devices = answer.stdout.splitlines()
    assert loaded == "loaded True"
    ours = [device for device in devices if device.startswith("SPARK")]
    others = [device.split(" - ")[0] for device in devices if not device.startswith("SPARK")]
    assert ours
    assert ours == [f"SPARK{index} - tiers over {others[index]}" for index in range(len(ours))]


@pytest.mark.parametrize("residency", ["", "none", "0", "-0.5", "1.5", "60%", "nan", "inf"])
def test_a_residency_that_is_no_share_is_refused(library: str, residency: str) -> None:
    answer = run(LIST, library, "path", residency=residency)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("loaded False\n")
    assert "SPARK0" not in answer.stdout
    assert f"SPARKMOE_RESIDENCY is '{residency}', expected a share of 1 above 0" in answer.stderr


def test_ggml_refuses_a_library_of_another_interface(library: str, tmp_path: Path) -> None:
    """Ours in all but the version, as it would be with a ggml of another one."""
    source, built = tmp_path / "other.cpp", tmp_path / "libother.so"
    source.write_text(
        f"""
        #include <dlfcn.h>
        extern "C" __attribute__((visibility("default"))) void * ggml_backend_init(void) {{
            void * ours = dlopen("{library}", RTLD_NOW);
            int * reg = static_cast<int *>(reinterpret_cast<void * (*)()>(dlsym(ours, "ggml_backend_init"))());
            *reg += 1;
            return reg;
        }}
        """
    )
    compiler = shutil.which("c++")
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"], check=True)
    answer = run(LIST, str(built), "path")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("loaded False\n")
    assert "incompatible API version (backend: 3, current: 2)" in answer.stderr


def test_without_ggmls_own_library_it_says_so(library: str) -> None:
    """A program that hides ggml's functions cannot use it, and lives on."""
    code = """
import ctypes, sys
folder, path = sys.argv[1:3]
ctypes.CDLL(f"{folder}/libggml-base.so", mode=ctypes.RTLD_GLOBAL)
spark = ctypes.CDLL(path)
spark.ggml_backend_init.restype = ctypes.c_void_p
print(spark.ggml_backend_init())
"""
    answer = run(code, library)
    assert answer.stdout == "None\n", answer
    assert "the library of ggml's devices is not loaded" in answer.stderr


@pytest.mark.parametrize("architecture", ["qwen3moe", "glm4moe"])
@pytest.mark.parametrize("residency", ["0.3", "1", None])
def test_a_model_on_the_device_computes_what_the_cpu_does(
    library: str, architecture: str, residency: str | None, tmp_path: Path
) -> None:
    """Placed by its share alone, as in a program that knows nothing of placements; loaded twice."""
    model = write_small_model(tmp_path / "model.gguf", architecture, SIZE)
    answer = run(RUN, library, str(model), residency=residency)
    assert answer.returncode == 0, answer.stderr
    cpu, first, second = answer.stdout.split()
    assert first == second == cpu
