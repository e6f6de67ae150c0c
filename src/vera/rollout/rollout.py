"""One rollout as a value: what its events add up to. Pure, so a restart rebuilds exactly what was there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from vera.params import Event
from vera.rollout.guard import Limits
from vera.rollout.plan import Plan, Step


class State(StrEnum):
    """Where a rollout stands."""

    RUNNING = "running"
    PAUSED = "paused"
    """Held: the weight stays. Both arms are served and watched."""
    PROMOTED = "promoted"
    """The candidate is the active version."""
    ABORTED = "aborted"
    """All requests are served as before."""


class Cause(StrEnum):
    """Why a rollout is held."""

    OPERATOR = "operator"
    BREACH = "breach"
    """The guard found a figure beyond its limit and waits for the next analysis."""
    PATIENCE = "patience"
    """There were too few samples for too long."""


STEP = "rollout.step"
HOLD = "rollout.hold"
RESUME = "rollout.resume"
PROMOTE = "rollout.promote"
ABORT = "rollout.abort"
START = "rollout.start"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A candidate on its way, or the end of it."""

    id: int
    """The number of the event that started it."""
    profile: str
    baseline: str | None
    """What the stable arm is served with, as PROFILE@NUMBER. None: natively."""
    candidate: str
    plan: Plan
    limits: Limits
    salt: str
    author: str
    state: State = State.RUNNING
    step: int = 0
    """Index of the step that it is in, or ended in."""
    held: frozenset[Cause] = frozenset()
    """Not empty: it is paused."""
    reason: str = ""
    """Of the latest event."""
    seq: int = 0
    """The number of the latest event."""

    @property
    def is_over(self) -> bool:
        return self.state in (State.PROMOTED, State.ABORTED)

    @property
    def current_step(self) -> Step:
        return self.plan.steps[self.step]

    @property
    def is_last_step(self) -> bool:
        return self.step + 1 == len(self.plan.steps)

    @property
    def weight(self) -> float:
        """Share of request keys that the candidate serves, in percent."""
        if self.is_over:
            return 100.0 if self.state is State.PROMOTED else 0.0
        return self.current_step.weight

    @property
    def compares(self) -> bool:
        """The stable arm gets requests too."""
        return self.weight < 100

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "id": self.id,
            "profile": self.profile,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "state": self.state.value,
            "step": self.step,
            "weight": self.weight,
            "held": sorted(self.held),
            "reason": self.reason,
            "author": self.author,
            "plan": self.plan.to_dict(),
            "limits": self.limits.to_dict(),
        }


def replay(events: Iterable[Event], profile: str, rollout: Rollout | None = None) -> Rollout | None:
    """The latest rollout of a profile, over or not, after these events; `rollout` is the one before them."""
    for event in events:
        if event.profile == profile:
            rollout = _after(rollout, event)
    return rollout


def _after(rollout: Rollout | None, event: Event) -> Rollout | None:
    if event.kind == START:
        return _started(event)
    if rollout is None or rollout.is_over:
        return rollout
    changed = _changed(rollout, event)
    return rollout if changed is None else replace(changed, reason=event.reason, seq=event.seq)


def _changed(rollout: Rollout, event: Event) -> Rollout | None:
    """None: the event does not concern it."""
    if event.kind == STEP:
        return replace(rollout, step=event.payload["step"])
    if event.kind == HOLD:
        return _with_held(rollout, rollout.held | _causes(event))
    if event.kind == RESUME:
        return _with_held(rollout, rollout.held - _causes(event))
    if event.kind == PROMOTE:
        return replace(rollout, state=State.PROMOTED, held=frozenset())
    # Somebody else chose the active version meanwhile: what the arms were compared for is gone.
    if event.kind in (ABORT, "activate", "rollback"):
        return replace(rollout, state=State.ABORTED, held=frozenset())
    return None


def _started(event: Event) -> Rollout:
    payload = event.payload
    return Rollout(
        id=event.seq,
        profile=str(event.profile),
        baseline=payload["baseline"],
        candidate=payload["candidate"],
        plan=Plan.from_dict(payload["plan"]),
        limits=Limits.from_dict(payload["limits"]),
        salt=payload["salt"],
        author=event.author,
        reason=event.reason,
        seq=event.seq,
    )


def _causes(event: Event) -> frozenset[Cause]:
    return frozenset(map(Cause, event.payload["causes"]))


def _with_held(rollout: Rollout, held: frozenset[Cause]) -> Rollout:
    return replace(rollout, held=held, state=State.PAUSED if held else State.RUNNING)
