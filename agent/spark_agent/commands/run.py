"""``spark-agent run``: load a model and serve it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spark_agent.addresses import listening_address, reachable
from spark_agent.chosen_placement import ChosenPlacement, choose_placement
from spark_agent.consent import ask_once
from spark_agent.context import AgentContext, warn_about_counting
from spark_agent.errors import RefusedError, SparkError, UsageError
from spark_agent.guesses import go_on_with_guesses, keep_guesses
from spark_agent.imported_start import describe_imported
from spark_agent.output import counted
from spark_agent.prefetching import PREFETCH_HELP, Prefetch
from spark_agent.run_plan import RunPlan, make_run_plan
from spark_agent.sizes import format_size
from spark_agent.tiering import (
    MOST_PARALLEL,
    MOST_THREADS,
    TierOptions,
    plan_for,
    planned_options,
    serving_threads,
    tiers_of,
    warn_about_tiers,
)
from spark_agent.workload_name import UNLABELLED, check_workload_name
from spark_schemas.mix import Mix

if TYPE_CHECKING:
    from spark_agent.api_key import ApiKey
    from spark_agent.env import Replacement
    from spark_agent.tls import ServerTls
    from spark_runtime.engine import Engine
    from spark_runtime.gguf_file import GgufModel
    from spark_runtime.tier_plan import TierPlan
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = ["run_command"]


def run_command(
    model: Annotated[
        Path | None, typer.Argument(help="GGUF file, or a name of models ls; the bundled demo model if left out.")
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(
            help="Placement to follow: a manifest file, the name of a pulled profile, or what spark import wrote."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="Workload that served sessions are counted under; the manifest's, else unlabelled."),
    ] = None,
    workload_rules: Annotated[
        Path | None,
        typer.Option(
            help="Rules that give requests a workload; left out: workloads.toml of the config folder, if any."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; beyond loopback requests need a key (--api-key-file).")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0: any free one.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of the key that requests must bear; left out: none on loopback, else one is made."),
    ] = None,
    tls_cert_file: Annotated[
        Path | None,
        typer.Option(help="Certificate, PEM, with those that vouch for it: TLS is spoken, and nothing else."),
    ] = None,
    tls_key_file: Annotated[Path | None, typer.Option(help="The certificate's key, PEM, not encrypted.")] = None,
    ctx: Annotated[
        int, typer.Option(min=0, help="Context, tokens; 0: the manifest's, else the longest that costs little.")
    ] = 0,
    parallel: Annotated[
        int, typer.Option(min=0, max=MOST_PARALLEL, help="Conversations kept at once; 0: as many as cost little.")
    ] = 0,
    alias: Annotated[
        list[str] | None, typer.Option(help="Further name that requests may give the model, or a pattern: 'claude-*'.")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, max=MOST_THREADS, help="CPU threads; 0: all but one, which answers.")
    ] = 0,
    vram: Annotated[
        str | None,
        typer.Option(
            help="Most video memory to use, e.g. 14G, beside the 0.4 GiB or so that a GPU's driver takes itself; "
            "left out: what is free but a reserve."
        ),
    ] = None,
    residency: Annotated[
        float | None, typer.Option(help="Share of the experts to keep in slots, e.g. 0.6, whatever fits.")
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(help="Keep as few experts in slots as cover this share of the profile's selections, e.g. 0.95."),
    ] = None,
    ubatch: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt computed at once; 0: as many as fit, at most 2048.")
    ] = 0,
    devices: Annotated[int, typer.Option(min=0, help="GPUs to spread the layers over; 0: all.")] = 0,
    pinned_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the slots that hold the manifest's hottest experts for good."),
    ] = 0.0,
    replacement: Annotated[
        Literal["auto", "on", "watch", "off"] | None,
        typer.Option(
            help="Recent traffic moves which experts are kept: auto, where no team's manifest is in force; on, always; "
            "watch, only told; off."
        ),
    ] = None,
    prefetch: Annotated[Prefetch, typer.Option(help=PREFETCH_HELP)] = Prefetch.AUTO,
    no_profile: Annotated[
        bool, typer.Option("--no-profile", help="Start cold: by no pulled profile and none of this machine's own.")
    ] = False,
    no_tier: Annotated[bool, typer.Option("--no-tier", help="Keep every expert resident, as llama.cpp does.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the memory plan and load nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the start-up object as JSON.")] = False,
) -> None:
    """Serve a model's OpenAI-compatible API on this machine and count its routing."""
    from spark_agent.server.workload_rules import rules_path
    from spark_runtime.gguf_file import read_gguf
    from spark_runtime.model_shape import shape_of

    context = AgentContext.create(json_mode=json)
    if workload is not None:
        check_workload_name(workload)
    rules = rules_path(workload_rules, context.environment)
    path = context.model_path(model)
    file = read_gguf(path)
    shape = shape_of(file)
    if manifest is not None and no_profile:
        raise UsageError("--manifest and --no-profile contradict each other", "pass one of them")
    chosen = choose_placement(
        shape,
        given=manifest,
        workload=workload or UNLABELLED,
        no_profile=no_profile or no_tier,
        warn=context.output.warning,
    )
    placement = chosen.asked
    if placement is not None and ctx > placement.n_ctx:
        context.output.warning(
            f"the manifest was planned for a context of {placement.n_ctx} tokens; {ctx} need "
            f"{format_size(shape.context_bytes(ctx) - shape.context_bytes(placement.n_ctx))} more than it counted"
        )
    tiers = TierOptions(vram, residency, ubatch, devices, pinned_share, no_tier, coverage, parallel)
    tiers.check(placement or chosen.imported)
    if no_tier and chosen.is_named:
        context.output.warning("--no-tier keeps every expert resident: the manifest is checked and not used")
    if dry_run:
        planned = make_run_plan(file, shape, tiers, chosen, ctx, prefetch=prefetch, always=True)
        _show_plan(context, path, shape, planned, chosen)
        return
    serving = _Serving(
        host if host is not None else context.environment.host,
        context.environment.port if port is None else port,
        api_key_file,
        rules,
        replacement or context.environment.replacement,
        tuple(alias or ()),
        _tls(context, tls_cert_file, tls_key_file),
    )
    context = ask_once(context)
    _serve(
        context,
        _Load(path, file, shape, tiers, chosen, ctx, threads, prefetch),
        serving,
        workload or (chosen.imported.workload if chosen.imported is not None else _workload_of(placement)),
    )


