"""Starting the slots by another tool's counts: what ``spark import`` wrote, in the place of a manifest.

Such a profile was made somewhere else from sessions that nobody here held out: it says where experts start, and never
how often they will be missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spark_agent.errors import RefusedError, SparkError
from spark_agent.formats.profile import ImportedLayer, ImportedProfile, bind, load_profile
from spark_agent.manifests import find_manifest
from spark_agent.sizes import format_size
from spark_runtime.manifest_check import check_manifest

if TYPE_CHECKING:
    from spark_agent.output import Output
    from spark_runtime.tier_plan import TierPlan
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = ["ImportedStart", "describe_imported", "find_start", "import_hint", "is_imported"]

_HEAD_BYTES = 4096
_OTHERS = (
    (b"GGUF", "imatrix"),
    (b"PK\x03\x04", "sglang"),
    (b"# hotness table", "lucebox-csv"),
    (b"# EXPERT_CACHE_PIN_LIST", "fitz"),
    (b"layer,expert", "layer-expert-csv"),
    (b"\x93NUMPY", "plumb"),
    (b'"hot_expert_ids"', "lucebox-placement"),
    (b'"expert_counts"', "freetoken"),
    (b'"logical_count"', "sglang-location"),
    (b'"heat"', "mbolt"),
    (b'"eplb_load_stats"', "vllm-eplb"),
)
"""What the beginnings of other tools' files hold."""


@dataclass(frozen=True, slots=True)
class ImportedStart:
    """An imported profile of the model that is loaded."""

    profile: ImportedProfile

    @property
    def workload(self) -> str:
        """As it was named when it was imported."""
        return self.profile.workload

    def frequency(self) -> list[NDArray[np.float64]]:
        """Expert frequencies, one array per MoE layer that sums to one.

        An order without counts does not say how layers compare: every layer falls off alike, so that slots are shared
        out evenly, and experts that it does not name come last.
        """
        return [layer.frequency() if layer.counts is not None else _falling(layer) for layer in self.profile.histograms]

    def cannot_say(self) -> list[str]:
        """What a start by it leaves open, for a person."""
        said = [f"imported from {self.profile.format}, not measured here: no cold-hit rate is expected of it"]
        orders = [layer for layer in self.profile.histograms if layer.counts is None]
        if orders:
            named = sum(len(layer.ranking or ()) for layer in orders)
            of = sum(layer.n_experts for layer in orders)
            said.append(
                f"it has an order and no counts: it names {named} of {of} experts, slots are shared out evenly over "
                "the layers, and how much hotter one expert is than the next is not known"
            )
        return said

    def told(self, plan: TierPlan | None) -> dict[str, Any]:
        """The ``manifest`` of a start-up object; ``slots`` is ``None`` where everything is resident."""
        start = None if plan is None else plan.start
        profile = self.profile
        return {
            "workload": profile.workload,
            "profile_revision": None,
            "slots": None if start is None else start.slots,
            "vram_slots_bytes": None if plan is None or start is None else sum(d.experts for d in plan.memory.devices),
            "expected_cold_hit_rate": None,
            "source": "imported",
            "format": profile.format,
            "has_counts": profile.has_counts,
            "phase": profile.phase,
            "tokens": profile.tokens,
            "model": profile.model,
            "warnings": [*self.cannot_say(), *profile.warnings],
        }

    def warn(self, output: Output, *, used: bool) -> None:
        """Say at the start what it cannot say; ``used`` is whether anything is tiered by it."""
        for warning in (*self.cannot_say(), *self.profile.warnings):
            output.warning(warning)
        if not used:
            output.warning("every expert is resident: the imported profile changes nothing")


def describe_imported(told: dict[str, Any]) -> str:
    """One line of the start-up text."""
    size = "every expert resident" if told["slots"] is None else f"{told['slots']} slots"
    if told["vram_slots_bytes"] is not None:
        size += f", {format_size(told['vram_slots_bytes'])}"
    what = "counts" if told["has_counts"] else "an order"
    return f"profile   {told['workload']}: imported from {told['format']} ({what}); {size}"


def find_start(named: str, shape: ModelShape) -> tuple[PlacementManifest | None, ImportedStart | None]:
    """The manifest or the imported profile of a name or a file, checked against the model.

    Raises what :func:`spark_agent.manifests.find_manifest` and ``check_manifest`` raise, :class:`RefusedError` for a
    profile that was imported for another model, :class:`SparkError` for one whose layers are not the model's.
    """
    path = Path(named)
    if path.is_file():
        head = _head(path)
        if is_imported(head):
            return None, ImportedStart(_bound(load_profile(path), shape, path))
        hint = import_hint(path, head)
        if hint is not None:
            raise SparkError(f"{path} is another tool's file, not a manifest", hint)
    manifest = find_manifest(named, shape.fingerprint)
    check_manifest(manifest, shape)
    return manifest, None


def is_imported(head: bytes) -> bool:
    """Whether a file that begins so is what ``spark import`` writes."""
    return b'"imported":' in head.replace(b" ", b"")


def import_hint(path: Path, head: bytes) -> str | None:
    """How to import a file that begins so, where its format is known by that."""
    for mark, form in _OTHERS:
        if head.startswith(mark) if not mark.startswith(b'"') else mark in head:
            return f"spark import {form} {path} --workload NAME --model MODEL --output PROFILE.json, then pass that"
    return None


def _bound(profile: ImportedProfile, shape: ModelShape, path: Path) -> ImportedProfile:
    if profile.fingerprint is not None and profile.fingerprint != shape.fingerprint:
        raise RefusedError(
            f"{path} was imported for another model: for {profile.fingerprint}, this file is {shape.fingerprint}",
            f"if it is of another quantisation of this model, import it again: spark import {profile.format} FILE "
            "--model THIS-MODEL",
        )
    unchecked = profile.fingerprint is None
    bound = bind(profile, shape)
    if unchecked:
        note = "it was imported without --model: that it is of this model rests on its numbers of layers and experts"
        bound = bound.model_copy(update={"warnings": (*bound.warnings, note)})
    return bound


def _falling(layer: ImportedLayer) -> NDArray[np.float64]:
    ranking = list(layer.ranking or ())
    named = set(ranking)
    order = [*ranking, *(expert for expert in range(layer.n_experts) if expert not in named)]
    shares = np.zeros(layer.n_experts)
    shares[order] = np.arange(layer.n_experts, 0, -1)
    return np.asarray(shares / shares.sum())


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise SparkError(f"cannot read {path}: {error.strerror}", "check the path") from error
