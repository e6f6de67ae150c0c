"""A result for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vera.bench.serve.settings import METRICS

_BUSY_CLIENT = 0.8
"""Share of a core from which on the client may have been what was measured."""
_LATE_MS = 50.0
"""An arrival that is sent this much late was not sent when it should have been."""
_METRIC_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_queue_time": "waiting in the client",
    "e2el_including_client_queue": "end-to-end, waiting included",
}


def render_serve(result: Mapping[str, Any]) -> RenderableType:
    """Two tables of what `run_serve` returned, and what a reader should know before trusting them."""
    return Group(Text(_title(result)), _totals(result), _latencies(result), *(Text(note) for note in _notes(result)))


def _title(result: Mapping[str, Any]) -> str:
    rate = result["request_rate"]
    arriving = "all at once" if rate == "inf" else f"{rate:g} a second"
    return f"serve, {result['num_requests']} requests, {arriving} ({result['dataset_name']}, {result['model_id']})"


def _totals(result: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _lines(result):
        table.add_row(name, value)
    return table


def _lines(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "completed", f"{result['completed']:,}"
    yield "failed", f"{result['failed']:,}"
    if result["unfinished"]:
        yield "unfinished", f"{result['unfinished']:,}"
    yield "duration s", f"{result['duration']:,.2f}"
    yield "input tokens", f"{result['total_input_tokens']:,}"
    if result["total_cached_tokens"]:
        yield "of them cached", f"{result['total_cached_tokens']:,}"
    yield "output tokens", f"{result['total_output_tokens']:,}"
    yield "requests/s", f"{result['request_throughput']:,.2f}"
    if result["request_goodput"] is not None:
        yield "good requests/s", f"{result['request_goodput']:,.2f}"
    yield "output tokens/s", f"{result['output_throughput']:,.1f}"
    yield "all tokens/s", f"{result['total_token_throughput']:,.1f}"
    yield "peak output tokens/s", f"{result['max_output_tokens_per_s']:,.0f}"
    yield "peak concurrent requests", f"{result['max_concurrent_requests']:,}"
    for name, value in _flat(result["vera"]):
        yield f"vera: {name}", f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _flat(counts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in counts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name} ")
        else:
            yield f"{above}{name}".replace("_", " "), value


def _latencies(result: Mapping[str, Any]) -> Table:
    """A line a metric; the columns are whatever statistics the result has of it."""
    measured = [metric for metric in METRICS if f"mean_{metric}_ms" in result]
    statistics = _statistics(result, measured[0]) if measured else []
    table = Table()
    table.add_column("ms")
    for statistic in statistics:
        table.add_column(statistic, justify="right")
    for metric in measured:
        values = [result[f"{statistic}_{metric}_ms"] for statistic in statistics]
        table.add_row(_METRIC_NAMES[metric], *("-" if value is None else f"{value:,.2f}" for value in values))
    return table


def _statistics(result: Mapping[str, Any], metric: str) -> list[str]:
    ending = f"_{metric}_ms"
    return [key.removesuffix(ending) for key in result if key.endswith(ending) and "_" not in key.removesuffix(ending)]


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    if result["interrupted"]:
        yield "Interrupted: the figures are those of the requests that had ended."
    if result["first_error"] is not None:
        yield f"The first error: {result['first_error']}"
    if result["without_usage"]:
        yield f"{result['without_usage']} answers came without token counts: their chunks were counted instead."
    if result["client_cpu_share"] > _BUSY_CLIENT:
        yield f"The client used {result['client_cpu_share']:.0%} of a core: it may have slowed down what it measured."
    if result["max_send_lag_ms"] > _LATE_MS:
        yield f"The client sent up to {result['max_send_lag_ms']:.0f} ms late: arrivals were not quite those asked for."
