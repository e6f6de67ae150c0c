"""What is worth having, and what is taken: by hand and by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surfaces import figures

from vera.errors import ConfigError
from vera.tune.frontier import choose, frontier
from vera.tune.trial import Failed, Figures, Limits, Objective, Trial

LIMITS = Limits(max_kl=2e-4, max_p99_ratio=1.0)


def trials_of(*results: Figures | Failed) -> list[Trial]:
    return [Trial(number, {}, result, 1.0) for number, result in enumerate(results, start=1)]


def numbers(trials: list[Trial]) -> list[int]:
    return [trial.number for trial in trials]


def test_frontier_by_hand() -> None:
    trials = trials_of(
        figures(0.5, 0.5, 1e-4),
        figures(0.5, 0.6, 1e-4),  # slower than 1, and nothing else
        figures(0.3, 0.9, 1e-4),  # smallest
        figures(0.6, 0.6, 1e-5),  # drifts least
        figures(0.6, 0.7, 2e-5),  # worse than 4 in two and as good in one
        Failed("no room"),
    )
    assert numbers(frontier(trials)) == [3, 1, 4]


def test_of_equal_trials_the_first_stands_for_all() -> None:
    assert numbers(frontier(trials_of(figures(), figures(), figures()))) == [1]


_SMALL = st.sampled_from([0.2, 0.4, 0.6, 0.8])


@given(st.lists(st.builds(figures, _SMALL, _SMALL, _SMALL), max_size=12))
def test_every_trial_is_on_the_frontier_or_beaten_by_one_that_is(results: list[Figures]) -> None:
    trials = trials_of(*results)
    best = [(t.result.memory, t.result.latency, t.result.kl_mean) for t in frontier(trials)]
    for one in best:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in best)
    for result in results:
        three = (result.memory, result.latency, result.kl_mean)
        assert any(all(a <= b for a, b in zip(one, three, strict=True)) for one in best)


@pytest.mark.parametrize(
    ("objective", "number"), [(Objective.LATENCY, 1), (Objective.MEMORY, 3), (Objective.THROUGHPUT, 2)], ids=str
)
def test_objective_decides_among_what_keeps_the_limits(objective: Objective, number: int) -> None:
    trials = trials_of(
        figures(memory=0.8, latency=0.4),  # 1 / 0.32 of native's tokens a second from a byte
        figures(memory=0.5, latency=0.5),  # 1 / 0.25
        figures(memory=0.3, latency=0.9),  # 1 / 0.27
        figures(memory=0.1, latency=0.1, kl=3e-4),  # drifts too far
        figures(memory=0.1, latency=0.1, p99=1.01),  # a tail too long
    )
    choice = choose(trials, LIMITS, objective)
    assert choice is not None
    assert choice.trial.number == number
    assert "3 of 5 trials" in choice.why


def test_within_the_noise_of_the_best_the_one_that_drifts_least_is_taken() -> None:
    trials = trials_of(figures(latency=0.500, kl=1.9e-4), figures(latency=0.509, kl=1e-5), figures(latency=0.511, kl=1e-6))
    choice = choose(trials, LIMITS, Objective.LATENCY)
    assert choice is not None
    assert choice.trial.number == 2
    assert "2 within 2%" in choice.why


def test_nothing_is_taken_where_nothing_keeps_the_limits() -> None:
    assert choose(trials_of(figures(kl=1.0), Failed("no room")), LIMITS, Objective.LATENCY) is None
    assert choose([], LIMITS, Objective.LATENCY) is None


def test_limits_are_kept_up_to_and_at_their_value() -> None:
    assert LIMITS.violations(figures(kl=3e-4, p99=0.9)) == {"kl": pytest.approx(0.5), "p99": pytest.approx(-0.1)}
    assert LIMITS.are_kept(figures(kl=2e-4, p99=1.0))
    assert not LIMITS.are_kept(figures(kl=2.001e-4, p99=1.0))
    assert not LIMITS.are_kept(Failed("no room"))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_limit_that_nothing_could_keep_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0"):
        Limits(max_kl=value)


def test_throughput_is_of_the_same_fast_memory() -> None:
    assert figures(memory=0.5, latency=0.8).throughput == pytest.approx(2.5)
