"""The nouns of tuning: what a candidate was measured to do, and what it must do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from vera.errors import ConfigError

Point = Mapping[str, float | int]
"""Values of the searched settings, by their names in CacheConfig."""

_FAILED = 10.0
"""Of a trial that gave no figures: by how much it misses each limit, far more than one that can be measured."""


class Objective(StrEnum):
    """What is made as good as the limits allow."""

    LATENCY = "latency"
    """The mean time between two tokens."""
    MEMORY = "memory"
    """The cache's fast memory."""
    THROUGHPUT = "throughput"
    """Tokens a second of the same bytes of fast memory: what counts where memory decides how many sequences run."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of an adaptive cache, beside a native one that did the same work in the same trial."""

    latency: float
    """Mean time between two tokens, by native's."""
    p99: float
    """99th percentile of it, by native's."""
    memory: float
    """Most bytes of fast memory that the cache used, by native's."""
    process: float
    """Most private memory of the process, by native's."""
    kl_mean: float
    """Mean KL divergence of the next token's distribution from the native cache's with float32 pages, in nats."""
    top1_agreement: float
    """Share of steps in which the most likely token is the same."""
    recompute_share: float
    """Share of decode steps that restored a cold page."""

    @property
    def throughput(self) -> float:
        """Tokens a second of the same bytes of fast memory, by native's; the higher the better."""
        return 1 / (self.latency * self.memory)

    def cost(self, objective: Objective) -> float:
        """What is to be made small."""
        return {Objective.LATENCY: self.latency, Objective.MEMORY: self.memory, Objective.THROUGHPUT: 1 / self.throughput}[
            objective
        ]


@dataclass(frozen=True, slots=True)
class Failed:
    """The candidate could not be measured."""

    why: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What every candidate has to keep. Raises ConfigError for a limit that nothing could keep."""

    max_kl: float = 2e-4
    """Most mean KL divergence, in nats."""
    max_p99_ratio: float = 1.0
    """Most of the 99th percentile of the time between two tokens, by native's."""

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_p99_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value!r} must be a number above 0")

    def violations(self, result: Figures | Failed) -> dict[str, float]:
        """By how much each limit is missed, as a share of it; 0 or less: it is kept."""
        if isinstance(result, Failed):
            return {"kl": _FAILED, "p99": _FAILED}
        return {"kl": result.kl_mean / self.max_kl - 1, "p99": result.p99 / self.max_p99_ratio - 1}

    def are_kept(self, result: Figures | Failed) -> bool:
        return all(violation <= 0 for violation in self.violations(result).values())


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate, measured or failed."""

    number: int
    """From 1; the first one is the settings that the search starts from."""
    point: dict[str, float | int]
    """Values of the searched settings; all others are those that the search starts from."""
    result: Figures | Failed
    seconds: float
    """What the measurement took."""
