"""``spark-agent run``: load a model and serve it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_agent.context import AgentContext, warn_about_counting
from spark_agent.errors import RefusedError, SparkError
from spark_agent.output import counted
from spark_agent.sizes import format_size
from spark_agent.workload_name import check_workload_name

if TYPE_CHECKING:
    from spark_runtime.engine import Engine
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = ["run_command"]


def run_command(
    model: Annotated[Path | None, typer.Argument(help="GGUF file; the bundled demo model if left out.")] = None,
    manifest: Annotated[
        str | None, typer.Option(help="Placement to follow: a manifest file, or the name of a pulled profile.")
    ] = None,
    workload: Annotated[str, typer.Option(help="Workload that served sessions are counted under.")] = "unlabelled",
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0: any free one.")] = None,
    ctx: Annotated[
        int, typer.Option(min=0, help="Context, tokens; 0: the manifest's, else as trained, at most 8192.")
    ] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all this process may use.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the start-up object as JSON.")] = False,
) -> None:
    """Serve a model's OpenAI-compatible API on this machine and count its routing."""
    from spark_agent.server.serve import bind, serve
    from spark_runtime.engine import Engine, EngineOptions
    from spark_runtime.manifest_check import check_manifest
    from spark_runtime.model_shape import read_model_shape

    context = AgentContext.create(json_mode=json)
    check_workload_name(workload)
    path = context.model_path(model)
    shape = read_model_shape(path)
    placement = _load_placement(manifest, shape)
    if placement is not None:
        check_manifest(placement, shape)
        if ctx > placement.n_ctx:
            context.output.warning(
                f"the manifest was planned for a context of {placement.n_ctx} tokens; {ctx} need "
                f"{format_size(shape.context_bytes(ctx) - shape.context_bytes(placement.n_ctx))} more than it counted"
            )
        ctx = ctx or placement.n_ctx
    address = host if host is not None else context.environment.host
    with (
        bind(address, context.environment.port if port is None else port) as listener,
        context.spool() as spool,
    ):
        key = context.session_key()
        with Engine.load(path, EngineOptions(n_ctx=ctx, n_threads=threads)) as engine:
            warn_about_counting(context, engine)
            start = _start_object(context, path, engine, placement, spool.stats().pending)
            serve(
                context,
                engine,
                spool,
                listener,
                key=key,
                name=path.stem,
                workload=workload,
                start=start,
                describe=_describe,
            )


def _load_placement(manifest: str | None, shape: ModelShape) -> PlacementManifest | None:
    if manifest is None:
        return None
    from spark_agent.manifests import ManifestStore, load_manifest
    from spark_agent.paths import manifests_dir

    file = Path(manifest)
    if file.is_file() or file.suffix or file.name != manifest:
        return load_manifest(file)
    check_workload_name(manifest, option="--manifest")
    found = ManifestStore(manifests_dir()).get(shape.fingerprint, manifest)
    if found is None:
        raise SparkError(f"no profile {manifest!r} was pulled for this model", f"spark pull-profile {manifest}")
    return found


def _start_object(
    context: AgentContext, path: Path, engine: Engine, placement: PlacementManifest | None, pending: int
) -> dict[str, Any]:
    shape = engine.shape
    kv_bytes = shape.context_bytes(engine.n_ctx)
    return {
        "model": str(path),
        "fingerprint": shape.fingerprint,
        "n_ctx": engine.n_ctx,
        # Without the native backend llama.cpp holds every expert on one device, so nothing is tiered yet.
        "tiers": {
            "backend": "llama.cpp",
            "device": "gpu" if engine.on_gpu else "cpu",
            "tiered": False,
            "core_bytes": shape.core_bytes,
            "expert_bytes": shape.expert_bytes_total,
            "kv_bytes": kv_bytes,
        },
        "manifest": None
        if placement is None
        else {
            "workload": placement.workload,
            "profile_revision": placement.profile_revision,
            "slots": sum(layer.slots for layer in placement.layers),
            "vram_slots_bytes": placement.bytes.vram_slots,
            "expected_cold_hit_rate": placement.expected.cold_hit_rate if placement.expected else None,
        },
        "upload": {
            "allowed": _may_upload(context),
            "pending": pending,
            "service_url": context.service_url(),
        },
    }


def _may_upload(context: AgentContext) -> bool:
    from spark_agent.upload import require_permission

    try:
        require_permission(
            context.environment, context.config.consent, context.service_url(), paused=context.config.paused
        )
    except RefusedError:
        return False
    return True


def _describe(start: dict[str, Any]) -> str:
    tiers, placement, upload = start["tiers"], start["manifest"], start["upload"]
    lines = [
        f"serving   {start['base_url']}  (OpenAI: base_url={start['base_url']}/v1)",
        f"model     {start['model']}  {start['fingerprint']}",
        f"memory    {format_size(tiers['core_bytes'])} core, {format_size(tiers['expert_bytes'])} experts, "
        f"{format_size(tiers['kv_bytes'])} context of {start['n_ctx']} tokens; all experts on the {tiers['device']}",
    ]
    if placement is not None:
        rate = placement["expected_cold_hit_rate"]
        promise = "" if rate is None else f", expected cold-hit rate {rate:.1%}"
        lines.append(
            f"manifest  {placement['workload']}: {placement['slots']} slots, "
            f"{format_size(placement['vram_slots_bytes'])}{promise}; accepted, "
            "though this version keeps every expert resident"
        )
    allowed = "on" if upload["allowed"] else "off: see spark-agent upload status"
    lines.append(f"uploads   {allowed}; {counted(upload['pending'], 'histogram')} waiting")
    return "\n".join(lines)
