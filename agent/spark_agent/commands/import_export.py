"""``spark import`` and ``spark export``: other tools' formats."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_agent.context import AgentContext
from spark_agent.errors import SparkError, UsageError
from spark_agent.output import counted
from spark_agent.sizes import parse_size
from spark_agent.workload_name import check_workload_name

if TYPE_CHECKING:
    from spark_agent.formats.profile import ImportedProfile
    from spark_schemas.model import ModelShape

__all__ = ["export_command", "import_command"]

_IMPORTED = (
    "imatrix, lucebox-csv, lucebox-placement, layer-expert-csv, sglang, sglang-location, ktransformers-mask, "
    "vllm-eplb, vllm-stats, plumb, mbolt, fitz, moe-l2, exl3moe, freetoken"
)
_EXPORTED = (
    "lucebox-csv, lucebox-placement, freetoken, fitz, sglang-location, ktransformers, ktransformers-mask, "
    "ktransformers-mask-pt, llama-cpp"
)


def import_command(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {_IMPORTED}.")],
    file: Annotated[Path, typer.Argument(help="The file.")],
    workload: Annotated[str, typer.Option(help="Name of the class of sessions that it was counted on.")],
    model: Annotated[Path | None, typer.Option(help="GGUF file of the model: checks that the file fits it.")] = None,
    experts: Annotated[
        int, typer.Option(min=0, help="Experts of a layer, where the format does not say; 0: unknown.")
    ] = 0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Experts that a token selects; 0: as the file or the model says.")
    ] = 0,
    domain: Annotated[str | None, typer.Option(help="Which profile of a file that holds several.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the profile to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: the profile.")] = False,
) -> None:
    """Read another tool's counts or placement; the result is marked as imported and is no measurement."""
    from spark_agent.formats.hints import Hints
    from spark_agent.formats.profile import save_profile
    from spark_agent.formats.registry import import_file

    context = AgentContext.create(json_mode=json)
    name = check_workload_name(workload)
    shape = _shape(model)
    sizes = {layer.n_experts for layer in shape.layers} if shape is not None else set()
    top_ks = {layer.top_k for layer in shape.layers} if shape is not None else set()
    hints = Hints(
        n_experts=experts or (sizes.pop() if len(sizes) == 1 else None),
        top_k=top_k or (top_ks.pop() if len(top_ks) == 1 else None),
        domain=domain,
    )
    profile = import_file(form, file, name, hints, shape)
    if output is not None:
        save_profile(output, profile)
    for warning in profile.warnings:
        context.output.warning(warning)
    context.output.result(profile.model_dump(mode="json"), _summary(profile, output))


def export_command(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {_EXPORTED}.")],
    profile: Annotated[
        str | None, typer.Option(help="What spark import wrote, or a manifest: a file or the name of a pulled one.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="GGUF file of the model: its blocks, names and bytes.")] = None,
    residency: Annotated[float, typer.Option(min=0, max=1, help="Share of the experts that is hot; 0: all known.")] = 0,
    vram: Annotated[str | None, typer.Option(help="Video memory for experts alone, e.g. 8G.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write; stdout if left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object about it; needs --output.")] = False,
) -> None:
    """Write a profile or a manifest in another tool's format."""
    from spark_agent.files import replacing
    from spark_agent.formats.exports import Wanted, export

    context = AgentContext.create(json_mode=json)
    if json and output is None:
        raise UsageError("--json tells about a file", "pass --output")
    if residency and vram is not None:
        raise UsageError("--vram and --residency both say how many experts are hot", "pass one of them")
    shape = _shape(model)
    wanted = Wanted(
        profile=_profile(profile, shape, form),
        shape=shape,
        residency=residency or None,
        budget_bytes=parse_size(vram, "--vram") if vram is not None else None,
    )
    exported = export(form, wanted)
    for warning in exported.warnings:
        context.output.warning(warning)
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(exported.content)
        sys.stdout.buffer.flush()
        return
    try:
        with replacing(output) as target:
            target.write(exported.content)
    except OSError as error:
        raise SparkError(f"cannot write {output}: {error.strerror}", "check the folder and its space") from error
    context.output.result(
        {"format": form, "output": str(output), "bytes": len(exported.content), "warnings": exported.warnings},
        f"wrote {output} ({len(exported.content)} bytes)",
    )


def _profile(name: str | None, shape: ModelShape | None, form: str) -> ImportedProfile:
    from spark_agent.formats.exports import profile_of_manifest
    from spark_agent.formats.profile import ImportedLayer, ImportedProfile, bind, load_profile
    from spark_agent.manifests import find_manifest

    if name is None:
        if shape is None or form != "llama-cpp":
            raise UsageError(
                "nothing says which experts are hot", "pass --profile FILE, or the name of a pulled manifest"
            )
        layers = tuple(
            ImportedLayer(block=layer.block, n_experts=layer.n_experts, top_k=layer.top_k, ranking=())
            for layer in shape.layers
        )
        return ImportedProfile(format="model", workload="none", histograms=layers)
    path = Path(name)
    if path.is_file() and b'"imported"' in _head(path):
        found = load_profile(path)
        return found if shape is None else bind(found, shape)
    if shape is None and not path.is_file():
        raise UsageError(f"--profile: {name!r} is no file", "the name of a pulled manifest needs --model")
    manifest = find_manifest(name, "" if shape is None else shape.fingerprint)
    if shape is not None:
        from spark_runtime.manifest_check import check_manifest

        check_manifest(manifest, shape)
    return profile_of_manifest(manifest)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise SparkError(f"cannot read {path}: {error.strerror}", "check the path") from error


def _shape(model: Path | None) -> ModelShape | None:
    if model is None:
        return None
    from spark_runtime.model_shape import read_model_shape

    return read_model_shape(model)


def _summary(profile: ImportedProfile, output: Path | None) -> str:
    layers = profile.histograms
    what = "counts" if profile.has_counts else "an order, no counts"
    tokens = "" if profile.tokens is None else f" over {counted(profile.tokens, 'token')}"
    bound = "checked against the model" if profile.fingerprint is not None else "not checked against a model"
    where = f"written to {output}" if output is not None else "nothing was written: pass --output, or --json"
    return (
        f"imported {counted(len(layers), 'layer')} of {max(layer.n_experts for layer in layers)} experts for "
        f"{profile.workload}: {what}{tokens}, {bound}; {where}"
    )
