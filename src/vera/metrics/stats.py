"""What the engine counts. Counters only grow; a rate is always a ratio of two of them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

RECENT = 10_000
"""Latencies kept for exact recent percentiles."""


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `share` of all values do not exceed. NaN if there is none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds else None


def _milliseconds(seconds: Collection[float], share: float) -> float | None:
    return percentile(seconds, share) * 1e3 if seconds else None


def _recent() -> deque[float]:
    return deque(maxlen=RECENT)


@dataclass(slots=True)
class EngineStats:
    """Written by the engine alone, once a step."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that were admitted."""
    cached_tokens: int = 0
    """Those of them that were found in the prefix index at first admission."""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    """Tokens computed in steps that read a prompt, or rebuilt a preempted request."""
    prefill_seconds: float = 0.0
    """The time of those steps."""
    decode_tokens: int = 0
    """Tokens computed in all other steps: one for each running request."""
    decode_seconds: float = 0.0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests that ended, by reason."""
    time_to_first_token_seconds: deque[float] = field(default_factory=_recent)
    inter_token_seconds: deque[float] = field(default_factory=_recent)

    def snapshot(self) -> dict[str, float | dict[str, int] | None]:
        """JSON-ready; latencies in milliseconds over the last `RECENT` samples, None where there is none."""
        ttft, gaps = self.time_to_first_token_seconds, self.inter_token_seconds
        return {
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens_per_s": _rate(self.prefill_tokens, self.prefill_seconds),
            "decode_tokens_per_s": _rate(self.decode_tokens, self.decode_seconds),
            "preemptions": self.preemptions,
            "finished": dict(self.finished),
            "ttft_ms_p50": _milliseconds(ttft, 0.5),
            "ttft_ms_p99": _milliseconds(ttft, 0.99),
            "itl_ms_p50": _milliseconds(gaps, 0.5),
            "itl_ms_p99": _milliseconds(gaps, 0.99),
        }