def _workload_of(placement: PlacementManifest | None) -> str:
    """What sessions are counted under where nobody says: a mix is of several workloads, and names none."""
    return placement.workload if placement is not None and len(Mix.parse(placement.workload).names) == 1 else UNLABELLED


@dataclass(frozen=True, slots=True)
class _Load:
    """What is loaded."""

    path: Path
    file: GgufModel
    shape: ModelShape
    tiers: TierOptions
    chosen: ChosenPlacement
    ctx: int
    """Context asked for, tokens; 0: nobody says."""
    threads: int
    prefetch: Prefetch

    @property
    def placement(self) -> PlacementManifest | None:
        return self.chosen.asked


@dataclass(frozen=True, slots=True)
class _Serving:
    """Where and how it is served."""

    host: str
    port: int
    api_key_file: Path | None
    rules: Path
    replacement: Replacement
    aliases: tuple[str, ...]
    tls: ServerTls | None

    def api_key(self, context: AgentContext) -> ApiKey | None:
        """What requests must bear; beyond loopback always something."""
        from spark_agent.api_key import named_api_key, own_api_key

        beyond = not listening_address(self.host).is_loopback
        key = named_api_key(context.environment, self.api_key_file)
        if key is None and beyond:
            key = own_api_key()
        if beyond:
            open_line = "" if self.tls is not None else "; nothing is encrypted"
            context.output.warning(
                f"listening on {self.host}: whoever reaches it and has the key can use this model{open_line}"
            )
        if beyond and self.tls is None:
            context.output.hint(
                "in a network that you do not trust: --tls-cert-file and --tls-key-file, or listen on 127.0.0.1 and "
                "use ssh -L"
            )
        return key


