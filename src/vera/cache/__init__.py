"""The KV cache, native and adaptive. `cache.AdaptiveCache` is its only door."""

from vera.cache.cache import AdaptiveCache, Restore
from vera.cache.housekeeping import TierStats
from vera.cache.pool import CacheShape
from vera.cache.recompute import BlockOf
from vera.cache.sequence import CacheUse, Span
from vera.cache.tiers import warm_bytes_per_block

__all__ = ["AdaptiveCache", "BlockOf", "CacheShape", "CacheUse", "Restore", "Span", "TierStats", "warm_bytes_per_block"]
