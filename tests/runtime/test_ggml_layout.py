"""Our declarations of ggml's structures, functions and constants against the headers of the pinned llama.cpp.

One small program is compiled twice, with their headers and with ours, and prints what it sees.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from spark_runtime.native.cache import PACKAGE

OURS = PACKAGE / "ggml_layout.h"
#: Placed by the set-up (infra/dev/llama_headers.py).
THEIRS = Path(sys.prefix) / "share/llama.cpp-headers"
THEIR_HEADERS = ("ggml.h", "ggml-backend.h", "ggml-impl.h", "ggml-backend-impl.h", "llama.h")

# Every member, in order.
STRUCTS = {
    "ggml_tensor": "type buffer ne nb op op_params flags src view_src view_offs data name extra padding",
    "ggml_hash_set": "size used keys",
    "ggml_cgraph": "size n_nodes n_leafs nodes grads grad_accs leafs use_counts visited_hash_set order uid",
    "ggml_init_params": "mem_size mem_buffer no_alloc",
    "ggml_backend_dev_caps": "async host_buffer buffer_from_host_ptr events mmap_support",
    "ggml_backend_dev_props": "name description memory_free memory_total type device_id caps",
    "ggml_backend_buffer_type_i": "get_name alloc_buffer get_alignment get_max_size get_alloc_size is_host",
    "ggml_backend_buffer_type": "iface device context",
    "ggml_backend_buffer_i": (
        "free_buffer get_base init_tensor memset_tensor set_tensor get_tensor set_tensor_2d get_tensor_2d cpy_tensor"
        " clear reset"
    ),
    "ggml_backend_buffer": "iface buft context size usage",
    "ggml_backend_graph_optimize_params": "add_alloc_dep user_data",
    "ggml_backend_i": (
        "get_name free set_tensor_async get_tensor_async set_tensor_2d_async get_tensor_2d_async cpy_tensor_async"
        " synchronize graph_plan_create graph_plan_free graph_plan_update graph_plan_compute graph_compute"
        " event_record event_wait graph_optimize"
    ),
    "ggml_backend": "guid iface device context",
    "ggml_backend_event": "device context",
    "ggml_backend_device_i": (
        "get_name get_description get_memory get_type get_props init_backend get_buffer_type get_host_buffer_type"
        " buffer_from_host_ptr supports_op supports_buft offload_op event_new event_free event_synchronize"
    ),
    "ggml_backend_device": "iface reg context",
    "ggml_backend_reg_i": "get_name get_device_count get_device get_proc_address",
    "ggml_backend_reg": "api_version iface context",
}
MEMBERS = [(struct, member) for struct, members in STRUCTS.items() for member in members.split()]
#: Names of ours for what ggml writes as an expression.
OWN_CONSTANTS = {"GGML_OP_PARAMS"}

# What decides how a value is passed: its kind and size; for a function, those of its result and arguments.
DESCRIBE = """
#include <cstddef>
#include <cstdio>
#include <string>
#include <type_traits>

template <typename T> struct kind {
    static std::string of() {
        if (std::is_void<T>::value) return "void";
        if (std::is_array<T>::value) return "array of " + kind<typename std::remove_extent<T>::type>::of();
        const char * name = std::is_pointer<T>::value ? "pointer"
            : std::is_same<T, bool>::value ? "bool"
            : std::is_floating_point<T>::value ? "float"
            : std::is_class<T>::value ? "struct"
            : "int";
        return name + std::to_string(size());
    }
    static size_t size() {
        if constexpr (std::is_void<T>::value) return 0; else return sizeof(T);
    }
};
template <typename R, typename... A> std::string signature(const char * end) {
    std::string all = kind<R>::of() + "(";
    ((all += kind<A>::of() + ","), ...);
    return all + end;
}
template <typename R, typename... A> struct kind<R (*)(A...)> {
    static std::string of() { return signature<R, A...>(")"); }
};
template <typename R, typename... A> struct kind<R (*)(A..., ...)> {
    static std::string of() { return signature<R, A...>("...)"); }
};
"""


def declared(pattern: str) -> list[str]:
    """What ours declares, without its comments."""
    code = re.sub(r"//.*", "", OURS.read_text(encoding="utf-8"))
    return list(dict.fromkeys(re.findall(pattern, code, re.MULTILINE)))


def constants() -> list[str]:
    return [name for name in declared(r"\b(GGML_[A-Z0-9_a-z]+)\b") if name not in OWN_CONSTANTS]


def functions() -> list[str]:
    return declared(r"^[\w \*]+?\b(ggml_\w+)\([^;{]*\);")


def program(includes: tuple[str, ...]) -> str:
    """Source of a program that prints a line for each declaration: its name, a tab, and what it is."""
    lines = [*(f'#include "{name}"' for name in includes), DESCRIBE, "int main() {"]
    lines += [f'std::printf("%s\\t%zu/%zu\\n", "{name}", sizeof({name}), alignof({name}));' for name in STRUCTS]
    lines += [
        f'std::printf("%s\\t%zu+%zu %s\\n", "{struct}.{member}", offsetof({struct}, {member}), '
        f"sizeof({struct}::{member}), kind<decltype({struct}::{member})>::of().c_str());"
        for struct, member in MEMBERS
    ]
    lines += [f'std::printf("%s\\t%lld\\n", "{name}", (long long) ({name}));' for name in constants()]
    lines += [f'std::printf("%s\\t%s\\n", "{name}", kind<decltype(&{name})>::of().c_str());' for name in functions()]
    return "\n".join([*lines, "}", ""])


def seen(folder: Path, includes: tuple[str, ...], *options: str) -> dict[str, str]:
    """Compile the program and return its lines."""
    folder.mkdir()
    source, binary = folder / "seen.cpp", folder / "seen"
    source.write_text(program(includes))
    # Optimized, so that their inline functions, which call into ggml, are left out: nothing calls them.
    command = ["c++", "-std=c++17", "-O1", "-w", *options, "-o", str(binary), str(source)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    lines = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split("\t") for line in lines)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    assert THEIRS.is_dir(), "no headers of llama.cpp: make setup"
    folders = [f"-I{THEIRS / folder}" for folder in ("ggml/include", "ggml/src", "include")]
    return seen(tmp_path_factory.mktemp("layout") / "theirs", THEIR_HEADERS, *folders)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return seen(tmp_path_factory.mktemp("layout") / "ours", (OURS.name,), f"-I{OURS.parent}")


def test_ours_are_theirs(ours: dict[str, str], theirs: dict[str, str]) -> None:
    assert len(ours) > 150
    assert ours == theirs


def test_all_that_ours_declares_is_compared(ours: dict[str, str]) -> None:
    assert set(declared(r"^struct (\w+) \{")) == set(STRUCTS)
    assert set(constants()) | set(functions()) <= set(ours)
    assert len(constants()) > 10
    assert len(functions()) > 30


def test_the_list_names_every_member(theirs: dict[str, str]) -> None:
    """A gap that is too wide for alignment would be a member that the list lacks."""
    for struct, members in STRUCTS.items():
        end = 0
        size, alignment = map(int, theirs[struct].split("/"))
        for member in members.split():
            offset, width = map(int, theirs[f"{struct}.{member}"].split()[0].split("+"))
            assert end <= offset < end + alignment, f"a member before {struct}.{member}"
            end = offset + width
        assert end <= size < end + alignment, f"a member at the end of {struct}"