def _tls(context: AgentContext, cert_file: Path | None, key_file: Path | None) -> ServerTls | None:
    """What the options name, else the environment: never a certificate of the one with a key of the other."""
    named = cert_file, key_file
    if named == (None, None):
        from_environment = context.environment.tls_cert_file, context.environment.tls_key_file
        if from_environment == (None, None):
            return None
        cert_file, key_file = (None if each is None else Path(each) for each in from_environment)
    from spark_agent.tls import read_server_tls

    return read_server_tls(cert_file, key_file, context.output.warning)


def _serve(context: AgentContext, load: _Load, serving: _Serving, workload: str) -> None:
    from spark_agent.server.engine_thread import EngineThread
    from spark_agent.server.prefetch_control import PrefetchControl
    from spark_agent.server.serve import bind, serve
    from spark_runtime.heap import share_heaps

    share_heaps()
    api_key = serving.api_key(context)
    token = None if api_key is None else api_key.value
    if serving.tls is not None:
        host = serving.tls.host_for(reachable(str(listening_address(serving.host))))
        if not serving.tls.covers(host):
            context.output.warning(f"the certificate is not for {host}: clients that reach the agent there refuse it")
    with bind(serving.host, serving.port, token=token) as listener, context.spool() as spool:
        key = context.session_key()
        planned = make_run_plan(load.file, load.shape, load.tiers, load.chosen, load.ctx, prefetch=load.prefetch)
        plan = planned.plan
        if load.chosen.imported is not None:
            load.chosen.imported.warn(context.output, used=plan is not None and plan.start is not None)
        context.output.info(planned.table())
        if plan is not None:
            _warn_about_budget(context, load, plan)
        options = planned_options(
            plan,
            replace(load.tiers, parallel=planned.n_seq_max),
            planned.n_ctx,
            load.threads or serving_threads(),
            early=planned.prefetch.early,
        )
        manifest = load.chosen.in_force(plan)
        with EngineThread() as thread, thread.load(load.path, options) as engine:
            warn_about_counting(context, engine)
            warn_about_tiers(context, engine)
            learned = engine.tier is not None and go_on_with_guesses(
                engine.tier, engine.shape.fingerprint, context.output
            )
            prefetch = PrefetchControl(engine, planned.prefetch, context.output, learned=learned)
            serve(
                context,
                engine,
                thread,
                spool,
                listener,
                key=key,
                name=load.path.stem,
                workload=workload,
                start=_start_object(context, load, engine, planned, spool.stats().pending, api_key),
                resident_share=1.0 if plan is None else plan.resident_share,
                manifest=manifest,
                source=load.chosen.source_of(plan),
                describe=_describe,
                token=token,
                aliases=serving.aliases,
                rules=serving.rules,
                replacement=serving.replacement,
                pinned_share=load.tiers.pinned_share,
                prefetch=prefetch,
                tls=serving.tls,
            )
            if engine.tier is not None:
                keep_guesses(engine.tier, engine.shape.fingerprint, context.output)


def _warn_about_budget(context: AgentContext, load: _Load, plan: TierPlan) -> None:
    """A manifest counts weights, slots and the context; a load takes compute buffers and more besides."""
    taken = sum(part.total for part in plan.memory.devices)
    placement = load.placement
    if placement is None or plan.start is None or load.tiers.vram is not None or load.tiers.residency is not None:
        return
    if taken > placement.vram_budget_bytes:
        context.output.warning(
            f"the manifest was planned for {format_size(placement.vram_budget_bytes)}, but with compute buffers and "
            f"what the tiers need besides it takes {format_size(taken)}"
        )
        try:
            within = replace(load.tiers, vram=str(placement.vram_budget_bytes))
            plan_for(load.file, load.shape, within, placement, plan.memory.n_ctx)
        except SparkError as error:
            context.output.hint(f"it cannot be kept within that: {error}")
        else:
            context.output.hint(f"--vram {placement.vram_budget_bytes} keeps within it, by the same profile")


