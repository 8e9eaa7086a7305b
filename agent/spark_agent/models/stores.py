"""Where tools keep models, and what they call them. Names and paths alone: no model file is opened here."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Candidate", "Source", "Survey", "survey"]

Source = Literal["spark", "llama.cpp", "huggingface", "ollama", "lmstudio"]

_MOST_ENTRIES = 50_000
"""Of one store; a folder that is no model store (a home folder, a build tree) is given up there, and said so."""
_MOST_DEPTH = 8
_MANIFEST_BYTES = 2**20
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})$")
_DIGEST = re.compile(r"^sha256[:-]([0-9a-f]{64})$")
_OLLAMA_LAYERS = {
    "application/vnd.ollama.image.model": "",
    "application/vnd.ollama.image.projector": "projector",
    "application/vnd.ollama.image.adapter": "adapter",
}
_SYSTEM_OLLAMA = ("usr/share/ollama/.ollama/models", "var/lib/ollama/.ollama/models")
"""Where Ollama's installers put the models of the service that they set up, below the root."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file, or the shards of one model, under one name of one tool."""

    name: str
    source: Source
    path: Path
    """The file to open; of a split model the first shard, whether or not it is there."""
    part: str = ""
    """Of an Ollama model beside the model itself: ``projector`` or ``adapter``."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found, where was looked, and what could not be looked at."""

    candidates: tuple[Candidate, ...]
    folders: tuple[tuple[Source, Path], ...]
    """Those that exist."""
    skipped: tuple[str, ...]
    """Folders and manifests that could not be read, with the reason."""


def survey(environment: Mapping[str, str], home: Path, root: Path = Path("/")) -> Survey:
    """Look through every store of this machine, in the order in which names are looked up.

    ``environment`` are the process's variables. Reads folders and Ollama's manifests, follows links, writes nothing.
    """
    found: list[Candidate] = []
    folders: list[tuple[Source, Path]] = []
    skipped: list[str] = []
    for source, folder in _folders(environment, home, root):
        if not folder.is_dir():
            continue
        folders.append((source, folder))
        walk = _ollama if source == "ollama" else _files
        found += walk(source, folder, skipped)
    return Survey(tuple(_by_model(found)), tuple(folders), tuple(skipped))


def _folders(environment: Mapping[str, str], home: Path, root: Path) -> Iterator[tuple[Source, Path]]:
    """Every store's folder, once."""
    seen: set[Path] = set()
    for source, folder in _named_folders(environment, home, root):
        resolved = Path(os.path.realpath(folder))
        if resolved not in seen:
            seen.add(resolved)
            yield source, folder


def _named_folders(environment: Mapping[str, str], home: Path, root: Path) -> Iterator[tuple[Source, Path]]:
    def given(name: str) -> Path | None:
        value = environment.get(name, "").strip()
        return Path(value).expanduser() if value else None

    cache = given("XDG_CACHE_HOME") or home / ".cache"
    if own := given("SPARKMOE_MODELS_DIR"):
        yield "spark", own
    yield "llama.cpp", given("LLAMA_CACHE") or cache / "llama.cpp"
    hub = given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE")
    yield "huggingface", hub or (given("HF_HOME") or cache / "huggingface") / "hub"
    if ollama := given("OLLAMA_MODELS"):
        yield "ollama", ollama
    else:
        yield "ollama", home / ".ollama/models"
        for folder in _SYSTEM_OLLAMA:
            yield "ollama", root / folder
    for folder in (".lmstudio/models", ".cache/lm-studio/models"):
        yield "lmstudio", home / folder


def _files(source: Source, folder: Path, skipped: list[str]) -> Iterator[Candidate]:
    """GGUF files below a folder, named by where they lie."""
    for path in _walk(folder, skipped):
        if path.suffix.lower() == ".gguf" and _is_file(path, skipped):
            yield Candidate(_name(source, path.relative_to(folder)), source, path)


