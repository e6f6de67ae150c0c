"""Ask, measure, tell, until the trials or the time are used up: no I/O, and the clock is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from vera.tune.search import Search
from vera.tune.space import Space
from vera.tune.trial import Failed, Figures, Limits, Objective, Point, Trial

_MOST_REPEATS = 50
"""Questions in a row that were all answered before: then there is nothing new to ask."""
_NO_COST = 1e6
"""Of a trial that gave no figures."""


class Stop(StrEnum):
    """Why no more is measured."""

    TRIALS = "all trials were made"
    BUDGET = "the time would not have sufficed for one more"
    EXHAUSTED = "the search asks for nothing that was not measured"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Course:
    """The trials in their order, and why there are no more."""

    trials: tuple[Trial, ...]
    stop: Stop


def run_trials(
    space: Space,
    start: Point,
    measure: Callable[[Point], Figures | Failed],
    search: Search,
    *,
    limits: Limits,
    objective: Objective,
    trials: int,
    budget_seconds: float,
    clock: Callable[[], float],
    tell: Callable[[str], None] = lambda _: None,
) -> Course:
    """Measures `start` and then what `search` asks for, each point once.

    A trial is begun only if there is time for one as long as the longest so far; the first one always is. A KeyboardInterrupt
    ends the course with what was measured before it; what else `measure` raises is passed on. `tell` is told of each trial.
    """
    done: list[Trial] = []
    known: dict[tuple[float, ...], Trial] = {}
    begun = clock()
    point: Point = start
    try:
        while True:
            now = clock()
            result = measure(dict(point))
            trial = Trial(len(done) + 1, dict(point), result, clock() - now)
            done.append(trial)
            known[tuple(point.values())] = trial
            tell(f"trial {trial.number} of {trials}: {_told(trial)}")
            _answer(search, trial, limits, objective)
            if len(done) >= trials:
                return Course(tuple(done), Stop.TRIALS)
            if clock() - begun + max(trial.seconds for trial in done) > budget_seconds:
                return Course(tuple(done), Stop.BUDGET)
            new = _something_new(search, known, limits, objective) if space.dimensions else None
            if new is None:
                return Course(tuple(done), Stop.EXHAUSTED)
            point = new
    except KeyboardInterrupt:
        return Course(tuple(done), Stop.INTERRUPTED)


def _something_new(
    search: Search, known: dict[tuple[float, ...], Trial], limits: Limits, objective: Objective
) -> dict[str, float | int] | None:
    """None: the search asked in vain too often. What is known already is told it again."""
    for _ in range(_MOST_REPEATS):
        point = search.ask()
        trial = known.get(tuple(point.values()))
        if trial is None:
            return point
        _answer(search, trial, limits, objective)
    return None


def _answer(search: Search, trial: Trial, limits: Limits, objective: Objective) -> None:
    cost = trial.result.cost(objective) if isinstance(trial.result, Figures) else _NO_COST
    search.tell(trial.point, cost, limits.violations(trial.result))


def _told(trial: Trial) -> str:
    if isinstance(trial.result, Failed):
        return f"failed: {trial.result.why}"
    figures = trial.result
    return (
        f"memory {figures.memory:.3f}, latency {figures.latency:.3f}, P99 {figures.p99:.3f} of native's, "
        f"KL {figures.kl_mean:.1e} ({trial.seconds:.0f} s)"
    )
