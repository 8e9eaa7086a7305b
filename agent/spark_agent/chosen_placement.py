"""Which profile a model starts from where several could: what a person named, a pulled one, one's own, or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from spark_agent.errors import SparkError
from spark_agent.imported_start import ImportedStart, find_start
from spark_agent.manifests import ManifestStore, check_known
from spark_agent.own_counts import OwnCounts, OwnCountsError, today
from spark_agent.paths import manifests_dir, own_counts_path
from spark_agent.trust import ManifestTrust
from spark_runtime.errors import ModelMismatchError
from spark_runtime.manifest_check import check_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_agent.own_profile import OwnProfile
    from spark_agent.signatures import SignedBy
    from spark_runtime.placement import FloatArray
    from spark_runtime.tier_plan import TierPlan
    from spark_schemas.manifest import PlacementManifest
    from spark_schemas.model import ModelShape

__all__ = ["FRESH_DAYS", "ChosenPlacement", "PlacementSource", "choose_placement"]

PlacementSource = Literal["given", "imported", "pulled", "local", "none"]
FRESH_DAYS = 30
"""An older pulled manifest is not taken unasked: traffic moves."""
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ChosenPlacement:
    """What the slots start from and why."""

    source: PlacementSource
    reason: str
    """One sentence for a person."""
    manifest: PlacementManifest | None = None
    """``given`` and ``pulled``; a given one also says how many slots, a pulled one only which experts."""
    own: OwnProfile | None = None
    """``local``"""
    imported: ImportedStart | None = None
    """``imported``: named by a person like a manifest, but it says neither how many slots nor what to expect."""
    signed: SignedBy | None = None

    @property
    def asked(self) -> PlacementManifest | None:
        """The manifest that a person named, whose slots and context count."""
        return self.manifest if self.source == "given" else None

    @property
    def is_named(self) -> bool:
        """Whether a person named it, so that tiers are wanted where they gain nothing by themselves."""
        return self.source in {"given", "imported"}

    @property
    def frequency(self) -> Sequence[FloatArray] | None:
        """Expert frequencies to start from, where nobody named a manifest: for ``TierRequest.frequency``."""
        from spark_runtime.tier_start import manifest_frequency

        if self.imported is not None:
            return self.imported.frequency()
        if self.own is not None:
            return self.own.frequency
        return manifest_frequency(self.manifest) if self.source == "pulled" and self.manifest is not None else None

    def in_force(self, plan: TierPlan | None) -> PlacementManifest | None:
        """The manifest to tell of, once the slots are known; of one's own profile made for exactly these slots.

        One that nobody asked for is in force only where something is tiered.
        """
        if self.source == "given":
            return self.manifest
        if plan is None or plan.start is None:
            return None
        if self.own is None:
            return self.manifest
        return self.own.manifest(plan.memory.n_ctx, slots=[layer.slots for layer in plan.start.layers])

    def source_of(self, plan: TierPlan | None) -> PlacementSource:
        """As :attr:`source`, once it is known whether anything is tiered."""
        tiered = plan is not None and plan.start is not None
        return self.source if tiered or self.is_named else "none"


def choose_placement(
    shape: ModelShape,
    *,
    given: str | None,
    workload: str | None,
    no_profile: bool,
    warn: Callable[[str], None],
) -> ChosenPlacement:
    """Choose, and say why.

    The given manifest or imported profile, else a fresh pulled one of the workload, else own sessions, else none.

    ``given`` is a file or the name of a pulled profile, ``workload`` what sessions will be counted under. Own counts
    that cannot be read and pulled manifests that must not be believed cost a warning. Raises as
    :func:`spark_agent.imported_start.find_start` for a given one.
    """
    if given is not None:
        manifest, imported = find_start(given, shape)
        if imported is not None:
            return ChosenPlacement("imported", f"the imported profile {given} was asked for", imported=imported)
        return ChosenPlacement("given", f"the manifest {given} was asked for", manifest)
    if no_profile:
        return ChosenPlacement("none", "--no-profile: the first experts of each layer")
    pulled, why_not = _pulled(shape, workload, warn)
    if pulled is not None:
        return pulled
    own = _own(shape, workload, warn)
    if isinstance(own, ChosenPlacement):
        return own
    return ChosenPlacement("none", "; ".join(filter(None, (why_not, own))))


def _pulled(
    shape: ModelShape, workload: str | None, warn: Callable[[str], None]
) -> tuple[ChosenPlacement | None, str | None]:
    if workload is None:
        return None, None
    store = ManifestStore(manifests_dir())
    known = store.find(shape.fingerprint, workload)
    if known is None:
        return None, None
    try:
        age_s = max(0.0, time.time() - store.path(shape.fingerprint, workload).stat().st_mtime)
        check_known(known, ManifestTrust.of_this_machine())
        check_manifest(known.manifest, shape)
    except (SparkError, ModelMismatchError, OSError) as error:
        warn(f"the pulled profile {workload} is not used: {error}")
        return None, None
    days = int(age_s / _DAY_S)
    if days > FRESH_DAYS:
        old = f"the pulled profile {workload} is {days} days old, expected at most {FRESH_DAYS}"
        return None, f"{old} (spark pull-profile {workload} renews it)"
    reason = f"the profile {workload} was pulled {_ago(days)}"
    return ChosenPlacement("pulled", reason, known.manifest, signed=known.signed), None


def _own(shape: ModelShape, workload: str | None, warn: Callable[[str], None]) -> ChosenPlacement | str:
    from spark_agent.own_profile import own_profile

    try:
        with OwnCounts(own_counts_path(), warn) as counts:
            parts = counts.parts(shape)
    except OwnCountsError as error:
        warn(str(error))
        return "this machine's own counts cannot be read"
    if not parts:
        return "no session of this model was served here yet"
    tried = own_profile(shape, parts, workload, today()) if workload is not None else None
    if tried is None or not tried.suffices:
        tried = own_profile(shape, parts, None, today())
    if tried is None or not tried.suffices:
        return "too little was decoded here yet for a profile of its own"
    of = f"of {tried.workload}" if tried.workload == workload else "of all workloads"
    return ChosenPlacement("local", f"from {tried.n_calibration} own sessions {of}", own=tried)


def _ago(days: int) -> str:
    return "today" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"
