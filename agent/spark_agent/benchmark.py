"""One model run in every way that matters on one machine, in one process, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spark_agent.errors import UsageError
from spark_agent.interrupts import unless
from spark_agent.measured import PREFETCHED, RING
from spark_runtime.bench import (
    COUNTED_AT_ONCE,
    UNTIMED_TOKENS,
    counts_of,
    decode_rate,
    gpu_memory,
    logits_sha256,
    prefill_tok_s,
    random_tokens,
)
from spark_runtime.bench_configuration import Configuration, blocks_on_cpu
from spark_runtime.buffer_sizes import HOST, log_lines, read_buffer_sizes
from spark_runtime.early_fetch import EarlyFetch
from spark_runtime.engine import Engine, EngineOptions
from spark_runtime.errors import SparkRuntimeError
from spark_runtime.placement import frequencies
from spark_runtime.tier_plan import BATCH, TIERED_BATCHES, TierPlan, TierRequest, cards, plan_tiers, plan_untiered

if TYPE_CHECKING:
    from spark_runtime.gguf_file import GgufModel
    from spark_runtime.memory_plan import MemoryPlan
    from spark_runtime.native_tier import LayerGuesses
    from spark_runtime.placement import FloatArray
    from spark_schemas.model import ModelShape

__all__ = ["ALL_GPU", "Benchmark", "Row", "Workload", "identical_output"]

ALL_GPU, UNIFORM, CALIBRATED, OFFLOAD = "all-gpu", "uniform", "calibrated", "llama-offload"
CALIBRATION_SEED, MEASURED_SEED, LONG_PROMPT_SEED = 101, 202, 303


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens that every configuration computes; lengths in tokens."""

    prompt: int
    decode: int
    long_prompt: int
    calibration: int
    n_ctx: int

    @classmethod
    def within(cls, shape: ModelShape, prompt: int, decode: int, long_prompt: int, calibration: int) -> Workload:
        """Cut to what the model was trained for; raise :class:`UsageError` when decode does not fit."""
        most = shape.context_length
        if decode <= UNTIMED_TOKENS or decode >= most:
            raise UsageError(
                f"--tokens: found {decode}, expected {UNTIMED_TOKENS + 1} to {most - 1}",
                f"the first {UNTIMED_TOKENS} are not timed, and the model's context is {most}",
            )
        prompt = min(prompt, most - decode)
        n_ctx = min(most, max(prompt + decode, long_prompt))
        return cls(prompt, decode, min(long_prompt, n_ctx), min(calibration, n_ctx - prompt), n_ctx)


@dataclass(slots=True)
class Row:
    """What was measured of one configuration; ``None`` where it could not be, with the reason."""

    config: str
    residency: float
    ring: float | None = None
    """Share of the slots that experts move through; the others hold the hottest for good."""
    slots: int | None = None
    resident_share: float | None = None
    """Of the experts' bytes: more than was asked for where that is below the floor of ``2 * top_k`` slots."""
    decode_tok_s: float | None = None
    prefill_tok_s: float | None = None
    share_of_all_gpu: float | None = None
    cold_hits_per_token: float | None = None
    cold_hit_rate: float | None = None
    early_per_token: float | None = None
    """Experts fetched early, by a guess, all layers together."""
    early_used_share: float | None = None
    """Of those, selected while they were in video memory."""
    pageable_share: float | None = None
    """Of the experts in host memory, in memory that is not locked; ``None`` where no GPU reads them."""
    vram_bytes: int | None = None
    """Peak of what the devices lost; over the CPU what was allocated in their place."""
    planned_bytes: int | None = None
    difference_percent: float | None = None
    """Of ``vram_bytes`` from ``planned_bytes``."""
    n_ubatch: int | None = None
    logits_sha256: str | None = None
    reason: str | None = None

    @property
    def tiered(self) -> bool:
        """Whether experts are in slots."""
        return self.config not in {ALL_GPU, OFFLOAD}

    def as_json(self) -> dict[str, Any]:
        """The row's columns."""
        return asdict(self)


def identical_output(rows: Sequence[Row]) -> bool | None:
    """Whether tiers gave the logits of every expert resident; ``None`` when there were not both to compare.

    llama.cpp's own offload computes some experts on the CPU, which rounds differently than a GPU.
    """
    resident = {row.logits_sha256 for row in rows if row.config == ALL_GPU} - {None}
    tiered = {row.logits_sha256 for row in rows if row.tiered} - {None}
    if len(tiered) > 1:
        return False
    return resident == tiered if resident and tiered else None