def _show_plan(context: AgentContext, path: Path, shape: ModelShape, planned: RunPlan, chosen: ChosenPlacement) -> None:
    from spark_runtime.tier_plan import cards

    if chosen.imported is not None:
        chosen.imported.warn(context.output, used=planned.plan is not None and planned.plan.start is not None)
    value = {
        "model": str(path),
        "fingerprint": shape.fingerprint,
        "n_ctx": planned.n_ctx,
        "parallel": planned.n_seq_max,
        "tiers": tiers_of(shape, planned.n_ctx, planned.plan, None, on_gpu=bool(cards())),
        "manifest": _manifest_of(chosen, planned.plan),
        "placement": {"source": chosen.source_of(planned.plan), "reason": chosen.reason},
        **planned.as_json(),
    }
    context.output.result(value, planned.table())


def _start_object(
    context: AgentContext,
    load: _Load,
    engine: Engine,
    planned: RunPlan,
    pending: int,
    api_key: ApiKey | None,
) -> dict[str, Any]:
    return {
        "model": str(load.path),
        "fingerprint": engine.shape.fingerprint,
        "n_ctx": engine.n_ctx,
        "parallel": planned.n_seq_max,
        "tiers": tiers_of(engine.shape, engine.n_ctx, planned.plan, engine, on_gpu=engine.on_gpu),
        "manifest": _manifest_of(load.chosen, planned.plan),
        "placement": {"source": load.chosen.source_of(planned.plan), "reason": load.chosen.reason},
        "upload": {
            "allowed": _may_upload(context),
            "pending": pending,
            "service_url": context.service_url(),
        },
        **planned.as_json(),
        "access": {
            "key_needed": api_key is not None,
            "key_file": None if api_key is None or api_key.file is None else str(api_key.file),
            "key_is_new": api_key is not None and api_key.is_new,
        },
    }


def _manifest_of(chosen: ChosenPlacement, plan: TierPlan | None) -> dict[str, Any] | None:
    if chosen.imported is not None:
        return chosen.imported.told(plan)
    placement = chosen.in_force(plan)
    if placement is None:
        return None
    return {
        "workload": placement.workload,
        "profile_revision": placement.profile_revision,
        "slots": sum(layer.slots for layer in placement.layers),
        "vram_slots_bytes": placement.bytes.vram_slots,
        "expected_cold_hit_rate": placement.expected.cold_hit_rate if placement.expected else None,
        "source": "service" if chosen.own is None else "local",
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
        f"{format_size(tiers['kv_bytes'])} context of {start['n_ctx']} tokens; {_where(tiers)}",
    ]
    if placement is not None and placement["source"] == "imported":
        lines.append(describe_imported(placement))
    elif placement is not None:
        rate = placement["expected_cold_hit_rate"]
        promise = "" if rate is None else f", expected cold-hit rate {rate:.1%}"
        lines.append(
            f"manifest  {placement['workload']}: {placement['slots']} slots, "
            f"{format_size(placement['vram_slots_bytes'])}{promise}"
        )
    access = start["access"]
    if access["key_file"] is not None:
        made = ", made just now" if access["key_is_new"] else ""
        lines.append(f"key       requests need the one in {access['key_file']}{made}")
    elif access["key_needed"]:
        lines.append("key       requests need the one in SPARKMOE_API_KEY")
    allowed = "on" if upload["allowed"] else "off: see spark-agent upload status"
    lines.append(f"uploads   {allowed}; {counted(upload['pending'], 'histogram')} waiting")
    return "\n".join(lines)


def _where(tiers: dict[str, Any]) -> str:
    if not tiers["tiered"]:
        return f"all experts on the {tiers['device']}"
    return f"{tiers['slots']} experts in slots ({tiers['residency']:.0%}), the {tiers['engine']} fetches the others"
