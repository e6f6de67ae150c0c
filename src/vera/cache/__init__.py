"""The KV cache. `cache.PagedCache` is its only door."""

from vera.cache.cache import PagedCache, Span
from vera.cache.pool import CacheShape

__all__ = ["CacheShape", "PagedCache", "Span"]
