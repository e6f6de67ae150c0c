"""Every metric that a Vera server shows, and every figure that is made of them: the one definition of each.

`server.metrics` takes names, labels and help texts from here; docs/metrics.md is written from here (`metrics.document`); the
dashboard and the alert rules in `vera/ops` are tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """What Prometheus calls the type."""

    COUNTER = "counter"
    """Only grows; a restart begins at 0."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Watcher(StrEnum):
    """Who looks at a metric, and acts when it is bad."""

    ALGORITHMS = "algorithms"
    """Heat, tolerance, recompute share, drift."""
    BACKEND = "backend"
    """Latency, page moves, kernel, host copies."""
    OPERATIONS = "operations"
    """Memory level, alerts, load tests, the switch."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of `/metrics`."""

    name: str
    """As it is written there; of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: Kind
    unit: str
    meaning: str
    """What is counted; the help text."""
    bad: str
    """What a bad value looks like and what it means."""
    watchers: tuple[Watcher, ...]
    labels: tuple[str, ...] = ()
    adaptive: bool = False
    """Only an adaptive cache has it, or gives it values."""

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its lines, as queries write them."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that people talk about, made of metrics: a rate, a share, a percentile."""

    name: str
    unit: str
    promql: str
    """The formula, over five minutes and all servers."""
    bad: str
    watchers: tuple[Watcher, ...]
    adaptive: bool = False


_ALGORITHMS, _BACKEND, _OPERATIONS = Watcher.ALGORITHMS, Watcher.BACKEND, Watcher.OPERATIONS

