"""Vera itself, with every page exact in fast memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any, Protocol, runtime_checkable

import torch

from vera.bench.statistics import decode_figures
from vera.bench.subjects import WARMUP_PROMPT_TOKENS, WARMUP_STEPS
from vera.cache import CacheShape
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine, StepTimes
from vera.models import LoadedModel, load_model
from vera.sampling_params import SamplingParams

_YARDSTICK_RUNS = 3


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
) -> dict[str, Any]:
    """Decodes `new_tokens` steps of `batch` sequences with the same prompt: prefilled once, copied to pages of their own."""
    total_tokens = len(token_ids) + 1 + WARMUP_STEPS + new_tokens
    engine = _engine(
        load_model(model),
        cache,
        page_dtype,
        batch,
        total_tokens,
        max_batch_tokens=max_batch_tokens,
        num_threads=num_threads,
        seed=seed,
    )
    start = time.perf_counter()
    # One token more than is read: every sequence must still be running in the last step.
    first = engine.add_request(token_ids, _greedy(2 + WARMUP_STEPS + new_tokens))
    answers = {first: _first_tokens(engine)}
    prefill_seconds = time.perf_counter() - start
    for _ in range(batch - 1):
        answers[engine.duplicate(first)] = list(answers[first])
    for _ in range(WARMUP_STEPS):
        _step(engine, answers)
    yardstick = _Yardstick(engine, num_threads)
    yardstick.begin()
    steps = [_step(engine, answers) for _ in range(new_tokens)]
    kernel = yardstick.figures()
    tokens = answers[first]
    return decode_figures([seconds for seconds, _ in steps], batch) | {
        "prefill_seconds": prefill_seconds,
        "cache_bytes": engine.cache.used_bytes,
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
    engine = _engine(
        load_model(model),
        cache,
        page_dtype,
        1,
        len(token_ids) + 1,
        max_batch_tokens=max_batch_tokens,
        num_threads=num_threads,
        seed=seed,
    )
    engine.add_request(token_ids[:WARMUP_PROMPT_TOKENS], _greedy(1))
    _first_tokens(engine)
    start = time.perf_counter()
    engine.add_request(token_ids, _greedy(1))
    tokens = _first_tokens(engine)
    seconds = time.perf_counter() - start
    return {
        "prefill_tokens_per_s": len(token_ids) / seconds,
        "ttft_ms": 1e3 * seconds,
        "page_dtype": page_dtype,
        "max_batch_tokens": max_batch_tokens,
        "threads": torch.get_num_threads(),
        "token_ids": tokens,
    }


def _engine(
    model: LoadedModel,
    cache: str,
    page_dtype: str,
    batch: int,
    sequence_tokens: int,
    *,
    max_batch_tokens: int,
    num_threads: int,
    seed: int,
) -> Engine:
    """An engine whose pool holds just `batch` sequences of `sequence_tokens`, with one block to spare for each."""
    spec = model.spec
    pages = CacheConfig(mode=cache, page_dtype=page_dtype, prefix_reuse=False)
    shape = CacheShape(layers=spec.num_layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
    blocks = batch * (-(-sequence_tokens // pages.page_size) + 1)
    pool = CacheConfig(mode=cache, page_dtype=page_dtype, prefix_reuse=False, cache_max_bytes=blocks * shape.block_bytes(pages))
    config = EngineConfig(
        cache=pool,
        max_num_seqs=batch,
        max_batch_tokens=max(max_batch_tokens, batch),
        max_model_len=min(sequence_tokens + 1, spec.max_context),
        num_threads=num_threads,
        seed=seed,
    )
    engine = Engine(model, config)
    # Memory that was never written is one shared page of zeros, which would flatter whatever is read from it.
    engine.cache.pool.pages.zero_()
    return engine


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _first_tokens(engine: Engine) -> list[int]:
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
    """The mean parts of a step in ms, which add up to the step, and the share of it that is neither model nor attention."""
    step_seconds = fmean(seconds for seconds, _ in steps)
    means = {name: fmean(getattr(times, name) for _, times in steps) for name in asdict(steps[0][1])}
    parts = means | {"model": means["model"] - means["attention"]}
    parts["other"] = step_seconds - sum(parts.values())
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
        self._num_threads = num_threads
        used_pages = engine.cache.used_bytes // engine.cache.pool.pages[0].nbytes
        self._pages = engine.cache.pool.pages[:used_pages]
        self._plain_seconds: list[float] = []
        self._start = (0.0, 0)

    def begin(self) -> None:
        self._sum_pages()
        self._start = self._counters()

    def figures(self) -> dict[str, Any]:
        """The kernel's figures since `begin`. The plain sum is the median of runs before and after; None: no native kernel."""
        if not isinstance(self._backend, _CountingKernel):
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
        if not isinstance(self._backend, _CountingKernel):
            return
        from vera.attention.cpu import plain_sum  # there, because the kernel is

        for _ in range(_YARDSTICK_RUNS):
            start = time.perf_counter()
            plain_sum(self._pages, self._num_threads)
            self._plain_seconds.append(time.perf_counter() - start)
