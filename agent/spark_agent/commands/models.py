"""``spark-agent models``: GGUF files that are already on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_agent.context import AgentContext
from spark_agent.output import counted
from spark_agent.sizes import format_size

if TYPE_CHECKING:
    from spark_agent.models.header import Header
    from spark_agent.models.listing import ListedModel, MachineMemory

__all__ = ["models_app"]

models_app = typer.Typer(no_args_is_help=True, help="Models on this machine, whichever tool fetched them.")

_COLUMNS = ("name", "kind", "size", "quantisation", "experts", "core", "all experts", "fits", "held by")
_FITS = {"gpu": "on the GPU", "tiered": "tiered", "host": "host memory", "no": "no", None: ""}


@models_app.callback()
def _models() -> None:
    """Models on this machine, whichever tool fetched them."""


@models_app.command("ls")
def list_command(
    moe: Annotated[bool, typer.Option("--moe", help="Only mixture-of-experts models.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List GGUF files of llama.cpp, Hugging Face, Ollama, LM Studio and SPARKMOE_MODELS_DIR; nothing is changed.

    ``spark-agent run NAME`` takes a name of this list.
    """
    from spark_agent.models.header import header_reader
    from spark_agent.models.listing import listed, same_files
    from spark_agent.models.stores import survey

    context = AgentContext.create(json_mode=json)
    memory = _machine_memory()
    found = survey(os.environ, Path.home())
    groups = same_files(found.candidates)
    models: list[ListedModel] = []
    with header_reader() as reader, context.output.progress("reading headers", len(groups)) as advance:
        for group in groups:
            models.append(listed(group, reader.read(group[0].path), memory))
            advance(1)
    if moe:
        models = [model for model in models if model.header.kind == "moe"]
    models.sort(
        key=lambda model: (model.header.kind != "moe", model.header.kind == "broken", model.names[0].casefold())
    )
    value = {
        "models": [model.as_json() for model in models],
        "folders": [{"source": source, "path": str(folder)} for source, folder in found.folders],
        "skipped": list(found.skipped),
    }

    def show() -> None:
        if models:
            context.output.table(_COLUMNS, [_cells(model) for model in models])

    context.output.result(value, show)
    if json:
        return
    for model in models:
        for name in model.names[1:]:
            context.output.info(f"{model.names[0]} is also {name}")
        if model.header.reason:
            context.output.warning(f"{model.names[0]}: {model.header.reason}")
    for line in found.skipped:
        context.output.warning(f"not looked at: {line}")
    if not models:
        places = ", ".join(str(folder) for _, folder in found.folders)
        context.output.info(f"no models found in {places}" if places else "no model folder of a known tool exists")
        context.output.hint("name a folder of your own: SPARKMOE_MODELS_DIR=FOLDER; the demo model needs none")


def _machine_memory() -> MachineMemory:
    """Memory of this machine now; raise ``InstallationError`` where llama.cpp is not what it should be."""
    from spark_agent.models.listing import MachineMemory
    from spark_runtime.host_probe import probe_host
    from spark_runtime.memory_plan import DeviceMemory
    from spark_runtime.tier_plan import cards

    devices = tuple(DeviceMemory(card.name, *card.memory()) for card in cards())
    return MachineMemory(devices, probe_host())


def _cells(model: ListedModel) -> tuple[str, ...]:
    header = model.header
    kind = header.kind if header.n_files == 1 else f"{header.kind}, {counted(header.n_files, 'file')}"
    return (
        model.names[0],
        kind,
        _size(model.file_bytes),
        header.quantisation or "",
        _experts(header),
        _size(header.core_bytes),
        _size(header.expert_bytes),
        _FITS[model.fit],
        ", ".join(model.sources),
    )


def _experts(header: Header) -> str:
    return "" if header.n_experts is None else f"{header.top_k} of {header.n_experts}"


def _size(n_bytes: int | None) -> str:
    return "" if n_bytes is None else format_size(n_bytes)
