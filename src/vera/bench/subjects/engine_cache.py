"""Vera itself, with a native or an adaptive cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any, Protocol, runtime_checkable

import torch

from vera.bench.shape import shape_of
from vera.bench.statistics import decode_figures
from vera.bench.subjects import WARMUP_PROMPT_TOKENS, WARMUP_STEPS
from vera.cache import warm_bytes_per_block
from vera.cache.housekeeping import TierStats
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine, StepTimes
from vera.models import LoadedModel, load_model
from vera.sampling_params import SamplingParams

_YARDSTICK_RUNS = 3
_ADAPTIVE_CEILING = 0.5
"""Ceiling of the adaptive cache, by what the native one takes for the same sequences. What it uses is measured."""
_SLACK_BYTES = 64 * 2**20


def decode(
    *,
    model: str,
    cache: str,
    page_dtype: str,
    token_ids: list[int],
    batch: int,
    new_tokens: int,
    max_batch_tokens: int,
    num_threads: int,
    seed: int,
    cold_share: float | None = None,
    adaptive: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Decodes `new_tokens` steps of `batch` sequences with the same prompt: prefilled once, copied to pages of their own."""
    total_tokens = len(token_ids) + 1 + WARMUP_STEPS + new_tokens
    loaded = load_model(model)
    settings = {"mode": cache, "page_dtype": page_dtype, "prefix_reuse": False}
    if cache == "adaptive":
        settings |= adaptive_settings(loaded, settings | dict(adaptive or {}), batch, total_tokens, cold_share)
    engine = make_engine(
        loaded,
        settings,
        batch,
        total_tokens,
        max_batch_tokens=max_batch_tokens,
        num_threads=num_threads,
        seed=seed,
    )
    start = time.perf_counter()
    # One token more than is read: every sequence must still be running in the last step.
    first = engine.add_request(token_ids, greedy(2 + WARMUP_STEPS + new_tokens))
    answers = {first: first_tokens(engine)}
    prefill_seconds = time.perf_counter() - start
    for _ in range(batch - 1):
        answers[engine.duplicate(first)] = list(answers[first])
    for _ in range(WARMUP_STEPS):
        _step(engine, answers)
    yardstick = _Yardstick(engine, num_threads)
    yardstick.begin()
    before = None if engine.cache.tier_stats is None else engine.cache.tier_stats.snapshot()
    steps = []
    cache_bytes = 0
    for _ in range(new_tokens):
        steps.append(_step(engine, answers))
        cache_bytes = max(cache_bytes, engine.cache.used_bytes)
    kernel = yardstick.figures() | _tier_figures(engine, before, steps)
    tokens = answers[first]
    return decode_figures([seconds for seconds, _ in steps], batch) | {
        "prefill_seconds": prefill_seconds,
        "cache_bytes": cache_bytes,
        "cache_capacity_bytes": engine.cache.capacity_bytes,
        "page_dtype": page_dtype,
        "kernel": engine.backend.name,
        **kernel,
        **_breakdown(steps),
        "threads": torch.get_num_threads(),
        "sequences_agree": all(answer == tokens for answer in answers.values()),
        "token_ids": tokens,
    }


def prefill(
    *, model: str, cache: str, page_dtype: str, token_ids: list[int], max_batch_tokens: int, num_threads: int, seed: int
) -> dict[str, Any]:
    """The time from the request to its first token in an idle engine, after a short warm-up."""
    engine = make_engine(
        load_model(model),
        {"mode": cache, "page_dtype": page_dtype, "prefix_reuse": False},
        1,
        len(token_ids) + 1,
        max_batch_tokens=max_batch_tokens,
        num_threads=num_threads,
        seed=seed,
    )
    engine.add_request(token_ids[:WARMUP_PROMPT_TOKENS], greedy(1))
    first_tokens(engine)
    start = time.perf_counter()
    engine.add_request(token_ids, greedy(1))
    tokens = first_tokens(engine)
    seconds = time.perf_counter() - start
    return {
        "prefill_tokens_per_s": len(token_ids) / seconds,
        "ttft_ms": 1e3 * seconds,
        "page_dtype": page_dtype,
        "max_batch_tokens": max_batch_tokens,
        "threads": torch.get_num_threads(),
        "token_ids": tokens,
    }


def make_engine(
    model: LoadedModel,
    cache: Mapping[str, Any],
    batch: int,
    sequence_tokens: int,
    *,
    max_batch_tokens: int,
    num_threads: int,
    seed: int,
) -> Engine:
    """An engine whose cache holds `batch` sequences of `sequence_tokens`; `cache` are settings of CacheConfig.

    Where they bring no ceiling, the pool holds just these sequences exactly, with one block to spare for each.
    """
    ceiling = {"cache_max_bytes": native_bytes(model, cache, batch, sequence_tokens)}
    config = EngineConfig(
        cache=CacheConfig.from_dict({**ceiling, **cache}),
        max_num_seqs=batch,
        max_batch_tokens=max(max_batch_tokens, batch),
        max_model_len=min(sequence_tokens + 1, model.spec.max_context),
        num_threads=num_threads,
        seed=seed,
    )
    engine = Engine(model, config)
    if not engine.cache.adaptive:
        # Memory that was never written is one shared page of zeros, which would flatter whatever is read from it.
        engine.cache.pool.pages.zero_()
    return engine


def native_bytes(model: LoadedModel, cache: Mapping[str, Any], batch: int, sequence_tokens: int) -> int:
    """With a block to spare for each sequence."""
    config = CacheConfig.from_dict(cache)
    return batch * shape_of(model).native_bytes(config, sequence_tokens + config.page_size)


