"""What Prometheus reads at `/metrics`: a registry of the server's own, each metric defined once.

Counters of the engine and the cache are read from a snapshot at each scrape; latencies are observed as answers go out. Nothing
here can disturb serving: what goes wrong while counting is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vera.engine.request import Update
from vera.server.snapshot import Snapshot

_log = logging.getLogger(__name__)

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_ERROR_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25)


class ServerMetrics:
    """Observed on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first_token = Histogram(
            "vera_time_to_first_token_seconds",
            "From an answer's request to its first token, waiting included.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "vera_inter_token_latency_seconds",
            "Between two tokens of an answer.",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self._end_to_end = Histogram(
            "vera_e2e_request_latency_seconds",
            "From an answer's request to its end.",
            buckets=_E2E_BUCKETS,
            registry=self.registry,
        )
        self._estimated_error = Histogram(
            "vera_attention_error_estimated",
            "An answer's mean estimated error of attention outputs, relative to the value norms.",
            buckets=_ERROR_BUCKETS,
            registry=self.registry,
        )
        self._true_error = Histogram(
            "vera_attention_error_true",
            "True error of an audited attention output, relative to the value norms.",
            buckets=_ERROR_BUCKETS,
            registry=self.registry,
        )
        self._responses = Counter(
            "vera_http_responses_total",
            "Answered HTTP requests; 499: the client left first.",
            ["route", "status"],
            registry=self.registry,
        )
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self._num_audits = 0

    def observe_first(self, seconds: float) -> None:
        with _harmless():
            self._first_token.observe(seconds)

    def observe_next(self, seconds: float) -> None:
        with _harmless():
            self._inter_token.observe(seconds)

    def observe_end(self, seconds: float, update: Update) -> None:
        with _harmless():
            self._end_to_end.observe(seconds)
            if update.cache_use is not None and update.cache_use.error_mean is not None:
                self._estimated_error.observe(update.cache_use.error_mean)

    def count_response(self, route: str, status: int) -> None:
        with _harmless():
            self._responses.labels(route, str(status)).inc()

    def render(self, snapshot: Snapshot | None) -> bytes:
        """The text that Prometheus reads. None: there is no engine yet."""
        if snapshot is not None:
            self._take_audits(snapshot)
        self._engine.snapshot = snapshot
        return generate_latest(self.registry)

    def _take_audits(self, snapshot: Snapshot) -> None:
        """Observes the audits since the last scrape, as far as they are still kept."""
        new = snapshot.num_audits - self._num_audits
        self._num_audits = snapshot.num_audits
        for error in snapshot.audited_errors[len(snapshot.audited_errors) - new :] if new > 0 else ():
            self._true_error.observe(error)


class _EngineCollector(Collector):
    """Turns the latest snapshot into metrics."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        if (taken := self.snapshot) is None:
            return
        stats = taken.stats
        yield _gauge("num_requests_running", "Requests that have a seat.", taken.num_running)
        yield _gauge("num_requests_waiting", "Requests that wait for a seat.", taken.num_waiting)
        yield _counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix index.", stats.prompt_tokens)
        yield _counter("prefix_cache_hits", "Those of them that were found.", stats.cached_tokens)
        yield _counter("num_preemptions", "Requests that lost their pages for a while.", stats.preemptions)
        ended = CounterMetricFamily("vera_request_success", "Requests that ended, by reason.", labels=["finished_reason"])
        for reason, count in stats.finished.items():
            ended.add_metric([reason], count)
        yield ended
        yield from _cache_metrics(taken)
        yield from _tier_metrics(taken)


def _cache_metrics(taken: Snapshot) -> Iterator[Metric]:
    used = GaugeMetricFamily("vera_cache_bytes", "Bytes that the cache takes now.", labels=["tier", "device"])
    limits = GaugeMetricFamily("vera_cache_capacity_bytes", "Most bytes that it may take.", labels=["tier", "device"])
    for tier, device, bytes_used, capacity in taken.memory:
        used.add_metric([tier, device], bytes_used)
        limits.add_metric([tier, device], capacity)
    pages = GaugeMetricFamily("vera_cache_pages", "Pages by tier; those kept for reuse are among them.", labels=["tier"])
    for tier, count in taken.pages.items():
        pages.add_metric([tier], count)
    yield from (used, limits, pages)
    yield _gauge("cache_idle_bytes", "Bytes of fast memory that are kept for reuse and can be had at any time.", taken.idle_bytes)


def _tier_metrics(taken: Snapshot) -> Iterator[Metric]:
    """Nothing for a native cache."""
    if (tiers := taken.tiers) is None:
        return
    moves = CounterMetricFamily("vera_page_moves", "Pages that changed their tier.", labels=["from", "to"])
    for (source, target), count in taken.page_moves.items():
        moves.add_metric([source, target], count)
    hits = CounterMetricFamily("vera_page_hits", "Pages that error control asked for, by where they were.", labels=["tier"])
    hits.add_metric(["warm"], tiers.hits - tiers.cold_hits)
    hits.add_metric(["cold"], tiers.cold_hits)
    yield from (moves, hits)
    yield _counter("decode_steps", "Steps times sequences served within bounds.", tiers.decode_steps)
    yield _counter("recompute_steps", "Those of them in which a cold page was restored.", tiers.recompute_steps)
    yield _counter("recompute_seconds", "Time spent on restoring cold pages.", tiers.restore_seconds)
    yield _counter("uncovered_hits", "Hits on cold pages that were left to their sketch.", tiers.uncovered_hits)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"vera_{name}", meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"vera_{name}", meaning, value=value)


@contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("a metric could not be counted")
