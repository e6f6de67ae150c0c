"""Which pages move: the rules of promotion, demotion and release, and the band of the recompute share."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vera.cache.placement import (
    RecomputeController,
    coldest_units,
    due,
    promotions_and_demotions,
    unit_scores,
    weakest,
)

SHAPE = (4, 3, 2)
PERIOD = 256
BAND = (0.08, 0.15)

score_values = st.sampled_from([0.0, 0.1, 0.5, 0.65, 0.68, 0.7, 0.72, 0.9, 1.0])  # few values: many ties
page_scores = arrays(np.float32, SHAPE, elements=score_values)
page_flags = arrays(np.bool_, SHAPE)


def after(hot, moves):
    """The hot pages once the moves are made."""
    hot = hot.copy()
    hot[tuple(moves.promote.T)] = True
    hot[tuple(moves.demote.T)] = False
    return hot


def moved(scores, hot, *, threshold=0.7, max_hot=100, hysteresis=0.04):
    scores = np.asarray(scores, dtype=np.float32).reshape(-1, 1, 1)
    hot = np.asarray(hot, dtype=bool).reshape(-1, 1, 1)
    moves = promotions_and_demotions(scores, hot, threshold=threshold, max_hot=max_hot, hysteresis=hysteresis)
    return moves.promote[:, 0].tolist(), moves.demote[:, 0].tolist()


# -- promotion and demotion -------------------------------------------------------------------------------------------


@given(page_scores, page_flags, st.integers(0, 30))
def test_never_more_hot_pages_than_allowed(scores, hot, max_hot):
    moves = promotions_and_demotions(scores, hot, threshold=0.7, max_hot=max_hot, hysteresis=0.04)
    assert after(hot, moves).sum() <= max_hot


@given(page_scores, page_flags, st.integers(0, 30))
def test_moves_made_once_leave_nothing_to_move(scores, hot, max_hot):
    limits = {"threshold": 0.7, "max_hot": max_hot, "hysteresis": 0.04}
    settled = after(hot, promotions_and_demotions(scores, hot, **limits))
    again = promotions_and_demotions(scores, settled, **limits)
    assert again.promote.size == again.demote.size == 0


@given(page_scores, page_flags)
def test_with_room_the_threshold_and_the_hysteresis_alone_decide(scores, hot):
    moves = promotions_and_demotions(scores, hot, threshold=0.7, max_hot=100, hysteresis=0.04)
    assert (after(hot, moves) == ((scores >= np.float32(0.7)) | hot & (scores >= 0.66))).all()


@given(page_scores, page_flags, st.integers(0, 30))
def test_without_hysteresis_no_hot_page_scores_less_than_one_that_is_left_out(scores, hot, max_hot):
    settled = after(hot, promotions_and_demotions(scores, hot, threshold=0.7, max_hot=max_hot, hysteresis=0.0))
    left_out = scores[~settled & (scores >= np.float32(0.7))]
    if settled.any() and left_out.size:
        assert scores[settled].min() >= left_out.max()
        assert settled.sum() == max_hot


@given(arrays(np.float32, (20, *SHAPE), elements=st.floats(0.6875, 0.71875, width=32)), page_flags)
def test_scores_that_wobble_within_the_hysteresis_move_no_page_twice(wobbles, hot):
    changes = np.zeros(SHAPE, dtype=int)
    for scores in wobbles:
        settled = after(hot, promotions_and_demotions(scores, hot, threshold=0.7, max_hot=5, hysteresis=0.05))
        changes += settled != hot
        hot = settled
    # At most once out, because there were too many at first, or once in.
    assert changes.max() <= 1


def test_lowest_scores_go_when_too_many_would_be_hot():
    assert moved([0.8, 0.75, 0.9, 0.95], [True, True, False, False], max_hot=2) == ([3, 2], [1, 0])


def test_page_takes_the_place_of_a_hot_one_only_if_it_scores_more_by_the_hysteresis():
    assert moved([0.80, 0.83], [True, False], max_hot=1) == ([], [])
    assert moved([0.80, 0.85], [True, False], max_hot=1) == ([1], [0])


def test_of_equals_the_older_page_gives_way():
    assert moved([0.8] * 4, [True] * 4, max_hot=2) == ([], [0, 1])
    assert moved([0.8] * 4, [False] * 4, max_hot=2) == ([3, 2], [])


def test_hottest_come_first_and_coolest_leave_first():
    assert moved([0.7, 0.9, 0.8, 0.3, 0.1, 0.2], [False] * 3 + [True] * 3) == ([1, 2, 0], [4, 5, 3])


def test_pinned_pages_are_the_last_to_give_way():
    assert moved([np.inf, 0.99, 0.98], [False, True, True], max_hot=1) == ([0], [2, 1])


def test_moves_name_block_layer_and_head():
    scores = np.zeros(SHAPE, dtype=np.float32)
    scores[2, 1, 0] = 0.9
    moves = promotions_and_demotions(scores, np.zeros(SHAPE, bool), threshold=0.7, max_hot=9, hysteresis=0.0)
    assert moves.promote.tolist() == [[2, 1, 0]]
    assert moves.demote.shape == (0, 3)


@given(arrays(np.float32, st.integers(0, 30), elements=score_values), st.integers(0, 40))
def test_weakest_are_the_lowest_in_order_equals_by_index(scores, count):
    expected = sorted(range(scores.size), key=lambda i: (scores[i], i))[:count]
    assert weakest(scores, count).tolist() == expected


# -- release ----------------------------------------------------------------------------------------------------------


def test_unit_is_as_hot_as_its_hottest_page_and_the_last_window_may_be_short():
    scores = np.zeros((2, 5, 3), dtype=np.float32)
    scores[0, 1, 2], scores[0, 0, 0], scores[1, 4, 1] = 0.9, 0.4, 0.6
    assert unit_scores(scores, 2).tolist() == np.float32([[0.9, 0, 0], [0, 0, 0.6]]).tolist()


@given(arrays(np.float32, (6, 3), elements=score_values), arrays(np.bool_, (6, 3)), st.integers(0, 20))
def test_only_candidates_are_released_and_the_coldest_first(scores, candidates, count):
    released = coldest_units(scores, candidates, count)
    assert len(set(released)) == len(released) == min(count, candidates.sum())
    assert all(candidates[unit] for unit in released)
    kept = [unit for unit in zip(*np.nonzero(candidates), strict=True) if unit not in released]
    assert [(scores[unit], unit) for unit in released] == sorted((scores[unit], unit) for unit in released)
    assert all((scores[a], a) < (scores[b], b) for a in released for b in kept)


# -- the recompute band -----------------------------------------------------------------------------------------------


class Sequences:
    """A simulated load under a controller: the recompute share is `scale * cold ** 1.3` plus noise."""

    def __init__(self, controller, *, scale, noise=0.0, restored_per_period=1.0):
        self.controller = controller
        self.scale, self.noise, self.restored_per_period = scale, noise, restored_per_period
        self.random = np.random.default_rng(7)
        self.num_units, self.num_cold = 6000, 0
        self.decode_steps = self.recompute_steps = 0
        self.share = 0.0

    def period(self, *, short=True):
        self.share = min(1.0, self.scale * (self.num_cold / self.num_units) ** 1.3)
        counted = np.clip(self.share + self.random.uniform(-self.noise, self.noise), 0, 1)
        self.decode_steps += PERIOD
        self.recompute_steps += round(counted * PERIOD)
        self.controller.observe(
            self.decode_steps, self.recompute_steps, num_units=self.num_units, num_cold=self.num_cold, short=short
        )
        surplus = self.num_cold - int(self.controller.cold_limit * self.num_units)
        self.num_cold -= max(0, int(surplus * self.restored_per_period))
        self.num_cold += self.controller.num_releasable(self.num_units, self.num_cold, short=short)
        return self.controller.cold_limit


def new_controller(target=BAND, max_cold_share=0.9):
    return RecomputeController(target, max_cold_share=max_cold_share, cold_drop_step=PERIOD)


@pytest.mark.parametrize("scale", [0.3, 0.6, 5.0, 30.0], ids=["far below", "below", "above", "far above"])
def test_share_comes_into_the_band_from_either_side_and_stays(scale):
    sequences = Sequences(new_controller(), scale=scale)
    for _ in range(20):
        sequences.period()
    limits = {sequences.period() for _ in range(30)}
    assert len(limits) == 1
    assert BAND[0] <= sequences.share <= BAND[1]


@pytest.mark.parametrize("scale", [0.6, 5.0], ids=["below", "above"])
@pytest.mark.parametrize("target", [BAND, (0.10, 0.13)])
def test_share_does_not_swing_across_the_band_under_noise(scale, target):
    sequences = Sequences(new_controller(target), scale=scale, noise=0.02)
    for _ in range(40):
        sequences.period()
    for _ in range(100):
        sequences.period()
        assert target[0] - 0.03 < sequences.share < target[1] + 0.03


def test_limit_waits_for_cold_pages_to_come_back_before_it_falls_further():
    sequences = Sequences(new_controller(), scale=5.0, restored_per_period=0.15)
    limits = [sequences.period() for _ in range(80)]
    assert BAND[0] <= sequences.share <= BAND[1]
    assert min(limits) > limits[-1] * 0.8


def test_limit_waits_for_releases_before_it_rises_further():
    controller = new_controller()
    for period in range(1, 10):
        controller.observe(period * PERIOD, 0, num_units=1000, num_cold=20, short=True)
    assert controller.cold_limit == pytest.approx(0.1)


def test_limit_does_not_rise_while_memory_has_room():
    controller = new_controller()
    for period in range(1, 10):
        controller.observe(period * PERIOD, 0, num_units=1000, num_cold=100, short=False)
    assert controller.cold_limit == pytest.approx(0.1)


def test_limit_moves_by_at_most_its_factor_once_a_period():
    controller = new_controller()
    controller.observe(PERIOD - 1, 0, num_units=1000, num_cold=100, short=True)
    assert controller.cold_limit == pytest.approx(0.1)
    controller.observe(PERIOD, 0, num_units=1000, num_cold=100, short=True)
    assert controller.cold_limit == pytest.approx(0.1 * controller.factor)
    controller.observe(PERIOD + 1, 0, num_units=1000, num_cold=125, short=True)
    assert controller.cold_limit == pytest.approx(0.1 * controller.factor)


def test_share_is_that_of_the_last_period_not_of_all_time():
    controller = new_controller()
    controller.observe(PERIOD, PERIOD, num_units=1000, num_cold=100, short=True)
    assert controller.cold_limit == pytest.approx(0.08)
    controller.observe(2 * PERIOD, PERIOD, num_units=1000, num_cold=80, short=True)
    assert controller.cold_limit == pytest.approx(0.1)


def test_load_that_bears_no_cold_pages_ends_with_none_and_can_come_back():
    controller = new_controller()
    for period in range(1, 40):
        controller.observe(period * PERIOD, period * PERIOD, num_units=1000, num_cold=0, short=True)
    assert controller.cold_limit == 0
    controller.observe(40 * PERIOD, 39 * PERIOD, num_units=1000, num_cold=0, short=True)
    assert controller.cold_limit > 0


@given(
    max_cold_share=st.floats(0, 1),
    periods=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 500), st.booleans()), max_size=40),
)
def test_limit_stays_in_its_bounds_and_nothing_is_released_beyond_it(max_cold_share, periods):
    controller = new_controller(max_cold_share=max_cold_share)
    recompute_steps = 0
    for number, (share, num_cold, short) in enumerate(periods, start=1):
        recompute_steps += int(share * PERIOD)
        controller.observe(number * PERIOD, recompute_steps, num_units=500, num_cold=num_cold, short=short)
        assert 0 <= controller.cold_limit <= max_cold_share
        releasable = controller.num_releasable(500, num_cold, short=short)
        assert releasable == 0 or (short and num_cold + releasable <= max_cold_share * 500)


# -- taking turns -----------------------------------------------------------------------------------------------------


@given(every=st.integers(1, 600), stagger=st.integers(0, 10**9), start=st.integers(1, 10**6))
def test_due_once_in_every_period(every, stagger, start):
    assert sum(due(tokens, every, stagger) for tokens in range(start, start + every)) == 1


@given(first=st.integers(0, 10**6))
def test_sixteen_sequences_that_grow_in_step_take_turns(first):
    turns = Counter(tokens for sequence in range(first, first + 16) for tokens in range(1, 257) if due(tokens, 256, sequence))
    assert max(turns.values()) == 1


def test_nothing_is_due_before_the_first_token():
    assert not any(due(0, 256, sequence) for sequence in range(1000))
