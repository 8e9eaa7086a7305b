"""What a running agent's slots run by: taken over from a pulled manifest, and looked at again as traffic goes on.

Everything that touches the slots happens on the computing thread, between two steps, so no output changes. The rest may
be called from any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from spark_agent.env import Replacement
from spark_agent.errors import SparkError
from spark_agent.server.generation import AbandonedError
from spark_runtime.manifest_check import check_manifest
from spark_runtime.placement import FloatArray, layer_sizes
from spark_runtime.replacement import Decision, RecentTraffic, Rules, decide, pool_slots
from spark_runtime.tier_start import TierStart, keeping, manifest_frequency, profile_start
from spark_schemas.manifest import PlacementManifest

if TYPE_CHECKING:
    from spark_agent.own_profile import OwnProfile
    from spark_agent.signatures import SignedBy
    from spark_agent.trust import ManifestTrust
    from spark_runtime.engine import Engine
    from spark_runtime.session_counts import SessionCounts
    from spark_schemas.ids import Phase

__all__ = ["DECISIONS_KEPT", "LivePromise", "Order", "PlacementControl"]

_T = TypeVar("_T")
DECISIONS_KEPT = 50
_PLACEMENTS_KEPT = 32
Source = Literal["given", "imported", "pulled", "local", "none", "recent"]


class _Caller(Protocol):
    """The worker: runs a function on the computing thread between two steps."""

    def call(self, function: Callable[[], _T]) -> Future[_T]: ...


@dataclass(frozen=True, slots=True)
class Order:
    """Checked, and ready to be placed."""

    frequency: tuple[FloatArray, ...]
    manifest: PlacementManifest
    source: Source


@dataclass(frozen=True, slots=True)
class LivePromise:
    """What was promised of the placement in force, and what has been measured under it. Rates are of decode."""

    expected_cold_hit_rate: float | None
    """Of its hot set, were it never to change: an upper bound for slots that adapt."""
    live_cold_hit_rate: float | None
    selections: int
    cold_hits: int


@dataclass(slots=True)
class _InForce:
    source: Source
    manifest: PlacementManifest | None
    frequency: tuple[FloatArray, ...] | None
    since: float
    """Seconds since the epoch."""
    selections: int = 0
    cold_hits: int = 0


class PlacementControl:
    """One model's placement."""

    def __init__(
        self,
        engine: Engine,
        worker: _Caller,
        trust: ManifestTrust,
        own: Callable[[str], OwnProfile | None],
        on_error: Callable[[BaseException], None],
        *,
        source: Source,
        manifest: PlacementManifest | None,
        replacement: Replacement = "auto",
        pinned_share: float = 0.0,
        rules: Rules | None = None,
    ) -> None:
        """``own`` gives the profile of this machine's own sessions of a workload.

        ``pinned_share`` of each layer's slots hold the hottest experts of whatever is placed, for good. Call before
        anything is computed: it listens to what the slots count.
        """
        self._engine = engine
        self._worker = worker
        self._trust = trust
        self._own = own
        self._on_error = on_error
        self.replacement = replacement
        self._pinned_share = pinned_share
        self._rules = rules or Rules()
        self._lock = threading.Lock()
        known = None if manifest is None else tuple(manifest_frequency(manifest))
        self._profile = known
        self._now = _InForce(source, manifest, known, time.time())
        self._decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_KEPT)
        self._counted: Counter[str] = Counter()
        self._traffic = RecentTraffic([layer.n_experts for layer in engine.shape.layers], self._rules)
        self._next_look = self._rules.every_tokens
        # Sessions are told of after they end, when another placement may be in force.
        self._ran: deque[tuple[TierStart, Source, PlacementManifest | None]] = deque(maxlen=_PLACEMENTS_KEPT)
        if engine.tier is not None:
            if engine.tier.start is not None:
                self._ran.append((engine.tier.start, source, manifest))
            engine.on_tier_counts(self._heard)

    def manifest_of(self, start: TierStart | None) -> tuple[bool, PlacementManifest | None]:
        """Whether what ran under ``start`` may be told as a team manifest's or as no profile's, and which it was.

        Own profiles and priors moved by traffic are nobody's promise.
        """
        with self._lock:
            for ran, source, manifest in self._ran:
                if ran is start:
                    return source in {"given", "pulled", "none"}, manifest
        return False, None

    @property
    def manifest(self) -> PlacementManifest | None:
        """What is promised of the placement in force; from any thread."""
        with self._lock:
            return self._now.manifest

    def promised_of(self, counts: SessionCounts) -> PlacementManifest | None:
        """The manifest, one's own too, under which all of a session ran; ``None`` if it was not one placement."""
        start = None if counts.misses is None else counts.misses.start
        with self._lock:
            return next((manifest for ran, _, manifest in self._ran if ran is start), None)

    def describe(self) -> dict[str, Any]:
        """What is in force, since when, and the latest decisions, newest first."""
        promise = self.live_promise()
        with self._lock:
            now, decisions, counted = self._now, list(self._decisions), dict(self._counted)
        manifest = now.manifest
        return {
            "tiered": self._engine.tier is not None,
            "source": now.source,
            "since": now.since,
            "workload": None if manifest is None else manifest.workload,
            "profile_revision": None if manifest is None else manifest.profile_revision,
            "expected_cold_hit_rate": promise.expected_cold_hit_rate,
            "live_cold_hit_rate": promise.live_cold_hit_rate,
            "replacement": self.replacement,
            "decisions_counted": {"changed": 0, "no_change": 0, **counted},
            "decisions": decisions[::-1],
        }

    def live_promise(self) -> LivePromise:
        """For ``/metrics`` and ``ps``; from any thread."""
        with self._lock:
            now = self._now
            selections, cold = now.selections, now.cold_hits
        expected = None if now.manifest is None or now.manifest.expected is None else now.manifest.expected
        return LivePromise(
            None if expected is None else expected.cold_hit_rate,
            cold / selections if selections else None,
            selections,
            cold,
        )

    def signed_order(self, content: bytes, signed: SignedBy) -> Order:
        """Check a service's manifest: signed by its pinned key, for this model, within the slots' memory.

        Raises ``RefusedError``, ``ModelMismatchError`` and :class:`SparkError`; nothing has changed then.
        """
        self._trust.check_pinned(content, signed)
        try:
            manifest = PlacementManifest.model_validate_json(content)
        except ValidationError as error:
            raise SparkError(
                "the signed bytes are no placement manifest of this version", "bring agent and service to one version"
            ) from error
        check_manifest(manifest, self._engine.shape)
        self._check_room(manifest)
        return Order(tuple(manifest_frequency(manifest)), manifest, "pulled")

    def own_order(self, workload: str) -> Order:
        """A placement by this machine's own sessions, for the slots there are. Raises :class:`SparkError`."""
        slots = self._slots()
        profile = self._own(workload)
        if profile is None:
            raise SparkError(f"no session of {workload} was served here yet", "see spark profiles ls --local")
        return Order(profile.frequency, profile.manifest(self._engine.n_ctx, slots=slots), "local")

    def place(self, order: Order) -> Future[None]:
        """Take over an order between two steps: its hot set is loaded, its priors decide from then on.

        The future raises ``TierError`` where it cannot be placed; the old placement stays.
        """
        return self._worker.call(lambda: self._place(order))

    def look(self) -> None:
        """Decide again, on the computing thread between two steps."""
        tier = self._engine.tier
        if tier is None:
            return
        with self._lock:
            now = self._now
        sizes, slots, pools = layer_sizes(self._engine.shape), self._slots(), self._pools()
        candidate = self._traffic.frequencies(self._profile)
        # What is resident stays, so nothing is copied: evictions then follow the new priors.
        decision = decide(self._traffic, now.frequency, candidate, sizes, slots, pools)
        named = now.source in {"given", "imported", "pulled"}
        applies = self.replacement == "on" or (self.replacement == "auto" and not named)
        if decision.outcome == "changed" and not applies:
            decision = replace(decision, outcome="no_change", reason=f"only watching: {decision.reason}")
        if decision.outcome == "changed":
            start = self._start(candidate, slots, tier.start)
            self._move(keeping(start, tier.resident()), _InForce("recent", now.manifest, tuple(candidate), time.time()))
        self._note(decision)

    def _place(self, order: Order) -> None:
        tier = self._engine.tier
        if tier is None:
            raise SparkError("every expert is resident: there is nothing to place", "start with --vram or --residency")
        slots = pool_slots(order.frequency, layer_sizes(self._engine.shape), self._slots(), self._pools())
        start = self._start(order.frequency, slots, tier.start)
        self._profile = order.frequency
        self._move(start, _InForce(order.source, order.manifest, order.frequency, time.time()))

    def _start(self, frequency: Sequence[FloatArray], slots: Sequence[int], present: TierStart | None) -> TierStart:
        decay, share = _decay(present), self._pinned_share
        return profile_start(self._engine.shape, frequency, slots, decay=decay, pinned_share=share)

    def _move(self, start: TierStart, then: _InForce) -> None:
        self._engine.place(start)
        with self._lock:
            self._now = then
            self._ran.append((start, then.source, then.manifest))

    def _check_room(self, manifest: PlacementManifest) -> None:
        layers = self._engine.shape.layers
        room = sum(count * layer.expert_bytes for count, layer in zip(self._slots(), layers, strict=True))
        if manifest.bytes.vram_slots > room:
            raise SparkError(
                f"the manifest's slots take {manifest.bytes.vram_slots} bytes, expected at most {room}, which is what "
                "this agent has for slots",
                f"pull it with a smaller --vram, or restart: spark-agent run --manifest {manifest.workload}",
            )

    def _slots(self) -> list[int]:
        tier = self._engine.tier
        if tier is None or tier.start is None:
            raise SparkError("every expert is resident: there is nothing to place", "start with --vram or --residency")
        return [layer.slots for layer in tier.start.layers]

    def _pools(self) -> list[object]:
        """A name for each layer's pool: layers on one device whose experts have the same tensors share their slots."""
        tier = self._engine.tier
        devices = () if tier is None else tier.devices
        on = {block: number for number, device in enumerate(devices) for block in device.blocks}
        return [
            (on.get(layer.block), layer.n_experts, layer.expert_bytes, tuple(sorted(layer.tensor_types.items())))
            for layer in self._engine.shape.layers
        ]

    def _heard(self, phase: Phase, tokens: int, counts: Sequence[Any], cold_hits: int) -> None:
        if phase != "decode" or not tokens:
            return
        with self._lock:
            self._now.selections += sum(int(layer.sum()) for layer in counts)
            self._now.cold_hits += cold_hits
        self._traffic.add(counts, tokens, cold_hits)
        if self._traffic.tokens >= self._next_look:
            self._next_look = self._traffic.tokens + self._rules.every_tokens
            if self.replacement != "off":
                # Not now: the slots are being read.
                with contextlib.suppress(AbandonedError):
                    self._worker.call(self.look).add_done_callback(self._looked)

    def _looked(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._on_error(error)

    def _note(self, decision: Decision) -> None:
        saving = decision.predicted_saving
        told = {
            "at": time.time(),
            "outcome": decision.outcome,
            "reason": decision.reason,
            "decoded_tokens": decision.tokens,
            "live_cold_hits_per_token": decision.live_cold_hits,
            "predicted_saving_per_token": None if saving is None else saving.mean,
            "interval": None if saving is None else [saving.low, saving.high],
            "cost_bytes": decision.cost_bytes,
        }
        with self._lock:
            self._decisions.append(told)
            self._counted[decision.outcome] += 1


def _decay(start: TierStart | None) -> float:
    if start is None:
        raise SparkError("the experts have no place since a placement failed", "restart the agent")
    return start.decay
