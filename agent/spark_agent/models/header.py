"""What a GGUF's headers say about it, read in a process of its own.

llama.cpp's reader is C++ that ends the process on some damaged files, and takes minutes or gigabytes on hostile ones. A
listing reads whatever lies around, so that process has limits of its own; what breaks it is told as broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from spark_runtime.gguf_file import GgufModel

__all__ = ["Header", "HeaderReader", "Kind", "header_reader"]

Kind = Literal["moe", "dense", "projector", "adapter", "vocabulary", "imatrix", "other", "broken"]

_SECONDS_PER_FILE = 20.0
_SECONDS_TO_START = 120.0
"""A busy machine takes long to load llama.cpp, which says nothing of any file."""
_MOST_MEMORY = 2 * 2**30
"""Beyond what the process has at its start: the largest vocabularies and tensor lists take some 100 MB."""
_MOST_ANSWER = 2**20
_READY = b"ready\n"
"""What the process says once it can be asked."""
_KINDS: dict[str, Kind] = {"mmproj": "projector", "adapter": "adapter", "imatrix": "imatrix", "vocab": "vocabulary"}


@dataclass(frozen=True, slots=True)
class Header:
    """One model, or what keeps a file from being one. Bytes are of tensors; ``None`` where there is no such thing."""

    kind: Kind
    reason: str = ""
    """Why it is broken, or cannot be run."""
    title: str | None = None
    """The model's own name."""
    architecture: str | None = None
    quantisation: str | None = None
    """The tensor type that most bytes have: of the experts, where there are some."""
    n_files: int = 1
    tensor_bytes: int | None = None
    core_bytes: int | None = None
    expert_bytes: int | None = None
    floor_bytes: int | None = None
    """Of the fewest experts that slots must hold: ``2 * top_k`` of every layer."""
    n_experts: int | None = None
    top_k: int | None = None
    moe_blocks: int | None = None
    context_length: int | None = None
    kv_bytes_per_token: int | None = None
    fingerprint: str | None = None


class HeaderReader:
    """Reads one file after another in a process that may be lost; :func:`header_reader` makes and ends one."""

    def __init__(self, seconds_per_file: float = _SECONDS_PER_FILE) -> None:
        self._seconds = seconds_per_file
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path) -> Header:
        """What the file's headers say; never raises for what is in it."""
        process = self._started()
        if process is None:
            return Header("broken", "its reader could not be started")
        questions, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        try:
            questions.write(json.dumps(os.fspath(path)).encode() + b"\n")
            questions.flush()
        except OSError:
            return self._lost("its reader ended before it was asked")
        ready, _, _ = select.select([answers], [], [], self._seconds)
        if not ready:
            return self._lost(f"its headers take more than {self._seconds:g} s to read")
        line = answers.readline(_MOST_ANSWER)
        if not line.endswith(b"\n"):
            return self._lost("llama.cpp's reader does not survive it")
        return Header(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _lost(self, reason: str) -> Header:
        self.close()
        return Header("broken", f"{reason}: the file is damaged")

    def _started(self) -> subprocess.Popen[bytes] | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            answers = cast(IO[bytes], self._process.stdout)
            ready, _, _ = select.select([answers], [], [], _SECONDS_TO_START)
            if not ready or answers.readline() != _READY:
                self.close()
        return self._process


@contextmanager
def header_reader(seconds_per_file: float = _SECONDS_PER_FILE) -> Iterator[HeaderReader]:
    """A reader, whose process is ended at the end; it is started for the first file."""
    reader = HeaderReader(seconds_per_file)
    try:
        yield reader
    finally:
        reader.close()


def _read_header(path: Path) -> Header:
    """The same in this process, for the worker alone."""
    from spark_runtime.errors import SparkRuntimeError
    from spark_runtime.gguf_file import read_gguf

    try:
        return _of_model(read_gguf(path))
    except SparkRuntimeError as error:
        return Header("broken", str(error))
    except MemoryError:
        return Header("broken", f"{path.name}: its headers take more than {_MOST_MEMORY >> 30} GiB: it is damaged")


def _of_model(model: GgufModel) -> Header:
    from spark_runtime.errors import NotMoeError, UnsupportedModelError
    from spark_runtime.model_shape import shape_of
    from spark_runtime.placement import floor_bytes, layer_sizes

    meta = model.metadata
    architecture, title, kind = (_text(meta.get(f"general.{key}")) for key in ("architecture", "name", "type"))
    found = Header(
        "dense",
        title=title,
        architecture=architecture,
        quantisation=_quantisation(model, ""),
        n_files=len(model.files),
        tensor_bytes=sum(tensor.n_bytes for tensor in model.tensors.values()),
    )
    if architecture == "clip":
        kind = "mmproj"
    elif kind is None and _text(meta.get("adapter.type")):
        kind = "adapter"
    if kind not in {None, "model"}:
        return Header(**{**asdict(found), "kind": _KINDS.get(str(kind), "other")})
    if not model.tensors:
        return Header(**{**asdict(found), "kind": "vocabulary"})
    context = model.get_int(f"{architecture}.context_length", 0)
    try:
        shape = shape_of(model)
    except NotMoeError:
        return Header(**{**asdict(found), "context_length": context or None})
    except UnsupportedModelError as error:
        return Header(**{**asdict(found), "kind": "other", "reason": str(error)})
    return Header(
        **{
            **asdict(found),
            "kind": "moe",
            "quantisation": _quantisation(model, "_exps."),
            "core_bytes": shape.core_bytes,
            "expert_bytes": shape.expert_bytes_total,
            "floor_bytes": floor_bytes(layer_sizes(shape)),
            "n_experts": max(layer.n_experts for layer in shape.layers),
            "top_k": max(layer.top_k for layer in shape.layers),
            "moe_blocks": len(shape.layers),
            "context_length": shape.context_length,
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "fingerprint": shape.fingerprint,
        }
    )


def _text(value: object) -> str | None:
    return value[:200] if isinstance(value, str) and value else None


def _quantisation(model: GgufModel, part: str) -> str | None:
    sizes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        if part in tensor.name:
            sizes[tensor.type_name] += tensor.n_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def _main() -> None:
    """Answer each line, a path in JSON, with a line of JSON until there are no more."""
    from spark_runtime import gguf_file, model_shape, placement  # noqa: F401 - loaded before anything is asked
    from spark_runtime.ggml import ggml_base

    ggml_base()  # its own memory does not count
    if (data := _data_bytes()) is not None:
        with contextlib.suppress(ValueError, OSError):  # an administrator's limit is lower
            resource.setrlimit(resource.RLIMIT_DATA, (data + _MOST_MEMORY, data + _MOST_MEMORY))
    sys.stdout.write(_READY.decode())
    sys.stdout.flush()
    for line in sys.stdin:
        header = _read_header(Path(json.loads(line)))
        sys.stdout.write(json.dumps(asdict(header)) + "\n")
        sys.stdout.flush()


def _data_bytes() -> int | None:
    """What ``RLIMIT_DATA`` counts of this process now; ``None`` where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)


if __name__ == "__main__":
    _main()
