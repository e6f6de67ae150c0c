"""Sticky arms, plans, and the statistics of an arm."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vera.errors import ConfigError
from vera.rollout import Arm, ArmStats, Audit, Outcome, Plan, Shadow, Step, arm_of, position
from vera.rollout.stats import WINDOW

weights = st.floats(0.01, 100)


@given(salt=st.text(max_size=20), key=st.text(max_size=40), weight=weights, more=weights)
@settings(deadline=None)
def test_a_key_never_goes_back_as_the_weight_grows(salt, key, weight, more):
    low, high = sorted((weight, more))
    assert 0 <= position(salt, key) < 1
    if arm_of(salt, key, low) is Arm.CANDIDATE:
        assert arm_of(salt, key, high) is Arm.CANDIDATE
    assert arm_of(salt, key, 100) is Arm.CANDIDATE


@pytest.mark.parametrize("weight", [1, 5, 25, 50, 99])
def test_the_candidate_has_its_weight_of_keys(weight):
    chosen = sum(arm_of("salt", f"user-{number}", weight) is Arm.CANDIDATE for number in range(20_000))
    share = weight / 100
    assert abs(chosen / 20_000 - share) < 5 * (share * (1 - share) / 20_000) ** 0.5


def test_another_salt_deals_anew():
    keys = [f"user-{number}" for number in range(2000)]
    both = sum(arm_of("a", key, 50) is arm_of("b", key, 50) for key in keys)
    assert 900 < both < 1100


def test_the_place_of_a_key_is_the_same_in_every_process_and_release():
    assert position("salt", "key") == 0.3862986793205848


def test_a_plan_is_read_from_its_short_form_and_back():
    plan = Plan.parse("5:60:20, 25:120,100")
    assert plan.steps == (Step(5, 60, 20), Step(25, 120), Step(100))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not of the form"),
        ("5:x", "not of the form"),
        ("5:1:1:1", "not of the form"),
        ("0", "weight=0.0"),
        ("101", "weight=101.0"),
        ("nan", "weight=nan"),
        ("25,5", "must grow"),
        ("5,5", "must grow"),
        ("5:-1", "pause_seconds=-1.0"),
        ("5:inf", "pause_seconds=inf"),
        ("5:1:0", "min_samples=0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        Plan.parse(text)


def test_a_plan_has_steps_and_limited_patience():
    with pytest.raises(ConfigError, match="needs a step"):
        Plan(())
    with pytest.raises(ConfigError, match="patience_seconds=0"):
        Plan(patience_seconds=0)


def test_figures_are_ratios_of_counters():
    stats = ArmStats.of(
        [
            Outcome(ttft_seconds=0.5, itl_seconds=(0.01, 0.03), decode_steps=10, recompute_steps=2),
            Outcome(failed=True),
            Audit(0.02, 0.01),
            Audit(0.01, 0.02),
            Shadow(tokens=10, kl_sum=0.5, agreed=9),
        ]
    )
    assert (stats.error_rate, stats.recompute_share, stats.ttft_p99, stats.itl_p99) == (0.5, 0.2, 0.5, 0.03)
    assert (stats.audit_error, stats.audit_ratio, stats.shadow_kl, stats.shadow_agreement) == (0.015, 1.0, 0.05, 0.9)
    assert json.loads(json.dumps(stats.summary(), allow_nan=False))["requests"] == 2


def test_an_arm_without_samples_has_no_figures():
    figures = ArmStats().summary()
    assert figures["requests"] == 0 and figures["error_rate"] is figures["itl_p99"] is figures["shadow_kl"] is None


samples = st.lists(
    st.one_of(
        st.builds(Outcome, failed=st.booleans(), ttft_seconds=st.none() | st.floats(0, 10), decode_steps=st.integers(0, 9)),
        st.builds(Shadow, tokens=st.integers(0, 9), kl_sum=st.just(0.25), agreed=st.just(0)),
    ),
    max_size=20,
)


@given(samples, samples, samples)
@settings(deadline=None)
def test_merging_is_adding_and_its_grouping_does_not_matter(one, two, three):
    a, b, c = map(ArmStats.of, (one, two, three))
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == ArmStats.of([*one, *two, *three])


def test_latencies_are_bounded_and_the_latest_stay():
    stats = ArmStats()
    stats.add(Outcome(itl_seconds=tuple(map(float, range(WINDOW + 5)))))
    assert len(stats.itl_seconds) == WINDOW and stats.itl_seconds[0] == 5.0
    merged = stats.merge(ArmStats.of([Outcome(itl_seconds=(-1.0,))]))
    assert len(merged.itl_seconds) == WINDOW and merged.itl_seconds[-1] == -1.0
