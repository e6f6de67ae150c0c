"""When adaptive serving is given up for native, and how it comes back. Pure: signals and the time in, a state out.

`closed`: adaptive. `open`: native. `half-open`: a share of new requests is adaptive again, to see whether it holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

from vera.errors import ConfigError


class BreakerState(StrEnum):
    """As electricians say it: an open breaker lets nothing through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Override(StrEnum):
    """A person's decision, which signals do not change."""

    NONE = "none"
    OPEN = "open"
    """Native until the override ends."""
    CLOSED = "closed"
    """Adaptive until the override ends, whatever the signals say."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a signal trips, and below what it is well again. Between the two it is neither."""

    trip: float
    clear: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.trip) and math.isfinite(self.clear) and 0 <= self.clear < self.trip):
            raise ConfigError(f"bounds trip={self.trip!r}, clear={self.clear!r}: clear must be from 0 up and below trip")


@dataclass(frozen=True, slots=True)
class Signals:
    """What was seen since the last look. None: nothing was."""

    audit_error: float | None = None
    """Mean true error of audits, relative to the value norms."""
    uncovered_per_step: float | None = None
    """Uncovered hits by bounded decode steps."""
    itl_p99_seconds: float | None = None
    memory_share: float | None = None
    """Of the memory that the process may have, what is in use."""
    nonfinite: int = 0
    """Values that were not finite. One trips at once."""
    adaptive_requests: int = 0
    """Requests that were served adaptively and have finished."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Bounds of None switch a signal off."""

    audit_error: Bounds | None = Bounds(0.05, 0.03)
    uncovered_per_step: Bounds | None = Bounds(0.5, 0.1)
    itl_p99_seconds: Bounds | None = None
    """Off: what is slow depends on the machine and the load."""
    memory_share: Bounds | None = Bounds(0.95, 0.90)
    confirm: int = 2
    """Looks that must find something beyond its bound, with none in between that finds all well."""
    cool_down_seconds: float = 60.0
    """How long it stays open after the first trip."""
    growth: float = 2.0
    """How many times longer after each further trip."""
    max_cool_down_seconds: float = 3600.0
    half_open_share: float = 0.1
    """Share of request keys that are adaptive again while half-open."""
    half_open_seconds: float = 60.0
    """How long all must be well, half-open, before it closes."""
    half_open_requests: int = 20
    """Fewest adaptive requests that must have finished in that time."""
    forget_seconds: float = 3600.0
    """After this long closed, earlier trips no longer lengthen the cool-down."""

    def __post_init__(self) -> None:
        for name in ("confirm", "half_open_requests"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 up")
        for name in ("cool_down_seconds", "half_open_seconds", "forget_seconds", "max_cool_down_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a number of seconds above 0")
        if self.max_cool_down_seconds < self.cool_down_seconds:
            raise ConfigError(
                f"max_cool_down_seconds={self.max_cool_down_seconds!r} is below cool_down_seconds={self.cool_down_seconds!r}"
            )
        if not 1 <= self.growth < math.inf:
            raise ConfigError(f"growth={self.growth!r} must be from 1 up")
        if not 0 < self.half_open_share < 1:
            raise ConfigError(f"half_open_share={self.half_open_share!r} must be between 0 and 1")

    @property
    def bounds(self) -> dict[str, Bounds]:
        """By signal, those that are on."""
        named = {name: getattr(self, name) for name in ("audit_error", "uncovered_per_step", "itl_p99_seconds", "memory_share")}
        return {name: bounds for name, bounds in named.items() if bounds is not None}


@dataclass(frozen=True, slots=True)
class Breaker:
    """Where the breaker stands. `since` and `well_since` are seconds of a clock that only goes forward."""

    state: BreakerState = BreakerState.CLOSED
    override: Override = Override.NONE
    trips: int = 0
    """Those that still lengthen the cool-down."""
    reason: str = "adaptive from the start"
    since: float = 0.0
    """When it came to this state."""
    suspects: int = 0
    """Closed: looks so far that found something beyond its bound."""
    well_since: float = 0.0
    """Half-open: since when all is well."""
    requests: int = 0
    """Half-open: adaptive requests that have finished since then."""

    def to_dict(self) -> dict[str, Any]:
        """What an event keeps: times of a clock mean nothing after a restart."""
        kept = asdict(self)
        return {name: kept[name] for name in ("state", "override", "trips")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, reason: str, now: float) -> Self:
        """What `to_dict` gave, with its waiting times begun anew."""
        return cls(
            BreakerState(values["state"]), Override(values["override"]), values["trips"], reason=reason, since=now, well_since=now
        )


def look(breaker: Breaker, signals: Signals, now: float, settings: BreakerSettings) -> Breaker:
    """The breaker after one look. Its state has changed or not; `reason` says why it is what it is."""
    if breaker.override is not Override.NONE:
        return breaker
    if breaker.state is BreakerState.CLOSED:
        return _look_closed(breaker, signals, now, settings)
    if breaker.state is BreakerState.OPEN:
        return _look_open(breaker, signals, now, settings)
    return _look_half_open(breaker, signals, now, settings)


def overridden(breaker: Breaker, override: Override, reason: str, now: float) -> Breaker:
    """By hand. Ending an override that held it open leaves it half-open: the careful way back."""
    if override is not Override.NONE:
        return _moved(replace(breaker, override=override), BreakerState(override.value), reason, now)
    state = BreakerState.HALF_OPEN if breaker.state is BreakerState.OPEN else breaker.state
    return _moved(replace(breaker, override=override), state, reason, now)


def cool_down(breaker: Breaker, settings: BreakerSettings) -> float:
    """Seconds that an open breaker stays open."""
    seconds = settings.cool_down_seconds
    for _ in range(breaker.trips - 1):
        if seconds >= settings.max_cool_down_seconds or settings.growth == 1:
            break
        seconds *= settings.growth
    return min(seconds, settings.max_cool_down_seconds)


def _look_closed(breaker: Breaker, signals: Signals, now: float, settings: BreakerSettings) -> Breaker:
    if breaker.trips and now - breaker.since >= settings.forget_seconds:
        breaker = replace(breaker, trips=0)
    if found := _tripping(signals, settings):
        breaker = replace(breaker, suspects=breaker.suspects + 1)
        if signals.nonfinite or breaker.suspects >= settings.confirm:
            return _tripped(breaker, found, now)
        return breaker
    return replace(breaker, suspects=0) if _is_well(signals, settings) else breaker


def _look_open(breaker: Breaker, signals: Signals, now: float, settings: BreakerSettings) -> Breaker:
    """Nothing adaptive runs, so the only signal that says something is memory."""
    waits = cool_down(breaker, settings)
    if now - breaker.since < waits or not _is_well(Signals(memory_share=signals.memory_share), settings):
        return breaker
    share = f"{settings.half_open_share:.0%} of new requests are adaptive again"
    return _moved(breaker, BreakerState.HALF_OPEN, f"after {waits:.0f} s of native serving {share}", now)


def _look_half_open(breaker: Breaker, signals: Signals, now: float, settings: BreakerSettings) -> Breaker:
    if found := _tripping(signals, settings):
        return _tripped(breaker, found, now)
    if not _is_well(signals, settings):
        return replace(breaker, well_since=now, requests=0)
    breaker = replace(breaker, requests=breaker.requests + signals.adaptive_requests)
    if now - breaker.well_since < settings.half_open_seconds or breaker.requests < settings.half_open_requests:
        return breaker
    reason = f"all well for {now - breaker.well_since:.0f} s and {breaker.requests} adaptive requests"
    return _moved(breaker, BreakerState.CLOSED, reason, now)


def _tripped(breaker: Breaker, reason: str, now: float) -> Breaker:
    return _moved(replace(breaker, trips=breaker.trips + 1), BreakerState.OPEN, reason, now)


def _moved(breaker: Breaker, state: BreakerState, reason: str, now: float) -> Breaker:
    return replace(breaker, state=state, reason=reason, since=now, well_since=now, suspects=0, requests=0)


def _tripping(signals: Signals, settings: BreakerSettings) -> str:
    """What is at or beyond its bound, with both values; empty: nothing. NaN is beyond any bound."""
    found = [f"{signals.nonfinite} values are not finite"] if signals.nonfinite else []
    for name, bounds in settings.bounds.items():
        value = getattr(signals, name)
        if value is not None and not value < bounds.trip:
            found.append(f"{name} {value:.4g} has reached {bounds.trip:g}")
    return "; ".join(found)


def _is_well(signals: Signals, settings: BreakerSettings) -> bool:
    """All that was seen is below where it clears."""
    values = ((getattr(signals, name), bounds) for name, bounds in settings.bounds.items())
    return not signals.nonfinite and all(value is None or value < bounds.clear for value, bounds in values)
