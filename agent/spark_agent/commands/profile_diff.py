"""``spark profiles diff``: what changes when one placement takes the place of another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_agent.context import AgentContext
from spark_agent.errors import SparkError, UsageError
from spark_agent.output import Output, counted
from spark_agent.sizes import format_size
from spark_agent.workload_name import check_profile_name

if TYPE_CHECKING:
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.manifest_diff import ManifestDiff

__all__ = ["diff_command"]

_REVISION = re.compile(r"(?P<name>[^@]+)@(?P<revision>[0-9a-f]{64})")
_SHOWN_EXPERTS = 8
_Side = Annotated[
    str,
    typer.Argument(
        help="A manifest file, the name of a pulled profile (a workload or a mix), or NAME@REVISION as the service "
        "kept it."
    ),
]


def diff_command(
    before: _Side,
    after: _Side,
    model: Annotated[
        Path | None, typer.Option("--model", help="GGUF file that names belong to; the bundled demo model if left out.")
    ] = None,
    service: Annotated[str | None, typer.Option("--service", help="Address of the calibration service.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two manifests of one model: slots, experts that come and go, bytes, expected cold-hit rates.

    NAME@REVISION asks for the phase and the budget of the profile that was pulled under NAME.

    Services keep revisions of their own window, not of one chosen with --window-days or --half-life-days.
    """
    from spark_schemas.manifest_diff import diff_manifests

    context = AgentContext.create(json_mode=json)
    sides = [_side(context, named, model, service) for named in (before, after)]
    try:
        found = diff_manifests(*sides)
    except ValueError as error:
        raise SparkError(
            f"{before} and {after} cannot be compared: {error}", "compare manifests of one model"
        ) from error
    context.output.result(found.model_dump(mode="json"), lambda: _print(context.output, found))


def _side(context: AgentContext, named: str, model: Path | None, service: str | None) -> PlacementManifest:
    from spark_agent.manifests import ManifestStore, find_manifest, load_manifest
    from spark_agent.paths import manifests_dir
    from spark_agent.trust import ManifestTrust
    from spark_runtime.model_shape import read_model_shape

    file = Path(named)
    if file.is_file() or file.suffix or file.name != named:
        return load_manifest(file)
    asked = _REVISION.fullmatch(named)
    if asked is None and "@" in named:
        raise UsageError(
            f"{named!r}: expected NAME@REVISION with the 64 hex digits of a profile's revision",
            "spark profiles show NAME --json has the newest as `revision`",
        )
    fingerprint = read_model_shape(context.model_path(model)).fingerprint
    if asked is None:
        return find_manifest(named, fingerprint)
    name = check_profile_name(asked["name"])
    pulled = ManifestStore(manifests_dir()).find(fingerprint, name)
    if pulled is None:
        raise SparkError(
            f"{named}: no profile {name!r} was pulled for this model, so its budget is not known",
            f"spark pull-profile {name}",
        )
    with context.client(service) as client:
        answer = client.manifest(
            fingerprint,
            name,
            vram_bytes=pulled.key.vram_bytes,
            n_ctx=pulled.key.n_ctx,
            reserve_bytes=pulled.key.reserve_bytes,
            phase=pulled.manifest.phase,
            revision=asked["revision"],
        )
        if answer.manifest is None:
            raise AssertionError("the client takes 'not modified' only when it sent an ETag")
        trust = ManifestTrust.of_this_machine(context.environment)
        trust.check_answer(client, answer.content, answer.signature, context.output.info)
    return answer.manifest


def _print(output: Output, diff: ManifestDiff) -> None:
    changed = [layer for layer in diff.layers if layer.entering or layer.leaving]
    output.table(
        ["block", "slots", "entering", "share", "leaving", "share", "shift"],
        [
            [
                str(layer.block),
                f"{layer.slots_before} -> {layer.slots_after}",
                _experts(layer.entering),
                f"{layer.entering_share:.1%}",
                _experts(layer.leaving),
                f"{layer.leaving_share:.1%}",
                f"{layer.frequency_shift:.1%}",
            ]
            for layer in changed
        ],
    )
    same = len(diff.layers) - len(changed)
    if same:
        output.info(f"{counted(same, 'block')} with the same hot set {'is' if same == 1 else 'are'} left out")
    output.info(
        f"{counted(diff.experts_entering, 'expert')} with {diff.entering_share:.1%} of the expected selections enter, "
        f"{diff.experts_leaving} with {diff.leaving_share:.1%} leave; {diff.slots_change:+d} slots"
    )
    sign = "+" if diff.vram_bytes_change >= 0 else "-"
    output.info(
        f"video memory: {format_size(diff.before.bytes.vram_total)} -> {format_size(diff.after.bytes.vram_total)} "
        f"({sign}{format_size(abs(diff.vram_bytes_change))})"
    )
    rates = [
        f"{side.expected.cold_hit_rate:.1%} ({side.expected.low:.1%} to {side.expected.high:.1%})"
        if side.expected
        else "none promised"
        for side in (diff.before, diff.after)
    ]
    output.info(f"expected cold-hit rate if never adapted: {rates[0]} -> {rates[1]}")
    output.info(f"verdict: {diff.before.verdict or 'none yet'} -> {diff.after.verdict or 'none yet'}")


def _experts(ids: tuple[int, ...]) -> str:
    shown = " ".join(str(expert) for expert in ids[:_SHOWN_EXPERTS])
    return shown if len(ids) <= _SHOWN_EXPERTS else f"{shown} and {len(ids) - _SHOWN_EXPERTS} more"
