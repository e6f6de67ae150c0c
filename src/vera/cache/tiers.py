"""Where each block's pages are, and moving them: hot, warm and cold.

A block is one of

    empty    it has no bytes
    exact    all its pages are in an exact block of the pool; every new block begins so
    tiered   its sketches are in the pool; each *unit* (the pages of one window of layers) has an exact copy in the warm store or
             is cold; and single pages may be hot, that is, have a slot of the pool besides
    parked   it has no bytes in the pool: all its units are in the warm store, and its sketches can be made from them again

This module moves bytes and keeps the tables right; which page belongs where is `placement`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vera.attention import copy_bytes, sketch_to
from vera.attention.protocol import NO_PAGE
from vera.cache.frames import Role
from vera.cache.pool import CacheShape, Integers, PagePool
from vera.cache.warm import HostStore, open_store
from vera.config import CacheConfig
from vera.errors import CapacityError

_NONE = -1
_ALIGNMENT = 64
"""Slots of a store begin at multiples of this."""
_MEMORY_PAGE = 4096
_STAGING = (-1, -1, -1)
"""Stands for the owner of a staging slot."""
_CHECKPOINT_DTYPE = torch.float32
"""Half precision would save memory, but then only two thirds of the restored elements are bit for bit what they were."""

Mask = NDArray[np.bool_]


def block_overhead_bytes(shape: CacheShape, config: CacheConfig) -> int:
    """Memory of the tables here, for each block."""
    windows = num_windows(shape, config)
    return (
        8  # exact_unit
        + 8  # sketch_unit
        + 4  # num_hot
        + windows * (8 + 8)  # warm slots and addresses
        + (windows - 1) * (8 + 2)  # checkpoint slots and their fill
    )


def num_windows(shape: CacheShape, config: CacheConfig) -> int:
    """As many windows as keep each within `recompute_layer_limit` layers."""
    return -(-shape.layers // config.recompute_layer_limit)


def warm_bytes_per_block(shape: CacheShape, config: CacheConfig) -> int:
    """What a block takes in the warm store: the exact copies of all its units, and its checkpoints."""
    windows = num_windows(shape, config)
    units = windows * -(-shape.layers // windows) * shape.kv_heads * shape.page_bytes(config)
    return units + (windows - 1) * config.page_size * shape.hidden_size * _CHECKPOINT_DTYPE.itemsize


class TierTables:
    """The places of all blocks, by block id. Says nothing about who owns a block."""

    def __init__(
        self, pool: PagePool, config: CacheConfig, *, warm_dir: Path, warm_bytes: int, checkpoints: bool, staging_pages: int
    ) -> None:
        """`warm_bytes`: most bytes of the warm store and the checkpoints together. `staging_pages`: slots kept for restores."""
        shape = pool.shape
        self.pool = pool
        self.num_windows = num_windows(shape, config)
        self.window_layers = -(-shape.layers // self.num_windows)
        self._poison = config.poison
        self._dtype = pool.pages.dtype
        blocks = pool.num_blocks
        self.exact_unit = np.full(blocks, _NONE, dtype=np.int64)
        self.sketch_unit = np.full(blocks, _NONE, dtype=np.int64)
        self.num_hot = np.zeros(blocks, dtype=np.int32)
        """Of each tiered block: its pages that have a slot, those of windowed layers not counted."""
        self.warm_slot = np.full((blocks, self.num_windows), _NONE, dtype=np.int64)
        self.warm_address = torch.zeros((blocks, self.num_windows), dtype=torch.int64)
        boundaries = self.num_windows - 1 if checkpoints else 0
        self.checkpoint_slot = np.full((blocks, boundaries), _NONE, dtype=np.int64)
        self.checkpoint_rows = np.zeros((blocks, boundaries), dtype=np.int16)
        self._checkpoint_shape = (config.page_size, shape.hidden_size)
        unit_bytes = self.window_layers * shape.kv_heads * pool.page_bytes
        checkpoint_bytes = config.page_size * shape.hidden_size * _CHECKPOINT_DTYPE.itemsize
        for_block = self.num_windows * unit_bytes + boundaries * checkpoint_bytes
        for_units = warm_bytes * self.num_windows * unit_bytes // for_block
        if warm_bytes > 0 and for_units < unit_bytes + _ALIGNMENT:
            raise CapacityError(
                f"warm_bytes={warm_bytes} is below the {for_block + _ALIGNMENT} that a block takes in the warm store; "
                "raise it, or give 0 for none"
            )
        self.warm: HostStore | None = open_store(config.warm_store, unit_bytes, for_units, warm_dir)
        self.checkpoints: HostStore | None = None
        if boundaries:
            # Without a warm store by choice, checkpoints are kept in memory all the same: recompute needs them most of all.
            kind = "ram" if config.warm_store == "none" else config.warm_store
            room = warm_bytes - for_units
            if config.warm_store == "none":
                limit = pool.capacity_bytes if config.warm_bytes is None else config.warm_bytes
                room = min(blocks * boundaries * checkpoint_bytes, limit)
            self.checkpoints = open_store(kind, checkpoint_bytes, room, warm_dir) if room >= checkpoint_bytes else None
        staging = pool.frames.take(Role.PAGE, staging_pages)
        if staging is None:
            raise CapacityError(
                f"the cache's ceiling of {pool.capacity_bytes / 2**20:.1f} MiB has no room to restore {config.recompute_budget} "
                "blocks at a time; raise it, or lower recompute_budget"
            )
        self.staging = staging
        """Slots that a restore writes to; they belong to no block."""
        self._prepared = 0
        """Frames before this one were touched ahead of their use."""
        self._table = pool.page_table.numpy()
        self.tierable = np.ones((shape.layers, shape.kv_heads), dtype=bool)
        """`[layers, kv_heads]`: false in layers with a window, whose pages keep their slots."""
        self.tierable[list(shape.windowed_layers)] = False
        self.tierable_pages = int(self.tierable.sum())
        """Of a block: the most pages that `num_hot` counts."""

    # -- what there is -------------------------------------------------------------------------------------------------

    def is_exact(self, blocks: Sequence[int] | Integers) -> Mask:
        """`[blocks]`: all pages lie in an exact block."""
        exact: Mask = self.exact_unit[np.asarray(blocks, dtype=np.int64)] >= 0
        return exact

    def is_tiered(self, blocks: Sequence[int] | Integers) -> Mask:
        tiered: Mask = self.sketch_unit[np.asarray(blocks, dtype=np.int64)] >= 0
        return tiered

    def is_parked(self, blocks: Sequence[int] | Integers) -> Mask:
        at = np.asarray(blocks, dtype=np.int64)
        away = (self.exact_unit[at] < 0) & (self.sketch_unit[at] < 0)
        parked: Mask = away & (self.warm_slot[at] >= 0).all(axis=1)
        return parked

    def hot_pages(self, blocks: Sequence[int] | Integers) -> Mask:
        """`[blocks, layers, kv_heads]`: pages that have a slot; for exact blocks all of them."""
        hot: Mask = self._table[np.asarray(blocks, dtype=np.int64)] != NO_PAGE
        return hot

    def count_hot(self, blocks: Integers) -> int:
        """How many pages of these tiered blocks have a slot, those of windowed layers not counted."""
        return int(self.num_hot[blocks].sum())

    def are_hot(self, pages: Integers) -> Mask:
        """`[n]`: which of the pages, each a row (block, layer, KV head), have a slot."""
        hot: Mask = self._table[pages[:, 0], pages[:, 1], pages[:, 2]] != NO_PAGE
        return hot

    def cold_units(self, blocks: Sequence[int] | Integers) -> Mask:
        """`[blocks, windows]`: units of tiered blocks without an exact copy (pages of them may still be hot)."""
        at = np.asarray(blocks, dtype=np.int64)
        cold: Mask = (self.warm_slot[at] < 0) & (self.sketch_unit[at] >= 0)[:, None]
        return cold

    def lacks_exact_pages(self, blocks: Sequence[int] | Integers) -> Mask:
        """`[blocks]`: some page is cold."""
        cold = np.repeat(self.cold_units(blocks), self.window_layers, axis=1)[:, : self.pool.shape.layers, None]
        lacking: Mask = np.asarray((cold & ~self.hot_pages(blocks)).any(axis=(1, 2)))
        return lacking

    def exact_addresses(self, blocks: Integers, layer: int) -> Integers:
        """`[blocks, kv_heads]`: where each page lies exactly, in the pool or in the warm store; 0: it is cold."""
        heads = np.arange(self.pool.shape.kv_heads)[None, :]
        slots = self._table[blocks, layer].astype(np.int64)
        warm = self._warm_addresses(blocks[:, None], np.full_like(blocks, layer)[:, None], heads)
        return np.where(slots != NO_PAGE, self.pool.slot_addresses(slots), warm)

    def device_bytes(self, blocks: Sequence[int] | Integers) -> Integers:
        """`[blocks]`: bytes of the pool that each block takes."""
        at = np.asarray(blocks, dtype=np.int64)
        tiered = self.sketch_unit[at] >= 0
        slots = self.num_hot[at] + self.tierable.size - self.tierable_pages
        return np.asarray(
            (self.exact_unit[at] >= 0) * self.pool.block_bytes
            + tiered * (self.pool.sketch_bytes + slots.astype(np.int64) * self.pool.page_bytes)
        )

    @property
    def warm_bytes(self) -> int:
        """Bytes in use outside fast memory: exact copies and checkpoints."""
        return sum(store.used_bytes for store in (self.warm, self.checkpoints) if store is not None)

    # -- a block's life ------------------------------------------------------------------------------------------------

    def make_exact(self, blocks: Sequence[int]) -> bool:
        """Gives each of these empty blocks an exact place. False: the pool has no room, nothing changed."""
        units = self.pool.frames.take(Role.EXACT, len(blocks))
        if units is None:
            return False
        at = np.asarray(blocks, dtype=np.int64)
        assert (self.exact_unit[at] < 0).all() and (self.sketch_unit[at] < 0).all()
        self.exact_unit[at] = units
        self._table[at] = self.pool.exact_slots(units)
        if self._poison and len(blocks):
            self.pool.poison_exact(units)
        return True

    def demote(self, block: int, hot: Mask, *, must_save: bool = False) -> int | None:
        """Makes a sealed exact block tiered: sketches, a warm copy of each unit as far as the store has room, `hot` pages kept.

        `hot` is `[layers, kv_heads]`; pages of windowed layers stay hot whatever it says. None: the pool has no room, or with
        `must_save` the warm store has none for all units (a disk may turn out to be full); nothing changed. Else the number of
        pages that hold a value that is not finite: if there is any, nothing changed either.
        """
        unit = int(self.exact_unit[block])
        assert unit >= 0
        kept = np.argwhere(hot | ~self.tierable)
        places = self._take_places(len(kept))
        if places is None:
            return None
        sketch, slots = places
        sources = self.pool.slot_addresses(self.pool.exact_slots([unit])[0])
        broken = self._write_sketch(sources, sketch)
        if broken:
            self._give_places(sketch, slots)
            return broken
        if not self._save(block, sources) and must_save:
            for window in np.flatnonzero(self.warm_slot[block] >= 0):
                self.release_unit(block, int(window))
            self._give_places(sketch, slots)
            return None
        copy_bytes(sources[kept[:, 0], kept[:, 1]], self.pool.slot_addresses(slots), self.pool.page_bytes)
        self._table[block] = NO_PAGE
        self._table[block, kept[:, 0], kept[:, 1]] = slots
        self.num_hot[block] = len(kept) - (self.tierable.size - self.tierable_pages)
        self._place_sketch(block, sketch)
        self._give_exact(block)
        return 0

    def park(self, block: int) -> bool:
        """Leaves a block to the warm store alone. False: a unit is cold, or the store has no room; nothing changed."""
        unit = int(self.exact_unit[block])
        if unit < 0 and (self.warm_slot[block] < 0).any():
            return False
        if unit >= 0:
            if not self._save(block, self.pool.slot_addresses(self.pool.exact_slots([unit])[0])):
                for window in np.flatnonzero(self.warm_slot[block] >= 0):
                    self.release_unit(block, int(window))
                return False
            self._give_exact(block)
        else:
            slots = self._table[block]
            self._give_slots(slots[slots != NO_PAGE].astype(np.int64))
            self._give_sketch(block)
        self._table[block] = NO_PAGE
        return True

    def fetch(self, block: int, *, exact: bool) -> int | None:
        """Brings a parked block back: to an exact place, without its warm copy, or as a tiered block of which nothing is hot.

        None: the pool has no room, nothing changed. Else the number of pages that hold a value that is not finite: if there is
        any, the block cannot be tiered and nothing changed either.
        """
        layers, heads = np.indices(self.tierable.shape)
        sources = self._warm_addresses(np.full_like(layers, block), layers, heads)
        if exact:
            if not self.make_exact([block]):
                return None
            targets = self.pool.slot_addresses(self._table[block].astype(np.int64))
            copy_bytes(sources.reshape(-1), targets.reshape(-1), self.pool.page_bytes)
            for window in range(self.num_windows):
                self.release_unit(block, window)
            return 0
        kept = np.argwhere(~self.tierable)
        places = self._take_places(len(kept))
        if places is None:
            return None
        sketch, slots = places
        broken = self._write_sketch(sources, sketch)
        if broken:
            self._give_places(sketch, slots)
            return broken
        copy_bytes(sources[kept[:, 0], kept[:, 1]], self.pool.slot_addresses(slots), self.pool.page_bytes)
        self._table[block, kept[:, 0], kept[:, 1]] = slots
        self._place_sketch(block, sketch)
        return 0

    def promote(self, blocks: Integers, layers: Integers, heads: Integers) -> int:
        """Makes these warm pages hot, in order, as far as the pool has room; those that are hot or cold are passed over.

        Returns how many became hot.
        """
        addresses = self._warm_addresses(blocks, layers, heads)
        wanted = np.flatnonzero((self._table[blocks, layers, heads] == NO_PAGE) & (addresses != 0))
        wanted = wanted[: self.pool.frames.num_available(Role.PAGE)]
        slots = self.pool.frames.take(Role.PAGE, len(wanted))
        assert slots is not None
        copy_bytes(addresses[wanted], self.pool.slot_addresses(slots), self.pool.page_bytes)
        self._table[blocks[wanted], layers[wanted], heads[wanted]] = slots
        np.add.at(self.num_hot, blocks[wanted], 1)
        return len(wanted)

    def cool(self, blocks: Integers, layers: Integers, heads: Integers) -> int:
        """Takes the slots of these hot pages of tiered blocks; they are warm or cold then. Returns how many there were."""
        blocks, layers, heads = self.distinct(blocks, layers, heads)
        slots = self._table[blocks, layers, heads]
        held = np.flatnonzero((slots != NO_PAGE) & (self.sketch_unit[blocks] >= 0) & self.tierable[layers, heads])
        if len(held):
            self._table[blocks[held], layers[held], heads[held]] = NO_PAGE
            np.subtract.at(self.num_hot, blocks[held], 1)
            self._give_slots(slots[held].astype(np.int64))
        return len(held)

    def distinct(self, blocks: Integers, layers: Integers, heads: Integers) -> tuple[Integers, Integers, Integers]:
        """The same pages in order of block, layer and KV head, each once."""
        pages = np.sort(self.page_numbers(np.column_stack([blocks, layers, heads])))
        pages = pages[np.diff(pages, prepend=-1) != 0]  # np.unique takes several times as long for some hundred
        blocks, layers, heads = np.unravel_index(pages, self._table.shape)
        return blocks, layers, heads

    def page_numbers(self, pages: Integers) -> Integers:
        """`[n]`: one number for each page, a row (block, layer, KV head): sorting rows of three would take ten times as long."""
        return np.ravel_multi_index((pages[:, 0], pages[:, 1], pages[:, 2]), self._table.shape)

    def reserve(self, blocks: int, *, limit: int) -> None:
        """Takes disk space for the checkpoints of `blocks` more, and touches frames for them; up to `limit` of them wait.

        Either takes a step milliseconds to do when it needs it.
        """
        if self.checkpoints is not None:
            boundaries = self.checkpoint_rows.shape[1]
            self.checkpoints.reserve(blocks * boundaries, limit * boundaries)
        frames = self.pool.frames
        units = frames.units_per_frame[Role.SKETCH]
        first = max(self._prepared, frames.num_touched)
        end = min(frames.num_frames, first + -(-blocks // units), frames.num_touched + -(-limit // units))
        if first < end:
            self.pool.arena[first * self.pool.frame_bytes : end * self.pool.frame_bytes : _MEMORY_PAGE].zero_()
            self._prepared = end

    def release_unit(self, block: int, window: int) -> None:
        """Takes the warm copy of a unit: its pages that are not hot are cold from now on."""
        slot = int(self.warm_slot[block, window])
        assert slot >= 0 and self.warm is not None
        self.warm_slot[block, window] = _NONE
        self.warm_address[block, window] = 0
        self.warm.free([slot])

    def save_unit(self, block: int, window: int, sources: Integers) -> bool:
        """Makes a cold unit warm from pages at `sources`, `[layers of the window, kv_heads]`. False: no room in the store."""
        slot = self.warm.add(sources.reshape(-1), self.pool.page_bytes) if self.warm is not None else None
        if slot is None:
            return False
        assert self.warm is not None and self.warm_slot[block, window] < 0
        self.warm_slot[block, window] = slot
        self.warm_address[block, window] = self.warm.address(slot)
        return True

    def free(self, blocks: Sequence[int]) -> None:
        """Makes blocks empty, whatever they were; each once."""
        at = np.asarray(blocks, dtype=np.int64)
        exact, tiered = at[self.exact_unit[at] >= 0], at[self.sketch_unit[at] >= 0]
        self._give_exact(exact)
        slots = self._table[tiered]
        self._give_slots(slots[slots != NO_PAGE].astype(np.int64))
        self._give_sketch(tiered)
        self._drop_warm(at)
        self._drop_checkpoints(at)
        self._table[at] = NO_PAGE

    def copy(self, source: int, target: int) -> bool:
        """Makes an empty block what another one is, in places of its own. False: no room, nothing changed.

        Warm copies are made as far as the store has room; what finds none is cold in the copy.
        """
        if self.exact_unit[source] >= 0:
            if not self.make_exact([target]):
                return False
            pages = self.pool.exact_slots([self.exact_unit[source], self.exact_unit[target]])
            self._copy_slots(pages[0].reshape(-1), pages[1].reshape(-1))
        elif self.sketch_unit[source] >= 0 and not self._copy_tiered(source, target):
            return False
        self._copy_checkpoints(source, target)
        return True

    def compact(self, role: Role) -> None:
        """Moves units together, so that frames become free."""
        frames = self.pool.frames
        moves = frames.compaction(role)
        owners = self._owners(role) if moves else {}
        for source, target in moves:
            owner = owners.pop(source)
            self._move(role, owner, source, target)
            frames.complete_move(role, source, target)
            owners[target] = owner

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def keep_checkpoint(self, block: int, boundary: int, offset: int, hidden: Tensor) -> None:
        """Writes what flowed into the first layer of window `boundary + 1`, `[tokens, hidden]`, from token `offset` of a block.

        A checkpoint is of use once it has all tokens of its block, written in order.
        """
        if self.checkpoints is None or self.checkpoint_rows[block, boundary] != offset:
            return
        if offset == 0 and self.checkpoint_slot[block, boundary] < 0:
            slots = self.checkpoints.allocate(1)
            if slots is None:
                return
            self.checkpoint_slot[block, boundary] = slots[0]
        elif self.checkpoint_slot[block, boundary] < 0:
            return
        rows = self._checkpoint(block, boundary)
        rows[offset : offset + len(hidden)] = hidden
        self.checkpoint_rows[block, boundary] = offset + len(hidden)
        if offset + len(hidden) == self._checkpoint_shape[0]:
            self.checkpoints.filled([int(self.checkpoint_slot[block, boundary])])

    def keep_checkpoint_rows(self, blocks: Integers, boundary: int, offsets: Integers, hidden: Tensor, rows: Integers) -> None:
        """`keep_checkpoint` for one token of each block: at `offsets`, `[n]`, what `hidden` holds in `rows`. Each block once."""
        begun = offsets > 0
        for i in np.flatnonzero(~begun).tolist():
            self.keep_checkpoint(int(blocks[i]), boundary, 0, hidden[rows[i] : rows[i] + 1])
        if self.checkpoints is None or not begun.any():
            return
        blocks, offsets, rows = blocks[begun], offsets[begun], rows[begun]
        slots = self.checkpoint_slot[blocks, boundary]
        kept = (slots >= 0) & (self.checkpoint_rows[blocks, boundary] == offsets)
        row_bytes = self._checkpoint_shape[1] * _CHECKPOINT_DTYPE.itemsize
        hidden = hidden.to(_CHECKPOINT_DTYPE).contiguous()
        targets = self.checkpoints.addresses(slots[kept].tolist()) + offsets[kept] * row_bytes
        copy_bytes(hidden.data_ptr() + rows[kept] * row_bytes, targets, row_bytes)
        self.checkpoint_rows[blocks[kept], boundary] += 1
        whole = self.checkpoint_rows[blocks[kept], boundary] == self._checkpoint_shape[0]
        self.checkpoints.filled(slots[kept][whole].tolist())

    def checkpoint(self, block: int, boundary: int) -> Tensor | None:
        """`[page_size, hidden]`, or None if the block has no whole one."""
        if boundary >= self.checkpoint_rows.shape[1]:
            return None
        whole = int(self.checkpoint_rows[block, boundary]) == self._checkpoint_shape[0]
        return self._checkpoint(block, boundary) if whole else None

    # -- restoring -----------------------------------------------------------------------------------------------------

    def lend_slots(self, block: int, first: int, stop: int, slots: Integers) -> Integers:
        """Points the pages of the layers `first` to `stop` at `slots`, `[layers, kv_heads]`; returns what stood there before."""
        before = self._table[block, first:stop].astype(np.int64)
        self._table[block, first:stop] = slots
        return before

    def slots(self, block: int, first: int, stop: int) -> Integers:
        """`[layers, kv_heads]`: what the pages of these layers point at now."""
        return self._table[block, first:stop].astype(np.int64)

    def return_slots(self, block: int, first: int, stop: int, before: Integers) -> None:
        """Undoes `lend_slots`."""
        self._table[block, first:stop] = before

    def adopt_page(self, block: int, layer: int, head: int, slot: int) -> bool:
        """Makes a page that has no slot hot, with what `slot` holds. False: the pool has no room, nothing changed."""
        assert self._table[block, layer, head] == NO_PAGE
        own = self.pool.frames.take(Role.PAGE, 1)
        if own is None:
            return False
        self._copy_slots(np.array([slot], dtype=np.int64), own)
        self._table[block, layer, head] = own[0]
        self.num_hot[block] += 1
        return True

    def check_invariants(self) -> None:
        """Raises AssertionError if tables, frames and stores disagree."""
        frames, pool = self.pool.frames, self.pool
        frames.check_invariants()
        exact, tiered = self.exact_unit >= 0, self.sketch_unit >= 0
        assert not (exact & tiered).any(), "a block is exact and tiered"
        assert len(set(self.exact_unit[exact])) == exact.sum() == frames.num_used(Role.EXACT), "exact units are lost"
        if pool.frame_sketches:
            assert len(set(self.sketch_unit[tiered])) == tiered.sum() == frames.num_used(Role.SKETCH), "sketches are lost"
        hot = self._table[tiered]
        slots = hot[hot != NO_PAGE]
        used = frames.num_used(Role.PAGE) - len(self.staging)
        assert len(set(slots.tolist()) - set(self.staging.tolist())) == len(slots) == used, "hot pages are lost or shared"
        if exact.any():
            assert (self._table[exact] == pool.exact_slots(self.exact_unit[exact])).all(), "an exact block's slots are wrong"
        assert (self._table[~exact & ~tiered] == NO_PAGE).all(), "an empty block has pages"
        counted = ((self._table != NO_PAGE) & self.tierable).sum(axis=(1, 2))
        assert (self.num_hot == np.where(tiered, counted, 0)).all(), "hot pages are miscounted"
        assert ((self.warm_slot >= 0) == (self.warm_address.numpy() != 0)).all(), "warm slots and addresses disagree"
        neither = ~tiered & ~self.is_parked(np.arange(len(tiered)))
        assert not (self.warm_slot[neither] >= 0).any(), "a block that is neither tiered nor parked is warm"
        warm = self.warm_slot[self.warm_slot >= 0]
        assert len(set(warm.tolist())) == len(warm) == (self.warm.num_used if self.warm else 0), "warm slots are lost"
        held = self.checkpoint_slot[self.checkpoint_slot >= 0]
        assert len(set(held.tolist())) == len(held) == (self.checkpoints.num_used if self.checkpoints else 0), "checkpoints lost"
        assert (pool.sketch_keys.numpy() >= 0).tolist() == tiered.tolist(), "a sketch is not in the table"

    @property
    def has_warm_room(self) -> bool:
        """The warm store can take one more unit."""
        return self.warm is not None and self.warm.num_used < self.warm.num_slots

    def close(self) -> None:
        """Gives the stores back; no page may be read afterwards."""
        for store in (self.warm, self.checkpoints):
            if store is not None:
                store.close()

    # -- details -------------------------------------------------------------------------------------------------------

    def _warm_addresses(self, blocks: Integers, layers: Integers, heads: Integers) -> Integers:
        """Where the warm copies of pages lie; 0: cold."""
        window, layer = np.divmod(layers, self.window_layers)
        units = self.warm_address.numpy()[blocks, window]
        return np.where(units != 0, units + (layer * self.pool.shape.kv_heads + heads) * self.pool.page_bytes, 0)

    def _save(self, block: int, sources: Integers) -> bool:
        """Makes the units warm as far as there is room; `sources`, `[layers, kv_heads]`, are the pages. False: not all."""
        for window in range(self.num_windows):
            layers = slice(window * self.window_layers, (window + 1) * self.window_layers)
            if not self.save_unit(block, window, sources[layers]):
                return False
        return True

    def _take_places(self, num_slots: int) -> tuple[int, Integers] | None:
        """Room for a block's sketches, and so many slots. None: the pool has not both, nothing changed."""
        sketch = self.pool.frames.take(Role.SKETCH, 1)
        slots = self.pool.frames.take(Role.PAGE, num_slots) if sketch is not None else None
        if sketch is not None and slots is None:
            self.pool.frames.give(Role.SKETCH, sketch)
        return None if sketch is None or slots is None else (int(sketch[0]), slots)

    def _give_places(self, sketch: int, slots: Integers) -> None:
        self.pool.frames.give(Role.SKETCH, np.array([sketch], dtype=np.int64))
        self.pool.frames.give(Role.PAGE, slots)

    def _write_sketch(self, sources: Integers, sketch: int) -> int:
        """Sketches the pages at `sources`, `[layers, kv_heads]`; returns how many of them hold a value that is not finite."""
        key_parts, value_parts = self.pool.sketch_addresses(sketch)
        return sketch_to(sources.reshape(-1), key_parts, value_parts, self.pool.sketch_format, self._dtype)

    def _copy_tiered(self, source: int, target: int) -> bool:
        hot = np.argwhere(self._table[source] != NO_PAGE)
        places = self._take_places(len(hot))
        if places is None:
            return False
        sketch, slots = places
        self.pool.copy_sketches(int(self.sketch_unit[source]), sketch)
        self._copy_slots(self._table[source, hot[:, 0], hot[:, 1]].astype(np.int64), slots)
        self._table[target, hot[:, 0], hot[:, 1]] = slots
        self.num_hot[target] = self.num_hot[source]
        self._place_sketch(target, sketch)
        for window in np.flatnonzero(self.warm_slot[source] >= 0):
            layers = min(self.window_layers, self.pool.shape.layers - int(window) * self.window_layers)
            pages = np.arange(layers * self.pool.shape.kv_heads, dtype=np.int64) * self.pool.page_bytes
            self.save_unit(target, int(window), int(self.warm_address[source, window]) + pages)
        return True

    def _copy_checkpoints(self, source: int, target: int) -> None:
        for boundary in range(self.checkpoint_rows.shape[1]):
            rows = int(self.checkpoint_rows[source, boundary])
            if rows:
                self.keep_checkpoint(target, boundary, 0, self._checkpoint(source, boundary)[:rows])

    def _copy_slots(self, sources: Integers, targets: Integers) -> None:
        copy_bytes(self.pool.slot_addresses(sources), self.pool.slot_addresses(targets), self.pool.page_bytes)

    def _place_sketch(self, block: int, unit: int) -> None:
        keys, values = self.pool.sketch_places([unit])
        self.sketch_unit[block] = unit
        self.pool.sketch_keys[block] = int(keys[0])
        self.pool.sketch_values[block] = int(values[0])

    def _give_exact(self, blocks: int | Integers) -> None:
        units = np.atleast_1d(self.exact_unit[blocks])
        self.exact_unit[blocks] = _NONE
        if self._poison:
            self.pool.poison_exact(units)
        self.pool.frames.give(Role.EXACT, units)

    def _give_sketch(self, blocks: int | Integers) -> None:
        units = np.atleast_1d(self.sketch_unit[blocks])
        self.sketch_unit[blocks] = _NONE
        self.num_hot[blocks] = 0
        self.pool.sketch_keys.numpy()[blocks] = NO_PAGE
        self.pool.sketch_values.numpy()[blocks] = NO_PAGE
        if self._poison and len(units):
            self.pool.poison_sketches(units)
        self.pool.frames.give(Role.SKETCH, units)

    def _drop_warm(self, blocks: Integers) -> None:
        held = self.warm_slot[blocks]
        if self.warm is not None:
            self.warm.free(held[held >= 0].tolist())
        self.warm_slot[blocks] = _NONE
        self.warm_address.numpy()[blocks] = 0

    def _give_slots(self, slots: Integers) -> None:
        if self._poison and len(slots):
            self.pool.poison_slots(slots)
        self.pool.frames.give(Role.PAGE, slots)

    def _checkpoint(self, block: int, boundary: int) -> Tensor:
        assert self.checkpoints is not None
        slot = int(self.checkpoint_slot[block, boundary])
        return self.checkpoints.view(slot).view(_CHECKPOINT_DTYPE).view(self._checkpoint_shape)

    def _drop_checkpoints(self, blocks: Integers) -> None:
        held = self.checkpoint_slot[blocks]
        if self.checkpoints is not None:
            self.checkpoints.free(held[held >= 0].tolist())
        self.checkpoint_slot[blocks] = _NONE
        self.checkpoint_rows[blocks] = 0

    def _owners(self, role: Role) -> dict[int, tuple[int, int, int]]:
        """Who has each unit of a role: a block, or a page (block, layer, head)."""
        if role is Role.PAGE:
            tiered = np.flatnonzero(self.sketch_unit >= 0)
            held = np.argwhere(self._table[tiered] != NO_PAGE)
            pages = [(int(tiered[block]), int(layer), int(head)) for block, layer, head in held]
            return {int(self._table[page]): page for page in pages} | {int(slot): _STAGING for slot in self.staging}
        units = self.exact_unit if role is Role.EXACT else self.sketch_unit
        return {int(units[block]): (int(block), 0, 0) for block in np.flatnonzero(units >= 0)}

    def _move(self, role: Role, owner: tuple[int, int, int], source: int, target: int) -> None:
        block = owner[0]
        if owner == _STAGING:
            self.staging[self.staging == source] = target
        elif role is Role.PAGE:
            self._copy_slots(np.array([source], dtype=np.int64), np.array([target], dtype=np.int64))
            self._table[owner] = target
        elif role is Role.EXACT:
            pages = self.pool.exact_slots([source, target])
            self._copy_slots(pages[0].reshape(-1), pages[1].reshape(-1))
            self.exact_unit[block] = target
            self._table[block] = pages[1]
        else:
            self.pool.copy_sketches(source, target)
            self._place_sketch(block, target)
