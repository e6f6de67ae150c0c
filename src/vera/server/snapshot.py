"""The engine and its cache at one moment, in plain values: what metrics and statistics are made of."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vera.cache import AdaptiveCache, TierStats
from vera.engine.audit import AuditResult
from vera.engine.engine import Engine
from vera.metrics.stats import EngineStats

DEVICE = "cpu"
HOST = "host"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies only: the engine goes on while it is read."""

    num_running: int
    num_waiting: int
    stats: EngineStats
    tiers: TierStats | None
    """None: the cache is native."""
    memory: tuple[tuple[str, str, int, int], ...]
    """Tier, device, bytes in use and most bytes. `hot` is all of fast memory: exact pages, sketches, tables."""
    idle_bytes: int
    pages: dict[str, int]
    """By tier: with a place in fast memory, with an exact copy elsewhere, with only a sketch."""
    page_moves: dict[tuple[str, str], int]
    """From a tier to another; pages of demoted blocks and released units count in whole."""
    num_audits: int
    audits: tuple[AuditResult, ...]
    """The latest, the newest last."""

    def cache(self) -> dict[str, Any]:
        """What the cache holds and has done, JSON-ready."""
        counters = {} if self.tiers is None else asdict(replace(self.tiers, heat=deque()))
        counters.pop("heat", None)
        return {
            "bytes": {tier: {"device": device, "used": used, "capacity": most} for tier, device, used, most in self.memory},
            "idle_bytes": self.idle_bytes,
            "pages": self.pages,
            "page_moves": {f"{source}->{target}": count for (source, target), count in self.page_moves.items()},
            "counters": counters,
            "audits": self.num_audits,
        }


def take_snapshot(engine: Engine) -> Snapshot:
    """Call between two steps, on the engine's thread."""
    cache, stats = engine.cache, engine.stats
    tiers = cache.tier_stats
    return Snapshot(
        num_running=engine.num_running,
        num_waiting=engine.num_waiting,
        stats=replace(
            stats,
            finished=Counter(stats.finished),
            time_to_first_token_seconds=deque(stats.time_to_first_token_seconds),
            inter_token_seconds=deque(stats.inter_token_seconds),
        ),
        tiers=None if tiers is None else replace(tiers, heat=deque(tiers.heat)),
        memory=_memory(cache),
        idle_bytes=cache.idle_bytes,
        pages=_pages(cache),
        page_moves={} if tiers is None else _page_moves(cache, tiers),
        num_audits=engine.auditor.num_audits,
        audits=tuple(engine.auditor.results),
    )


_WARM, _COLD = 1, 2
"""In what `AdaptiveCache.tiers_of` gives; 0 is hot."""


def take_page_map(engine: Engine, request_id: str) -> dict[str, Any] | None:
    """Of a request that runs, JSON-ready: for each layer and block where its pages are, and the heat of the hottest one. None:
    it does not run (any more). Call between two steps, on the engine's thread.

    `e`: exact, since nothing of the block was ever demoted. Otherwise by KV heads: `c` if a page is cold, `h` if any is hot, `w`.
    """
    cache = engine.cache
    if request_id not in engine.running_ids:
        return None
    tiers, heat = cache.tiers_of(request_id)
    tiered = cache.is_tiered(request_id)
    codes = np.where((tiers == _COLD).any(axis=2), "c", np.where((tiers != _WARM).any(axis=2), "h", "w"))
    codes[~tiered] = "e"
    return {
        "tokens": len(tiers) * cache.config.page_size,
        "page_size": cache.config.page_size,
        "layers": tiers.shape[1],
        "blocks": tiers.shape[0],
        "tier": codes.T.tolist(),
        "heat": heat.max(axis=2).T.astype(float).round(3).tolist(),
    }


def _memory(cache: AdaptiveCache) -> tuple[tuple[str, str, int, int], ...]:
    fast = ("hot", DEVICE, cache.used_bytes + cache.idle_bytes, cache.capacity_bytes)
    if not cache.adaptive:
        return (fast,)
    return fast, ("warm", HOST, cache.warm_bytes, cache.warm_capacity_bytes)


def _pages(cache: AdaptiveCache) -> dict[str, int]:
    tables = cache.tables
    blocks = np.flatnonzero((tables.exact_unit >= 0) | (tables.sketch_unit >= 0))
    hot = tables.hot_pages(blocks)
    cold = np.repeat(tables.cold_units(blocks), tables.window_layers, axis=1)[:, : cache.shape.layers, None] & ~hot
    counts = {"hot": int(hot.sum()), "cold": int(cold.sum())}
    return {"hot": counts["hot"], "warm": hot.size - counts["hot"] - counts["cold"], "cold": counts["cold"]}


def _page_moves(cache: AdaptiveCache, tiers: TierStats) -> dict[tuple[str, str], int]:
    block_pages = cache.shape.layers * cache.shape.kv_heads
    return {
        ("hot", "warm"): tiers.cooled_pages + tiers.parked_pages + tiers.demoted_blocks * block_pages,
        ("warm", "hot"): tiers.promoted_pages + tiers.fetched_pages + tiers.hit_promotions,
        ("warm", "cold"): tiers.released_units * cache.tables.window_layers * cache.shape.kv_heads,
        ("cold", "hot"): tiers.restored_pages,
    }
