"""What runs in a process of its own: preparing, decoding a full batch, and finding how many sequences a ceiling holds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from vera.bench.memory import MemoryMeter
from vera.bench.shape import shape_of
from vera.bench.statistics import decode_figures
from vera.bench.subjects.engine_cache import adaptive_settings, first_tokens, greedy, make_engine, native_bytes
from vera.bench.workload import document_tokens
from vera.engine.engine import Engine, StepTimes
from vera.errors import CapacityError, ConfigError
from vera.models import LoadedModel, load_model

_SEATS = 5
"""How many times the native number of sequences is tried at an equal ceiling; many more than an adaptive cache can hold."""
_PATIENCE = 4
"""How many times as long an answer may get while sequences lose their places at an equal ceiling."""


def prepare(*, model: str, num_tokens: int, seed: int) -> dict[str, Any]:
    """Loads the model once, which converts it if need be; returns the longest prompt and the facts that the plan needs."""
    loaded = load_model(model, progress=_tell)
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{loaded.spec.name} comes without a tokenizer, so the document cannot be its prompt; add the tokenizer"
        )
    return {
        "token_ids": document_tokens(loaded.tokenizer, num_tokens, seed=seed),
        "model_name": loaded.spec.name,
        "max_context": loaded.spec.max_context,
        "has_chat": bool(loaded.tokenizer.chat_template),
        "shape": asdict(shape_of(loaded)),
    }


def decode(
    *,
    model: str,
    cache: Mapping[str, Any],
    token_ids: list[int],
    batch: int,
    new_tokens: int,
    max_batch_tokens: int,
    num_threads: int,
    seed: int,
    cold_share: float | None = None,
    ceiling_share: float | None = None,
) -> dict[str, Any]:
    """Answers of `new_tokens` tokens to `batch` copies of one prompt: it is read once and copied to pages of their own.

    `cache` are settings of a CacheConfig with its mode. Every step is timed, from the one after the prompt on. A prompt that is
    longer than the model's context is read all the same: the times are right, the tokens mean nothing.
    """
    total_tokens = len(token_ids) + new_tokens + 1  # one more than is read: every sequence still runs in the last step
    loaded = _stretched(load_model(model), total_tokens + 1)
    settings = {**cache, "prefix_reuse": False}
    if settings["mode"] == "adaptive":
        if ceiling_share is not None:
            settings["cache_max_bytes"] = int(ceiling_share * native_bytes(loaded, settings, batch, total_tokens))
        settings = adaptive_settings(loaded, settings, batch, total_tokens, cold_share)
    with MemoryMeter() as meter:
        engine = make_engine(
            loaded, settings, batch, total_tokens, max_batch_tokens=max_batch_tokens, num_threads=num_threads, seed=seed
        )
        first, ttft_seconds = _read_prompt(engine, token_ids, new_tokens)
        for _ in range(batch - 1):
            engine.duplicate(first)
        lap = _Lap(engine)
        for _ in range(new_tokens - 1):
            if (moved := len(lap.step())) != batch:
                raise RuntimeError(f"a step gave {moved} of {batch} sequences a token; the figures would be wrong")
    return lap.figures(batch) | _others(engine, ttft_seconds, meter)


def capacity(
    *,
    model: str,
    cache: Mapping[str, Any],
    token_ids: list[int],
    native_sequences: int,
    new_tokens: int,
    max_batch_tokens: int,
    num_threads: int,
    seed: int,
) -> dict[str, Any]:
    """As many sequences as decode together, to the end, under the ceiling that `native_sequences` take in a native cache.

    Copies of a prompt that has been read are added until one is refused, and those that lose their place while they decode are
    taken away, until `new_tokens - 1` steps in a row have lost none: these are timed, and "sequences" took part in them.
    """
    max_tokens = _PATIENCE * new_tokens
    total_tokens = len(token_ids) + max_tokens + 1
    loaded = _stretched(load_model(model), total_tokens + 1)
    ceiling = native_bytes(loaded, _page_settings(cache), native_sequences, len(token_ids) + new_tokens)
    settings = {**cache, "prefix_reuse": False, "cache_max_bytes": ceiling}
    seats = _SEATS * native_sequences
    with MemoryMeter() as meter:
        engine = make_engine(
            loaded, settings, seats, total_tokens, max_batch_tokens=max_batch_tokens, num_threads=num_threads, seed=seed
        )
        first, ttft_seconds = _read_prompt(engine, token_ids, max_tokens)
        _fill(engine, first, seats)
        lap, sequences = _steps_without_a_loss(engine, new_tokens - 1, patience=max_tokens - 1)
    counted = {"sequences": sequences, "ceiling_bytes": ceiling, "all_seats_taken": sequences == seats}
    return lap.figures(sequences) | counted | _others(engine, ttft_seconds, meter)


def _fill(engine: Engine, first: str, seats: int) -> None:
    """Copies of a request until every seat is taken, or one is refused."""
    try:
        for _ in range(seats - 1):
            engine.duplicate(first)
    except CapacityError:
        pass  # that is what was looked for


def _steps_without_a_loss(engine: Engine, num_steps: int, *, patience: int) -> tuple[_Lap, int]:
    """So many steps in a row in which each sequence gained a token, and how many sequences there were.

    Those that did not are sent off, and the count begins again; RuntimeError after `patience` steps.
    """
    lap = _Lap(engine)
    for _ in range(patience):
        there = set(engine.request_ids)
        moved = lap.step()
        if there == moved:
            if len(lap.seconds) == num_steps:
                return lap, len(moved)
            continue
        for request_id in there - moved:
            engine.abort(request_id)
        lap = _Lap(engine)
    raise RuntimeError(f"in {patience} steps there were no {num_steps} in a row without a sequence that lost its place")


def _others(engine: Engine, ttft_seconds: float, meter: MemoryMeter) -> dict[str, Any]:
    """Figures that are not of the steps. What loading the model took for a while is not in "serving_bytes"."""
    return {
        "ttft_ms": 1e3 * ttft_seconds,
        "serving_bytes": meter.peak_private_bytes,
        "kernel": engine.backend.name,
    }


def _page_settings(cache: Mapping[str, Any]) -> dict[str, Any]:
    """What of a cache's settings makes the pages of a native one."""
    return {name: cache[name] for name in ("page_dtype", "page_size") if name in cache}


