"""What Prometheus reads at `/metrics`: a registry of the server's own; what each metric is stands in `vera.metrics.registry`.

Counters of the engine and the cache are read from a snapshot at each scrape; latencies are observed as answers go out. Nothing
here can disturb serving: what goes wrong while counting is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vera.engine.request import Update
from vera.metrics.registry import METRICS, Kind
from vera.server.snapshot import Snapshot

_log = logging.getLogger(__name__)

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_ERROR_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25)


@dataclass(frozen=True, slots=True)
class Overview:
    """How a service is operated, for Prometheus."""

    profile: str | None
    version: str | None
    rollout_weight: float
    """Percent."""
    degraded_share: float
    shadows_replayed: int
    shadows_left_out: int


class ServerMetrics:
    """Observed on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first_token = self._histogram("vera_time_to_first_token_seconds", _TTFT_BUCKETS)
        self._inter_token = self._histogram("vera_inter_token_latency_seconds", _ITL_BUCKETS)
        self._end_to_end = self._histogram("vera_e2e_request_latency_seconds", _E2E_BUCKETS)
        self._estimated_error = self._histogram("vera_attention_error_estimated", _ERROR_BUCKETS)
        self._true_error = self._histogram("vera_attention_error_true", _ERROR_BUCKETS)
        responses = METRICS["vera_http_responses_total"]
        self._responses = Counter(responses.name, responses.meaning, responses.labels, registry=self.registry)
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self._num_audits = 0

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, METRICS[name].meaning, buckets=buckets, registry=self.registry)

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

    def render(self, snapshot: Snapshot | None, overview: Overview | None = None) -> bytes:
        """The text that Prometheus reads. None: there is no engine yet, or nothing is operated."""
        if snapshot is not None:
            self._take_audits(snapshot)
        self._engine.snapshot, self._engine.overview = snapshot, overview
        return generate_latest(self.registry)

    def _take_audits(self, snapshot: Snapshot) -> None:
        """Observes the audits since the last scrape, as far as they are still kept."""
        new = snapshot.num_audits - self._num_audits
        self._num_audits = snapshot.num_audits
        for audit in snapshot.audits[-new:] if new > 0 else ():
            self._true_error.observe(audit.true_error)


class _EngineCollector(Collector):
    """Turns the latest snapshot into metrics."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.overview: Overview | None = None

    def collect(self) -> Iterator[Metric]:
        if self.overview is not None:
            yield from _operation_metrics(self.overview)
        if (taken := self.snapshot) is None:
            return
        stats = taken.stats
        yield _plain("vera_num_requests_running", taken.num_running)
        yield _plain("vera_num_requests_waiting", taken.num_waiting)
        yield _plain("vera_prompt_tokens_total", stats.prompt_tokens)
        yield _plain("vera_generation_tokens_total", stats.generated_tokens)
        yield _plain("vera_prefix_cache_queries_total", stats.prompt_tokens)
        yield _plain("vera_prefix_cache_hits_total", stats.cached_tokens)
        yield _plain("vera_num_preemptions_total", stats.preemptions)
        yield _labelled("vera_request_success_total", (((reason,), count) for reason, count in stats.finished.items()))
        yield from _cache_metrics(taken)
        yield from _tier_metrics(taken)


def _cache_metrics(taken: Snapshot) -> Iterator[Metric]:
    yield _labelled("vera_cache_bytes", (((tier, device), used) for tier, device, used, _ in taken.memory))
    yield _labelled("vera_cache_capacity_bytes", (((tier, device), most) for tier, device, _, most in taken.memory))
    yield _labelled("vera_cache_pages", (((tier,), count) for tier, count in taken.pages.items()))
    yield _plain("vera_cache_idle_bytes", taken.idle_bytes)


def _tier_metrics(taken: Snapshot) -> Iterator[Metric]:
    """Nothing for a native cache."""
    if (tiers := taken.tiers) is None:
        return
    yield _labelled("vera_page_moves_total", taken.page_moves.items())
    yield _labelled("vera_page_hits_total", ((("warm",), tiers.hits - tiers.cold_hits), (("cold",), tiers.cold_hits)))
    yield _plain("vera_decode_steps_total", tiers.decode_steps)
    yield _plain("vera_recompute_steps_total", tiers.recompute_steps)
    yield _plain("vera_recompute_seconds_total", tiers.restore_seconds)
    yield _plain("vera_uncovered_hits_total", tiers.uncovered_hits)


def _operation_metrics(overview: Overview) -> Iterator[Metric]:
    version = (overview.profile or "", overview.version or "")
    yield _labelled("vera_params_version_info", [(version, 1)])
    yield _plain("vera_rollout_weight", overview.rollout_weight)
    yield _plain("vera_degraded", overview.degraded_share)
    shadows = {("replayed",): overview.shadows_replayed, ("left_out",): overview.shadows_left_out}
    yield _labelled("vera_shadow_answers_total", shadows.items())


def _plain(name: str, value: float) -> Metric:
    """A family of one value."""
    return _labelled(name, [((), value)])


def _labelled(name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """A family with a value for each set of labels."""
    metric = METRICS[name]
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = make(name, metric.meaning, labels=metric.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


@contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception:
        _log.exception("a metric could not be counted")
