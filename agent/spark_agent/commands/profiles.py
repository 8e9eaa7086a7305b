"""``spark pull-profile`` and ``spark profiles``: what the service knows, for this model and this memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_agent.commands.live_lines import live_lines
from spark_agent.commands.own_profiles import (
    forget_command,
    local_manifest,
    local_profile,
    local_profiles,
    offer_to_running,
    refuse_with_local,
)
from spark_agent.commands.profile_diff import diff_command
from spark_agent.commands.pull_budget import DEFAULT_RESIDENCY, default_budget
from spark_agent.context import AgentContext
from spark_agent.errors import UsageError
from spark_agent.output import Output, counted
from spark_agent.sizes import format_size, parse_size
from spark_agent.workload_name import check_profile_name
from spark_schemas.ids import MAX_COUNT, Phase
from spark_schemas.mix import Mix
from spark_schemas.signature import key_id_of

if TYPE_CHECKING:
    from spark_agent.http import ServiceClient
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.profile import CurvePoint, Profile

__all__ = ["profiles_app", "pull_profile_command"]

profiles_app = typer.Typer(no_args_is_help=True, help="Profiles and how well they predicted sessions they never saw.")
profiles_app.command("diff")(diff_command)
profiles_app.command("forget")(forget_command)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Service = Annotated[str | None, typer.Option("--service", help="Address of the calibration service.")]
Model = Annotated[Path | None, typer.Option("--model", help="GGUF file; the bundled demo model if left out.")]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Workload, e.g. code-heavy, or a mix of up to 8 with weights, e.g. code-heavy:7+chat:3."
    ),
]
MAX_DAYS = 36_500
WindowDays = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_DAYS, help="Only sessions of so many days, e.g. 30; 0: all. Left out: as the service is set."
    ),
]
HalfLifeDays = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=MAX_DAYS,
        help="A session is worth half after so many days, e.g. 30; 0: always as much. Left out: as the service is set.",
    ),
]
Local = Annotated[bool, typer.Option("--local", help="From this machine's own sessions; no service is asked.")]


def pull_profile_command(
    name: Name,
    model: Model = None,
    vram: Annotated[
        str | None,
        typer.Option(
            help="Video memory for the model, context and experts, e.g. 14G; left out: what a GPU has free but a "
            "reserve, without one what 60% of the experts take."
        ),
    ] = None,
    ctx: Annotated[int, typer.Option(min=0, help="Context, tokens; 0: as trained, at most 8192.")] = 0,
    reserve: Annotated[str, typer.Option(help="Video memory to leave free within --vram.")] = "0",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the manifest to this file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the placement and store nothing.")] = False,
    window_days: WindowDays = None,
    half_life_days: HalfLifeDays = None,
    accept_older: Annotated[
        bool, typer.Option("--accept-older", help="Take a profile revision that the service had replaced before.")
    ] = False,
    service: Service = None,
    local: Local = False,
    apply: Annotated[
        bool,
        typer.Option("--apply/--no-apply", help="Let agents that run this model take it over, between two tokens."),
    ] = True,
    json: Json = False,
) -> None:
    """Get the best placement of a model's experts for a workload, or a mix, within a memory budget.

    While the service is away, what was pulled before is used and its age shown.

    The service signs it. Its key is pinned at the first pull and another one later is refused: see spark service-key.
    """
    from spark_agent.manifests import ManifestStore, PullKey, save_manifest
    from spark_agent.paths import manifests_dir
    from spark_agent.pulling import Question, pull
    from spark_agent.trust import ManifestTrust
    from spark_runtime.engine import context_for
    from spark_runtime.model_shape import read_model_shape

    context = AgentContext.create(json_mode=json)
    name = check_profile_name(name)
    path = context.model_path(model)
    shape = read_model_shape(path)
    n_ctx = context_for(shape, ctx)
    reserve_bytes = parse_size(reserve, "--reserve")
    vram_bytes = (
        parse_size(vram, "--vram") if vram is not None else default_budget(context, path, shape, n_ctx, reserve_bytes)
    )
    if not 1 <= vram_bytes <= MAX_COUNT:
        raise UsageError(f"--vram: found {vram_bytes} bytes, expected 1 to {MAX_COUNT}", "e.g. --vram 14G")
    if local:
        refuse_with_local(("--service", service), ("--window-days", window_days), ("--half-life-days", half_life_days))
        found = local_manifest(context, shape, name, vram_bytes=vram_bytes, n_ctx=n_ctx, reserve_bytes=reserve_bytes)
        if output is not None and not dry_run:
            save_manifest(output, found.model_dump_json().encode(), None)
        if apply and not dry_run:
            offer_to_running(context, shape.fingerprint, local=name)
        context.output.result(
            _pulled(found, "local", None, window_days, half_life_days), lambda: _print_manifest(context.output, found)
        )
        return
    with context.client(service) as client:
        key = PullKey(client.base_url, vram_bytes, n_ctx, reserve_bytes, window_days, half_life_days)
        pulled = pull(
            client,
            Question(shape, name, key, budget_is_given=vram is not None),
            ManifestStore(manifests_dir()),
            ManifestTrust.of_this_machine(context.environment),
            context.output.info,
            keep=not dry_run,
            accept_older=accept_older,
        )
    if pulled.path is not None and not dry_run:
        if pulled.age_s is None:
            context.output.info(f"{'stored' if pulled.is_new else 'unchanged'}: {pulled.path}")
        if output is not None:
            save_manifest(output, pulled.content, pulled.signed)
        if apply:
            offer_to_running(context, shape.fingerprint, content=pulled.content, signed=pulled.signed)
    signed_by = key_id_of(pulled.signed.key) if pulled.signed else None
    context.output.result(
        _pulled(pulled.manifest, key.service_url, signed_by, window_days, half_life_days, age_s=pulled.age_s),
        lambda: _print_manifest(context.output, pulled.manifest),
    )


def _pulled(
    manifest: PlacementManifest,
    source: str,
    signed_by: str | None,
    window_days: int | None,
    half_life_days: float | None,
    *,
    age_s: float | None = None,
) -> dict[str, Any]:
    expected = manifest.expected
    return {
        "manifest": manifest.model_dump(mode="json"),
        "expected_cold_hit_rate": expected.cold_hit_rate if expected else None,
        "interval": [expected.low, expected.high] if expected else None,
        "verdict": manifest.verdict,
        "bytes": manifest.bytes.model_dump(),
        "source": source,
        "from_cache": age_s is not None,
        "age_s": age_s,
        "signed_by": signed_by,
        "window_days": window_days,
        "half_life_days": half_life_days,
    }


def _tell_age(context: AgentContext, client: ServiceClient) -> float | None:
    """Say of an answer that it is a kept one, and how old; return its age in seconds."""
    from spark_agent.pulling import age_text

    if client.kept_age_s is not None:
        context.output.warning(f"{client.away_because}")
        context.output.info(f"this is what the service said {age_text(client.kept_age_s)}")
    return client.kept_age_s


def _print_manifest(output: Output, manifest: PlacementManifest) -> None:
    parts = manifest.bytes
    slots = sum(layer.slots for layer in manifest.layers)
    experts = sum(layer.n_experts for layer in manifest.layers)
    output.table(
        ["tier", "holds", "bytes", ""],
        [
            ["video memory", "core weights", parts.vram_core, format_size(parts.vram_core)],
            ["", f"context, {manifest.n_ctx} tokens", parts.vram_kv, format_size(parts.vram_kv)],
            ["", f"{slots} of {experts} experts", parts.vram_slots, format_size(parts.vram_slots)],
            ["", "reserve", parts.vram_reserve, format_size(parts.vram_reserve)],
            ["", "in all", parts.vram_total, format_size(parts.vram_total)],
            ["host memory", "all experts", parts.host_experts, format_size(parts.host_experts)],
        ],
    )
    if manifest.expected is not None:
        rate = manifest.expected
        output.info(
            f"expected cold-hit rate if never adapted: {rate.cold_hit_rate:.1%} "
            f"({rate.low:.1%} to {rate.high:.1%}); first experts instead of these: {rate.uniform_cold_hit_rate:.1%}"
        )
    output.info(f"from {counted(manifest.n_calibration, 'session')}, judged on {counted(manifest.n_held_out, 'other')}")
    output.info(f"verdict: {manifest.verdict or 'none yet'}: {manifest.verdict_reason}")


@profiles_app.command("ls")
@profiles_app.command("list", hidden=True)
def list_command(service: Service = None, local: Local = False, json: Json = False) -> None:
    """List the service's profiles, or what this machine counted itself."""
    context = AgentContext.create(json_mode=json)
    if local:
        refuse_with_local(("--service", service))
        local_profiles(context)
        return
    with context.client(service) as client:
        profiles = client.profiles().profiles
        age_s = _tell_age(context, client)
    context.output.result(
        {"profiles": [profile.model_dump(mode="json") for profile in profiles], "age_s": age_s},
        lambda: context.output.table(
            ["workload", "phase", "model", "fingerprint", "calibration", "held out", "verdict", "traffic"],
            [
                [
                    profile.workload,
                    profile.phase,
                    profile.model_name or "",
                    profile.fingerprint,
                    profile.n_calibration,
                    profile.n_held_out,
                    profile.verdict or "none yet",
                    "" if profile.drift is None else profile.drift.state,
                ]
                for profile in profiles
            ],
        ),
    )
    if not profiles:
        context.output.info("no profiles yet: record sessions and upload them")


