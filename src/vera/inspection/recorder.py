"""Runs one prompt through an adaptive cache and writes down what happens to its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vera.bench.shape import shape_of
from vera.cache import AdaptiveCache, CacheUse
from vera.cache.housekeeping import TierRates, TierStats
from vera.cache.pool import ceiling_bytes
from vera.config import CacheConfig, EngineConfig
from vera.engine.audit import AuditResult
from vera.engine.engine import Engine
from vera.errors import ConfigError, VeraError
from vera.models import LoadedModel
from vera.sampling_params import SamplingParams

HOT, WARM, COLD = 0, 1, 2
"""In `Inspection.tiers`."""
TIERS = ("hot", "warm", "cold")

Progress = Callable[[int], None]
"""Is told after each step how many tokens of prompt and answer are computed."""


@dataclass(frozen=True, slots=True)
class StepUse:
    """What one decode step that was served within bounds asked of the cache."""

    hits: int
    """Pages that error control asked for, over all layers and KV heads."""
    recomputed: bool
    """A cold page was restored."""
    uncovered_hits: int
    """Hits on cold pages that were left to their sketch."""
    error: float
    """Estimated error, relative to the value norms: the mean over query heads and layers."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes, by what they are for."""

    exact_blocks: int
    """Whole blocks in fast memory: the first, the latest, the open one, and those that cannot be sketched."""
    hot_pages: int
    """Single pages in fast memory."""
    sketches: int
    tables: int
    """Tables and statistics, which a larger ceiling makes larger."""
    fast: int
    """All fast memory in use: the four above, and what is free in frames that are not full."""
    warm: int
    """Exact copies in the warm store."""
    checkpoints: int
    native: int
    """What the same blocks take in a native cache."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """One prompt and its answer; pages are as the last step left them."""

    model: str
    prompt_tokens: int
    answer_tokens: int
    text: str
    cache: CacheConfig
    tiers: NDArray[np.int8]
    """`[blocks, layers, kv_heads]`: HOT, WARM or COLD."""
    heat: NDArray[np.float32]
    """`[blocks, layers, kv_heads]`: scores from 0 to 1, as of the last recalibration."""
    steps: tuple[StepUse, ...]
    rates: TierRates
    """Of these steps."""
    error_max: float
    """The largest estimated error of any head, layer and step, relative to the value norms."""
    audits: tuple[AuditResult, ...]
    """One layer of each step, drawn at random, was also computed exactly."""
    memory: MemoryUse
    why_untiered: str | None
    """None: some page left fast memory."""

    @property
    def num_blocks(self) -> int:
        return len(self.tiers)

    @property
    def pages(self) -> dict[str, int]:
        """Pages in each tier."""
        return {name: int((self.tiers == tier).sum()) for tier, name in enumerate(TIERS)}

    def tier_shares(self, tier: int) -> NDArray[np.float64]:
        """`[layers, blocks]`: the share of a block's KV heads whose page is in `tier`."""
        shares: NDArray[np.float64] = (self.tiers == tier).mean(axis=2).T
        return shares

    def heat_map(self) -> NDArray[np.float64]:
        """`[layers, blocks]`: the score of the hottest KV head."""
        scores: NDArray[np.float64] = self.heat.max(axis=2).T.astype(np.float64)
        return scores

    def errors_over_tolerance(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of each audit the estimated and the true error, as shares of the tolerance; empty if nothing may be in error."""
        tolerance = self.cache.attention_tolerance
        audits = self.audits if tolerance else ()
        estimated, true = ([getattr(audit, name) for audit in audits] for name in ("estimated_error", "true_error"))
        return np.array(estimated) / (tolerance or 1), np.array(true) / (tolerance or 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        estimated, true = self.errors_over_tolerance()
        return {
            "model": self.model,
            "context": self.prompt_tokens,
            "tokens": self.answer_tokens,
            "text": self.text,
            "fidelity": self.cache.fidelity,
            "attention_tolerance": self.cache.attention_tolerance,
            "page_size": self.cache.page_size,
            "blocks": self.num_blocks,
            "layers": self.tiers.shape[1],
            "kv_heads": self.tiers.shape[2],
            "why_untiered": self.why_untiered,
            "pages": self.pages,
            "bytes": {name: getattr(self.memory, name) for name in MemoryUse.__slots__},
            "hits": [step.hits for step in self.steps],
            "recomputed": [step.recomputed for step in self.steps],
            "uncovered_hits": [step.uncovered_hits for step in self.steps],
            "rates": asdict(self.rates),
            "errors": [step.error for step in self.steps],
            "error_max": self.error_max,
            "audits": {"estimated_over_tolerance": estimated.tolist(), "true_over_tolerance": true.tolist()},
            "hot_share_map": self.tier_shares(HOT).round(3).tolist(),
            "cold_share_map": self.tier_shares(COLD).round(3).tolist(),
            "heat_map": self.heat_map().round(3).tolist(),
        }


def inspect_cache(
    model: LoadedModel,
    prompt: Sequence[int],
    *,
    tokens: int,
    cache: CacheConfig,
    num_threads: int | None = None,
    attention_backend: str = "auto",
    progress: Progress = lambda tokens: None,
) -> Inspection:
    """Reads `prompt` and generates `tokens` greedily, alone in a cache.

    A ceiling that is larger than this takes is lowered, because tables grow with it and would hide what is to be seen. Raises
    ConfigError for a native cache, RequestError for more tokens than can be served, VeraError if the answer breaks off.
    """
    if cache.mode != "adaptive":
        raise ConfigError(f"cache mode {cache.mode!r} has no tiers to inspect; take 'adaptive'")
    total = len(prompt) + tokens
    config = EngineConfig(
        cache=replace(cache, cache_max_bytes=min(ceiling_bytes(cache), _ample_bytes(model, cache, total))),
        max_num_seqs=1,
        max_model_len=min(total + 1, model.spec.max_context),
        num_threads=num_threads,
        attention_backend=attention_backend,
    )
    engine = Engine(model, config)
    try:
        return _record(engine, prompt, tokens, progress)
    finally:
        engine.close()


def _ample_bytes(model: LoadedModel, cache: CacheConfig, tokens: int) -> int:
    """Twice what a native cache needs for one sequence of `tokens`, and some blocks to spare."""
    return 2 * shape_of(model).native_bytes(cache, tokens + 16 * cache.page_size)


def _record(engine: Engine, prompt: Sequence[int], tokens: int, progress: Progress) -> Inspection:
    engine.auditor.every_step = True
    # One more token is asked for where there is room, because what a request's last step did to its pages cannot be seen.
    longest = max(tokens, min(tokens + 1, engine.max_model_len - len(prompt)))
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=longest, ignore_eos=True))
    recorder = _Recorder(engine.cache, request_id)
    text, written = "", 0
    while engine.has_unfinished():
        for update in engine.step():
            text += update.delta
            written += len(update.new_token_ids)
            if update.error is not None:
                raise VeraError(f"the answer broke off: {update.error}")
        if engine.num_running:
            recorder.look()
        if written == tokens:
            engine.abort(request_id)
        progress(engine.stats.prefill_tokens + engine.stats.decode_tokens)
    return Inspection(
        model=engine.model.spec.name,
        prompt_tokens=len(prompt),
        answer_tokens=tokens,
        text=text,
        cache=engine.config.cache,
        tiers=recorder.tiers,
        heat=recorder.heat,
        steps=tuple(recorder.steps),
        rates=recorder.rates,
        error_max=recorder.use.error_max,
        audits=tuple(engine.auditor.results),
        memory=recorder.memory,
        why_untiered=None if (recorder.tiers != HOT).any() else _why_untiered(engine, len(prompt) + tokens, len(recorder.tiers)),
    )


class _Recorder:
    """Looks at a running sequence after each step."""

    def __init__(self, cache: AdaptiveCache, sequence: str) -> None:
        self._cache = cache
        self._sequence = sequence
        self._before = CacheUse()
        self.steps: list[StepUse] = []
        self.use = CacheUse()
        self.rates = TierStats().rates
        shape = cache.shape
        self.tiers: NDArray[np.int8] = np.zeros((0, shape.layers, shape.kv_heads), dtype=np.int8)
        self.heat: NDArray[np.float32] = np.zeros_like(self.tiers, dtype=np.float32)
        self.memory = MemoryUse(0, 0, 0, 0, 0, 0, 0, 0)

    def look(self) -> None:
        self.use = self._cache.use(self._sequence)
        self.rates = (self._cache.tier_stats or TierStats()).rates
        self._note_step()
        self.tiers, self.heat = self._cache.tiers_of(self._sequence)
        self.memory = _memory_use(self._cache, len(self.tiers))

    def _note_step(self) -> None:
        """Takes in what the counters have gained, if the step was a decode step within bounds."""
        use, before = self.use, self._before
        if use.decode_steps > before.decode_steps:
            self.steps.append(
                StepUse(
                    hits=use.hits - before.hits,
                    recomputed=use.recompute_steps > before.recompute_steps,
                    uncovered_hits=use.uncovered_hits - before.uncovered_hits,
                    error=(use.error_sum - before.error_sum) / (use.error_count - before.error_count),
                )
            )
        self._before = replace(use)


def _memory_use(cache: AdaptiveCache, num_blocks: int) -> MemoryUse:
    """With one sequence alone in the cache."""
    pool, tables = cache.pool, cache.tables
    every_block = range(pool.num_blocks)
    exact_blocks = int(tables.is_exact(every_block).sum()) * pool.block_bytes
    sketches = int(tables.is_tiered(every_block).sum()) * pool.sketch_bytes
    checkpoints = tables.checkpoints.used_bytes if tables.checkpoints is not None else 0
    return MemoryUse(
        exact_blocks=exact_blocks,
        hot_pages=int(tables.device_bytes(every_block).sum()) - exact_blocks - sketches,
        sketches=sketches,
        tables=pool.table_bytes,
        fast=cache.used_bytes,
        warm=cache.warm_bytes - checkpoints,
        checkpoints=checkpoints,
        native=cache.shape.native_bytes(cache.config, num_blocks * cache.config.page_size),
    )


def _why_untiered(engine: Engine, num_tokens: int, num_blocks: int) -> str:
    config, stats = engine.config.cache, engine.cache.tier_stats
    if config.fidelity == "native":
        return "the fidelity is native: every page stays exact in fast memory"
    if num_tokens <= config.min_context:
        return (
            f"the {num_tokens:,} tokens are not above min_context={config.min_context:,}, so the sequence is served natively; "
            "take a longer context or lower min_context"
        )
    if stats is not None and stats.broken_pages:
        return f"{stats.broken_pages:,} pages hold values that are not finite, so their blocks stay exact"
    if num_blocks <= 3:
        return (
            f"its {num_blocks} blocks of {config.page_size} tokens are the first, the latest and the open one, which stay exact; "
            "take a longer context"
        )
    return "no block could leave: there is no room where it could wait warm (see warm_store and warm_bytes)"
