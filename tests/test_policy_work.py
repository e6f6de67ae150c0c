"""What the adaptive cache does in a step grows with the pages that are hit and moved, not with context and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tier_engines import ceiling_of
from vera.cache import AdaptiveCache, CacheShape, Span
from vera.cache.features import Heat
from vera.cache.tiers import TierTables
from vera.config import CacheConfig

PAGE = 16
SHAPE = CacheShape(layers=8, kv_heads=2, head_dim=16, hidden_size=8)
HITS = 4
"""Of each sequence in each step."""


def decoding(batch: int, blocks: int, **values: Any) -> tuple[AdaptiveCache, dict[str, int]]:
    """A cache with `batch` sequences of that many blocks, whose prompts are read; and how many tokens each has."""
    settings: dict[str, Any] = {
        "mode": "adaptive",
        "page_size": PAGE,
        "min_context": 64,
        "warm_store": "ram",
        "prefix_reuse": False,
        "recalibrate_every": 10_000,
        "hot_max_share": 0.2,
        **values,
    }
    tokens = blocks * PAGE
    config = CacheConfig(**settings)
    frames = batch * blocks + 16
    config = CacheConfig(**settings, cache_max_bytes=ceiling_of(SHAPE, config, frames, batch, tokens + 512))
    cache = AdaptiveCache(SHAPE, config, identity="", max_sequences=batch, max_tokens=tokens + 512, max_chunk=64)
    cache.pool.arena.zero_()
    lengths = {f"s{number}": tokens for number in range(batch)}
    for name in lengths:
        assert cache.admit(name, [0] * tokens) is not None
        for start in range(0, tokens, 64):
            assert cache.reserve(name, start + 64)
            cache.batch([Span(name, start, start + 64)])
            cache.commit(name, [0] * tokens, start + 64)
            cache.settle()
    return cache, lengths


def step(cache: AdaptiveCache, lengths: dict[str, int], chosen: Callable[[np.ndarray], np.ndarray]) -> int:
    """A step in which of each sequence's warm pages, rows (block, layer, KV head), those that `chosen` gives are hit."""
    spans = []
    for name in lengths:
        lengths[name] += 1
        assert cache.reserve(name, lengths[name])
        spans.append(Span(name, lengths[name] - 1, lengths[name]))
    report = cache.batch(spans).tiers.report
    hits = []
    for row, name in enumerate(lengths):
        state = cache._sequences[name]
        report.errors[row, 2] += 1
        pages = chosen(np.argwhere(cache.pool.page_table.numpy()[state.block_ids] < 0))
        report.frequencies[state.row].numpy()[pages[:, 1], pages[:, 2], pages[:, 0]] += 1
        hits.append(np.column_stack([np.full(len(pages), row), pages[:, 1], pages[:, 2], pages[:, 0], np.zeros(len(pages))]))
    all_hits = np.concatenate(hits).astype(np.int32)
    report.hits.extend(torch.from_numpy(all_hits[all_hits[:, 1] == layer]) for layer in np.unique(all_hits[:, 1]))
    cache.observe()
    for name, length in lengths.items():
        cache.commit(name, [0] * length, length)
    cache.settle()
    return len(all_hits)


