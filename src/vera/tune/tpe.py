"""The search by Optuna: a tree-structured Parzen estimator that knows the limits (Watanabe and Hutter, 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import optuna

from vera.tune.space import Space
from vera.tune.trial import Point


class TpeSearch:
    """A `Search`. Every setting is a number from 0 to 1 to Optuna; `Space` makes values of it."""

    def __init__(self, space: Space, *, trials: int, seed: int) -> None:
        self.name = f"Optuna {optuna.__version__}, TPE with constraints"
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # a line for each trial, on stderr, is not ours to print
        self._space = space
        self._study = optuna.create_study(
            direction="minimize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(2, trials // 2))),
        )
        self._asked: dict[tuple[float, ...], optuna.Trial] = {}

    def ask(self) -> dict[str, float | int]:
        trial = self._study.ask()
        point = self._space.point([trial.suggest_float(d.name, 0.0, 1.0) for d in self._space.dimensions])
        self._asked[tuple(point.values())] = trial
        return point

    def tell(self, point: Point, cost: float, violations: Mapping[str, float]) -> None:
        trial = self._asked.pop(tuple(point.values()), None) or self._given(point)
        for name, violation in violations.items():
            trial.set_constraint(name, violation)
        self._study.tell(trial, cost)

    def _given(self, point: Point) -> optuna.Trial:
        """A trial for a point that was not asked for."""
        names = [dimension.name for dimension in self._space.dimensions]
        self._study.enqueue_trial(dict(zip(names, self._space.places(point), strict=True)))
        trial = self._study.ask()
        for name in names:
            trial.suggest_float(name, 0.0, 1.0)
        return trial
