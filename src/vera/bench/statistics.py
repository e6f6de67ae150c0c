"""From samples to figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


def percentile(samples: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest sample that at least `share` of the samples do not exceed. It is always one of them."""
    assert samples and 0 < share <= 1
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def decode_figures(step_seconds: Sequence[float], batch: int) -> dict[str, Any]:
    """What every decode run reports about its steps, each of which made one token for each of `batch` sequences."""
    return {
        "batch": batch,
        "steps": len(step_seconds),
        "decode_tokens_per_s": batch * len(step_seconds) / sum(step_seconds),
        "step_ms_p50": 1e3 * percentile(step_seconds, 0.50),
        "step_ms_p99": 1e3 * percentile(step_seconds, 0.99),
    }


def merge_repeats(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One outcome for several runs of the same subject: of each number the median, and under "spread" its [min, max].

    What is not a number is taken from the first run that worked. Runs that did not work are counted under
    "failed_repeats"; if none worked, the first is what is returned.
    """
    worked = [outcome for outcome in outcomes if not is_absent(outcome)]
    if not worked:
        return dict(outcomes[0])
    merged = dict(worked[0])
    if len(worked) > 1:
        columns: dict[str, list[Any]] = {name: [outcome.get(name) for outcome in worked] for name in merged}
        numbers = {name: values for name, values in columns.items() if all(map(_is_number, values))}
        merged |= {name: median(values) for name, values in numbers.items()}
        merged["spread"] = {name: [min(values), max(values)] for name, values in numbers.items()}
    if len(worked) < len(outcomes):
        merged["failed_repeats"] = len(outcomes) - len(worked)
    return merged


def is_absent(outcome: Mapping[str, Any]) -> bool:
    """Whether the run gave no figures: its subject is missing, or it failed."""
    return "missing" in outcome or "failed" in outcome


def agreeing(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two answers have in common from the start."""
    for i, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return i
    return min(len(tokens), len(others))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
