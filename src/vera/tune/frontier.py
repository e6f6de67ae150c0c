"""Which candidates are worth having, and which one is taken: arithmetic over trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vera.tune.trial import Figures, Limits, Objective, Trial

_NOISE = 0.02
"""Two runs of the same settings differ by about this share; what lies closer to the best is as good."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate that is taken, and why."""

    trial: Trial
    figures: Figures
    why: str


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other one is better than in memory, latency or drift without being worse in another.

    By memory, the smallest first. Of trials with the same three figures the first one stands for all; failed ones are left out.
    """
    measured: dict[tuple[float, float, float], Trial] = {}
    for trial in trials:
        if isinstance(trial.result, Figures):
            measured.setdefault(_three(trial.result), trial)
    best = [three for three in measured if not any(_dominates(other, three) for other in measured)]
    return [measured[three] for three in sorted(best)]


def choose(trials: Sequence[Trial], limits: Limits, objective: Objective) -> Choice | None:
    """The best trial that keeps the limits; of those within the noise of it the one that drifts least. None: none keeps them."""
    kept = [(trial, trial.result) for trial in trials if isinstance(trial.result, Figures) and limits.are_kept(trial.result)]
    if not kept:
        return None
    best = min(figures.cost(objective) for _, figures in kept)
    close = [(trial, figures) for trial, figures in kept if figures.cost(objective) <= best * (1 + _NOISE)]
    trial, figures = min(close, key=lambda pair: (pair[1].kl_mean, pair[0].number))
    why = f"{_achieved(figures, objective)}: the best of {len(kept)} of {len(trials)} trials that keep the limits"
    if len(close) > 1:
        why += f"; of {len(close)} within {_NOISE:.0%} of each other the one that drifts least"
    return Choice(trial, figures, why)


def _achieved(figures: Figures, objective: Objective) -> str:
    return {
        Objective.LATENCY: f"{figures.latency:.3f} of native's mean time between tokens",
        Objective.MEMORY: f"{figures.memory:.3f} of native's fast memory",
        Objective.THROUGHPUT: f"{figures.throughput:.2f} times native's tokens a second from the same fast memory",
    }[objective]


def _three(figures: Figures) -> tuple[float, float, float]:
    return figures.memory, figures.latency, figures.kl_mean


def _dominates(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
