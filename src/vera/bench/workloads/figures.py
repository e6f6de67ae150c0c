"""From runs to figures, ratios and a verdict in words: pure arithmetic.

recompute share   recompute steps / decode steps, of the measured requests that were served within bounds
cached share      prompt tokens that were found in the cache / prompt tokens
ratio             adaptive / native; of rates more is better, of latencies and bytes less
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vera.bench.statistics import is_absent

Figures = Mapping[str, Any]

RATES = ("qps", "output_tokens_per_s", "goodput_qps")
LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p50", "e2e_ms_p99")
NAMES = {
    "qps": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "goodput_qps": "good requests/s",
    "ttft_ms_p50": "TTFT P50 ms",
    "ttft_ms_p99": "TTFT P99 ms",
    "itl_ms_p50": "ITL P50 ms",
    "itl_ms_p99": "ITL P99 ms",
    "e2e_ms_p50": "end-to-end P50 ms",
    "e2e_ms_p99": "end-to-end P99 ms",
}
_COMPARED = (*RATES, *LATENCIES, "cpu_seconds", "peak_process_bytes")
_SAME = 0.05
"""A ratio that is off from 1 by less is called no difference."""
_WORSE = 1.10
"""From here on a latency is named as worse."""
_FULL = 0.9
"""A cache that never held this share of its ceiling was not short of memory."""


def run_figures(result: Figures, *, told: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one run: `result` is what `run_serve` returned, the rest what the service told of the same time."""
    used = result["vera"]
    steps = used.get("decode_steps", 0)
    prompt_tokens = result["total_input_tokens"]
    return {
        "qps": result["request_throughput"],
        "output_tokens_per_s": result["output_throughput"],
        "goodput_qps": result["request_goodput"],
        **{f"{name}_ms_p{rank}": result[f"p{rank}_{key}_ms"] for name, key in _METRICS for rank in (50, 99)},
        "seconds": result["duration"],
        "completed": result["completed"],
        "prompt_tokens": prompt_tokens,
        "output_tokens": result["total_output_tokens"],
        "cached_share": result["total_cached_tokens"] / prompt_tokens if prompt_tokens else None,
        "cached_tokens": used.get("cached_tokens"),
        "bounded_steps": steps,
        "hits_per_step": used.get("hits", 0) / steps if steps else None,
        "recompute_share": used.get("recompute_steps", 0) / steps if steps else None,
        "uncovered_hits": used.get("uncovered_hits", 0),
        "client_cpu_share": result["client_cpu_share"],
        **told,
    }


def ratios(native: Figures, adaptive: Figures) -> dict[str, float | None]:
    """Adaptive by native. None: one of them has no such figure, or native's is 0."""
    if is_absent(native) or is_absent(adaptive):
        return dict.fromkeys(_COMPARED)
    return {name: _ratio(native.get(name), adaptive.get(name)) for name in _COMPARED}


def ratio_spread(natives: Sequence[Figures], adaptives: Sequence[Figures]) -> dict[str, list[float]]:
    """For each figure [least, most] of the ratios of runs that followed each other."""
    pairs = [ratios(native, adaptive) for native, adaptive in zip(natives, adaptives, strict=True)]
    columns = {name: [value for pair in pairs if (value := pair[name]) is not None] for name in _COMPARED}
    return {name: [min(values), max(values)] for name, values in columns.items() if values}


def verdict(native: Figures, adaptive: Figures, ratio: Figures, spread: Mapping[str, Sequence[float]], *, ceiling: int) -> str:
    """Whether an adaptive cache helped here, what it cost, and what the reader should know before believing it."""
    for name, run in (("native", native), ("adaptive", adaptive)):
        if is_absent(run):
            return f"Not compared, because {name} failed: {run['failed']}."
    sentences = [_helps(ratio["qps"], spread.get("qps", ()))]
    if worse := [name for name in LATENCIES if (ratio[name] or 0) > _WORSE]:
        sentences.append("Worse than native: " + ", ".join(f"{NAMES[name]} {ratio[name]:.2f}x" for name in worse) + ".")
    if native["peak_cache_bytes"] < _FULL * ceiling:
        sentences.append("Native did not fill its ceiling, so memory was not what held it back.")
    if not adaptive["bounded_steps"]:
        sentences.append("No step was served within bounds: the sequences are not above min_context.")
    return " ".join(sentences)


def _helps(qps: float, spread: Sequence[float]) -> str:
    told = f"{qps:.2f}x native's requests a second at the same ceiling"
    if spread and spread[0] < 1 < spread[-1]:
        return f"Adaptive does not help here beyond the spread of the runs: {told} ({spread[0]:.2f}x to {spread[-1]:.2f}x)."
    if qps >= 1 + _SAME:
        return f"Adaptive helps: {told}."
    if qps > 1 - _SAME:
        return f"Adaptive does not help here, and costs next to nothing: {told}."
    return f"Adaptive does not help here, it costs: {told}."


def _ratio(native: float | None, adaptive: float | None) -> float | None:
    return adaptive / native if native and adaptive is not None else None


_METRICS = (("ttft", "ttft"), ("itl", "itl"), ("e2e", "e2el"))
"""Our names of latencies, and those of `vera bench serve`."""