class Watch:
    """Counts the pages whose place or heat is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages = 0
        for owner, name in ((TierTables, "hot_pages"), (TierTables, "are_hot"), (Heat, "scores"), (Heat, "page_scores")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def counted(*arguments: Any) -> np.ndarray:
            result = function(*arguments)
            self.pages += result.size
            return result

        return counted


def looks_per_page(batch: int, blocks: int) -> float:
    """Pages looked at for each page that was hit or moved, over steps that also seal and demote blocks."""
    cache, lengths = decoding(batch, blocks)
    random = np.random.default_rng(0)

    def again_and_again(warm: np.ndarray) -> np.ndarray:
        return warm[random.permutation(len(warm) // 4)[:HITS]]

    with pytest.MonkeyPatch.context() as monkeypatch:
        watch, stats = Watch(monkeypatch), cache.tier_stats
        before, hits = stats.snapshot(), 0
        for _ in range(160):
            hits += step(cache, lengths, again_and_again)
        moved = stats.since(before)
        assert moved.hit_promotions > 50 and moved.cooled_pages > 20 and moved.demoted_blocks >= 8 * batch
        return watch.pages / (hits + moved.hit_promotions + moved.cooled_pages)


def test_pages_looked_at_grow_with_hits_and_moves_and_not_with_context_or_batch():
    figures = {(batch, blocks): looks_per_page(batch, blocks) for batch in (1, 8) for blocks in (32, 128)}
    assert max(figures.values()) < 20, figures
    for batch in (1, 8):
        assert figures[batch, 128] < 2 * figures[batch, 32], figures
    for blocks in (32, 128):
        assert figures[8, blocks] < 2 * figures[1, blocks], figures


def test_step_without_hits_looks_at_no_page(monkeypatch):
    cache, lengths = decoding(8, 64)
    watch = Watch(monkeypatch)
    for _ in range(8):
        step(cache, lengths, lambda warm: warm[:0])
    assert watch.pages == 0


def test_blocks_that_are_sealed_together_are_demoted_one_a_step_and_all_before_the_next():
    cache, lengths = decoding(8, 16)
    stats, demoted = cache.tier_stats, []
    for _ in range(3 * PAGE):
        before = stats.demoted_blocks
        step(cache, lengths, lambda warm: warm[:0])
        demoted.append(stats.demoted_blocks - before)
    assert max(demoted) == 1
    assert sum(demoted[-PAGE:]) == 8


def test_page_becomes_hot_when_it_is_needed_again_and_not_before():
    cache, lengths = decoding(1, 64)
    for _ in range(60):  # all that may be hot is
        step(cache, lengths, lambda warm: warm[::7][:8])
    state = cache._sequences["s0"]
    hot = set(map(tuple, np.argwhere(cache.pool.page_table.numpy()[state.block_ids] >= 0)))
    wanted = np.argwhere(cache.pool.page_table.numpy()[state.block_ids] < 0)[-5]
    place = (state.blocks[wanted[0]], wanted[1], wanted[2])
    assert tuple(wanted) not in hot
    step(cache, lengths, lambda warm: wanted[None])
    assert cache.pool.page_table[place] < 0
    step(cache, lengths, lambda warm: wanted[None])
    assert cache.pool.page_table[place] >= 0


def test_no_more_pages_become_hot_in_a_step_than_its_limit_the_most_needed_first():
    cache, lengths = decoding(1, 64)
    for _ in range(60):
        step(cache, lengths, lambda warm: warm[::7][:8])
    state = cache._sequences["s0"]
    warm = np.argwhere(cache.pool.page_table.numpy()[state.block_ids] < 0)[-60:]
    often, twice = warm[:3], warm[3:]
    frequencies = cache._keeper.frequencies[state.row].numpy()
    for pages, times in ((often, 9), (twice, 1)):
        frequencies[pages[:, 1], pages[:, 2], pages[:, 0]] += times
    before = cache.tier_stats.hit_promotions
    step(cache, lengths, lambda _: warm)
    assert cache.tier_stats.hit_promotions - before == 8
    assert (cache.pool.page_table.numpy()[state.block_ids[often[:, 0]], often[:, 1], often[:, 2]] >= 0).all()


def test_hot_pages_of_a_sequence_stay_within_its_share_whatever_is_hit():
    cache, lengths = decoding(2, 32)
    random = np.random.default_rng(0)
    for _ in range(40):
        step(cache, lengths, lambda warm: warm[random.random(len(warm)) < 0.3])
        for name in lengths:
            blocks = cache._sequences[name].block_ids
            tiered = blocks[cache.tables.is_tiered(blocks)]
            assert cache.tables.hot_pages(tiered).sum() <= 0.2 * len(tiered) * SHAPE.layers * SHAPE.kv_heads
        cache.check_invariants()