_METRICS = (
    Metric(
        "vera_num_requests_running",
        Kind.GAUGE,
        "requests",
        "Requests that have a seat.",
        "At max_num_seqs all the time: the server is full, and new requests wait.",
        (_OPERATIONS,),
    ),
    Metric(
        "vera_num_requests_waiting",
        Kind.GAUGE,
        "requests",
        "Requests that wait for a seat.",
        "Above 0 for minutes: more comes than is served. Clients get 429 once max_waiting is reached.",
        (_OPERATIONS,),
    ),
    Metric(
        "vera_time_to_first_token_seconds",
        Kind.HISTOGRAM,
        "seconds",
        "From an answer's request to its first token, waiting included.",
        "P99 above the goal: requests wait, or prompts are long and rarely found in the prefix index.",
        (_BACKEND, _OPERATIONS),
    ),
    Metric(
        "vera_inter_token_latency_seconds",
        Kind.HISTOGRAM,
        "seconds",
        "Between two tokens of an answer.",
        "P99 far above P50: steps that read prompts or restore cold pages stand between the others.",
        (_BACKEND, _OPERATIONS),
    ),
    Metric(
        "vera_e2e_request_latency_seconds",
        Kind.HISTOGRAM,
        "seconds",
        "From an answer's request to its end.",
        "Above the goal: see time to first token and inter-token latency; long answers take long.",
        (_OPERATIONS,),
    ),
    Metric(
        "vera_prompt_tokens_total",
        Kind.COUNTER,
        "tokens",
        "Prompt tokens of admitted requests.",
        "Stands still under load: nothing is admitted.",
        (_OPERATIONS,),
    ),
    Metric(
        "vera_generation_tokens_total",
        Kind.COUNTER,
        "tokens",
        "Tokens generated.",
        "Stands still while requests run: the engine hangs.",
        (_BACKEND, _OPERATIONS),
    ),
    Metric(
        "vera_prefix_cache_queries_total",
        Kind.COUNTER,
        "tokens",
        "Prompt tokens looked up in the prefix index.",
        "Read with vera_prefix_cache_hits_total.",
        (_BACKEND,),
    ),
    Metric(
        "vera_prefix_cache_hits_total",
        Kind.COUNTER,
        "tokens",
        "Those of them that were found.",
        "Falls while prompts stay alike: blocks are evicted before they are wanted again.",
        (_BACKEND,),
    ),
    Metric(
        "vera_num_preemptions_total",
        Kind.COUNTER,
        "requests",
        "Requests that lost their pages for a while.",
        "Grows steadily: memory does not hold what is running; work is done twice.",
        (_BACKEND, _OPERATIONS),
    ),
    Metric(
        "vera_request_success_total",
        Kind.COUNTER,
        "requests",
        "Requests that ended, by reason.",
        "error: the model or the server failed. timeout: too slow for the deadlines. abort: clients leave.",
        (_OPERATIONS,),
        labels=("finished_reason",),
    ),
    Metric(
        "vera_http_responses_total",
        Kind.COUNTER,
        "responses",
        "Answered HTTP requests; 499: the client left first.",
        "5xx: the server fails. 429: it is full. 499 in numbers: clients do not wait so long.",
        (_OPERATIONS,),
        labels=("route", "status"),
    ),
    Metric(
        "vera_cache_bytes",
        Kind.GAUGE,
        "bytes",
        "Bytes that the cache takes now.",
        "hot near its capacity is usual, since idle blocks are kept; without them it means preemptions soon.",
        (_BACKEND, _OPERATIONS),
        labels=("tier", "device"),
    ),
    Metric(
        "vera_cache_capacity_bytes",
        Kind.GAUGE,
        "bytes",
        "Most bytes that it may take.",
        "warm falls: the disk of the warm file is full.",
        (_OPERATIONS,),
        labels=("tier", "device"),
    ),
    Metric(
        "vera_cache_idle_bytes",
        Kind.GAUGE,
        "bytes",
        "Bytes of fast memory that are kept for reuse and can be had at any time.",
        "0 under load: nothing is left to give, and little can be found again.",
        (_BACKEND, _OPERATIONS),
    ),
    Metric(
        "vera_cache_pages",
        Kind.GAUGE,
        "pages",
        "Pages by tier; those kept for reuse are among them.",
        "cold grows without end: the warm store is too small for what runs.",
        (_ALGORITHMS, _BACKEND),
        labels=("tier",),
    ),
    Metric(
        "vera_page_moves_total",
        Kind.COUNTER,
        "pages",
        "Pages that changed their tier.",
        "hot to warm and warm to hot equally fast: pages are moved to and fro, heat does not foretell hits.",
        (_ALGORITHMS, _BACKEND),
        labels=("from", "to"),
        adaptive=True,
    ),
    Metric(
        "vera_page_hits_total",
        Kind.COUNTER,
        "pages",
        "Pages that error control asked for, by where they were.",
        "Many: too few pages are hot, or the tolerance is tight. Many cold ones: recomputes, and tokens that come late.",
        (_ALGORITHMS,),
        labels=("tier",),
        adaptive=True,
    ),
    Metric(
        "vera_decode_steps_total",
        Kind.COUNTER,
        "steps",
        "Steps times sequences served within bounds.",
        "Stands still while requests run: they are short, native or exact, so nothing is gained.",
        (_ALGORITHMS,),
        adaptive=True,
    ),
    Metric(
        "vera_recompute_steps_total",
        Kind.COUNTER,
        "steps",
        "Those of them in which a cold page was restored.",
        "Read by vera_decode_steps_total: above recompute_target, too much is cold.",
        (_ALGORITHMS, _BACKEND),
        adaptive=True,
    ),
    Metric(
        "vera_recompute_seconds_total",
        Kind.COUNTER,
        "seconds",
        "Time spent on restoring cold pages.",
        "Near recompute_time_share of all time: recomputing is at its limit, and hits go uncovered.",
        (_BACKEND,),
        adaptive=True,
    ),
    Metric(
        "vera_uncovered_hits_total",
        Kind.COUNTER,
        "hits",
        "Hits on cold pages that were left to their sketch.",
        "Any steady rate: answers are less exact than asked for. Give the warm store room, or recomputing more time.",
        (_ALGORITHMS, _OPERATIONS),
        adaptive=True,
    ),
    Metric(
        "vera_attention_error_estimated",
        Kind.HISTOGRAM,
        "share of the value norms",
        "An answer's mean estimated error of attention outputs, relative to the value norms.",
        "Near attention_tolerance: little room is left before pages must be read exactly.",
        (_ALGORITHMS,),
        adaptive=True,
    ),
    Metric(
        "vera_attention_error_true",
        Kind.HISTOGRAM,
        "share of the value norms",
        "True error of an audited attention output, relative to the value norms.",
        "Above attention_tolerance: bounds do not hold. Degrade, then find out why.",
        (_ALGORITHMS, _OPERATIONS),
        adaptive=True,
    ),
    Metric(
        "vera_params_version_info",
        Kind.GAUGE,
        "1",
        "Always 1; its labels name the version of the cache's settings that serves by default, empty where none is active.",
        "Differs between servers of one profile for longer than a few seconds: one of them refused it; its log says why.",
        (_ALGORITHMS, _OPERATIONS),
        labels=("profile", "version"),
        adaptive=True,
    ),
    Metric(
        "vera_rollout_weight",
        Kind.GAUGE,
        "percent",
        "Share of request keys that the candidate of a rollout serves; 0 while none runs.",
        "Stands still for longer than its pause: the guard holds it, or too few requests come.",
        (_ALGORITHMS, _OPERATIONS),
        adaptive=True,
    ),
    Metric(
        "vera_degraded",
        Kind.GAUGE,
        "share of request keys",
        "Served natively because of the degrade switch: 1 while it is open, 0 while it is closed, between them half-open.",
        "Above 0: a person or the breaker gave up adaptive serving; the audit trail says why. Memory fills as if native.",
        (_ALGORITHMS, _BACKEND, _OPERATIONS),
        adaptive=True,
    ),
    Metric(
        "vera_shadow_answers_total",
        Kind.COUNTER,
        "answers",
        "A candidate's answers that were chosen for a native replay: replayed, or left_out because too many waited or it failed.",
        "left_out grows: the drift of a candidate is judged by few answers; lower the shadow share or the load.",
        (_ALGORITHMS,),
        labels=("result",),
        adaptive=True,
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
"""By name."""


def _percentile(name: str, share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({name}_bucket[5m])))"


def _mean(name: str) -> str:
    return f"sum(rate({name}_sum[5m])) / sum(rate({name}_count[5m]))"


_FIGURES = (
    Figure(
        "qps",
        "requests/s",
        'sum(rate(vera_request_success_total{finished_reason=~"stop|length"}[5m]))',
        "Below what comes in: the queue grows.",
        (_OPERATIONS,),
    ),
    Figure(
        "failed_share",
        "share",
        '(sum(rate(vera_request_success_total{finished_reason=~"error|timeout"}[5m])) or vector(0))'
        " / sum(rate(vera_request_success_total[5m]))",
        "Above 0.01: the model or the server fails, or requests pass their deadlines.",
        (_OPERATIONS,),
    ),
    Figure(
        "http_error_share",
        "share",
        '(sum(rate(vera_http_responses_total{status=~"5.."}[5m])) or vector(0)) / sum(rate(vera_http_responses_total[5m]))',
        "Above 0.01: see the log's request lines with status 500 to 504.",
        (_OPERATIONS,),
    ),
    Figure(
        "generated_tokens_per_second",
        "tokens/s",
        "sum(rate(vera_generation_tokens_total[5m]))",
        "Falls under the same load: longer contexts, prompts that stand in between, restores.",
        (_BACKEND, _OPERATIONS),
    ),
    Figure(
        "prompt_tokens_per_second",
        "tokens/s",
        "sum(rate(vera_prompt_tokens_total[5m]))",
        "Higher than load tests were run with: expect longer waits.",
        (_OPERATIONS,),
    ),
    Figure(
        "ttft_p50",
        "seconds",
        _percentile("vera_time_to_first_token_seconds", 0.5),
        "Grows with the queue.",
        (_BACKEND, _OPERATIONS),
    ),
    Figure(
        "ttft_p99",
        "seconds",
        _percentile("vera_time_to_first_token_seconds", 0.99),
        "Above the goal of the service.",
        (_BACKEND, _OPERATIONS),
    ),
    Figure(
        "itl_p50",
        "seconds",
        _percentile("vera_inter_token_latency_seconds", 0.5),
        "Above the speed of reading, about 0.2.",
        (_BACKEND, _OPERATIONS),
    ),
    Figure(
        "itl_p99",
        "seconds",
        _percentile("vera_inter_token_latency_seconds", 0.99),
        "Many times P50: answers stutter.",
        (_BACKEND, _OPERATIONS),
    ),
    Figure(
        "e2e_p99",
        "seconds",
        _percentile("vera_e2e_request_latency_seconds", 0.99),
        "Near the requests' deadlines.",
        (_OPERATIONS,),
    ),
    Figure(
        "prefix_hit_share",
        "share",
        "sum(rate(vera_prefix_cache_hits_total[5m])) / sum(rate(vera_prefix_cache_queries_total[5m]))",
        "Low with conversations or shared prompts: blocks are evicted too early.",
        (_BACKEND,),
    ),
    Figure(
        "preemptions_per_second",
        "requests/s",
        "sum(rate(vera_num_preemptions_total[5m]))",
        "Above 0 for long: lower max_num_seqs, or give the cache more memory.",
        (_BACKEND, _OPERATIONS),
    ),
    Figure(
        "fast_memory_share",
        "share",
        '(sum(vera_cache_bytes{tier="hot"}) - sum(vera_cache_idle_bytes)) / sum(vera_cache_capacity_bytes{tier="hot"})',
        "Near 1: what runs fills the cache; preemptions follow.",
        (_BACKEND, _OPERATIONS),
    ),
    Figure(
        "warm_store_share",
        "share",
        'sum(vera_cache_bytes{tier="warm"}) / sum(vera_cache_capacity_bytes{tier="warm"})',
        "Near 1: pages become cold; raise warm_bytes if recompute_share is high.",
        (_BACKEND, _OPERATIONS),
        adaptive=True,
    ),
    Figure(
        "tier_share",
        "share of the pages, by tier",
        "sum by (tier) (vera_cache_pages) / ignoring (tier) group_left () sum(vera_cache_pages)",
        "hot near 1 with long contexts: nothing is tiered.",
        (_ALGORITHMS, _BACKEND),
    ),
    Figure(
        "hits_per_step",
        "pages/step",
        "sum(rate(vera_page_hits_total[5m])) / sum(rate(vera_decode_steps_total[5m]))",
        "Above about 30 once answers have settled: heat or tolerance do not suit the load.",
        (_ALGORITHMS,),
        adaptive=True,
    ),
    Figure(
        "cold_hit_share",
        "share",
        'sum(rate(vera_page_hits_total{tier="cold"}[5m])) / sum(rate(vera_page_hits_total[5m]))',
        "Higher than the share of cold pages: what is released is what is needed.",
        (_ALGORITHMS,),
        adaptive=True,
    ),
    Figure(
        "recompute_share",
        "share",
        "sum(rate(vera_recompute_steps_total[5m])) / sum(rate(vera_decode_steps_total[5m]))",
        "Above recompute_target (0.08 to 0.15): the warm store is too small.",
        (_ALGORITHMS, _BACKEND),
        adaptive=True,
    ),
    Figure(
        "recompute_time_share",
        "share",
        "avg(rate(vera_recompute_seconds_total[5m]))",
        "At recompute_time_share: the limit is reached.",
        (_BACKEND,),
        adaptive=True,
    ),
    Figure(
        "uncovered_per_step",
        "hits/step",
        "sum(rate(vera_uncovered_hits_total[5m])) / sum(rate(vera_decode_steps_total[5m]))",
        "Above 0.1: cold pages are wanted more often than they can be restored; drift grows.",
        (_ALGORITHMS, _OPERATIONS),
        adaptive=True,
    ),
    Figure(
        "page_moves_per_second",
        "pages/s, by from and to",
        "sum by (from, to) (rate(vera_page_moves_total[5m]))",
        "High without new requests: pages are moved to and fro.",
        (_ALGORITHMS, _BACKEND),
        adaptive=True,
    ),
    Figure(
        "estimated_error",
        "share of the value norms",
        _mean("vera_attention_error_estimated"),
        "Near attention_tolerance (0.015).",
        (_ALGORITHMS,),
        adaptive=True,
    ),
    Figure(
        "true_error",
        "share of the value norms",
        _mean("vera_attention_error_true"),
        "Above estimated_error: estimates are too low.",
        (_ALGORITHMS,),
        adaptive=True,
    ),
    Figure(
        "true_error_p99",
        "share of the value norms",
        _percentile("vera_attention_error_true", 0.99),
        "Above attention_tolerance by more than skip_share: bounds do not hold.",
        (_ALGORITHMS, _OPERATIONS),
        adaptive=True,
    ),
    Figure(
        "shadow_answers_per_second",
        "answers/s",
        'sum(rate(vera_shadow_answers_total{result="replayed"}[5m]))',
        "0 while a rollout runs: nothing is known of the candidate's drift, and the guard waits.",
        (_ALGORITHMS,),
        adaptive=True,
    ),
)

FIGURES: Mapping[str, Figure] = MappingProxyType({figure.name: figure for figure in _FIGURES})
"""By name."""