def _name(source: Source, path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if source == "huggingface" and parts[0].startswith("models--") and "snapshots" in parts:
        # models--OWNER--REPOSITORY/snapshots/REVISION/FILE
        parts = [*parts[0].removeprefix("models--").split("--"), *parts[parts.index("snapshots") + 2 :]]
    return "/".join(parts)


def _ollama(source: Source, folder: Path, skipped: list[str]) -> Iterator[Candidate]:
    """Models that Ollama's manifests name: ``HOST/NAMESPACE/MODEL/TAG`` holds the digests of its files."""
    manifests = folder / "manifests"
    if not manifests.is_dir():
        return
    for path in _walk(manifests, skipped):
        parts = path.relative_to(manifests).parts
        if len(parts) < 3 or path.name.startswith(".") or not _is_file(path, skipped):
            continue
        *place, model, tag = parts
        owner = "/".join(place).removeprefix("registry.ollama.ai").removeprefix("/").removeprefix("library")
        name = f"{owner.strip('/')}/{model}:{tag}".lstrip("/")
        try:
            layers = _layers(path)
        except (OSError, ValueError) as error:
            skipped.append(f"{path}: no manifest of Ollama's: {error}")
            continue
        for kind, digest in layers:
            part = _OLLAMA_LAYERS[kind]
            yield Candidate(f"{name} ({part})" if part else name, source, folder / "blobs" / f"sha256-{digest}", part)


def _layers(path: Path) -> list[tuple[str, str]]:
    """Kinds and digests of a manifest's layers that are GGUF files; raise ``ValueError`` for what is no manifest."""
    with path.open("rb") as file:
        content = file.read(_MANIFEST_BYTES + 1)
    if len(content) > _MANIFEST_BYTES:
        raise ValueError(f"more than {_MANIFEST_BYTES} bytes")
    try:
        value: Any = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, list):
        raise ValueError("it has no layers")
    found = []
    for layer in layers:
        kind, digest = (layer.get("mediaType"), layer.get("digest")) if isinstance(layer, dict) else (None, None)
        if isinstance(kind, str) and kind in _OLLAMA_LAYERS:
            # A name in a manifest must not lead out of the store.
            match = _DIGEST.match(digest) if isinstance(digest, str) else None
            if match is None:
                raise ValueError(f"a layer's digest is {str(digest)[:80]!r}")
            found.append((kind, match[1]))
    return found


def _walk(folder: Path, skipped: list[str]) -> Iterator[Path]:
    """Files below a folder in order of their names; links to folders are followed, each folder is entered once."""
    entered: set[tuple[int, int]] = set()
    seen = 0
    waiting = [(folder, 0)]
    while waiting:
        current, depth = waiting.pop()
        try:
            status = current.stat()
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            with os.scandir(current) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            skipped.append(f"{current}: {error.strerror}")
            continue
        below: list[tuple[Path, int]] = []
        for entry in entries:
            seen += 1
            if seen > _MOST_ENTRIES:
                skipped.append(f"{folder}: more than {_MOST_ENTRIES} entries, the others were not looked at")
                return
            if entry.is_dir():
                # The Hub's own store of contents, which its snapshots link to by their names.
                if depth < _MOST_DEPTH and not (entry.name == "blobs" and current.name.startswith("models--")):
                    below.append((Path(entry.path), depth + 1))
            else:
                yield Path(entry.path)
        waiting += reversed(below)


def _is_file(path: Path, skipped: list[str]) -> bool:
    """Whether it is a file in the end; opening a pipe would wait for ever, and a link may lead nowhere."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        skipped.append(f"{path}: {error.strerror}")
        return False


def _by_model(found: list[Candidate]) -> Iterator[Candidate]:
    """Shards as the one model that they are, by its first file."""
    seen: set[tuple[str, Path]] = set()
    for candidate in found:
        path, name = candidate.path, candidate.name
        if (match := _SHARD.match(path.stem)) and (named := _SHARD.match(name)):
            path = path.with_name(f"{match['stem']}-00001-of-{match['count']}{path.suffix}")
            name = named["stem"]
        if (candidate.source, path) not in seen or candidate.source == "ollama":
            seen.add((candidate.source, path))
            yield Candidate(name, candidate.source, path, candidate.part)
