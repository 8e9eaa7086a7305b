"""What was measured of one configuration of a benchmark."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_runtime.bench import DecodeRate, decode_rate, gpu_memory, logits_sha256, prefill_tok_s
from spark_runtime.bench_configuration import Configuration
from spark_runtime.engine import Engine, EngineOptions

SPARE_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What every configuration computes."""

    model: Path
    prompt: list[int]
    tokens: list[int]
    long_prompt: list[int]
    threads: int
    repeats: int
    """Timed prefills a load."""


@dataclass(slots=True)
class Measurement:
    """What was measured of one configuration, over all rounds. Bytes are of all GPUs together."""

    configuration: Configuration
    slots: int | None = None
    load_s: list[float] = field(default_factory=list)
    decode: list[DecodeRate] = field(default_factory=list)
    prefill: dict[int, list[float]] = field(default_factory=dict)
    """Tokens a second by size of the batches computed at once."""
    logits_sha256: str | None = None
    vram: dict[str, int] = field(default_factory=dict)
    """Bytes taken ``after_load``, ``after_decode``, by ``prefill_N``, and left ``after_close``; empty without GPU."""
    errors: list[str] = field(default_factory=list)

    def measure_decode(self, plan: Plan) -> None:
        """Load, decode, hash all logits if that has not been done; a failure is recorded, not raised."""
        with self._recorded("decode"), self._memory() as note:
            start = time.perf_counter()
            with self._load(plan, batch=len(plan.prompt), length=len(plan.prompt) + len(plan.tokens)) as engine:
                self.load_s.append(time.perf_counter() - start)
                note("after_load")
                self.decode.append(decode_rate(engine, plan.prompt, plan.tokens))
                # Afterwards, and one timed run a load: slots that have seen the tokens would have fewer cold hits.
                if self.logits_sha256 is None:
                    self.logits_sha256 = logits_sha256(engine, plan.prompt, plan.tokens)
                note("after_decode")

    def measure_prefill(self, plan: Plan, batch: int) -> None:
        """Load, compute the long prompt once unmeasured and then measured; a failure is recorded, not raised."""
        with (
            self._recorded(f"prefill {batch}"),
            self._memory() as note,
            self._load(plan, batch=batch, length=len(plan.long_prompt)) as engine,
        ):
            prefill_tok_s(engine, plan.long_prompt)
            rates = self.prefill.setdefault(batch, [])
            rates.extend(prefill_tok_s(engine, plan.long_prompt) for _ in range(plan.repeats))
            note(f"prefill_{batch}")

    @contextmanager
    def _recorded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(f"{what}: {type(error).__name__}: {error}")
            traceback.print_exc()

    @contextmanager
    def _memory(self) -> Iterator[Callable[[str], None]]:
        """A function that notes what is taken since now; what is not given back in the end is noted, too."""
        before = _free()

        def note(moment: str) -> None:
            free = _free()
            if before is not None and free is not None:
                self.vram[moment] = max(self.vram.get(moment, 0), before - free)

        yield note
        gc.collect()
        note("after_close")

    def _load(self, plan: Plan, *, batch: int, length: int) -> Engine:
        configuration = self.configuration
        start = configuration.tier() if configuration.tier is not None else None
        self.slots = start.slots if start is not None else None
        size = EngineOptions(n_ctx=length + SPARE_CONTEXT, n_batch=batch, n_threads=plan.threads)
        options = configuration.options(size, start, on_gpu=gpu_memory() is not None)
        return Engine.load(plan.model, options)

    def row(self) -> dict[str, Any]:
        """The measurement as JSON; rates are medians of all runs, with the runs beside them."""
        rates = [run.tok_s for run in self.decode]
        return {
            "config": self.configuration.name,
            "residency": self.configuration.residency,
            "slots": self.slots,
            "decode_tok_s": _median(rates),
            "decode_runs": [round(rate, 2) for rate in rates],
            "decode_spread": round((max(rates) - min(rates)) / statistics.median(rates), 4) if rates else None,
            "prefill_tok_s": {batch: _median(runs) for batch, runs in self.prefill.items()},
            "prefill_runs": {batch: [round(rate, 1) for rate in runs] for batch, runs in self.prefill.items()},
            "cold_hits_per_token": _median([run.cold_hits_per_token for run in self.decode]),
            "cold_hit_rate": _median([run.cold_hit_rate for run in self.decode], 5),
            "load_s": _median(self.load_s),
            "load_runs": [round(seconds, 2) for seconds in self.load_s],
            "vram_bytes": max((taken for moment, taken in self.vram.items() if moment != "after_close"), default=None),
            "vram": self.vram,
            "logits_sha256": self.logits_sha256,
            "errors": self.errors,
        }


def _free() -> int | None:
    memory = gpu_memory()
    return memory.free if memory is not None else None


def _median(values: list[Any], digits: int = 2) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), digits) if known else None
