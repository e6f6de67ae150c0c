"""`vera bench workloads`: its arithmetic against figures worked out by hand, and one whole run of a tiny model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tiny_models import save_tiny, tiny_tokenizer
from vera.bench.workloads import SCENARIOS, Scenario, WorkloadsBench, markdown, render_workloads, run_workloads, save_workloads
from vera.bench.workloads.budget import ceiling_for, default_ceiling, useful_tokens
from vera.bench.workloads.facts import Facts, measure_facts
from vera.bench.workloads.figures import ratio_spread, ratios, run_figures, verdict
from vera.bench.workloads.service import ServiceFailed, WatchedService
from vera.cli import app
from vera.errors import ConfigError

FACTS = Facts(block_tokens=64, block_bytes=1000, sequence_tokens=(640, 1280, 320, 960))

SERVED: dict[str, Any] = {
    "request_throughput": 2.0,
    "output_throughput": 64.0,
    "request_goodput": 1.5,
    "duration": 10.0,
    "completed": 20,
    "total_input_tokens": 4000,
    "total_output_tokens": 640,
    "total_cached_tokens": 1000,
    "client_cpu_share": 0.1,
    "vera": {"decode_steps": 200, "hits": 500, "recompute_steps": 10, "uncovered_hits": 3, "cached_tokens": {"hot": 1000}},
} | {f"p{rank}_{key}_ms": value for key, value in {"ttft": 100.0, "itl": 20.0, "e2el": 700.0}.items() for rank in (50, 99)}
TOLD = {"preemptions": 4, "cpu_seconds": 15.0, "peak_cache_bytes": 990, "peak_warm_bytes": 0, "peak_process_bytes": 5000}


def _run(**changes: Any) -> dict[str, Any]:
    return run_figures(SERVED, told=TOLD) | changes


def _verdict(native: dict[str, Any], adaptive: dict[str, Any], *, spread: Any = None, ceiling: int = 1000) -> str:
    return verdict(native, adaptive, ratios(native, adaptive), spread or {}, ceiling=ceiling)


def test_figures_of_a_run():
    figures = _run()
    assert (figures["qps"], figures["goodput_qps"], figures["output_tokens_per_s"]) == (2.0, 1.5, 64.0)
    assert (figures["ttft_ms_p99"], figures["itl_ms_p50"], figures["e2e_ms_p99"]) == (100.0, 20.0, 700.0)
    assert figures["cached_share"] == 0.25  # 1000 of 4000
    assert figures["recompute_share"] == 0.05  # 10 of 200
    assert figures["hits_per_step"] == 2.5  # 500 by 200
    assert figures["preemptions"] == 4


def test_run_without_bounded_steps_has_no_shares_of_them():
    figures = run_figures(SERVED | {"vera": {}}, told=TOLD)
    assert (figures["bounded_steps"], figures["recompute_share"], figures["hits_per_step"]) == (0, None, None)


def test_ratios_are_adaptive_by_native():
    found = ratios(_run(), _run(qps=3.0, ttft_ms_p99=50.0))
    assert (found["qps"], found["ttft_ms_p99"], found["itl_ms_p50"]) == (1.5, 0.5, 1.0)


def test_ratio_to_nothing_is_none():
    assert ratios(_run(goodput_qps=0.0), _run())["goodput_qps"] is None
    assert ratios({"failed": "no room"}, _run())["qps"] is None


def test_spread_is_that_of_runs_that_followed_each_other():
    spread = ratio_spread([_run(qps=1.0), _run(qps=2.0), {"failed": "died"}], [_run(qps=2.0), _run(qps=3.0), _run(qps=9.0)])
    assert spread["qps"] == [1.5, 2.0]  # 2 / 1 and 3 / 2; the third pair is none


def test_verdict_says_that_it_helps():
    assert _verdict(_run(), _run(qps=3.0)) == "Adaptive helps: 1.50x native's requests a second at the same ceiling."


@pytest.mark.parametrize(("qps", "words"), [(2.04, "costs next to nothing: 1.02x"), (1.5, "it costs: 0.75x")])
def test_verdict_says_that_it_does_not_help(qps: float, words: str):
    told = _verdict(_run(), _run(qps=qps))
    assert told.startswith("Adaptive does not help here")
    assert words in told


def test_verdict_trusts_no_ratio_within_the_spread():
    told = _verdict(_run(), _run(qps=2.4), spread={"qps": [0.9, 1.4]})
    assert told.startswith("Adaptive does not help here beyond the spread of the runs")


def test_verdict_names_what_became_worse_and_what_else_to_know():
    told = _verdict(_run(), _run(qps=3.0, itl_ms_p99=40.0, bounded_steps=0), ceiling=2000)
    assert "Worse than native: ITL P99 ms 2.00x." in told
    assert "Native did not fill its ceiling" in told
    assert "No step was served within bounds" in told


def test_verdict_of_a_failed_run_is_its_reason():
    assert _verdict(_run(), {"failed": "killed"}) == "Not compared, because adaptive failed: killed."


def test_ceiling_is_a_share_of_what_is_of_use_at_the_same_time():
    assert useful_tokens(FACTS, 2) == 1280 + 960  # the two longest
    assert useful_tokens(FACTS, None) == 3200
    # ceil(0.75 * 35 blocks) = 27, above the 1.25 * 20 + 1 = 26 that the longest sequence needs to have room
    assert default_ceiling(FACTS, concurrency=2, share=0.75) == 27_000
    assert default_ceiling(FACTS, concurrency=2, share=0.1) == 26_000


def test_ceiling_of_whole_sequences():
    assert ceiling_for(FACTS, 3) == 60_000  # 3 * 20 blocks
    assert ceiling_for(FACTS, 1) == 26_000


def test_every_scenario_has_a_profile_and_fits_the_usual_context():
    assert WorkloadsBench().adaptive_settings("short-text") == {"mode": "adaptive", "min_context": 4096}
    for scenario in SCENARIOS.values():
        for load in (scenario.workload, scenario.quick):
            turns = load.num_turns if load.dataset == "multi-turn" else 1
            longest = load.prefix_len + (1 + load.range_ratio) * turns * (load.input_len + load.output_len)
            assert longest < 8192


def test_conversations_keep_texts_of_their_own_when_their_number_changes():
    load = SCENARIOS["multi-turn"].load(quick=False, requests=5)
    assert (load.num_prompts, load.num_prefixes) == (5, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workloads": ["chat"]}, "unknown workload 'chat'; known are long-document, multi-turn, short-text"),
        ({"workloads": ["multi-turn", "multi-turn"]}, "named twice"),
        ({"workloads": []}, "nothing to measure"),
        ({"cache_bytes": 10, "budget_sequences": 2}, "give one of them"),
        ({"budget_sequences": 0.5}, "must be 1 or above"),
        ({"repeats": 0}, "repeats=0 must be a whole number from 1 up"),
        ({"requests": 0}, "requests=0"),
        ({"adaptive": {"sketch_bitts": 4}}, "unknown setting sketch_bitts"),
        ({"timeout_seconds": 0.0}, "timeout_seconds"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        WorkloadsBench(**given)


# -- the whole, with a tiny model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    save_tiny(folder, tokenizer=tokenizer, vocab_size=len(tokenizer))
    return str(folder)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Conversations of a few hundred letters: the tiny tokenizer has about a token for each."""
    usual = SCENARIOS["multi-turn"]
    load = replace(
        usual.quick, num_prompts=4, num_turns=2, num_prefixes=4, prefix_len=60, input_len=10, output_len=8, think_seconds=0.2
    )
    small = replace(usual, quick=load)
    monkeypatch.setitem(SCENARIOS, "multi-turn", small)
    return small


