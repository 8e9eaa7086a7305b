"""``/metrics``: the agent's state in Prometheus' text format. The names are described in ``infra/docs/metrics.md``.

Labels take few values: phases, outcomes, the routes there are, status codes, and a bounded number of workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_agent.server.activity import Distribution

if TYPE_CHECKING:
    from spark_agent.server.prefetch_control import PrefetchState
    from spark_agent.server.state import AgentState

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_Samples = Iterable[tuple[tuple[str, ...], float]]
_PREFIX = "spark_agent_"


class Metrics(Collector):
    """Renders what a function gives at the moment of being asked."""

    def __init__(self, state: Callable[[], AgentState]) -> None:
        self._state = state
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """The whole page; reads the spool's file: not on the event loop."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise collect once at the start."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        state = self._state()
        yield _gauge("build_info", "Version of the agent, always 1", [((state.version,), 1.0)], "version")
        yield _gauge("uptime_seconds", "Time since the agent began to serve", [((), state.uptime_s)])
        yield from _serving(state)
        yield from _tiers(state)
        yield from _sessions(state)


def _serving(state: AgentState) -> Iterator[Metric]:
    numbers = state.numbers
    yield _counter("http_requests", "Answered requests", numbers.requests.items(), "route", "status")
    yield _counter("generations", "Generations that ended", numbers.generations.items(), "outcome", "workload")
    for name, text, counted in (
        ("prompt_tokens", "Tokens of prompts, reused ones included", numbers.prompt_tokens),
        ("reused_tokens", "Tokens of prompts that were still in the cache", numbers.reused_tokens),
        ("completion_tokens", "Generated tokens", numbers.completion_tokens),
    ):
        yield _counter(name, text, [((workload,), count) for workload, count in counted.items()], "workload")
    yield _histogram("queue_seconds", "From being submitted to the first step", numbers.queue_s)
    yield _histogram("first_token_seconds", "From being submitted to the first token", numbers.first_token_s)
    yield _histogram("token_seconds", "Mean time of a token after the first, by generation", numbers.token_s)
    yield _gauge("running", "Requests that are being computed", [((), state.running)])
    yield _gauge("waiting", "Requests in line", [((), state.waiting)])
    yield _gauge("sequences", "Conversations that can be computed side by side", [((), state.sequences)])
    yield _gauge("cached_tokens", "Tokens that the context holds", [((), state.tokens_cached)])
    speed = [] if numbers.decode_tok_s is None else [((), numbers.decode_tok_s)]
    yield _gauge("decode_tokens_per_second", "Speed of the latest generations", speed)


def _tiers(state: AgentState) -> Iterator[Metric]:
    totals = state.totals
    yield _gauge(
        "resident_share", "Share of the experts' bytes in slots; 1 without tiers", [((), state.resident_share)]
    )
    for name, text, counted in (
        ("tier_tokens", "Tokens that were routed through the tiers", totals and totals.tokens),
        ("selections", "Selections of an expert", totals and totals.selections),
        ("cold_hits", "Selections whose expert was not in video memory", totals and totals.cold_hits),
        ("expert_loads", "Experts copied from host memory", totals and totals.loads),
        ("moved_bytes", "Bytes copied from host memory", totals and totals.bytes_moved),
        ("prefetched_bytes", "Bytes fetched early, by a guess", totals and totals.early_bytes),
        ("prefetched_used_bytes", "Of those, of experts selected while in slots", totals and totals.early_used_bytes),
        ("prefetched_wasted_bytes", "Of those, of experts gone unused", totals and totals.early_wasted_bytes),
    ):
        yield _counter(name, text, [((phase,), count) for phase, count in (counted or {}).items()], "phase")
    rate = None if totals is None else totals.cold_hit_rate("decode")
    yield _gauge("live_cold_hit_rate", "Cold hits by selections in decode", [] if rate is None else [((), rate)])
    yield from _prefetch(state.prefetch)
    promise = state.promise
    bounds = () if promise is None else (("low", promise.low), ("mean", promise.cold_hit_rate), ("high", promise.high))
    yield _gauge(
        "promised_cold_hit_rate",
        "What the placement's manifest expects if never adapted, with its 95% interval",
        [((bound,), value) for bound, value in bounds],
        "bound",
    )


def _prefetch(found: PrefetchState) -> Iterator[Metric]:
    yield _gauge("prefetch", "How experts are fetched early, always 1", [((found.use,), 1.0)], "use")
    compared = [] if found.pairs is None else [((), float(found.pairs))]
    yield _gauge("prefetch_trial_pairs", "Pairs of blocks with and without that a trial compared", compared)
    yield _gauge(
        "prefetch_gain",
        "Speed with fetching early over the speed without, by a trial, with its 99% interval",
        [] if found.gain is None else [((bound,), value) for bound, value in found.gain._asdict().items()],
        "bound",
    )


def _sessions(state: AgentState) -> Iterator[Metric]:
    numbers, spool = state.numbers, state.spool
    yield _gauge("sessions_open", "Sessions that are being counted", [((), state.sessions_open)])
    closed = [((workload,), count) for workload, count in numbers.closed.items()]
    yield _counter("sessions_closed", "Sessions that were handed over", closed, "workload")
    yield _counter("sessions_lost", "Sessions given up because none could be kept", [((), state.sessions_lost)])
    yield _gauge("spool_pending", "Histograms that wait for upload", [] if spool is None else [((), spool.pending)])
    yield _gauge("spool_bytes", "Bytes of the histograms that are kept", [] if spool is None else [((), spool.bytes)])
    yield _gauge(
        "spool_rejected",
        "Histograms that the service refused for good",
        [] if spool is None else [((), spool.rejected)],
    )
    yield _counter(
        "spool_dropped",
        "Histograms given up because the spool was full",
        [] if spool is None else [((), spool.dropped)],
    )
    results = [(("ok",), numbers.uploads_ok), (("failed",), numbers.uploads_failed)]
    yield _counter("uploads", "Attempts to send what the spool holds", results, "result")
    yield _counter("uploaded_histograms", "Histograms that the service took", [((), numbers.uploaded_histograms)])


def _gauge(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, f"{text}.", labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, f"{text}.", labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, found: Distribution) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, f"{text}.")
    family.add_metric([], buckets=found.cumulative(), sum_value=found.total)
    return family
