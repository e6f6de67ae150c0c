"""The bytes of the device's cache: one arena, made once, within a hard ceiling, for exact pages and sketches alike.

The arena is cut into frames (`frames.Frames`); a frame serves exact blocks, sketches of blocks, or single pages. Inside a frame
of exact blocks or sketches the layers lie apart, so that a layer of a step reads long runs:

    exact block   slot of page (l, h) of block i of the frame = first slot of the frame + (l * blocks + i) * kv_heads + h
    sketches      for each (l, h): the key parts of all blocks of the frame, then their value parts
    single page   the slot is the unit's number
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vera.attention import advise_hugepages
from vera.attention.moves import bytes_at
from vera.attention.protocol import NO_PAGE, PAGE_DTYPES
from vera.attention.sketch import SketchFormat
from vera.cache.frames import Frames, Role
from vera.cache.memory import available_bytes
from vera.config import CacheConfig
from vera.errors import CapacityError

_MIB = 2**20
_FRAME_BLOCKS = 8
"""Exact blocks of a frame, where the pool is large: a layer's run is then as long as what a decode item reads."""
_MIN_FRAMES = 64

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model needs of a cache."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int = 0
    """Width of the residual stream, which checkpoints keep; 0: unknown, so there are none."""
    windowed_layers: tuple[int, ...] = ()
    """Layers with a sliding window: their pages are never tiered."""

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

    def native_bytes(self, config: CacheConfig, num_tokens: int) -> int:
        """What a native cache takes for one sequence: ceil(num_tokens / page_size) * block_bytes."""
        return -(-num_tokens // config.page_size) * self.block_bytes(config)

    def sketch_format(self, config: CacheConfig) -> SketchFormat:
        return SketchFormat(config.page_size, self.head_dim, config.sketch_bits)

    def sketch_bytes(self, config: CacheConfig) -> int:
        """The sketches of a block's pages."""
        return self.layers * self.kv_heads * self.sketch_format(config).page_bytes


def ceiling_bytes(config: CacheConfig) -> int:
    """The most that the cache may take: `cache_max_bytes`, or the ratio of the memory that is available now."""
    if config.cache_max_bytes is not None:
        return config.cache_max_bytes
    return int(config.cache_max_size_ratio * available_bytes())


class PagePool:
    """Frames of exact pages and sketches, and the tables that say where they are.

    The tables are indexed by block id. `page_table` is `[num_blocks, layers, kv_heads]` int32 (a slot of `pages`, or NO_PAGE),
    `sketch_keys` and `sketch_values` are `[num_blocks]` int64 (bytes of `arena`, or NO_PAGE); see `attention.protocol`.
    """

    def __init__(
        self, shape: CacheShape, config: CacheConfig, *, block_overhead_bytes: int = 0, fixed_overhead_bytes: int = 0
    ) -> None:
        """What the owner keeps besides, for each block and in all, counts towards the ceiling."""
        self.shape = shape
        self.block_bytes = shape.block_bytes(config)
        self.page_bytes = shape.page_bytes(config)
        adaptive = config.mode == "adaptive"
        self._sketch_format = shape.sketch_format(config) if adaptive else None
        self.sketch_bytes = shape.sketch_bytes(config) if adaptive else 0
        ceiling = ceiling_bytes(config) - fixed_overhead_bytes
        blocks = ceiling // self.block_bytes
        self.frame_blocks = max(1, min(_FRAME_BLOCKS, blocks // _MIN_FRAMES))
        self.frame_bytes = self.frame_blocks * self.block_bytes
        self.frame_sketches = self.frame_bytes // self.sketch_bytes if adaptive else 0
        if adaptive:
            self.sketch_bytes = self.frame_bytes // self.frame_sketches  # what is left over in a frame is nobody else's
        ids_per_frame = max(self.frame_blocks, self.frame_sketches)
        overhead = ids_per_frame * (block_overhead_bytes + 4 * shape.layers * shape.kv_heads + 16) if adaptive else 0
        num_frames = ceiling // (self.frame_bytes + overhead)
        if num_frames == 0:
            raise CapacityError(
                f"the cache ceiling of {ceiling / _MIB:.1f} MiB is below one block of {config.page_size} tokens, which takes "
                f"{(self.frame_bytes + overhead) / _MIB:.1f} MiB; raise cache_max_bytes or cache_max_size_ratio, or take a "
                "smaller page_size"
            )
        self.frame_pages = self.frame_blocks * shape.layers * shape.kv_heads
        units = {Role.EXACT: self.frame_blocks, Role.PAGE: self.frame_pages} | (
            {Role.SKETCH: self.frame_sketches} if adaptive else {}
        )
        self.num_blocks = num_frames * ids_per_frame
        self.table_bytes = num_frames * overhead + fixed_overhead_bytes
        """Bytes of tables and statistics, the owner's among them."""
        try:
            self.arena = torch.empty(num_frames * self.frame_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise CapacityError(
                f"{num_frames * self.frame_bytes / _MIB:.0f} MiB for the cache cannot be had; lower cache_max_size_ratio or "
                "cache_max_bytes"
            ) from error
        advise_hugepages(self.arena)
        self.frames = Frames(num_frames, units)
        self.pages = self.arena.view(PAGE_DTYPES[config.page_dtype]).view(-1, 2, config.page_size * shape.head_dim)
        """`[num_slots, 2, page_size * head_dim]`: the whole arena seen as exact pages."""
        self.page_table = torch.full((self.num_blocks, shape.layers, shape.kv_heads), NO_PAGE, dtype=torch.int32)
        self.sketch_keys = torch.full((self.num_blocks,), NO_PAGE, dtype=torch.int64)
        self.sketch_values = torch.full((self.num_blocks,), NO_PAGE, dtype=torch.int64)
        self._in_frame = (
            (np.arange(shape.layers)[:, None] * self.frame_blocks * shape.kv_heads) + np.arange(shape.kv_heads)[None, :]
        ).astype(np.int64)

    @property
    def capacity_bytes(self) -> int:
        """All frames and the tables: never more than the ceiling."""
        return self.arena.nbytes + self.table_bytes

    @property
    def used_bytes(self) -> int:
        """Frames that hold something, in whole, and the tables."""
        return self.frames.num_used_frames * self.frame_bytes + self.table_bytes

    @property
    def sketch_format(self) -> SketchFormat:
        assert self._sketch_format is not None, "a native pool has no sketches"
        return self._sketch_format

    @property
    def sketch_stride(self) -> int:
        """Bytes from the sketches of one (layer, KV head) to those of the next, inside a frame."""
        return self.frame_sketches * self.sketch_format.page_bytes

    def exact_slots(self, units: Sequence[int] | Integers) -> Integers:
        """`[units, layers, kv_heads]`: the slots of the pages of exact blocks."""
        frame, index = np.divmod(np.asarray(units, dtype=np.int64), self.frame_blocks)
        first = frame * self.frame_pages + index * self.shape.kv_heads
        slots: Integers = first[:, None, None] + self._in_frame[None]
        return slots

    def sketch_places(self, units: Sequence[int] | Integers) -> tuple[Integers, Integers]:
        """`[units]` each: the bytes of the arena where the key parts and value parts of layer 0, KV head 0 begin."""
        frame, index = np.divmod(np.asarray(units, dtype=np.int64), self.frame_sketches)
        first = frame * self.frame_bytes
        keys = first + index * self.sketch_format.key_bytes
        values = first + self.frame_sketches * self.sketch_format.key_bytes + index * self.sketch_format.value_bytes
        return keys, values

    def slot_addresses(self, slots: Integers) -> Integers:
        """Where pages lie in memory."""
        return self.arena.data_ptr() + slots * self.page_bytes

    def read_pages(self, addresses: Integers) -> tuple[Tensor, Tensor]:
        """Exact pages as float32: keys `[..., head_dim, page_size]` and values `[..., page_size, head_dim]`."""
        dtype, half = self.pages.dtype, self.pages.shape[2]
        raw = [bytes_at(address, self.page_bytes).view(dtype) for address in addresses.reshape(-1).tolist()]
        pages = torch.stack(raw).float().view(*addresses.shape, 2, half)
        head_dim = self.shape.head_dim
        keys = pages[..., 0, :].reshape(*addresses.shape, head_dim, half // head_dim)
        return keys, pages[..., 1, :].reshape(*addresses.shape, half // head_dim, head_dim)

    def sketch_addresses(self, unit: int) -> tuple[Integers, Integers]:
        """`[layers * kv_heads]` each: where the key and value parts of a block's sketches lie in memory."""
        keys, values = self.sketch_places([unit])
        steps = np.arange(self.shape.layers * self.shape.kv_heads, dtype=np.int64) * self.sketch_stride
        return self.arena.data_ptr() + keys + steps, self.arena.data_ptr() + values + steps

    def poison_exact(self, units: Sequence[int] | Integers) -> None:
        """Fills these exact blocks with NaN, so that a read of stale bytes shows."""
        self.poison_slots(self.exact_slots(units).reshape(-1))

    def poison_slots(self, slots: Integers) -> None:
        self.pages[torch.from_numpy(slots)] = float("nan")

    def poison_sketches(self, units: Sequence[int] | Integers) -> None:
        """Fills the sketches of these units with bytes that read as NaN."""
        sizes = (self.sketch_format.key_bytes, self.sketch_format.value_bytes)
        for places, size in zip(self.sketch_places(units), sizes, strict=True):
            for place in places:
                self._runs(int(place), size).fill_(0xFF)

    def copy_sketches(self, source: int, target: int) -> None:
        """Copies the sketches of one unit to another."""
        sizes = (self.sketch_format.key_bytes, self.sketch_format.value_bytes)
        for sources, targets, size in zip(self.sketch_places([source]), self.sketch_places([target]), sizes, strict=True):
            self._runs(int(targets[0]), size).copy_(self._runs(int(sources[0]), size))

    def _runs(self, first: int, size: int) -> Tensor:
        """`[layers * kv_heads, size]` uint8: the same part of a unit's sketches in all layers and heads."""
        rows = self.shape.layers * self.shape.kv_heads
        return torch.as_strided(self.arena, (rows, size), (self.sketch_stride, 1), storage_offset=first)
