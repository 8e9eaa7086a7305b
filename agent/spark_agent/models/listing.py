"""Models as a person chooses among them: each once, whatever tools hold it, with what it is and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spark_agent.models.header import Header
from spark_agent.models.stores import Candidate

if TYPE_CHECKING:
    from spark_runtime.host_memory import HostMemory
    from spark_runtime.memory_plan import DeviceMemory

__all__ = ["Fit", "ListedModel", "MachineMemory", "file_bytes", "fit_of", "listed", "same_files"]

Fit = Literal["gpu", "tiered", "host", "no"]

_SHOWN_CONTEXT = 8192
"""Tokens whose keys and values are counted; a longer context is a choice that ``run`` makes and shows."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What this machine has room for now."""

    devices: tuple[DeviceMemory, ...]
    """GPUs; none: everything is in host memory."""
    host: HostMemory

    @property
    def device_bytes(self) -> int:
        """Room on all GPUs, with what each takes for itself off."""
        return sum(max(0, device.room_bytes - device.overhead_bytes) for device in self.devices)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One model on this machine."""

    names: tuple[str, ...]
    """What its holders call it; the first is the one to show."""
    sources: tuple[str, ...]
    paths: tuple[Path, ...]
    """Every place that it has; the same bytes in one file."""
    file_bytes: int | None
    """Of all its files; ``None`` where the file is missing."""
    header: Header
    fit: Fit | None
    """``None``: no model to run."""

    def as_json(self) -> dict[str, Any]:
        """One of ``models[]``."""
        header = asdict(self.header)
        return {
            "name": self.names[0],
            "names": list(self.names),
            "sources": list(self.sources),
            "path": str(self.paths[0]),
            "paths": [str(path) for path in self.paths],
            "moe": self.header.kind == "moe",
            "file_bytes": self.file_bytes,
            **header,
            "fit": self.fit,
        }


def same_files(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates in groups that are one file under several names: a hard link, a link, or a path found twice."""
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        try:
            status = candidate.path.stat()
            key: object = (status.st_dev, status.st_ino)
        except OSError:
            key = candidate.path
        groups.setdefault(key, []).append(candidate)
    return list(groups.values())


def file_bytes(path: Path, n_files: int) -> int | None:
    """Bytes of a model's files; ``path`` is the first of them."""
    stem, _, _ = path.name.rpartition(f"-00001-of-{n_files:05d}")
    paths = [path]
    if n_files > 1 and stem:
        paths = [path.with_name(f"{stem}-{index:05d}-of-{n_files:05d}.gguf") for index in range(1, n_files + 1)]
    try:
        return sum(each.stat().st_size for each in paths)
    except OSError:
        return None


def listed(group: Sequence[Candidate], header: Header, memory: MachineMemory) -> ListedModel:
    """A group of candidates with what their file says."""
    names, sources = _unique(each.name for each in group), _unique(each.source for each in group)
    if group[0].part and header.kind == "dense":
        # Old projectors say no type of their own; Ollama's manifest does.
        header = Header(**{**asdict(header), "kind": group[0].part})
    paths = tuple(dict.fromkeys(each.path for each in group))
    return ListedModel(names, sources, paths, file_bytes(paths[0], header.n_files), header, fit_of(header, memory))


def fit_of(header: Header, memory: MachineMemory) -> Fit | None:
    """Where a model fits: all of it on GPUs, tiered between them and the host, in the host's memory, or nowhere.

    A first look from headers: compute buffers are not in it. ``run --dry-run`` plans every byte.
    """
    if header.kind not in {"moe", "dense"} or header.tensor_bytes is None:
        return None
    context = min(_SHOWN_CONTEXT, header.context_length or _SHOWN_CONTEXT) * (header.kv_bytes_per_token or 0)
    total = header.tensor_bytes + context
    if not memory.devices:
        return "host" if total <= memory.host.available_bytes else "no"
    if total <= memory.device_bytes:
        return "gpu"
    if header.core_bytes is not None and header.expert_bytes is not None:
        least = header.core_bytes + context + (header.floor_bytes or 0)
        if least <= memory.device_bytes and header.expert_bytes <= memory.host.available_bytes:
            return "tiered"
    return "no"


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
