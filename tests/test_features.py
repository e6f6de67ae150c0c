"""Heat: what a page's score says, and how it follows what the readers of its block see."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vera.cache.features import HISTOGRAM_BINS, Heat, histogram, score, summarise

LAYERS, KV_HEADS = 2, 3
HALF_LIFE = 100

amounts = st.floats(0, 1e6, width=32)
weights = st.floats(0, 1)


def new_heat(num_blocks=8, frequency_weight=0.0):
    return Heat(num_blocks, LAYERS, KV_HEADS, half_life_tokens=HALF_LIFE, frequency_weight=frequency_weight)


def see(heat, relative, *, blocks=None, rows=HALF_LIFE, reader=0, hits=None):
    """`relative[i]` is the mass of block `i` in every layer and head, 1 being the average; `hits[i]` its hits."""
    relative = np.asarray(relative, dtype=np.float32)
    shape = (LAYERS, KV_HEADS, relative.size)
    masses = np.broadcast_to(relative * rows / relative.size, shape)
    frequencies = np.broadcast_to(np.zeros_like(relative) if hits is None else np.float32(hits), shape)
    blocks = np.arange(relative.size) if blocks is None else np.asarray(blocks)
    heat.absorb(blocks, masses, frequencies, rows=rows, reader=reader)


def contributions(heat, blocks):
    """Undoes `x / (1 + x)` for the first layer and head."""
    scores = heat.scores(np.asarray(blocks))[:, 0, 0].astype(np.float64)
    return scores / (1 - scores)


# -- the score --------------------------------------------------------------------------------------------------------


@given(amounts, amounts, weights)
def test_score_lies_between_0_and_1(contribution, frequency, weight):
    assert 0 <= score(contribution, frequency, weight) <= 1


@given(amounts, amounts, amounts, weights)
def test_score_grows_with_each_dimension(low, high, other, weight):
    low, high = min(low, high), max(low, high)
    assert score(low, other, weight) <= score(high, other, weight) + 1e-6
    assert score(other, low, weight) <= score(other, high, weight) + 1e-6


@given(weights)
def test_average_page_scores_one_half(weight):
    assert score(1.0, 1.0, weight) == pytest.approx(0.5)


def test_page_of_2_3_times_the_average_scores_0_7():
    assert score(2.3, 0.0, 0.0) == pytest.approx(0.7, abs=0.005)


def test_frequency_has_the_share_of_its_weight():
    assert score(0.0, 1e6, 0.3) == pytest.approx(0.3, abs=1e-5)


# -- what is observed -------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 500))
def test_equal_pages_are_average_whatever_the_rows_and_blocks(num_blocks, rows):
    heat = new_heat(num_blocks)
    see(heat, np.ones(num_blocks), rows=rows)
    assert heat.scores(np.arange(num_blocks)) == pytest.approx(0.5, abs=1e-5)


def test_scores_are_laid_out_by_block_layer_and_head():
    heat = new_heat()
    masses = np.arange(LAYERS * KV_HEADS * 4, dtype=np.float32).reshape(LAYERS, KV_HEADS, 4)
    heat.absorb(np.array([5, 1, 7, 2]), masses, np.zeros_like(masses), rows=4, reader=0)
    assert heat.scores(np.array([7]))[0, 1, 2] == pytest.approx(score(masses[1, 2, 2], 0, 0))


def test_hits_count_relative_to_the_average_page():
    heat = new_heat(frequency_weight=1.0)
    see(heat, [1, 1, 1, 1], hits=[0, 2, 4, 2])
    assert heat.scores(np.arange(4))[:, 0, 0] == pytest.approx([0, 1 / 2, 2 / 3, 1 / 2])


def test_without_any_hits_no_page_is_frequent():
    heat = new_heat(frequency_weight=1.0)
    see(heat, [1, 1, 1, 1])
    assert (heat.scores(np.arange(4)) == 0).all()


def test_a_single_hit_among_thousands_of_pages_is_forgotten_within_seven_half_lives():
    heat = new_heat(5000, frequency_weight=1.0)
    see(heat, np.ones(5000), hits=np.eye(1, 5000)[0])
    assert heat.scores(np.array([0]))[0, 0, 0] == pytest.approx(0.99)
    see(heat, np.ones(5000), rows=7 * HALF_LIFE)
    assert heat.scores(np.array([0]))[0, 0, 0] < 0.5


# -- how it is kept ---------------------------------------------------------------------------------------------------


def test_pages_never_seen_score_as_average():
    assert (new_heat(frequency_weight=0.3).scores(np.arange(8)) == 0.5).all()


def test_first_observation_is_taken_as_it_is():
    heat = new_heat()
    see(heat, [0.5, 1.5], rows=1)
    assert contributions(heat, [0, 1]) == pytest.approx([0.5, 1.5], rel=1e-4)


def test_observation_loses_half_its_weight_in_a_half_life():
    heat = new_heat()
    see(heat, [4, 0])
    see(heat, [0, 2], rows=HALF_LIFE)
    assert contributions(heat, [0, 1]) == pytest.approx([2, 1], rel=1e-4)


def test_weight_depends_on_the_rows_not_on_how_often_they_are_read():
    once, often = new_heat(), new_heat()
    for heat in (once, often):
        see(heat, [4, 0])
    see(once, [0, 2], rows=60)
    for _ in range(6):
        see(often, [0, 2], rows=10)
    assert contributions(often, [0, 1]) == pytest.approx(contributions(once, [0, 1]), rel=1e-4)


def test_nothing_seen_changes_nothing():
    heat = new_heat()
    see(heat, [3, 1])
    heat.absorb(np.arange(2), np.zeros((LAYERS, KV_HEADS, 2)), np.zeros((LAYERS, KV_HEADS, 2)), rows=0, reader=0)
    assert contributions(heat, [0, 1]) == pytest.approx([3, 1], rel=1e-4)


def test_recycled_block_knows_nothing_of_its_former_content():
    heat = new_heat()
    see(heat, [9, 9, 9])
    heat.reset(np.array([1]))
    assert contributions(heat, [0, 1, 2]) == pytest.approx([9, 1, 9], rel=1e-4)
    see(heat, [3], blocks=[1], reader=5)
    assert contributions(heat, [1]) == pytest.approx([3], rel=1e-4)


def test_its_bytes_are_reported():
    assert new_heat(10).num_bytes == 10 * LAYERS * KV_HEADS * 2 * (4 + 4)  # two dimensions, each a value and a holder


# -- blocks of several readers ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    seen=st.lists(st.floats(0, 100, width=32), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_shared_page_becomes_as_hot_as_the_reader_that_sees_most_of_it_finds_it(seen, order):
    heat = new_heat()
    for _ in range(25):
        readers = list(range(len(seen)))
        order.shuffle(readers)
        for reader in readers:
            see(heat, [seen[reader]], reader=reader)
    assert contributions(heat, [0]) == pytest.approx([max(seen)], rel=0.02, abs=1e-3)


def test_reader_that_does_not_look_never_cools_what_another_reads():
    heat = new_heat()
    see(heat, [10], reader=1)
    for _ in range(20):
        see(heat, [0], reader=2)
    assert contributions(heat, [0]) == pytest.approx([10], rel=1e-4)


def test_page_sinks_to_the_next_reader_once_its_hottest_reader_looks_away():
    heat = new_heat()
    see(heat, [10], reader=1)
    for _ in range(20):
        see(heat, [0], reader=1)
        see(heat, [3], reader=2)
    assert contributions(heat, [0]) == pytest.approx([3], rel=1e-2)


def test_page_sinks_after_its_hottest_reader_has_left():
    heat = new_heat()
    see(heat, [10], reader=1)
    heat.leave(np.array([0]), 1)
    assert contributions(heat, [0]) == pytest.approx([10], rel=1e-4)
    see(heat, [0], reader=2)
    assert contributions(heat, [0]) == pytest.approx([5], rel=1e-4)


# -- summaries --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1, width=32), max_size=50))
def test_histogram_counts_every_page_once(scores):
    counts = histogram(np.array(scores, dtype=np.float32))
    assert len(counts) == HISTOGRAM_BINS
    assert sum(counts) == len(scores)


def test_each_page_is_in_one_tier_and_hot_wins_over_released():
    scores = np.full((2, LAYERS, KV_HEADS), 0.72, dtype=np.float32)
    hot = np.zeros(scores.shape, dtype=bool)
    hot[1, 0, 0] = True
    released = np.array([False, True])[:, None, None]
    summary = summarise(scores, hot, released)
    assert (summary.num_hot, summary.num_warm, summary.num_cold) == (1, 6, 5)
    assert summary.histogram[14] == 12
    assert json.loads(json.dumps(summary.to_dict()))["num_cold"] == 5