def adaptive_settings(
    model: LoadedModel, settings: Mapping[str, Any], batch: int, sequence_tokens: int, cold_share: float | None
) -> dict[str, Any]:
    """The settings, with a ceiling below which the batch fits, and a warm store that holds all but `cold_share` of its units."""
    config = CacheConfig.from_dict(settings)
    native = native_bytes(model, settings, batch, sequence_tokens)
    if sequence_tokens <= config.min_context:
        return dict(settings) | {"cache_max_bytes": native + _SLACK_BYTES}
    blocks = batch * -(-sequence_tokens // config.page_size)
    for_all = blocks * warm_bytes_per_block(shape_of(model), config)
    share = 1.0 if cold_share is None else 1.0 - cold_share
    return {"cache_max_bytes": int(_ADAPTIVE_CEILING * native) + _SLACK_BYTES, "warm_bytes": int(share * for_all)} | dict(
        settings
    )


def _tier_figures(engine: Engine, before: TierStats | None, steps: Sequence[tuple[float, StepTimes]]) -> dict[str, Any]:
    """What the adaptive cache did in the measured steps; nothing for a native one. Rates are over steps times sequences."""
    stats = engine.cache.tier_stats
    if stats is None or before is None:
        return {}
    done = stats.since(before)
    seconds = sum(seconds for seconds, _ in steps)
    counters = ("uncovered_hits", "restored_blocks", "promoted_pages", "hit_promotions", "cooled_pages", "demoted_blocks")
    return {
        "warm_bytes": engine.cache.warm_bytes,
        **asdict(done.rates),
        **{name: getattr(done, name) for name in counters},
        "cold_units_share": engine.cache.cold_share,
        "policy_share": sum(times.policy for _, times in steps) / seconds,
        "restore_share": sum(times.restore for _, times in steps) / seconds,
    }


def greedy(max_tokens: int) -> SamplingParams:
    """The most likely token each time, whatever ends an answer."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def first_tokens(engine: Engine) -> list[int]:
    """Steps until a request of the engine gains a token."""
    while engine.has_unfinished():
        for update in engine.step():
            if update.new_token_ids:
                return list(update.new_token_ids)
    raise RuntimeError("the request ended without a token")


def _step(engine: Engine, answers: dict[str, list[int]]) -> tuple[float, StepTimes]:
    """One step, which must give every sequence one token; its seconds, and where they went."""
    start = time.perf_counter()
    updates = engine.step()
    seconds = time.perf_counter() - start
    for update in updates:
        answers[update.request_id] += update.new_token_ids
    if len(updates) != len(answers):
        raise RuntimeError(f"a step gave {len(updates)} of {len(answers)} sequences a token; the figures would be wrong")
    return seconds, engine.step_times


def _breakdown(steps: Sequence[tuple[float, StepTimes]]) -> dict[str, Any]:
    """The mean parts of a step in ms, and the share of it that is neither model nor attention.

    The parts add up to the step but for "restore", which happens within "model" and "prepare".
    """
    step_seconds = fmean(seconds for seconds, _ in steps)
    means = {name: fmean(getattr(times, name) for _, times in steps) for name in asdict(steps[0][1])}
    parts = means | {"model": means["model"] - means["attention"]}
    parts["other"] = step_seconds - sum(parts.values()) + parts["restore"]
    return {
        "step_parts_ms": {name: 1e3 * seconds for name, seconds in parts.items()},
        "overhead_share": 1 - means["model"] / step_seconds,
    }


@runtime_checkable
class _CountingKernel(Protocol):
    """An attention backend that counts what its decode kernel reads, and in what time."""

    decode_seconds: float
    decode_bytes_read: int


class _Yardstick:
    """How fast the decode kernel reads pages, relative to a plain sum over as many bytes of the same pool."""

    def __init__(self, engine: Engine, num_threads: int) -> None:
        self._backend = engine.backend
        self._adaptive = engine.cache.adaptive
        self._num_threads = num_threads
        used_pages = engine.cache.pool.frames.num_used_frames * engine.cache.pool.frame_pages
        self._pages = engine.cache.pool.pages[:used_pages]
        self._plain_seconds: list[float] = []
        self._start = (0.0, 0)

    def begin(self) -> None:
        self._sum_pages()
        self._start = self._counters()

    def figures(self) -> dict[str, Any]:
        """The kernel's figures since `begin`. The plain sum is the median of runs before and after; None: no native kernel."""
        if not isinstance(self._backend, _CountingKernel) or self._adaptive:
            return {"kernel_bandwidth_share": None}
        seconds, num_bytes = (now - then for now, then in zip(self._counters(), self._start, strict=True))
        self._sum_pages()
        kernel = num_bytes / seconds
        plain = self._pages.nbytes / median(self._plain_seconds)
        return {
            "kernel_bandwidth_share": kernel / plain,
            "kernel_bytes_per_s": kernel,
            "plain_sum_bytes_per_s": plain,
        }

    def _counters(self) -> tuple[float, int]:
        backend = self._backend
        return (backend.decode_seconds, backend.decode_bytes_read) if isinstance(backend, _CountingKernel) else (0.0, 0)

    def _sum_pages(self) -> None:
        if not isinstance(self._backend, _CountingKernel) or self._adaptive:
            return
        from vera.attention.cpu import plain_sum  # there, because the kernel is

        for _ in range(_YARDSTICK_RUNS):
            start = time.perf_counter()
            plain_sum(self._pages, self._num_threads)
            self._plain_seconds.append(time.perf_counter() - start)
