"""The steps of a rollout, in Argo Rollouts' words: a weight is set, a pause passes, an analysis follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

from vera.errors import ConfigError

_WEEK = 7 * 24 * 3600.0
_MOST_SAMPLES = 10**9


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Step:
    """One weight and what has to be there before the next one."""

    weight: float
    """Share of request keys that the candidate serves, in percent."""
    pause_seconds: float = 60.0
    """The least time at this weight."""
    min_samples: int = 50
    """The fewest finished requests of each arm that an analysis needs; at 100%, of the candidate alone."""

    def __post_init__(self) -> None:
        if not _is_number(self.weight) or not 0 < self.weight <= 100:
            raise ConfigError(f"weight={self.weight!r} must be a percentage above 0, and at most 100")
        if not _is_number(self.pause_seconds) or not 0 <= self.pause_seconds <= _WEEK:
            raise ConfigError(f"pause_seconds={self.pause_seconds!r} must be from 0 to a week ({_WEEK:g})")
        if not _is_count(self.min_samples) or not 1 <= self.min_samples <= _MOST_SAMPLES:
            raise ConfigError(
                f"min_samples={self.min_samples!r} must be a whole number from 1 (no step passes unseen) to {_MOST_SAMPLES}"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps. After the last one has passed, the candidate is promoted."""

    steps: tuple[Step, ...] = (Step(5.0), Step(25.0), Step(50.0), Step(100.0))
    patience_seconds: float = 3600.0
    """How long a step may wait for samples beyond its pause; then the rollout is held, because nothing can be said."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        if not self.steps:
            raise ConfigError("a rollout needs a step, such as 5:60:50 (percent, seconds, samples)")
        weights = [step.weight for step in self.steps]
        if any(after <= before for before, after in pairwise(weights)):
            raise ConfigError(f"the weights {', '.join(f'{weight:g}' for weight in weights)} must grow from step to step")
        if not _is_number(self.patience_seconds) or not 0 < self.patience_seconds <= _WEEK:
            raise ConfigError(f"patience_seconds={self.patience_seconds!r} must be above 0, and at most a week ({_WEEK:g})")

    @classmethod
    def parse(cls, text: str, *, patience_seconds: float = 3600.0) -> Self:
        """From `WEIGHT[:PAUSE[:SAMPLES]],...`, such as `5:60:50,25:120,100`; what is left out takes its default."""
        return cls(tuple(_parse_step(part) for part in text.split(",")), patience_seconds)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        return cls(tuple(Step(**step) for step in values["steps"]), values["patience_seconds"])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def _parse_step(text: str) -> Step:
    parts = [part.strip() for part in text.split(":")]
    kinds = {"weight": float, "pause_seconds": float, "min_samples": int}
    try:
        values = {name: kind(part) for (name, kind), part in zip(kinds.items(), parts, strict=False)}
    except ValueError:
        raise _bad_step(text) from None
    if len(parts) > len(kinds):
        raise _bad_step(text)
    return Step(**values)


def _bad_step(text: str) -> ConfigError:
    return ConfigError(
        f"step {text.strip()!r} is not of the form WEIGHT[:PAUSE[:SAMPLES]], such as 5:60:50 (percent, seconds, requests)"
    )
