"""Tuning from beginning to end: what is given, what comes of it, and how the chosen settings get into the parameter store."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from vera.bench.machine import available_cores
from vera.bench.signals import ends_on_sigterm
from vera.config import CacheConfig
from vera.errors import ConfigError
from vera.params import ParameterStore, Version
from vera.params.starters import STARTERS
from vera.tune.frontier import Choice, choose, frontier
from vera.tune.loop import Course, Stop, run_trials
from vera.tune.measure import Bench, Work
from vera.tune.search import open_search
from vera.tune.space import Space, space_for
from vera.tune.trial import Failed, Limits, Objective, Trial
from vera.tune.workloads import Workload

_DIFFERENT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is to be tuned for what. Raises ConfigError for what cannot be meant."""

    workload: Workload
    model: str = "embedded"
    """A folder, a .gguf file, or `embedded`."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Cache settings that the search starts from, by name; all others are an adaptive cache's defaults."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that stay as they are, in place of those of `base` and of the workload."""
    limits: Limits = field(default_factory=Limits)
    objective: Objective = Objective.LATENCY
    trials: int = 16
    """Most candidates that are measured, the first of them the settings that the search starts from."""
    budget_minutes: float = 60.0
    """No trial is begun that would end later than this, by the longest one so far."""
    search: str = "auto"
    """Of SEARCHES."""
    seed: int = 0
    """The same seed asks for the same candidates, as far as measurements come out the same."""
    repeats: int = 1
    """Runs of each cache in a trial, in turns; figures are then medians."""
    memory_bytes: int | None = None
    """What `cache_max_size_ratio` is a share of. None: what is available when the search begins."""
    num_threads: int | None = None
    """None: one for each core that the process may use."""

    def __post_init__(self) -> None:
        for name in ("trials", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be a whole number from 1 up")
        if not self.budget_minutes > 0:
            raise ConfigError(f"budget_minutes={self.budget_minutes!r} must be above 0")
        for name, value in (("mode", "adaptive"), ("fidelity", "bounded")):
            if self.given.get(name, value) != value:
                raise ConfigError(f"{name}={self.given[name]!r} leaves nothing to tune: candidates have {name}={value!r}")

    @property
    def settings(self) -> dict[str, Any]:
        """All that is not a default of what every candidate shares."""
        return {**self.base, **self.workload.settings, **self.given, "mode": "adaptive", "fidelity": "bounded"}

    @property
    def work(self) -> Work:
        return Work(
            model=self.model,
            workload=self.workload,
            settings=self.settings,
            threads=self.num_threads or available_cores(),
            memory_bytes=self.memory_bytes,
            repeats=self.repeats,
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of it."""

    tuning: Tuning
    model_name: str
    space: Space
    search: str
    """Its name, for people."""
    course: Course
    choice: Choice | None
    """None: no trial keeps the limits."""
    seconds: float
    machine: dict[str, Any] | None

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen settings, whole. Needs a choice."""
        assert self.choice is not None
        return self.tuning.work.config(self.choice.trial.point).to_dict()

    @property
    def changes(self) -> dict[str, Any]:
        """What the choice changes of the settings that the search started from; nothing where they are the best."""
        if self.choice is None:
            return {}
        start = self.course.trials[0].point
        return {name: value for name, value in self.choice.trial.point.items() if abs(value - start[name]) > _DIFFERENT}

    def summary(self) -> str:
        """Why the choice was made, with its figures: the reason that the store keeps."""
        assert self.choice is not None
        figures, workload = self.choice.figures, self.tuning.workload
        return (
            f"tuned for {workload.name} ({workload.batch} x {workload.context} + {workload.new_tokens} tokens, "
            f"{self.model_name}) by {self.tuning.objective.value} with KL <= {self.tuning.limits.max_kl:g} and P99 <= "
            f"{self.tuning.limits.max_p99_ratio:g} of native's: memory {figures.memory:.3f}, latency {figures.latency:.3f}, "
            f"P99 {figures.p99:.3f} of native's, KL {figures.kl_mean:.2e}, same token {figures.top1_agreement:.2%}, recompute "
            f"share {figures.recompute_share:.3f}; trial {self.choice.trial.number} of {len(self.course.trials)}, seed "
            f"{self.tuning.seed}"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        tuning = self.tuning
        return {
            "bench": "tune",
            "model": self.model_name,
            "workload": tuning.workload.to_dict(),
            "objective": tuning.objective.value,
            "limits": asdict(tuning.limits),
            "search": self.search,
            "seed": tuning.seed,
            "searched": [asdict(dimension) for dimension in self.space.dimensions],
            "not_searched": self.space.left_out,
            "start": _plain(tuning.work.config({})),
            "stop": self.course.stop.name.lower(),
            "seconds": self.seconds,
            "trials": [_trial(trial, tuning.limits) for trial in self.course.trials],
            "frontier": [trial.number for trial in frontier(self.course.trials)],
            "chosen": self.choice.trial.number if self.choice else None,
            "why": self.choice.why if self.choice else None,
            "changes": self.changes,
            "machine": self.machine,
        }


@ends_on_sigterm()
def run_tuning(tuning: Tuning) -> Tuned:
    """Measures candidates and takes one. Says what it is doing on stderr.

    Ctrl-C ends it with what was measured; nothing is chosen then. Raises a VeraError where nothing can be measured.
    """
    begun = time.monotonic()
    work = tuning.work
    with Bench(work) as bench:
        space = space_for(bench.facts, {**_ceiling(tuning.settings), **tuning.given})
        search = open_search(tuning.search, space, trials=tuning.trials, seed=tuning.seed)
        config = work.config({})
        course = run_trials(
            space,
            {dimension.name: getattr(config, dimension.name) for dimension in space.dimensions},
            bench.measure,
            search,
            limits=tuning.limits,
            objective=tuning.objective,
            trials=tuning.trials,
            budget_seconds=60 * tuning.budget_minutes,
            clock=time.monotonic,
            tell=lambda line: print(f"vera tune: {line}", file=sys.stderr, flush=True),
        )
        choice = choose(course.trials, tuning.limits, tuning.objective) if course.stop is not Stop.INTERRUPTED else None
        return Tuned(tuning, bench.model_name, space, search.name, course, choice, time.monotonic() - begun, bench.machine)


def base_settings(store: ParameterStore | None, profile: str | None, workload: Workload) -> tuple[dict[str, Any], Version | None]:
    """What the search starts from, and the version that it is: that of an existing profile, else a new store's for this work."""
    if store is not None and profile in store.profiles():
        version = store.find(profile)
        return dict(version.settings), version
    starter = next((starter for starter in STARTERS if starter.profile == workload.name), STARTERS[0])
    return dict(starter.changes), None


def rehearse(store: ParameterStore, profile: str, *, author: str, reason: str) -> None:
    """Raises what creating a version would raise for these names, or for a store that cannot be written; changes nothing."""
    with suppress(_Rehearsed), store.changing():
        store.record("tune", {}, author=author, reason=reason, profile=profile)
        raise _Rehearsed


def create_version(
    tuned: Tuned, store: ParameterStore, profile: str, *, parent: Version | None, author: str, reason: str | None
) -> Version:
    """The choice as a new version of a profile, not active yet. Its reason is the one given, with the figures."""
    text = "; ".join(filter(None, [reason, tuned.summary()]))
    return store.create(profile, tuned.settings, author=author, reason=text, parent=parent)


class _Rehearsed(Exception):
    """Takes back what was only tried."""


def _ceiling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A ceiling in bytes takes the place of the ratio."""
    ceiling = settings.get("cache_max_bytes")
    return {} if ceiling is None else {"cache_max_bytes": ceiling}


def _trial(trial: Trial, limits: Limits) -> dict[str, Any]:
    result = {"failed": trial.result.why} if isinstance(trial.result, Failed) else asdict(trial.result)
    kept = limits.are_kept(trial.result)
    return {"number": trial.number, "settings": trial.point, **result, "within_limits": kept, "seconds": trial.seconds}


def _plain(config: CacheConfig) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.to_dict().items()}
