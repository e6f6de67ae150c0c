"""Made-up machines: figures as formulas of settings, for searches that take no time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from vera.tune.space import DIMENSIONS, Space
from vera.tune.trial import Figures

SPACE = Space(DIMENSIONS, {})
START = {
    "attention_tolerance": 0.015,
    "hot_score_threshold": 0.7,
    "hot_max_share": 0.075,
    "cold_drop_step": 256,
    "recompute_layer_limit": 16,
    "cache_max_size_ratio": 0.6,
}


def figures(memory: float = 0.4, latency: float = 0.6, kl: float = 1e-4, *, p99: float = 0.8) -> Figures:
    return Figures(latency=latency, p99=p99, memory=memory, process=0.5, kl_mean=kl, top1_agreement=0.99, recompute_share=0.1)


def plausible(point: dict[str, Any]) -> Figures:
    """A higher tolerance is faster and drifts more, a larger hot share takes memory and saves hits; 9 layers are best for P99."""
    tolerance, hot = point["attention_tolerance"], point["hot_max_share"]
    latency = 0.5 + 0.1 * math.log(0.05 / tolerance) + 0.3 * (hot - 0.1) ** 2
    return replace(
        figures(memory=0.3 + hot, latency=latency, kl=0.6 * tolerance**2),
        p99=latency + 0.01 * abs(point["recompute_layer_limit"] - 9),
    )


class Machine:
    """Measures by a formula, and takes `seconds` of its own clock for it."""

    def __init__(self, formula: Any = plausible, *, seconds: float = 60.0) -> None:
        self.now = 0.0
        self.asked: list[dict[str, Any]] = []
        self._formula = formula
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def measure(self, point: dict[str, Any]) -> Any:
        self.asked.append(dict(point))
        self.now += self._seconds
        return self._formula(point)
