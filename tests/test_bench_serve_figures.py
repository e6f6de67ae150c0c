"""The arithmetic of `vera bench serve`, against figures worked out by hand."""

import pytest

from vera.bench.serve.answer import Answer
from vera.bench.serve.figures import peak_concurrency, peak_output_rate, serving_figures, sum_usage, tpot

FIRST = Answer(
    sent_at=100.0, ttft_seconds=0.5, gaps_seconds=(0.1, 0.3), e2e_seconds=0.9, prompt_tokens=20, output_tokens=3, cached_tokens=8
)
SECOND = Answer(
    sent_at=100.5, queued_seconds=0.5, ttft_seconds=1.0, gaps_seconds=(0.2,), e2e_seconds=1.6, prompt_tokens=30, output_tokens=5
)
ONE_TOKEN = Answer(sent_at=101.0, ttft_seconds=0.3, e2e_seconds=0.3, prompt_tokens=10, output_tokens=1, counted=False)
FAILED = Answer(sent_at=101.0, error="500: no")
ALL = [FIRST, SECOND, ONE_TOKEN, FAILED]


def _figures(answers=ALL, seconds=4.0, goodput=None, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(50, 99.0)):
    return serving_figures(answers, seconds, goodput=goodput or {}, metrics=metrics, percentiles=percentiles)


def test_counts_and_rates_leave_failures_out():
    figures = _figures()
    assert (figures["completed"], figures["failed"], figures["without_usage"]) == (3, 1, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["total_cached_tokens"]) == (60, 9, 8)
    assert figures["request_throughput"] == pytest.approx(0.75)
    assert figures["output_throughput"] == pytest.approx(2.25)
    assert figures["total_token_throughput"] == pytest.approx(17.25)


def test_tpot_is_the_rest_of_the_time_over_the_rest_of_the_tokens():
    assert tpot(FIRST) == pytest.approx(0.2)  # (0.9 - 0.5) / 2
    assert tpot(SECOND) == pytest.approx(0.15)  # (1.6 - 1.0) / 4
    assert tpot(ONE_TOKEN) is None


def test_statistics_in_milliseconds():
    figures = _figures()
    assert figures["mean_ttft_ms"] == pytest.approx(600)
    assert figures["median_ttft_ms"] == figures["p50_ttft_ms"] == pytest.approx(500)
    assert figures["std_ttft_ms"] == pytest.approx((260000 / 3) ** 0.5)  # of -100, 400, -300
    assert figures["p99_ttft_ms"] == pytest.approx(500 + 0.98 * 500)  # between the second and the third of three
    assert figures["mean_tpot_ms"] == pytest.approx(175)
    assert figures["mean_itl_ms"] == pytest.approx(200)
    assert figures["mean_e2el_ms"] == pytest.approx(2800 / 3)


def test_waiting_in_the_client_is_apart_from_latency():
    figures = _figures(metrics=("client_queue_time", "e2el_including_client_queue"))
    assert figures["mean_client_queue_time_ms"] == pytest.approx(500 / 3)
    assert figures["mean_e2el_including_client_queue_ms"] == pytest.approx(3300 / 3)
    assert "mean_ttft_ms" not in figures


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 500.0}, 2),
        ({"tpot": 160.0}, 2),  # an answer of one token keeps any limit
        ({"e2el": 900.1}, 2),
        ({"ttft": 500.0, "tpot": 160.0}, 1),
        ({"ttft": 1.0}, 0),
    ],
)
def test_goodput_counts_those_that_keep_all_limits(limits, good):
    assert _figures(goodput=limits)["request_goodput"] == pytest.approx(good / 4)


def test_no_limits_no_goodput():
    assert _figures()["request_goodput"] is None


def test_percentiles_are_named_as_people_write_them():
    assert {"p50_itl_ms", "p99.9_itl_ms"} <= set(_figures(percentiles=(50.0, 99.9)))


def test_statistics_without_samples_are_none():
    figures = _figures(answers=[FAILED])
    assert figures["mean_ttft_ms"] is figures["p99_itl_ms"] is None
    assert figures["request_throughput"] == figures["max_output_tokens_per_s"] == figures["max_concurrent_requests"] == 0


def test_peak_rate_is_that_of_the_fullest_second():
    # FIRST brings one token each at 0.5, 0.6 and 0.9 s; SECOND 2.5 each at 1.5 and 1.7 s; ONE_TOKEN one at 1.3 s.
    assert peak_output_rate([FIRST, SECOND, ONE_TOKEN]) == pytest.approx(6.0)


def test_peak_concurrency_counts_no_request_that_ends_as_another_is_sent():
    assert peak_concurrency([FIRST, SECOND, ONE_TOKEN]) == 2
    back_to_back = [Answer(sent_at=0.0, e2e_seconds=1.0), Answer(sent_at=1.0, e2e_seconds=1.0)]
    assert peak_concurrency(back_to_back) == 1


def test_usage_is_added_in_its_own_shape():
    first = {"cached_tokens": {"hot": 64, "cold": 0}, "hits": 3, "error_mean": 0.01, "fidelity": "bounded"}
    second = {"cached_tokens": {"hot": 1, "cold": 128}, "hits": 4, "error_mean": 0.03, "recompute_steps": 2}
    assert sum_usage([first, second, {}]) == {
        "cached_tokens": {"hot": 65, "cold": 128},
        "hits": 7,
        "error_mean": {"mean": pytest.approx(0.02), "max": 0.03},
        "recompute_steps": 2,
    }
