"""The bytes of the pages: one allocation, made once, within a hard ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vera.attention import advise_hugepages
from vera.attention.protocol import PAGE_DTYPES
from vera.cache.memory import available_bytes
from vera.config import CacheConfig
from vera.errors import CapacityError

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model needs of a cache."""

    layers: int
    kv_heads: int
    head_dim: int

    def page_bytes(self, config: CacheConfig) -> int:
        """A page: the keys and values of one block for one layer and one KV head."""
        return (
            2  # keys and values
            * config.page_size  # tokens
            * self.head_dim
            * PAGE_DTYPES[config.page_dtype].itemsize
        )

    def block_bytes(self, config: CacheConfig) -> int:
        """A block: the pages of all layers and KV heads for `page_size` tokens."""
        return self.layers * self.kv_heads * self.page_bytes(config)


def ceiling_bytes(config: CacheConfig) -> int:
    """The most that the cache may take: `cache_max_bytes`, or the ratio of the memory that is available now."""
    if config.cache_max_bytes is not None:
        return config.cache_max_bytes
    return int(config.cache_max_size_ratio * available_bytes())


class PagePool:
    """Pages of all layers, heads and sequences: `pages` is `[num_pages, 2, page_size * head_dim]`.

    The pages of block `b` never move: layer `l`, head `h` is slot `(l * num_blocks + b) * kv_heads + h`. Layers lie apart, so
    a step reads each layer's pages from one compact range of memory.
    """

    def __init__(self, shape: CacheShape, config: CacheConfig) -> None:
        self.block_bytes = shape.block_bytes(config)
        ceiling = ceiling_bytes(config)
        self.num_blocks = ceiling // self.block_bytes
        if self.num_blocks == 0:
            raise CapacityError(
                f"the cache ceiling of {ceiling / _MIB:.1f} MiB is below one block of {config.page_size} tokens, which takes "
                f"{self.block_bytes / _MIB:.1f} MiB; raise cache_max_bytes or cache_max_size_ratio, or take a smaller page_size"
            )
        num_pages = self.num_blocks * shape.layers * shape.kv_heads
        try:
            self.pages = torch.empty((num_pages, 2, config.page_size * shape.head_dim), dtype=PAGE_DTYPES[config.page_dtype])
        except RuntimeError as error:
            raise CapacityError(
                f"{self.capacity_bytes / _MIB:.0f} MiB for the cache cannot be had; lower cache_max_size_ratio or cache_max_bytes"
            ) from error
        advise_hugepages(self.pages)
        slots = torch.arange(num_pages, dtype=torch.int32).view(shape.layers, self.num_blocks, shape.kv_heads)
        self.page_table = slots.transpose(0, 1).contiguous()
        """`[num_blocks, layers, kv_heads]` int32: the slot of each page."""

    @property
    def capacity_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def poison(self, blocks: Sequence[int]) -> None:
        """Fills these blocks' pages with NaN, so that a read of stale bytes shows."""
        self.pages[self._slots(blocks)] = float("nan")

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the pages of each source block to the target block at the same place in the list."""
        for source, target in zip(sources, targets, strict=True):
            self.pages[self._slots([target])] = self.pages[self._slots([source])]

    def _slots(self, blocks: Sequence[int]) -> Tensor:
        return self.page_table[torch.from_numpy(np.asarray(blocks, dtype=np.int64))].flatten().long()
