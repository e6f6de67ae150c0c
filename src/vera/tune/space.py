"""What is searched: settings of the cache with their ranges, on a grid as coarse as measurements can tell apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vera.tune.trial import Point


@dataclass(frozen=True, slots=True)
class Dimension:
    """One setting. The search knows it as a number from 0 to 1."""

    name: str
    """Of CacheConfig."""
    low: float
    high: float
    step: float | None
    """Distance of two values; None: the scale is logarithmic and values have two digits."""

    def at(self, unit: float) -> float | int:
        """The value at a place from 0 to 1; of the type of its bounds."""
        unit = min(max(unit, 0.0), 1.0)
        if self.step is None:
            value = self.low * (self.high / self.low) ** unit
            return min(max(float(f"{value:.1e}"), self.low), self.high)
        steps = round(unit * (self.high - self.low) / self.step)
        value = self.low + steps * self.step
        return value if isinstance(value, int) else round(value, 6)

    def place_of(self, value: float) -> float:
        """The place from 0 to 1 of a value; for one out of range, the nearest end's."""
        if self.step is None:
            place = math.log(max(value, 1e-12) / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(max(place, 0.0), 1.0)


DIMENSIONS = (
    Dimension("attention_tolerance", 0.005, 0.05, None),
    Dimension("hot_score_threshold", 0.62, 0.78, 0.02),
    Dimension("hot_max_share", 0.025, 0.15, 0.025),
    Dimension("cold_drop_step", 128, 512, 64),
    Dimension("recompute_layer_limit", 8, 16, 2),
    Dimension("cache_max_size_ratio", 0.45, 0.70, 0.05),
)
"""All that can be searched, within the recommended ranges. What matters most comes first."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides which settings can change anything."""

    num_layers: int
    native_bytes: int
    """What a native cache takes for the work."""
    memory_bytes: int
    """What `cache_max_size_ratio` is a share of."""
    has_cold: bool
    """The warm store is too small for all, so pages become cold."""


@dataclass(frozen=True, slots=True)
class Space:
    """The searched settings, and why the others are not."""

    dimensions: tuple[Dimension, ...]
    left_out: dict[str, str]
    """By name, the reason."""

    def point(self, places: Sequence[float]) -> dict[str, float | int]:
        """The values at a place for each dimension."""
        return {dimension.name: dimension.at(place) for dimension, place in zip(self.dimensions, places, strict=True)}

    def places(self, point: Point) -> list[float]:
        return [dimension.place_of(point[dimension.name]) for dimension in self.dimensions]


def space_for(facts: Facts, given: Mapping[str, Any]) -> Space:
    """The settings that can change something for this work. `given` were set by the user, so they stay."""
    left_out = {}
    for dimension in DIMENSIONS:
        if dimension.name in given:
            left_out[dimension.name] = f"{given[dimension.name]} was given"
        elif why := _why_idle(dimension, facts, given):
            left_out[dimension.name] = why
    return Space(tuple(dimension for dimension in DIMENSIONS if dimension.name not in left_out), left_out)


def _why_idle(dimension: Dimension, facts: Facts, given: Mapping[str, Any]) -> str | None:
    """Why no value of it could change anything. None: it can."""
    if dimension.name == "cache_max_size_ratio":
        if given.get("cache_max_bytes") is not None:
            return f"cache_max_bytes={given['cache_max_bytes']} takes its place"
        if dimension.low * facts.memory_bytes >= facts.native_bytes:
            return (
                f"the lowest, {dimension.low} of {facts.memory_bytes / 2**20:,.1f} MiB, has room for all the work natively "
                f"({facts.native_bytes / 2**20:,.1f} MiB), so no ceiling is felt; one of a smaller --memory-mib would be"
            )
    if dimension.name in ("cold_drop_step", "recompute_layer_limit") and not facts.has_cold:
        return "no page becomes cold, because the warm store has room for all; --cold-share 0.1 is work where that is not so"
    if dimension.name == "recompute_layer_limit" and facts.num_layers <= dimension.low:
        return f"the model has {facts.num_layers} layers, so that every value from {dimension.low} up is the same"
    return None
