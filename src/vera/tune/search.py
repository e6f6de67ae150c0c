"""Which candidate is measured next: Optuna's TPE with constraints if it is installed, else a plain search."""

from __future__ import annotations

import random
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Protocol

from vera.errors import ConfigError
from vera.tune.space import Space
from vera.tune.trial import Point

SEARCHES = ("auto", "optuna", "plain")
NOT_INSTALLED = "Optuna is not installed; pip install 'vera-engine[tune]', or take --search plain"


class Search(Protocol):
    """Asked and told in turns. The same seed and the same answers give the same questions."""

    name: str
    """For people."""

    def ask(self) -> dict[str, float | int]:
        """A point of the space. It may have been asked before."""
        ...

    def tell(self, point: Point, cost: float, violations: Mapping[str, float]) -> None:
        """What a point cost, asked or not, and by how much it misses each limit (0 or less: it is kept)."""
        ...


def open_search(kind: str, space: Space, *, trials: int, seed: int) -> Search:
    """`kind` is of SEARCHES; `auto`: Optuna if it is installed. `trials`: how many there will be at the most."""
    if kind not in SEARCHES:
        raise ConfigError(f"search={kind!r} is not one of {', '.join(SEARCHES)}")
    if kind == "plain" or (kind == "auto" and find_spec("optuna") is None):
        return PlainSearch(space, trials=trials, seed=seed)
    if find_spec("optuna") is None:
        raise ConfigError(NOT_INSTALLED)
    from vera.tune.tpe import TpeSearch  # here, because Optuna is an extra

    return TpeSearch(space, trials=trials, seed=seed)


class PlainSearch:
    """A Latin hypercube for the first half of the trials, then steps around the best point, shorter from one to the next.

    A hypercube has each setting's range cut into as many parts as it has points, and one point in each part (McKay, Beckman and
    Conover, 1979).
    """

    _FIRST_RADIUS = 0.3
    _LAST_RADIUS = 0.05
    _TRIES = 64
    """Steps that are tried for one that leads to a new point."""

    def __init__(self, space: Space, *, trials: int, seed: int) -> None:
        self.name = "Latin hypercube and local steps"
        self._space = space
        self._random = random.Random(seed)
        self._waiting = self._hypercube(max(1, trials // 2))
        self._steps = max(1, trials - len(self._waiting))
        self._step = 0
        self._told: dict[tuple[float, ...], tuple[float, float]] = {}

    def ask(self) -> dict[str, float | int]:
        while self._waiting:
            point = self._waiting.pop(0)
            if _key(point) not in self._told:
                return point
        share = min(1.0, self._step / self._steps)
        radius = self._FIRST_RADIUS * (self._LAST_RADIUS / self._FIRST_RADIUS) ** share
        self._step += 1
        for _ in range(self._TRIES):
            point = self._near_the_best(radius)
            if _key(point) not in self._told:
                return point
            radius = min(1.0, radius * 1.1)
        return point

    def tell(self, point: Point, cost: float, violations: Mapping[str, float]) -> None:
        missed = sum(max(0.0, violation) for violation in violations.values())
        self._told[_key(point)] = (missed, cost)

    def _hypercube(self, count: int) -> list[dict[str, float | int]]:
        columns = []
        for _ in self._space.dimensions:
            parts = list(range(count))
            self._random.shuffle(parts)
            columns.append([(part + self._random.random()) / count for part in parts])
        return [self._space.point([column[i] for column in columns]) for i in range(count)]

    def _near_the_best(self, radius: float) -> dict[str, float | int]:
        """Limits count before costs: where none is kept, what misses them least is the best."""
        if not self._told:
            return self._space.point([self._random.random() for _ in self._space.dimensions])
        best = min(self._told, key=self._told.__getitem__)
        names = [dimension.name for dimension in self._space.dimensions]
        places = self._space.places(dict(zip(names, best, strict=True)))
        return self._space.point([place + self._random.gauss(0, radius) for place in places])


def _key(point: Point) -> tuple[float, ...]:
    return tuple(point.values())
