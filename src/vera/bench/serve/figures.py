"""From answers to figures: pure arithmetic, with the definitions and the keys of `vllm bench serve`.

TTFT    from sending to the first content chunk
ITL     between a content chunk and the next; one sample a gap
E2EL    from sending to the end of the answer
TPOT    (E2EL - TTFT) / (output tokens - 1); answers of one token have none, and keep every limit on it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vera.bench.serve.answer import Answer


def serving_figures(
    answers: Sequence[Answer],
    seconds: float,
    *,
    goodput: Mapping[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """All figures of a run that took `seconds`. Limits in `goodput` are milliseconds.

    Failed answers count as `failed` and in nothing else. A statistic without a sample is None.
    """
    done = [answer for answer in answers if answer.error is None]
    total_input = sum(answer.prompt_tokens for answer in done)
    total_output = sum(answer.output_tokens for answer in done)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": sum(answer.cached_tokens for answer in done),
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(is_good(answer, goodput) for answer in done) / seconds if goodput else None,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
        "max_output_tokens_per_s": peak_output_rate(done),
        "max_concurrent_requests": peak_concurrency(done),
        "without_usage": sum(not answer.counted for answer in done),
    }
    for metric in metrics:
        figures |= _statistics(metric, _samples(metric, done), percentiles)
    return figures


def tpot(answer: Answer) -> float | None:
    """Seconds for each token after the first; None where there are none."""
    if answer.output_tokens < 2:
        return None
    return (answer.e2e_seconds - answer.ttft_seconds) / (answer.output_tokens - 1)


def is_good(answer: Answer, goodput: Mapping[str, float]) -> bool:
    """Whether an answer keeps all limits, which are in milliseconds."""
    seconds = {"ttft": answer.ttft_seconds, "tpot": tpot(answer) or 0.0, "e2el": answer.e2e_seconds}
    return all(1e3 * seconds[name] <= limit for name, limit in goodput.items())


def peak_output_rate(done: Sequence[Answer]) -> float:
    """Most tokens that arrived in one second, seconds counted from the first request. A chunk brings its share of the answer."""
    if not done:
        return 0.0
    start = min(answer.sent_at for answer in done)
    tokens: dict[int, float] = {}
    for answer in done:
        share = answer.output_tokens / (1 + len(answer.gaps_seconds))
        arrived = answer.sent_at + answer.ttft_seconds - start
        for gap in (0.0, *answer.gaps_seconds):
            arrived += gap
            tokens[int(arrived)] = tokens.get(int(arrived), 0.0) + share
    return max(tokens.values())


def peak_concurrency(done: Sequence[Answer]) -> int:
    """Most requests that were under way together; one that ends as another is sent does not overlap it."""
    changes = [(answer.sent_at, 1) for answer in done] + [(answer.sent_at + answer.e2e_seconds, -1) for answer in done]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def sum_usage(usages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What servers report with each answer, over all answers, in the same shape.

    Whole numbers are counts and are added; other numbers become `{"mean", "max"}` over the answers that have them; texts and
    the like are left out.
    """
    by_name: dict[str, list[Any]] = {}
    for usage in usages:
        for name, value in usage.items():
            by_name.setdefault(name, []).append(value)
    summed = {name: _combined(values) for name, values in by_name.items()}
    return {name: value for name, value in summed.items() if value is not None}


def _combined(values: list[Any]) -> Any:
    if parts := [value for value in values if isinstance(value, Mapping)]:
        return sum_usage(parts) or None
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if not numbers:
        return None
    if all(isinstance(number, int) for number in numbers):
        return sum(numbers)
    return {"mean": sum(numbers) / len(numbers), "max": max(numbers)}


def _samples(metric: str, done: Sequence[Answer]) -> list[float]:
    """In seconds."""
    match metric:
        case "ttft":
            return [answer.ttft_seconds for answer in done]
        case "tpot":
            return [value for answer in done if (value := tpot(answer)) is not None]
        case "itl":
            return [gap for answer in done for gap in answer.gaps_seconds]
        case "e2el":
            return [answer.e2e_seconds for answer in done]
        case "client_queue_time":
            return [answer.queued_seconds for answer in done]
        case "e2el_including_client_queue":
            return [answer.queued_seconds + answer.e2e_seconds for answer in done]
    raise AssertionError(metric)


def _statistics(metric: str, samples: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds; percentiles lie between two samples where they have to."""
    names = {f"p{percentile:g}_{metric}_ms": percentile for percentile in percentiles}
    if not samples:
        return dict.fromkeys([f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms", *names])
    milliseconds = 1e3 * np.asarray(samples)
    return {
        f"mean_{metric}_ms": math.fsum(milliseconds) / len(samples),
        f"median_{metric}_ms": float(np.median(milliseconds)),
        f"std_{metric}_ms": float(np.std(milliseconds)),
        **{name: float(np.percentile(milliseconds, percentile)) for name, percentile in names.items()},
    }