@profiles_app.command("show")
def show_command(
    name: Name,
    model: Model = None,
    phase: Annotated[Phase, typer.Option(help="Phase the profile was counted in.")] = "decode",
    window_days: WindowDays = None,
    half_life_days: HalfLifeDays = None,
    service: Service = None,
    local: Local = False,
    json: Json = False,
) -> None:
    """Show a profile's held-out curves: cold-hit rate by policy and share of experts in video memory.

    Of a mix also what the profile of each of its workloads alone would miss on the whole.
    """
    from spark_runtime.model_shape import read_model_shape

    context = AgentContext.create(json_mode=json)
    name = check_profile_name(name)
    shape = read_model_shape(context.model_path(model))
    age_s = None
    if local:
        refuse_with_local(("--service", service), ("--window-days", window_days), ("--half-life-days", half_life_days))
        if phase != "decode":
            raise UsageError(f"--phase {phase}: own sessions are counted in decode", "leave out --phase")
        profile = local_profile(context, shape, name)
    else:
        with context.client(service) as client:
            profile = client.profile(
                shape.fingerprint, name, phase, window_days=window_days, half_life_days=half_life_days
            )
            age_s = _tell_age(context, client)
    rates = {(point.residency, point.policy): point for point in profile.curves}
    policies = sorted({policy for _, policy in rates})
    rows = [
        [f"{residency:.0%}", *(_cell(rates.get((residency, policy))) for policy in policies)]
        for residency in sorted({residency for residency, _ in rates})
    ]
    context.output.result(
        {
            "curves": [point.model_dump(mode="json") for point in profile.curves],
            "live": [point.model_dump(mode="json") for point in profile.live],
            "live_comparisons": [one.model_dump(mode="json") for one in profile.live_comparisons],
            "drift": None if profile.drift is None else profile.drift.model_dump(mode="json"),
            "warnings": list(profile.warnings),
            "n_calibration": profile.n_calibration,
            "n_held_out": profile.n_held_out,
            "verdict": profile.verdict,
            "verdict_reason": profile.verdict_reason,
            "revision": profile.revision,
            "workload": profile.workload,
            "age_s": age_s,
            "mismatch": [row.model_dump(mode="json") for row in profile.mismatch],
            "window_days": window_days,
            "half_life_days": half_life_days,
        },
        lambda: context.output.table(["resident", *policies], rows),
    )
    context.output.info(
        f"from {counted(profile.n_calibration, 'session')}, judged on {counted(profile.n_held_out, 'other')}"
    )
    _print_gain(context.output, profile)
    context.output.info(f"verdict: {profile.verdict or 'none yet'}: {profile.verdict_reason}")
    for line in live_lines(profile):
        context.output.info(line)
    for warning in profile.warnings:
        context.output.warning(warning)


def _print_gain(output: Output, profile: Profile) -> None:
    """Say what mixing gains: the mix beside the profile of each of its workloads alone."""
    members = Mix.parse(profile.workload).names
    if len(members) == 1:
        return
    own = [
        f"mixed {point.cold_hit_rate:.1%}"
        for point in profile.curves
        if (point.policy, point.residency) == ("own", DEFAULT_RESIDENCY)
    ]
    alone = [
        f"{row.workload} alone {row.cold_hit_rate:.1%}"
        for row in profile.mismatch
        if row.residency == DEFAULT_RESIDENCY and row.workload in members
    ]
    if own:
        output.info(f"cold-hit rate on the mix with {DEFAULT_RESIDENCY:.0%} resident: {', '.join(own + alone)}")


def _cell(point: CurvePoint | None) -> str:
    if point is None:
        return ""
    return f"{point.cold_hit_rate:.3f} ({point.low:.3f}-{point.high:.3f})"
