"""Whole benchmarks of a tiny model: what they report, and that the subjects really did the same work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiny_models import save_tiny, tiny_tokenizer
from vera.bench import DecodeBench, PrefillBench, render, run_decode, run_prefill
from vera.errors import ConfigError, ModelNotFound

_DECODE_KEYS = {"decode_tokens_per_s", "step_ms_p50", "step_ms_p99", "cache_bytes", "process_bytes", "kernel_bandwidth_share"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    save_tiny(folder, tokenizer=tokenizer, vocab_size=len(tokenizer))
    return str(folder)


@pytest.fixture(scope="module")
def decoded(model: str) -> dict[str, Any]:
    bench = DecodeBench(
        model=model,
        batch=3,
        context=200,
        new_tokens=5,
        baselines=("transformers", "llama.cpp"),
        page_dtype="float32",
        repeats=2,
        num_threads=1,
    )
    return run_decode(bench)


def test_decode_reports_the_agreed_keys(decoded: dict[str, Any]) -> None:
    assert {key: decoded[key] for key in ("bench", "batch", "context", "new_tokens")} == {
        "bench": "decode", "batch": 3, "context": 200, "new_tokens": 5,
    }  # fmt: skip
    assert set(decoded["runs"]["native"]) >= _DECODE_KEYS
    assert set(decoded["runs"]["transformers"]) >= {"batch", "decode_tokens_per_s", "step_ms_p50", "process_bytes"}
    assert decoded["machine"]["threads"] == 1
    json.dumps(decoded)
    render(decoded)


def test_decode_subjects_give_the_same_tokens_in_every_sequence(decoded: dict[str, Any]) -> None:
    native, transformers = decoded["runs"]["native"], decoded["runs"]["transformers"]
    assert native["sequences_agree"]
    assert transformers["sequences_agree"]
    assert transformers["tokens_compared"] == 1 + 2 + 5  # of the prompt, of the warm-up, timed
    assert transformers["same_tokens_as_native"]
    assert native["token_checksum"] == transformers["token_checksum"]


def test_decode_pages_are_distinct_for_each_sequence(decoded: dict[str, Any]) -> None:
    token_bytes = 2 * 4 * 2 * 16 * 4  # keys and values, layers, KV heads, head_dim, float32
    assert decoded["runs"]["native"]["cache_bytes"] >= 3 * 200 * token_bytes
    assert decoded["runs"]["transformers"]["cache_bytes"] == 3 * (200 + 2 + 5) * token_bytes


def test_subject_that_cannot_run_the_model_is_missing_with_a_reason(decoded: dict[str, Any]) -> None:
    assert decoded["runs"]["llama.cpp"]["missing"]
    assert list(decoded["ratios"]) == ["native/transformers"]


def test_repeated_runs_give_their_spread(decoded: dict[str, Any]) -> None:
    native = decoded["runs"]["native"]
    low, high = native["spread"]["decode_tokens_per_s"]
    assert low <= native["decode_tokens_per_s"] <= high


def test_adaptive_decode_tells_the_rates_of_the_timed_steps(model: str) -> None:
    settings = {"min_context": 64, "page_size": 16, "warm_store": "ram", "recalibrate_every": 1}
    bench = DecodeBench(model=model, batch=2, context=400, new_tokens=6, caches=("adaptive",), adaptive=settings, num_threads=1)
    adaptive = run_decode(bench)["runs"]["adaptive"]
    assert 0 < adaptive["exact_read_share"] <= 1
    assert 0 <= adaptive["values_skipped_share"] < 1
    assert adaptive["hits_per_step"] >= 0 == adaptive["recompute_share"] == adaptive["uncovered_hits"]
    assert adaptive["warm_bytes"] > 0


def test_prefill_reports_the_agreed_keys(model: str) -> None:
    result = run_prefill(PrefillBench(model=model, context=300, baselines=("transformers",), page_dtype="float32", num_threads=1))
    assert (result["bench"], result["context"]) == ("prefill", 300)
    native, transformers = result["runs"]["native"], result["runs"]["transformers"]
    for run in (native, transformers):
        assert run["prefill_tokens_per_s"] == pytest.approx(300 / (run["ttft_ms"] / 1e3))
    assert transformers["same_tokens_as_native"]
    assert result["ratios"]["native/transformers"] == pytest.approx(
        native["prefill_tokens_per_s"] / transformers["prefill_tokens_per_s"]
    )
    render(result)


def test_model_that_is_not_there_is_refused_before_anything_runs() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        run_prefill(PrefillBench(model="no-such-model", context=10))


def test_context_above_the_model_s_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="above the 4096 tokens"):
        run_decode(DecodeBench(model=model, context=4090, new_tokens=16))
