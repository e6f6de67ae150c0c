"""Searches over made-up machines: the plain one and Optuna's keep one contract."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surfaces import SPACE, START, Machine, figures, plausible

from vera.config import CacheConfig
from vera.errors import ConfigError
from vera.tune.frontier import choose
from vera.tune.loop import Course, Stop, run_trials
from vera.tune.search import open_search
from vera.tune.space import DIMENSIONS, Facts, Space, space_for
from vera.tune.trial import Failed, Figures, Limits, Objective
from vera.tune.workloads import WORKLOADS

LIMITS = Limits(max_kl=2e-4, max_p99_ratio=0.66)
KINDS = ("plain", "optuna")


def course_of(kind: str, machine: Machine, *, trials: int = 20, seed: int = 0, budget: float = 1e9, **given: Any) -> Course:
    space = given.pop("space", SPACE)
    return run_trials(
        space,
        {dimension.name: START[dimension.name] for dimension in space.dimensions},
        machine.measure,
        open_search(kind, space, trials=trials, seed=seed),
        limits=LIMITS,
        objective=given.pop("objective", Objective.LATENCY),
        trials=trials,
        budget_seconds=budget,
        clock=machine.clock,
        **given,
    )


# -- both searches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_first_trial_is_what_the_search_starts_from_and_no_point_is_measured_twice(kind: str) -> None:
    course = course_of(kind, machine := Machine())
    assert course.stop is Stop.TRIALS
    assert machine.asked[0] == START
    assert len({tuple(point.items()) for point in machine.asked}) == len(machine.asked) == 20


@pytest.mark.parametrize("kind", KINDS)
def test_every_point_is_a_recommended_setting(kind: str) -> None:
    course_of(kind, machine := Machine())
    for point in machine.asked:
        assert CacheConfig(mode="adaptive", **point).risks() == []


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_asks_the_same_and_another_one_does_not(kind: str) -> None:
    asked = []
    for seed in (7, 7, 8):
        course_of(kind, machine := Machine(), seed=seed)
        asked.append(machine.asked)
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_choice_keeps_limits_that_the_start_misses_and_is_as_fast(kind: str, seed: int) -> None:
    course = course_of(kind, Machine(), trials=30, seed=seed)
    choice = choose(course.trials, LIMITS, Objective.LATENCY)
    assert choice is not None
    assert choice.figures.kl_mean <= 2e-4
    assert choice.figures.p99 <= 0.66 < plausible(START).p99
    assert choice.figures.latency <= plausible(START).latency


@pytest.mark.parametrize("kind", KINDS)
def test_no_trial_is_begun_that_would_not_end_in_time(kind: str) -> None:
    course = course_of(kind, machine := Machine(seconds=60), budget=250)
    assert course.stop is Stop.BUDGET
    assert (len(course.trials), machine.now) == (4, 240)


@pytest.mark.parametrize("kind", KINDS)
def test_one_trial_is_made_however_short_the_time(kind: str) -> None:
    course = course_of(kind, Machine(seconds=60), budget=1)
    assert (len(course.trials), course.stop) == (1, Stop.BUDGET)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupt_keeps_what_was_measured(kind: str) -> None:
    def interrupted(point: dict[str, Any]) -> Figures:
        if len(machine.asked) == 3:
            raise KeyboardInterrupt
        return plausible(point)

    machine = Machine(interrupted)
    course = course_of(kind, machine)
    assert (len(course.trials), course.stop) == (2, Stop.INTERRUPTED)


@pytest.mark.parametrize("kind", KINDS)
def test_candidate_that_fails_is_a_trial_and_the_search_goes_on(kind: str) -> None:
    def fails(point: dict[str, Any]) -> Figures | Failed:
        return Failed("no room") if point["cache_max_size_ratio"] < 0.6 else plausible(point)

    course = course_of(kind, Machine(fails), trials=25)
    failed = [trial for trial in course.trials if isinstance(trial.result, Failed)]
    assert len(course.trials) == 25
    assert 0 < len(failed) < 25
    assert choose(course.trials, Limits(1.0, 2.0), Objective.MEMORY) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_small_space_is_measured_whole_and_then_there_is_nothing_to_ask(kind: str) -> None:
    layers = next(dimension for dimension in DIMENSIONS if dimension.name == "recompute_layer_limit")
    machine = Machine(lambda point: figures(latency=point["recompute_layer_limit"]))
    course = course_of(kind, machine, space=Space((layers,), {}), trials=40)
    assert course.stop is Stop.EXHAUSTED
    assert sorted(point["recompute_layer_limit"] for point in machine.asked) == [8, 10, 12, 14, 16]


def test_plain_search_comes_near_to_the_best_that_the_limits_allow() -> None:
    course = course_of("plain", Machine(), trials=60)
    choice = choose(course.trials, LIMITS, Objective.LATENCY)
    assert choice is not None
    best = min(
        plausible({**START, "attention_tolerance": tolerance / 1e4, "hot_max_share": 0.1}).latency for tolerance in range(50, 183)
    )  # 0.6 * 0.0182 ** 2 is 1.99e-4
    assert choice.figures.latency < 1.03 * best


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_auto_takes_optuna_where_it_is_and_else_the_plain_search(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Optuna" in open_search("auto", SPACE, trials=4, seed=0).name
    monkeypatch.setattr("vera.tune.search.find_spec", lambda name: None)
    assert "Latin hypercube" in open_search("auto", SPACE, trials=4, seed=0).name
    with pytest.raises(ConfigError, match="--search plain"):
        open_search("optuna", SPACE, trials=4, seed=0)


def test_plain_search_does_without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert len(course_of("plain", Machine()).trials) == 20


def test_unknown_search_is_refused() -> None:
    with pytest.raises(ConfigError, match="search='grid' is not one of auto, optuna, plain"):
        open_search("grid", SPACE, trials=4, seed=0)


# -- the space ---------------------------------------------------------------------------------------------------------


@given(st.sampled_from(DIMENSIONS), st.floats(-0.5, 1.5))
def test_value_is_in_range_on_the_grid_and_has_its_place(dimension: Any, place: float) -> None:
    value = dimension.at(place)
    assert dimension.low <= value <= dimension.high
    assert dimension.at(dimension.place_of(value)) == value


def test_values_by_hand() -> None:
    tolerance, threshold, hot, drop, *_ = DIMENSIONS
    assert (tolerance.at(0.0), tolerance.at(0.5), tolerance.at(1.0)) == (0.005, 0.016, 0.05)
    assert (threshold.at(0.26), hot.at(0.6), drop.at(0.34)) == (0.66, 0.1, 256)


_FACTS = Facts(num_layers=30, native_bytes=1000, memory_bytes=1500, has_cold=True)


def test_all_is_searched_where_all_matters() -> None:
    assert [dimension.name for dimension in space_for(_FACTS, {}).dimensions] == list(START)


@pytest.mark.parametrize(
    ("facts", "given", "name", "why"),
    [
        ({"memory_bytes": 2223}, {}, "cache_max_size_ratio", "no ceiling is felt"),
        ({}, {"cache_max_bytes": 5}, "cache_max_size_ratio", "cache_max_bytes=5 takes its place"),
        ({"has_cold": False}, {}, "cold_drop_step", "no page becomes cold"),
        ({"has_cold": False}, {}, "recompute_layer_limit", "no page becomes cold"),
        ({"num_layers": 8}, {}, "recompute_layer_limit", "8 layers"),
        ({}, {"attention_tolerance": 0.02}, "attention_tolerance", "0.02 was given"),
    ],
)
def test_setting_that_could_change_nothing_is_not_searched(facts: Any, given: Any, name: str, why: str) -> None:
    values = {name: getattr(_FACTS, name) for name in ("num_layers", "native_bytes", "memory_bytes", "has_cold")}
    space = space_for(Facts(**{**values, **facts}), given)
    assert name not in [dimension.name for dimension in space.dimensions]
    assert why in space.left_out[name]


def test_documentation_names_what_is_searched_and_the_workloads() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tune.md").read_text()
    for dimension in DIMENSIONS:
        assert re.search(rf"^\| `{dimension.name}` \| {dimension.low:g}0? \| {dimension.high:g}0? \|", text, re.M), dimension
    for name, work in WORKLOADS.items():
        assert f"| `{name}` | {work.batch} x {work.context} + {work.new_tokens} | {work.text} |" in text
