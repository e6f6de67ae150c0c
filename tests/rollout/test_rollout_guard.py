"""The guard: waits, passes, holds, rolls back, and does not take noise for a breach."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vera.errors import ConfigError
from vera.rollout import ArmStats, Audit, Decision, Limits, Outcome, Shadow, judge
from vera.rollout.guard import wilson_lower

GAPS = (0.02,) * 5


def arm(requests=100, *, failed=0, ttft=0.5, itl=0.02, audits=10, audit=(0.01, 0.01), kl=1e-4, agreed=1.0, **outcome):
    """An arm that is well, unless told otherwise."""
    outcomes = [
        Outcome(failed=number < failed, ttft_seconds=ttft, itl_seconds=(itl,) * 5, decode_steps=10, **outcome)
        for number in range(requests)
    ]
    shadows = [Shadow(tokens=100, kl_sum=100 * kl, agreed=round(100 * agreed))] * 5
    return ArmStats.of([*outcomes, *[Audit(*audit)] * audits, *shadows])


def verdict(candidate, stable=None, *, limits=None, min_samples=50, **options):
    return judge(stable if stable is not None else arm(), candidate, limits or Limits(), min_samples=min_samples, **options)


def test_a_candidate_like_the_stable_arm_passes():
    assert verdict(arm()).decision is Decision.PASS


def test_too_few_samples_wait_and_say_how_many_are_missing():
    found = verdict(arm(30, audits=2), arm(45))
    assert found.decision is Decision.WAIT
    assert dict(found.missing) == {
        "requests of the candidate": 20,
        "requests of the stable arm": 5,
        "audits of the candidate": 3,
    } | {"first tokens of the candidate": 70, "first tokens of the stable arm": 55}
    assert "20 more requests of the candidate" in found.reason


def test_no_traffic_at_all_waits():
    assert verdict(ArmStats(), ArmStats()).decision is Decision.WAIT


def test_where_all_requests_are_the_candidates_the_stable_arm_is_not_waited_for():
    assert verdict(arm(), ArmStats(), compares=False).decision is Decision.PASS


def test_but_what_the_stable_arm_has_is_still_compared_with():
    assert verdict(arm(itl=0.05), arm(), compares=False).decision is Decision.HOLD


@pytest.mark.parametrize(
    ("candidate", "metric", "says"),
    [
        (arm(ttft=0.7), "ttft_p99", "0.7 of 100 samples, stable 0.5 of 100; allowed is at most 0.625"),
        (arm(itl=0.03), "itl_p99", "0.03 of 500 samples, stable 0.02 of 500"),
        (arm(recompute_steps=3), "recompute_share", "0.3 of 1000 samples"),
        (arm(audit=(0.06, 0.06)), "audit_error", "0.06 of 10 samples"),
        (arm(audit=(0.02, 0.01)), "audit_ratio", "allowed is at most 1.5"),
        (arm(kl=0.01), "shadow_kl", "0.01 of 500 samples"),
        (arm(agreed=0.9), "shadow_agreement", "allowed is at least 0.97"),
    ],
)
def test_a_breach_holds_first_and_is_rolled_back_when_it_is_confirmed(candidate, metric, says):
    first = verdict(candidate)
    assert first.decision is Decision.HOLD and [breach.metric for breach in first.breaches] == [metric] and says in first.reason
    second = verdict(candidate, suspected=True)
    assert second.decision is Decision.ROLLBACK and metric in second.reason and says in second.reason
    assert verdict(arm(), suspected=True).decision is Decision.PASS


@pytest.mark.parametrize(
    ("candidate", "metric"),
    [
        (arm(20, failed=20), "error_rate"),
        (arm(5, nonfinite=1), "nonfinite"),
        (arm(5, kl=0.5), "shadow_kl"),
        (arm(5, audit=(0.9, 0.9)), "audit_error"),
        (arm(5, audits=1, audit=(math.nan, 0.01)), "audit_error"),
        (arm(5, audits=1, audit=(math.inf, 0.01)), "audit_error"),
        (arm(5, kl=math.inf), "shadow_kl"),
    ],
)
def test_beyond_a_hard_limit_it_is_rolled_back_at_once(candidate, metric):
    found = verdict(candidate)
    assert (
        found.decision is Decision.ROLLBACK and metric in [breach.metric for breach in found.breaches] and metric in found.reason
    )


def test_two_failures_of_many_are_noise_and_three_of_three_are_none():
    assert verdict(arm(100, failed=2)).decision is Decision.PASS
    assert verdict(arm(3, failed=3)).decision is Decision.ROLLBACK


def test_errors_that_both_arms_have_are_not_the_candidates():
    assert verdict(arm(200, failed=60), arm(200, failed=60)).decision is Decision.PASS


def test_a_short_latency_may_wobble_within_the_slack():
    assert verdict(arm(itl=0.004), arm(itl=0.001)).decision is Decision.PASS


def test_limits_of_none_are_neither_compared_nor_waited_for():
    off = Limits(
        error_increase=None, ttft_ratio=None, itl_ratio=None, recompute_share=None, audit_error=None, audit_ratio=None,
        shadow_kl=None, shadow_agreement=None,
    )  # fmt: skip
    bad = ArmStats.of([Outcome(failed=True, ttft_seconds=100.0)] * 50)
    assert judge(ArmStats.of([Outcome()] * 50), bad, off, min_samples=50).decision is Decision.PASS


def test_a_candidate_that_decodes_nothing_within_bounds_owes_no_audits():
    native = ArmStats.of([Outcome(ttft_seconds=0.5, itl_seconds=GAPS)] * 100 + [Shadow(300, 0.0, 300)])
    assert verdict(native).decision is Decision.PASS


@pytest.mark.parametrize("seed", range(20))
def test_two_arms_of_one_distribution_are_not_told_apart_twice(seed):
    """Latencies with a heavy tail, some errors: both arms are the same, so two successive breaches must be rare."""
    dice = random.Random(seed)

    def drawn():
        return ArmStats.of(
            Outcome(
                failed=dice.random() < 0.01,
                ttft_seconds=dice.lognormvariate(-1, 0.3),
                itl_seconds=tuple(dice.lognormvariate(-4, 0.3) for _ in range(20)),
            )
            for _ in range(400)
        )

    limits = Limits(shadow_kl=None, shadow_agreement=None, ttft_ratio=1.5)
    first = judge(drawn(), drawn(), limits, min_samples=50)
    again = judge(drawn(), drawn(), limits, min_samples=50, suspected=first.decision is Decision.HOLD)
    assert first.decision is not Decision.ROLLBACK and again.decision is not Decision.ROLLBACK


@given(total=st.integers(0, 500), share=st.floats(0, 1))
@settings(deadline=None)
def test_the_lower_bound_is_below_the_share_and_never_negative(total, share):
    count = round(total * share)
    assert 0 <= wilson_lower(count, total) <= (count / total if total else 0) + 1e-12


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"ttft_ratio": 0.9}, "no candidate would ever pass"),
        ({"audit_error": -1}, "audit_error=-1"),
        ({"audit_error": "x"}, "audit_error='x'"),
        ({"shadow_kl": math.nan}, "shadow_kl=nan"),
        ({"min_audits": 1.5}, "whole number"),
        ({"latency_slack_seconds": None}, "latency_slack_seconds=None"),
        ({"ttft": 1}, "unknown limit ttft; known are error_increase"),
    ],
)
def test_limits_that_make_no_sense_are_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        Limits.from_dict(values)