@dataclass(slots=True)
class Benchmark:
    """A model with what it is run with."""

    model: GgufModel
    shape: ModelShape
    workload: Workload
    residencies: Sequence[float]
    rings: Sequence[float]
    threads: int = 0
    ubatch: int = 0
    devices: int = 0
    profile: Sequence[FloatArray] | None = None
    """Expert frequencies in place of those that would be counted."""
    prefetch: bool = False
    """Whether fetching early is measured, too, beside a ring of all slots."""
    check: Callable[[], None] = lambda: None
    """Called between steps; what it raises ends the benchmark."""
    on_cards: bool = field(default_factory=lambda: bool(cards()))
    _frequency: Sequence[FloatArray] | None = None
    _failure: SparkRuntimeError | None = None

    def rows(self) -> list[Row]:
        """Every configuration, not measured yet."""
        rows = [Row(ALL_GPU, 1.0)]
        for residency in self.residencies:
            rows += [Row(UNIFORM, residency), Row(CALIBRATED, residency)]
            rows += [Row(RING, residency, ring) for ring in self.rings]
            if self.prefetch:
                rows.append(Row(PREFETCHED, residency, 1.0))
            rows.append(Row(OFFLOAD, residency))
        return rows

    @property
    def steps(self) -> int:
        """Of :meth:`run`: the calibration and every row."""
        return 1 + len(self.rows())

    def run(self, advance: Callable[[float], None]) -> list[Row]:
        """Calibrate and measure every row; a row that cannot run says why.

        Raises the first reason when no row could run, and whatever :attr:`check` raises.
        """
        rows = self.rows()
        self._calibrate()
        advance(1)
        for row in rows:
            self.check()
            try:
                self._measure(row)
            except SparkRuntimeError as error:
                row.reason = str(error) if error.hint is None else f"{error} ({error.hint})"
                self._failure = self._failure or error
            advance(1)
        if self._failure is not None and all(row.decode_tok_s is None for row in rows):
            raise self._failure
        baseline = rows[0].decode_tok_s
        for row in rows:
            if baseline and row.decode_tok_s:
                row.share_of_all_gpu = round(row.decode_tok_s / baseline, 4)
        return rows

    def _calibrate(self) -> None:
        """A profile from other tokens than the measured ones, counted in slots: that needs the least memory."""
        self._frequency = self.profile
        try:
            plan = plan_tiers(
                self.model,
                self.shape,
                replace(self._request, residency=min(self.residencies), n_outputs_max=COUNTED_AT_ONCE),
            )
            options = replace(self._size(plan.memory), tier=plan.start, n_outputs_max=COUNTED_AT_ONCE)
            with self._loaded(options) as engine:
                if self._frequency is None:
                    length = self.workload.prompt + self.workload.calibration
                    tokens = random_tokens(length, engine.n_vocab, CALIBRATION_SEED)
                    prompt, rest = tokens[: self.workload.prompt], tokens[self.workload.prompt :]
                    counts = counts_of(engine, prompt, rest, before_step=self.check)
                    self._frequency = frequencies([counts.counts["decode"]], [counts.tokens["decode"]])
        except SparkRuntimeError as error:
            self._failure = error

    def _loaded(self, options: EngineOptions) -> Engine:
        return Engine.load(self.model.path, options, wanted=unless(self.check))

    @property
    def _request(self) -> TierRequest:
        return TierRequest(n_ctx=self.workload.n_ctx, n_ubatch=self.ubatch, n_devices=self.devices)

    def _size(self, plan: MemoryPlan | None) -> EngineOptions:
        n_ubatch = plan.n_ubatch if plan is not None else self._plain_ubatch
        return EngineOptions(
            n_ctx=self.workload.n_ctx,
            n_batch=max(BATCH, n_ubatch),
            n_ubatch=n_ubatch,
            n_threads=self.threads,
            n_outputs_max=1,
            devices=self.devices,
        )

    @property
    def _plain_ubatch(self) -> int:
        """llama.cpp streams experts from the host for a large batch as well, so it is given the same."""
        return min(self.ubatch or (TIERED_BATCHES[0] if self.on_cards else BATCH), self.workload.n_ctx)

    def _measure(self, row: Row) -> None:
        plan = self._plan(row)
        configuration = Configuration(
            row.config,
            row.residency,
            cpu_blocks=blocks_on_cpu(self.shape, row.residency) if row.config == OFFLOAD else 0,
            # In allocated memory every buffer has its true size, by which a plan over the CPU is checked.
            mapped=self.on_cards,
        )
        size = self._size(None if plan is None else plan.memory)
        options = configuration.options(size, None if plan is None else plan.start, on_gpu=self.on_cards)
        learned: Mapping[int, LayerGuesses] = {}
        if row.config == PREFETCHED:
            options = replace(options, early=EarlyFetch())
            learned = self._learn(options)
        row.n_ubatch = options.n_ubatch
        row.slots = options.tier.slots if options.tier is not None else None
        row.resident_share = None if plan is None else round(plan.resident_share, 4)
        row.planned_bytes = None if plan is None else sum(part.total for part in plan.memory.devices)
        free = _free()
        with log_lines() as lines:
            engine = self._loaded(options)
        with engine:
            if engine.tier is not None and learned:
                engine.tier.set_guesses(learned)
            taken = [_taken(free)]
            self._run(row, engine, lambda: taken.append(_taken(free)))
            known = [peak for peak in taken if peak is not None]
            row.vram_bytes = max(known) if known else _allocated(lines, engine, plan)
        if row.planned_bytes and row.vram_bytes is not None:
            row.difference_percent = round(100 * (row.vram_bytes / row.planned_bytes - 1), 2)

    def _learn(self, options: EngineOptions) -> Mapping[int, LayerGuesses]:
        """What an agent knows of the next layers' selections after the calibration's tokens; a start keeps it."""
        with self._loaded(options) as engine:
            length = self.workload.prompt + self.workload.calibration
            tokens = random_tokens(length, engine.n_vocab, CALIBRATION_SEED)
            engine.feed(tokens[: self.workload.prompt], "prefill", before_step=self.check)
            for token in tokens[self.workload.prompt :]:
                engine.feed([token], "decode", before_step=self.check)
            return {} if engine.tier is None else engine.tier.guesses()

    def _plan(self, row: Row) -> TierPlan | None:
        """llama.cpp plans its own offload itself."""
        if row.config == OFFLOAD:
            return None
        if row.config == ALL_GPU:
            return plan_untiered(self.model, self.shape, replace(self._request, n_ubatch=self._plain_ubatch))
        request = replace(self._request, residency=row.residency)
        if row.config != UNIFORM:
            if self._frequency is None:
                raise self._failure or SparkRuntimeError("there is no profile")
            pinned = 1.0 if row.ring is None else 1.0 - row.ring
            request = replace(request, frequency=self._frequency, pinned_share=pinned)
        return plan_tiers(self.model, self.shape, request)

    def _run(self, row: Row, engine: Engine, note: Callable[[], None]) -> None:
        workload, check = self.workload, self.check
        tokens = random_tokens(workload.prompt + workload.decode, engine.n_vocab, MEASURED_SEED)
        prompt, rest = tokens[: workload.prompt], tokens[workload.prompt :]
        # First, and once: slots that have seen the tokens would have fewer cold hits.
        rate = decode_rate(engine, prompt, rest, before_step=check)
        row.decode_tok_s = round(rate.tok_s, 2)
        if rate.cold_hits_per_token is not None and rate.cold_hit_rate is not None:
            row.cold_hits_per_token = round(rate.cold_hits_per_token, 3)
            row.cold_hit_rate = round(rate.cold_hit_rate, 5)
        if rate.early_per_token is not None and row.config == PREFETCHED:
            row.early_per_token = round(rate.early_per_token, 3)
            row.early_used_share = None if rate.early_used_share is None else round(rate.early_used_share, 4)
        if engine.tier is not None and self.on_cards:
            memory = engine.tier.memory()
            row.pageable_share = round(1.0 - memory.host_pinned / memory.host, 4) if memory.host else None
        note()
        row.logits_sha256 = logits_sha256(engine, prompt, rest, before_step=check)
        long_prompt = random_tokens(workload.long_prompt, engine.n_vocab, LONG_PROMPT_SEED)
        if self.on_cards:
            prefill_tok_s(engine, long_prompt, before_step=check)  # kernels are loaded on first use
        row.prefill_tok_s = round(prefill_tok_s(engine, long_prompt, before_step=check), 1)
        note()


def _free() -> int | None:
    memory = gpu_memory()
    return memory.free if memory is not None else None


def _taken(before: int | None) -> int | None:
    """What the GPUs have lost since; ``None`` without GPUs."""
    now = _free()
    return before - now if before is not None and now is not None else None


def _allocated(lines: Sequence[str], engine: Engine, plan: TierPlan | None) -> int:
    """What a load over the CPU took in place of video memory: what llama.cpp logged, and the slots."""
    sizes = read_buffer_sizes(lines)
    names = [HOST] if plan is None else [memory.name for memory in plan.memory.memory]
    kinds = (sizes.model, sizes.context, sizes.compute, sizes.output)
    total = sum(kind.get(name, 0) for kind in kinds for name in names)
    if engine.tier is not None:
        memory = engine.tier.memory()
        total += memory.slots + memory.scratch + memory.tables
    return total
