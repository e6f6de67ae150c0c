"""The sampler against transformers' processors, exact distributions, and itself in other batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vera.engine.sampler import NO_TOKEN, Sampler, SamplingRow, prompt_logprobs, uniform
from vera.sampling_params import SamplingParams

VOCAB = 40


def row(
    *, seed: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = (), eos: Sequence[int] = (), **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, list(prompt), list(output), frozenset(eos))


def random_logits(rows: int, vocab: int = VOCAB, *, scale: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    return [sampled.token_id for sampled in Sampler().sample(logits, rows)]


def draw_many(logits: Tensor, count: int, **params: Any) -> list[int]:
    """Answers at `count` output indices of one stream, for one row of logits."""
    rows = [row(output=[0] * index, seed=11, **params) for index in range(count)]
    return tokens(logits.expand(count, -1).contiguous(), rows)


def warp(logits: Tensor, warpers: Sequence[LogitsProcessor]) -> Tensor:
    scores = logits[None]
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return torch.softmax(scores[0].double(), dim=0)


def assert_drawn_from(drawn: Sequence[int], probabilities: Tensor) -> None:
    """Chi-square at a level of about one in 10,000, by the Wilson-Hilferty approximation; and nothing impossible was drawn."""
    counts = Counter(drawn)
    possible = [token for token, probability in enumerate(probabilities.tolist()) if probability > 0]
    assert set(counts) <= set(possible)
    expected = {token: len(drawn) * float(probabilities[token]) for token in possible}
    rare = [token for token in possible if expected[token] < 5]
    bins = [([token], expected[token]) for token in possible if expected[token] >= 5]
    bins += [(rare, sum(expected[token] for token in rare))] if rare else []
    if len(bins) == 1:
        return
    statistic = sum((sum(counts[token] for token in members) - mean) ** 2 / mean for members, mean in bins if mean > 0)
    freedom = len(bins) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f} with {freedom} degrees of freedom"


# -- greedy ------------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_most_likely_token_and_the_lowest_id_among_equals() -> None:
    logits = random_logits(3)
    logits[1, 7] = logits[1, 30] = 50.0
    assert tokens(logits, [row(), row(), row()]) == [int(logits[0].argmax()), 7, int(logits[2].argmax())]


def test_logits_are_not_modified() -> None:
    logits = random_logits(4)
    before = logits.clone()
    rows = [
        row(logprobs=3),
        row(temperature=1.0, top_p=0.5),
        row(logit_bias={3: 9.0}, repetition_penalty=2.0, prompt=[1]),
        row(min_tokens=3, eos=[0]),
    ]
    Sampler().sample(logits, rows)
    assert torch.equal(logits, before)


def test_greedy_ignores_the_filters_and_the_seed() -> None:
    logits = random_logits(1)
    assert tokens(logits, [row(top_k=3, top_p=0.1, min_p=0.5, seed=99)]) == [int(logits.argmax())]


# -- rows that are not finite ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize("fault", ["nan", "inf", "all -inf"])
def test_a_row_that_is_not_finite_is_marked_and_leaves_the_others_alone(fault: str, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    whole = tokens(logits, [row(**params) for _ in range(3)])
    match fault:
        case "nan":
            logits[1, 5] = float("nan")
        case "inf":
            logits[1, 5] = float("inf")
        case _:
            logits[1] = -float("inf")
    results = Sampler().sample(logits, [row(**params) for _ in range(3)])
    assert [result.finite for result in results] == [True, False, True]
    assert results[1].token_id == NO_TOKEN
    assert [results[0].token_id, results[2].token_id] == [whole[0], whole[2]]


def test_some_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = random_logits(1)
    logits[0, 5:] = -float("inf")
    assert_drawn_from(draw_many(logits[0], 2000, temperature=2.0), torch.softmax(logits[0].double() / 2, dim=0))


def test_a_row_whose_every_token_is_banned_is_marked() -> None:
    [result] = Sampler().sample(random_logits(1, 4), [row(min_tokens=1, stop_token_ids=(0, 1, 2, 3))])
    assert not result.finite


def test_penalties_that_overflow_are_marked() -> None:
    [result] = Sampler().sample(torch.full((1, 4), 3e38), [row(repetition_penalty=0.01, prompt=[2])])
    assert not result.finite


# -- adjustments -------------------------------------------------------------------------------------------------------


def adjusted(logits: Tensor, sampling_row: SamplingRow) -> Tensor:
    values = logits.clone()
    sampling_row.adjust(values.numpy())
    return values


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    logits = random_logits(1)[0]
    seen = torch.tensor([[3, 3, 9, 20, 1, 9]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits[None].clone())[0]
    torch.testing.assert_close(adjusted(logits, row(prompt=[3, 3, 9], output=[20, 1, 9], repetition_penalty=1.7)), expected)


def test_presence_and_frequency_penalties_are_those_of_openai_over_the_output_only() -> None:
    logits = random_logits(1)[0]
    sampling_row = row(prompt=[3, 5], output=[5, 8, 8, 8], presence_penalty=0.5, frequency_penalty=-0.25)
    expected = logits.clone()
    expected[5] -= 0.5 - 0.25
    expected[8] -= 0.5 - 0.25 * 3
    torch.testing.assert_close(adjusted(logits, sampling_row), expected)


def test_penalties_follow_the_output_as_it_grows() -> None:
    logits = random_logits(1)[0]
    output: list[int] = []
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    live = SamplingRow(params, 0, [1, 2], output)
    for token in (4, 4, 9, 2, 4):
        output.append(token)
        fresh = SamplingRow(params, 0, [1, 2], list(output))
        assert torch.equal(adjusted(logits, live), adjusted(logits, fresh))


def test_bias_adds_to_the_logit_before_the_repetition_penalty() -> None:
    logits = torch.tensor([1.0, -1.0, 0.5])
    sampling_row = row(prompt=[1], logit_bias={1: 3.0}, repetition_penalty=2.0)
    assert adjusted(logits, sampling_row).tolist() == [1.0, (-1.0 + 3.0) / 2, 0.5]


def test_bias_can_force_and_forbid_a_token() -> None:
    logits = random_logits(2)
    best = int(logits[1].argmax())
    assert tokens(logits, [row(logit_bias={17: 100.0}), row(logit_bias={best: -100.0})]) == [
        17,
        int(logits[1].topk(2).indices[1]),
    ]


def test_ends_are_banned_until_min_tokens_are_there() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 2], logits[:, 6], logits[:, 9] = 30.0, 20.0, 10.0
    ends = {"eos": [2], "stop_token_ids": (6,), "min_tokens": 2}
    rows = [row(output=[1] * count, **ends) for count in range(4)]
    assert tokens(logits, rows) == [9, 9, 2, 2]


def test_an_end_outside_the_vocabulary_is_no_obstacle() -> None:
    assert tokens(random_logits(1), [row(eos=[VOCAB + 5], min_tokens=1)]) == [int(random_logits(1).argmax())]


# -- the filters, against transformers and exact distributions ---------------------------------------------------------

FILTERS: list[tuple[dict[str, Any], list[LogitsProcessor]]] = [
    ({"temperature": 1.0}, []),
    ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    ({"temperature": 3.0, "top_k": 5}, [TemperatureLogitsWarper(3.0), TopKLogitsWarper(5)]),
    ({"temperature": 1.5, "top_k": 1000}, [TemperatureLogitsWarper(1.5)]),
    ({"temperature": 1.3, "top_p": 0.7}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.7)]),
    ({"temperature": 1.3, "top_p": 0.001}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.001)]),
    ({"temperature": 2.0, "min_p": 0.1}, [TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.1)]),
    ({"temperature": 2.0, "min_p": 1.0}, [TemperatureLogitsWarper(2.0), MinPLogitsWarper(1.0)]),
    (
        {"temperature": 2.0, "top_k": 12, "top_p": 0.8},
        [TemperatureLogitsWarper(2.0), TopKLogitsWarper(12), TopPLogitsWarper(0.8)],
    ),
    (
        {"temperature": 2.0, "top_k": 20, "top_p": 0.95, "min_p": 0.15},
        [TemperatureLogitsWarper(2.0), TopKLogitsWarper(20), TopPLogitsWarper(0.95), MinPLogitsWarper(0.15)],
    ),
]


@pytest.mark.parametrize(("params", "warpers"), FILTERS, ids=lambda value: str(value) if isinstance(value, dict) else "")
@pytest.mark.parametrize("vocab", [VOCAB, 700])
def test_tokens_are_drawn_from_the_distribution_of_transformers_warpers(
    params: dict[str, Any], warpers: list[LogitsProcessor], vocab: int
) -> None:
    logits = random_logits(1, vocab, seed=vocab)[0]
    assert_drawn_from(draw_many(logits, 3000, **params), warp(logits, warpers))


@pytest.mark.parametrize(("params", "warpers"), FILTERS[2:], ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_exactly_the_tokens_that_transformers_keeps_can_be_drawn(params: dict[str, Any], warpers: list[LogitsProcessor]) -> None:
    for seed in range(5):
        logits = random_logits(1, 24, scale=1.0, seed=seed)[0]
        kept = set(torch.nonzero(warp(logits, warpers)).flatten().tolist())
        assert set(draw_many(logits, 1500, **params)) == kept


def test_top_k_keeps_all_that_equal_the_last() -> None:
    logits = torch.zeros(VOCAB)
    logits[3] = 1.0
    logits[[10, 11, 12]] = 0.5
    assert set(draw_many(logits, 400, temperature=1.0, top_k=2)) == {3, 10, 11, 12}


@pytest.mark.parametrize("vocab", [10, 9000])
def test_among_equals_top_p_keeps_the_lowest_ids(vocab: int) -> None:
    assert set(draw_many(torch.zeros(vocab), 300, temperature=1.0, top_p=2.5 / vocab)) == {0, 1, 2}


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9999}, {"top_p": 0.5}, {"top_k": 5000}, {"top_k": 300}, {"min_p": 0.001}, {"min_p": 0.5}, {}],
    ids=str,
)
def test_a_flat_distribution_over_a_large_vocabulary_needs_more_than_the_prefix_and_is_still_exact(
    params: dict[str, Any],
) -> None:
    vocab = 9000
    logits = random_logits(1, vocab, scale=0.5)[0]
    warpers: list[LogitsProcessor] = [
        {"top_p": TopPLogitsWarper, "top_k": TopKLogitsWarper, "min_p": MinPLogitsWarper}[name](value)  # type: ignore[abstract]
        for name, value in params.items()
    ]
    probabilities = warp(logits, warpers)
    drawn = draw_many(logits, 400, temperature=1.0, **params)
    assert set(drawn) <= set(torch.nonzero(probabilities).flatten().tolist())
    # Ranks of the drawn tokens, in tenths of the mass: each is as likely as the others.
    order = probabilities.sort(descending=True, stable=True)
    reached = torch.empty(vocab, dtype=torch.double).scatter(0, order.indices, order.values.cumsum(0) - order.values / 2)
    tenths = (reached[drawn] * 10).long().clamp(0, 9).tolist()
    assert_drawn_from(tenths, torch.full((10,), 0.1, dtype=torch.double))


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = random_logits(6, 500)
    for temperature in (1e-3, 1e-12, 5e-324):
        assert tokens(logits, [row(temperature=temperature, seed=i) for i in range(6)]) == logits.argmax(dim=1).tolist()


# -- randomness --------------------------------------------------------------------------------------------------------

MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 40, "min_p": 0.02},
    {},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2},
]


@pytest.mark.parametrize("others", [1, 7, 45])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(others: int) -> None:
    vocab = 3000
    shuffled = np.random.default_rng(others)
    for case, params in enumerate(MIXED):
        logits = random_logits(others + 1, vocab, scale=1.5, seed=case)
        place = int(shuffled.integers(others + 1))
        rows = [row(seed=1000 + i, prompt=[i], output=[i] * (i % 5), **MIXED[i % len(MIXED)]) for i in range(others + 1)]
        rows[place] = row(seed=case, prompt=[1, 2], output=[5, 6, 7], **params)
        alone = row(seed=case, prompt=[1, 2], output=[5, 6, 7], **params)
        [expected] = Sampler().sample(logits[place : place + 1].clone(), [alone])
        assert Sampler().sample(logits, rows)[place] == expected


def test_an_answer_resumed_at_any_index_goes_on_as_if_it_had_not_stopped() -> None:
    logits = random_logits(12, 600)
    output: list[int] = []
    live = SamplingRow(SamplingParams(temperature=1.0, presence_penalty=0.3), 5, [1], output)
    for step in range(12):
        output += tokens(logits[step : step + 1], [live])
    for resumed_at in (1, 5, 11):
        again = output[:resumed_at]
        resumed = SamplingRow(live.params, 5, [1], again)
        for step in range(resumed_at, 12):
            again += tokens(logits[step : step + 1], [resumed])
        assert again == output


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
def test_a_larger_number_never_gives_a_smaller_id(params: dict[str, Any]) -> None:
    """The order of the inverse is part of what makes a seed repeatable."""
    drawn = draw_many(random_logits(1, 700)[0], 300, temperature=1.0, **params)
    by_number = [token for _, token in sorted((uniform(11, index), token) for index, token in enumerate(drawn))]
    assert by_number == sorted(by_number)


def test_other_seeds_and_other_indices_give_other_numbers() -> None:
    numbers = [uniform(seed, index) for seed in (-1, 0, 1, 2, 2**63, 2**64 - 2) for index in range(200)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)


def test_numbers_are_uniform_and_uncorrelated_along_a_stream_and_across_neighbouring_seeds() -> None:
    for stream in ([uniform(7, index) for index in range(20_000)], [uniform(seed, 3) for seed in range(20_000)]):
        assert_drawn_from([int(number * 50) for number in stream], torch.full((50,), 1 / 50, dtype=torch.double))
        correlation = np.corrcoef(stream[:-1], stream[1:])[0, 1]
        assert abs(correlation) < 4 / len(stream) ** 0.5


def test_the_numbers_of_a_seed_never_change() -> None:
    """Answers of an earlier version can be repeated: this is part of the contract."""
    assert [uniform(0, 0), uniform(0, 1), uniform(42, 1000)] == [0.6524484863740322, 0.7012121095215252, 0.6952598398323256]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_logits_as_they_came() -> None:
    logits = random_logits(3)
    expected = torch.log_softmax(logits, dim=1)
    rows = [row(logprobs=4), row(logprobs=2, temperature=2.0, top_k=3), row(logprobs=0, logit_bias={11: 100.0})]
    for i, result in enumerate(Sampler().sample(logits, rows)):
        assert result.logprob == pytest.approx(float(expected[i, result.token_id]), abs=1e-5)
        assert result.rank == int((logits[i] > logits[i, result.token_id]).sum()) + 1
        best = expected[i].topk((4, 2, 0)[i])
        assert [token for token, _ in result.top_logprobs] == best.indices.tolist()
        assert [value for _, value in result.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_rows_that_did_not_ask_have_no_logprobs() -> None:
    asked, silent = Sampler().sample(random_logits(2), [row(logprobs=1), row()])
    assert asked.logprob is not None
    assert silent.logprob is None
    assert silent.rank is None
    assert silent.top_logprobs == ()


@pytest.mark.parametrize("vocab", [VOCAB, 9000])
def test_equally_likely_tokens_are_reported_by_id(vocab: int) -> None:
    logits = (torch.arange(vocab) % 3).float()[None]
    [result] = Sampler().sample(logits, [row(logprobs=3)])
    assert [token for token, _ in result.top_logprobs] == [2, 5, 8]


@pytest.mark.parametrize("positions", [1, 63, 64, 65, 130])
def test_prompt_logprobs_have_the_next_token_its_rank_and_the_most_likely_ones(positions: int) -> None:
    logits = random_logits(positions, 200)
    following = torch.randint(200, (positions,), generator=torch.Generator().manual_seed(1)).tolist()
    reports = prompt_logprobs(logits, following, 5)
    expected = torch.log_softmax(logits, dim=1)
    best = expected.topk(5, dim=1)
    assert [report.token_id for report in reports] == following
    assert [report.logprob for report in reports] == pytest.approx(expected[range(positions), following].tolist(), abs=1e-5)
    assert [report.rank for report in reports] == [
        int((values > values[token]).sum()) + 1 for values, token in zip(logits, following, strict=True)
    ]
    assert [[token for token, _ in report.top] for report in reports] == best.indices.tolist()


def test_no_prompt_positions_give_no_prompt_logprobs() -> None:
    assert prompt_logprobs(torch.empty(0, VOCAB), [], 3) == []
