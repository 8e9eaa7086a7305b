"""The C interface: only the pinned version, names from the library, complaints in order."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from spark_runtime import ggml
from spark_runtime.errors import InstallationError


def test_names_come_from_the_library() -> None:
    number = ggml.op_number("MUL_MAT_ID")
    assert ggml.ggml_base().ggml_op_name(number) == b"MUL_MAT_ID"
    assert [ggml.type_name(number) for number in (0, 1, 2, 26)] == ["f32", "f16", "q4_0", "i32"]


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(InstallationError, match="no operation MUL_MAT_NOTHING"):
        ggml.op_number("MUL_MAT_NOTHING")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.3.35")
    with pytest.raises(InstallationError, match=r"is 0\.3\.35, expected 0\.3\.36") as caught:
        ggml.library_dir()
    assert "spark-moe[agent]" in (caught.value.hint or "")


def test_an_absent_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InstallationError, match="not installed"):
        ggml.library_dir()


def test_errors_come_before_warnings_and_blocks_do_not_mix() -> None:
    with ggml.complaints() as first:
        ggml.LOG_CALLBACK(3, b"a warning\n", None)
        ggml.LOG_CALLBACK(4, b"the cause\n", None)
        ggml.LOG_CALLBACK(2, b"chatter\n", None)
        ggml.LOG_CALLBACK(4, b"a consequence\n", None)
    with ggml.complaints() as second:
        pass
    assert first == ["the cause", "a consequence", "a warning"]
    assert second == []


def test_an_abort_ends_the_process_with_a_reason() -> None:
    program = "from spark_runtime import ggml; ggml._ABORT_CALLBACK(b'/src/ggml.c:12: GGML_ASSERT(x) failed')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: llama.cpp cannot go on: ggml.c:12: GGML_ASSERT(x) failed\nhint: ")