def _stretched(model: LoadedModel, tokens: int) -> LoadedModel:
    """The model, which does not object to `tokens` tokens."""
    if tokens > model.spec.max_context:
        model.spec = replace(model.spec, max_context=tokens)
    return model


def _read_prompt(engine: Engine, token_ids: list[int], new_tokens: int) -> tuple[str, float]:
    """The request, which has its first token, and the seconds that it took in an idle engine."""
    start = time.perf_counter()
    first = engine.add_request(token_ids, greedy(new_tokens + 1))
    first_tokens(engine)
    return first, time.perf_counter() - start


class _Lap:
    """Steps that are timed, and what the cache did in them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = None if engine.cache.tier_stats is None else engine.cache.tier_stats.snapshot()
        self.seconds: list[float] = []
        self._times: list[StepTimes] = []
        self._cache_bytes: list[int] = []

    def step(self) -> set[str]:
        """The requests that gained a token."""
        start = time.perf_counter()
        updates = self._engine.step()
        self.seconds.append(time.perf_counter() - start)
        self._times.append(self._engine.step_times)
        self._cache_bytes.append(self._engine.cache.used_bytes)
        return {update.request_id for update in updates if update.new_token_ids}

    def figures(self, batch: int) -> dict[str, Any]:
        """Of steps in which each of `batch` sequences gained a token."""
        speed = decode_figures(self.seconds, batch)
        return {
            "steps": len(self.seconds),
            "cache_bytes": fmean(self._cache_bytes),
            "cache_peak_bytes": max(self._cache_bytes),
            "itl_ms_mean": 1e3 * fmean(self.seconds),
            "itl_ms_p50": speed["step_ms_p50"],
            "itl_ms_p99": speed["step_ms_p99"],
            "decode_tokens_per_s": speed["decode_tokens_per_s"],
            "attention_ms": 1e3 * fmean(times.attention for times in self._times),
            **self._tier_figures(),
        }

    def _tier_figures(self) -> dict[str, Any]:
        """Nothing for a native cache. Rates are over steps times sequences, times and pages over steps."""
        stats = self._engine.cache.tier_stats
        if stats is None or self._before is None:
            return {}
        done = stats.since(self._before)
        return {
            "warm_bytes": self._engine.cache.warm_bytes,
            "cold_units_share": self._engine.cache.cold_share,
            "recompute_share": done.rates.recompute_share,
            "exact_read_share": done.rates.exact_read_share,
            "hits_per_step": done.rates.hits_per_step,
            "uncovered_hits": done.uncovered_hits,
            "recalibrations": done.recalibrations,
            "policy_ms": 1e3 * fmean(times.policy for times in self._times),
            "pages_touched_per_step": (done.hits + done.promoted_pages + done.cooled_pages) / len(self._times),
        }


def _tell(line: str) -> None:
    print(f"vera bench: {line}", file=sys.stderr, flush=True)