def _bench(model: str, **changes: Any) -> WorkloadsBench:
    given: dict[str, Any] = {"model": model, "workloads": ["multi-turn"], "quick": True, "num_threads": 1, "seed": 3}
    return WorkloadsBench(**given | {"adaptive": {"min_context": 64, "warm_store": "ram"}} | changes)


@pytest.mark.slow
def test_conversations_through_both_services(model: str, small: Scenario, tmp_path: Path):
    result = run_workloads(_bench(model, cache_bytes=2_000_000))
    assert (result["bench"], result["machine"]["threads"], len(result["workloads"])) == ("workloads", 1, 1)
    measured = result["workloads"][0]
    native, adaptive = measured["native"], measured["adaptive"]
    assert (native["completed"], adaptive["completed"]) == (8, 8)  # 4 conversations of 2 turns
    assert native["output_tokens"] == adaptive["output_tokens"]
    assert adaptive["bounded_steps"] > 0
    assert native["bounded_steps"] == 0
    for run in (native, adaptive):
        assert 0 < run["peak_cache_bytes"] <= measured["cache_bytes"]
        assert run["cpu_seconds"] > 0
    assert measured["ratios"]["qps"] == pytest.approx(adaptive["qps"] / native["qps"])
    render_workloads(result)
    saved, page = save_workloads(result, tmp_path / "out")
    assert json.loads(saved.read_text()) == result
    assert measured["verdict"] in page.read_text() == markdown(result)


def test_sequence_beyond_the_models_context_is_refused(model: str, small: Scenario):
    load = {**asdict(replace(small.quick, prefix_len=2000)), "request_rate": 1.0}
    with pytest.raises(ConfigError, match=r"above the 4096 of .*; leave it out of --workload"):
        measure_facts(model=model, workloads={"multi-turn": load}, page_dtype="float16")


@pytest.mark.slow
def test_service_that_does_not_start_gives_its_reason(model: str):
    with (
        pytest.raises(ServiceFailed, match=r"did not start: .*below one block"),
        WatchedService([model, "--cache-max-bytes", "1000"], threads=1),
    ):
        pass


def test_command_refuses_an_unknown_workload():
    refused = CliRunner().invoke(app, ["bench", "workloads", "--workload", "chat"])
    assert isinstance(refused.exception, ConfigError)
    assert "unknown workload 'chat'" in str(refused.exception)
