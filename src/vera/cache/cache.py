"""The KV cache, native or adaptive: the only door to blocks and pages.

A sequence is known by its id. Its life here: `admit` (prefix look-up, room for its tokens), then for each step `reserve` and
`batch`, the model runs, and `commit` and `settle` make the step final; at the end `release`. Nothing but this module and what it
owns writes block tables, page tables and tiers.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vera.attention.protocol import NO_PAGE, PagedBatch, TierReport, Tiers
from vera.cache.blocks import Blocks, extend_hashes
from vera.cache.frames import Role
from vera.cache.housekeeping import RECENT_BLOCKS, Housekeeper, TierStats
from vera.cache.memory import available_bytes
from vera.cache.pool import CacheShape, Integers, PagePool
from vera.cache.recompute import BlockOf, Costs, RecomputeTrigger, RestorePass
from vera.cache.sequence import PROBE_TOKENS, CacheUse, Sequence, Span
from vera.cache.tiers import TierTables, block_overhead_bytes
from vera.config import FIDELITIES, LIVE_SETTINGS, STORE_SETTINGS, CacheConfig
from vera.errors import ConfigError

_LAYOUT_VERSION = "vera-pages-1"
_WARM_CEILINGS = 4
"""The warm store's limit where none is given, in ceilings of the cache."""
_RAM_SHARE = 0.9
"""Of the memory that is available, what cache and warm store together take where no limit for the latter is given."""
_ALL = 2**40
"""More tokens or blocks than any sequence has."""
_GIVEN_WAY_A_STEP = 8
"""Idle blocks that give way when a sequence gains blocks: copying one to the warm store takes up to some milliseconds."""
_EXACT = -1.0
"""In `Tiers.tolerances`: serve the sequence exactly."""


@dataclass(frozen=True, slots=True)
class Restore:
    """A pass of local recompute, ready to run. The slots it writes to are lent until `finish_restore`."""

    plan: RestorePass
    batch: PagedBatch
    """A sequence for each block: its tokens are the new ones, and what lies before them is the context."""
    hidden: Tensor | None
    """`[blocks * page_size, hidden]`: what flows into the first layer; None: begin with the token ids."""
    lent: tuple[Integers, ...]
    """For each block the slots, `[layers, kv_heads]`."""
    inexact: tuple[bool, ...]
    """For each block: what lies before it has cold pages or was computed within bounds, so what is restored is not exact."""


class AdaptiveCache:
    """Blocks shared between sequences by prefix, their pages hot, warm or cold. In mode `native` all of them stay exact."""

    def __init__(
        self,
        shape: CacheShape,
        config: CacheConfig,
        *,
        identity: str,
        max_sequences: int = 16,
        max_tokens: int = 8192,
        max_chunk: int = 512,
        can_recompute: bool = False,
    ) -> None:
        """`identity` is what makes keys and values differ besides tokens and page format: weights and rope settings.

        `max_sequences` of up to `max_tokens` may run at the same time, each computing up to `max_chunk` tokens a step.
        `can_recompute`: the caller runs the restores that this cache asks for; without, no page is cold. Raises CapacityError
        or ConfigError for what memory or disk cannot give.
        """
        self.config = config
        self.shape = shape
        self.adaptive = config.mode == "adaptive"
        self._max_chunk = max_chunk
        self._check_shape()
        max_blocks = -(-max_tokens // config.page_size) + 1
        heat_bytes = 16 * shape.layers * shape.kv_heads
        overhead = block_overhead_bytes(shape, config) + heat_bytes if self.adaptive else 0
        statistics = 2 * 4 * max_sequences * shape.layers * shape.kv_heads * max_blocks if self.adaptive else 0
        self.pool = PagePool(shape, config, block_overhead_bytes=overhead, fixed_overhead_bytes=statistics)
        self.blocks = Blocks(self.pool.num_blocks, reuse_window=self.pool.frames.num_frames * self.pool.frame_blocks)
        self._inexact = np.zeros(self.pool.num_blocks, dtype=np.bool_)
        """Sealed blocks whose keys and values were computed within bounds, or over such ones."""
        self._made_with = config
        self._sequences: dict[str, Sequence] = {}
        self._salt = self._salt_of(identity)
        self._number = 0
        self._step: tuple[list[Span], PagedBatch | None] = ([], None)
        self.costs = Costs()
        self.warm_capacity_bytes = self._allowed_warm_bytes()
        """Most bytes of the warm store, checkpoints included."""
        recompute = self.adaptive and can_recompute and config.recompute_budget > 0
        self.tables = TierTables(
            self.pool,
            config,
            warm_dir=_warm_dir(config),
            warm_bytes=self.warm_capacity_bytes,
            checkpoints=recompute and shape.hidden_size > 0,
            staging_pages=config.recompute_budget * shape.layers * shape.kv_heads if recompute else 0,
        )
        self.trigger = RecomputeTrigger(
            config.recompute_budget, self.tables.window_layers, shape.layers, time_share=config.recompute_time_share
        )
        self._keeper = (
            Housekeeper(
                config,
                self.tables,
                self.blocks,
                self._sequences,
                max_sequences=max_sequences,
                max_blocks=max_blocks,
                can_recompute=self.adaptive and can_recompute,
            )
            if self.adaptive
            else None
        )

    # -- what there is -------------------------------------------------------------------------------------------------

    def change_settings(self, config: CacheConfig) -> None:
        """Serves what comes with other settings; running sequences keep theirs, but for those that concern all together.

        Raises ConfigError for a change that a running cache cannot make.
        """
        self.check_settings(config)
        self.config = config
        self.trigger.limit(config.recompute_budget, time_share=config.recompute_time_share)
        if self._keeper is not None:
            self._keeper.change_settings(config)

    def check_settings(self, config: CacheConfig, *, of_one_request: bool = False) -> None:
        """Raises ConfigError if the cache would have to be made anew for these settings, or changed for all requests."""
        fixed = [f.name for f in fields(CacheConfig) if f.name not in LIVE_SETTINGS]
        if changed := [name for name in fixed if getattr(config, name) != getattr(self._made_with, name)]:
            told = ", ".join(f"{name}={getattr(self._made_with, name)!r} to {getattr(config, name)!r}" for name in changed)
            raise ConfigError(f"a running cache cannot change {told}; make a new one with these settings")
        shared = sorted(name for name in STORE_SETTINGS if getattr(config, name) != getattr(self.config, name))
        if of_one_request and shared:
            raise ConfigError(
                f"one request cannot bring {', '.join(shared)} of its own, which concern all requests; "
                "leave the cache's values, or change them with Engine.set_cache_settings"
            )
        if config.recompute_budget > self._made_with.recompute_budget:
            raise ConfigError(
                f"recompute_budget={config.recompute_budget} is above the {self._made_with.recompute_budget} that this cache has "
                "set room aside for; lower it, or make a new cache with it"
            )

    def longest_sequence(self, fidelity: str | None = None, settings: CacheConfig | None = None) -> int:
        """Tokens of the longest sequence that fits when it runs alone, at a fidelity (None: that of the settings)."""
        tokens = (settings or self.config).min_context + 1
        state = self._new_state(tokens, reuse=False, fidelity=fidelity, tolerance=None, settings=settings)
        exact = self._exact_blocks_alone()
        if not state.tiered:
            return exact * self.config.page_size
        room = (exact - 2 * self.pool.frame_blocks) * self.pool.block_bytes  # each role may leave a frame partly empty
        low, high = exact, self.blocks.num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._footprint(middle, state) <= room else (low, middle - 1)
        return low * self.config.page_size

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of fast memory that the cache takes: never above the ceiling."""
        return self.pool.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of fast memory in use by running sequences; in an adaptive cache those of all frames, tables and statistics."""
        if not self.adaptive:
            return self.pool.frames.num_used(Role.EXACT) * self.pool.block_bytes - self.idle_bytes
        return self.pool.used_bytes - self.idle_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of blocks that are kept for reuse and can be evicted at any time."""
        return int(self.tables.device_bytes(self.blocks.idle_in_place).sum())

    @property
    def warm_bytes(self) -> int:
        """Bytes in the warm store, checkpoints included."""
        return self.tables.warm_bytes

    @property
    def cold_share(self) -> float:
        """Share of the units of tiered blocks that are cold."""
        tiered = self.tables.sketch_unit >= 0
        return float((self.tables.warm_slot[tiered] < 0).mean()) if tiered.any() else 0.0

    @property
    def tier_stats(self) -> TierStats | None:
        """None: the cache is native."""
        return None if self._keeper is None else self._keeper.stats

    @property
    def checkpoint_layers(self) -> list[int]:
        """Layers of which `keep_checkpoints` wants to see what flows in."""
        return [(boundary + 1) * self.tables.window_layers for boundary in range(self.tables.checkpoint_rows.shape[1])]

    def num_tokens_reusable(self, token_ids: Listing[int]) -> int:
        """How many of these tokens a new sequence would find in the cache now."""
        return len(self._find(token_ids, exactly=self._is_short(len(token_ids), self.config))) * self.config.page_size

    def use(self, sequence: str) -> CacheUse:
        """What the cache did for a running sequence so far."""
        return self._sequences[sequence].use

    def tiers_of(self, sequence: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """For each page of a running sequence, `[blocks, layers, kv_heads]`: its tier (0 hot, 1 warm, 2 cold), and its score."""
        blocks = self._sequences[sequence].block_ids
        cold = np.repeat(self.tables.cold_units(blocks), self.tables.window_layers, axis=1)[:, : self.shape.layers, None]
        hot = self.tables.hot_pages(blocks)
        scores = self._keeper.heat.scores(blocks) if self._keeper is not None else np.full(hot.shape, 0.5, dtype=np.float32)
        return np.where(hot, 0, np.where(cold, 2, 1)).astype(np.int8), scores

    def is_tiered(self, sequence: str) -> NDArray[np.bool_]:
        """For each block of a running sequence: it has a sketch, and its pages may be anywhere."""
        return self.tables.is_tiered(self._sequences[sequence].block_ids)

    def exact_pages(self, sequence: str, layer: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """The exact keys and values of a sequence's first `num_tokens` in a layer, and its scale of errors; float32 copies.

        Keys and values are `[kv_heads, tokens, head_dim]`; the scale, `[kv_heads]`, is the mean over tiered blocks of the largest
        value norm. None: a page is cold, or no block is tiered.
        """
        blocks = self._sequences[sequence].block_ids[: self._blocks_for(num_tokens)]
        addresses = self.tables.exact_addresses(blocks, layer)
        tiered = self.tables.is_tiered(blocks)
        if not addresses.all() or not tiered.any():
            return None
        keys, values = self.pool.read_pages(addresses)
        norms = values.norm(dim=-1).amax(dim=-1)[torch.from_numpy(tiered)].mean(dim=0)
        keys = keys.permute(1, 0, 3, 2).flatten(1, 2)[:, :num_tokens]
        return keys, values.permute(1, 0, 2, 3).flatten(1, 2)[:, :num_tokens], norms

    # -- the life of a sequence ----------------------------------------------------------------------------------------

    def admit(
        self,
        sequence: str,
        token_ids: Listing[int],
        *,
        headroom: int = 0,
        reuse: bool = True,
        fidelity: str | None = None,
        tolerance: float | None = None,
        settings: CacheConfig | None = None,
        use: CacheUse | None = None,
    ) -> int | None:
        """Takes in a sequence and finds room for all of `token_ids`; returns how many of them are in the cache already.

        Always leaves at least one token to compute, because logits come from computing. `headroom` exact blocks must stay
        available beyond the need. With `reuse` off nothing is looked up (prompt log-probabilities need every position).
        `settings`, which `check_settings` has let pass, take the place of the cache's own, `fidelity` and `tolerance` that of
        theirs; `use` is the account to go on with. None: no room, nothing changed.
        """
        assert sequence not in self._sequences
        state = self._new_state(len(token_ids), reuse=reuse, fidelity=fidelity, tolerance=tolerance, settings=settings)
        found: list[int] = []
        if state.reuse:
            extend_hashes(state.hashes, self._salt, token_ids, self.config.page_size)
            found = self._usable(self.blocks.find(self._reusable(state.hashes, len(token_ids))), exactly=not state.bounded)
        self.blocks.share(found)  # pinned before anything is evicted to make room
        needed = self._footprint(self._blocks_for(len(token_ids)), state) - int(self.tables.device_bytes(found).sum())
        if max(0, needed) + headroom * self.pool.block_bytes > self._available_bytes():
            self._give_back(found)
            return None
        state.blocks.extend(found)
        self._sequences[sequence] = state  # what it reads is known from here on, and is not released to make room
        cached_tokens = self._tokens_by_tier(found)
        fresh = self._allocate(0 if state.tiered else self._blocks_for(len(token_ids)) - len(found))
        if fresh is None or not self._fetch_parked(found, exact=not state.tiered):
            self._give_back(fresh or [])
            del self._sequences[sequence]
            self._give_back(found)
            return None
        state.blocks.extend(fresh)
        state.sealed = len(found)
        state.num_computed = len(found) * self.config.page_size
        if state.bounded:
            state.exact_tokens = min(self._first_inexact(found) * self.config.page_size, state.prompt_tokens)
        if use is not None:
            state.use = use
        if not state.use.admitted:
            self.blocks.note_found(found)
            state.use.admitted, state.use.cached_tokens = True, cached_tokens
        if state.tiered and self._keeper is not None:
            self._keeper.begin(state)
        return len(found) * self.config.page_size

    def would_fit(
        self,
        token_ids: Listing[int],
        *,
        without: Listing[str],
        headroom: int = 0,
        reuse: bool = True,
        fidelity: str | None = None,
        settings: CacheConfig | None = None,
    ) -> bool:
        """Whether `admit` would succeed if the sequences `without` were released. Changes nothing."""
        state = self._new_state(len(token_ids), reuse=reuse, fidelity=fidelity, tolerance=None, settings=settings)
        shares = np.zeros_like(self.blocks.owners)
        for name in without:
            np.add.at(shares, self._sequences[name].block_ids, 1)
        left = np.flatnonzero((shares > 0) & (self.blocks.owners == shares))
        available = self._available_bytes(without=without) + int(self.tables.device_bytes(left).sum())
        found = self._find(token_ids, exactly=not state.bounded) if state.reuse else []
        unowned = [block for block in found if self.blocks.owners[block] == shares[block]]
        available -= int(self.tables.device_bytes(unowned).sum())  # these would be shared, not handed out
        needed = self._footprint(self._blocks_for(len(token_ids)), state) - int(self.tables.device_bytes(found).sum())
        return max(0, needed) + headroom * self.pool.block_bytes <= available

    def reserve(self, sequence: str, num_tokens: int) -> bool:
        """Makes the sequence's blocks reach `num_tokens`. False: no room, nothing changed."""
        state = self._sequences[sequence]
        missing = self._blocks_for(num_tokens) - len(state.blocks)
        if missing <= 0:
            return True
        fresh = self._allocate(missing)
        if fresh is None:
            return False
        state.blocks.extend(fresh)
        self._become_tiered(state, num_tokens)
        self._make_room_for_tiers(state)
        return True

    def commit(self, sequence: str, token_ids: Listing[int], num_computed: int) -> None:
        """Seals the blocks that are full now that the first `num_computed` of `token_ids` are in the cache."""
        state = self._sequences[sequence]
        state.num_computed = num_computed
        full = num_computed // self.config.page_size
        if full > state.sealed and state.reuse:
            extend_hashes(state.hashes, self._salt, token_ids[: full * self.config.page_size], self.config.page_size)
            for i in range(state.sealed, full):
                self._seal(state.blocks[i], state.hashes[i], exact=(i + 1) * self.config.page_size <= state.exact_tokens)
        state.sealed = max(state.sealed, full)

    def observe(self) -> None:
        """Takes in what the step's attention has shown about pages. Call once the model has run, before anything is committed."""
        spans, batch = self._step
        if self._keeper is not None and batch is not None and batch.tiers is not None:
            read = self._keeper.observe(spans, batch.tiers.report, batch.block_tables.numpy())
            if read.pages:
                self.costs.measured_read(read.seconds / read.pages * self.tables.window_layers * self.shape.kv_heads)

    def settle(self) -> None:
        """Ends a step: pages move. Call once all its sequences are committed."""
        spans, _ = self._step
        self._step = ([], None)
        if self._keeper is not None:
            self._keeper.settle(spans)

    def release(self, sequence: str, *, discard: bool = False) -> None:
        """Ends a sequence. Its sealed blocks stay findable until their memory is needed, unless they are to be discarded."""
        state = self._sequences.pop(sequence)
        self.trigger.forget(sequence)
        if self._keeper is not None:
            self._keeper.end(state)
        if discard:
            self.blocks.unseal(state.blocks)
        self._give_back(state.blocks)

    def duplicate(self, sequence: str, copy: str, *, use: CacheUse | None = None) -> bool:
        """`copy` becomes a sequence with the same content in blocks of its own. False: no room, nothing changed."""
        source = self._sequences[sequence]
        if source.tiered:  # by the rule of admission
            needed = self._wanted_bytes(source) + len(self._sequences) * self.pool.block_bytes
            if needed > self._available_bytes():
                return False
        fresh = self.blocks.allocate(len(source.blocks)) if self._make_room_for_copy(source) else None
        if fresh is None:
            return False
        for old, new in zip(source.blocks, fresh, strict=True):
            if self._keeper is not None and self.tables.sketch_unit[old] >= 0:
                self._keeper.make_warm_room()
            if not self.tables.copy(old, new):
                self._give_back(fresh)
                return False
        if not source.bounded and self.tables.lacks_exact_pages(fresh).any():
            self._give_back(fresh)
            return False
        state = Sequence(number=self._next_number(), settings=source.settings, reuse=False, use=use or CacheUse())
        state.exact_tokens = source.exact_tokens
        state.fidelity, state.tolerance, state.tiered = source.fidelity, source.tolerance, source.tiered
        state.prompt_tokens, state.num_computed = source.prompt_tokens, source.num_computed
        state.sealed, state.demoted = source.sealed, source.demoted
        state.blocks.extend(fresh)
        self._sequences[copy] = state
        if self._keeper is not None:
            self._keeper.recycle(fresh)
            if state.tiered:
                self._keeper.begin(state)
                self._keeper.inherit(source, state)
        return True

    def truncate(self, sequence: str, num_tokens: int) -> int:
        """Takes back what was computed after `num_tokens`, to a whole block; returns how many tokens are in the cache now.

        Never more than there were. The blocks behind stay findable, as far as they were sealed.
        """
        state = self._sequences[sequence]
        self.trigger.forget(sequence)
        blocks = min(max(num_tokens, 0), state.num_computed) // self.config.page_size
        dropped = state.blocks[blocks:]
        del state.blocks[blocks:]
        del state.hashes[blocks:]
        state.sealed, state.demoted = min(state.sealed, blocks), min(state.demoted, max(1, blocks))
        state.num_computed = blocks * self.config.page_size
        self._give_back(dropped)
        return state.num_computed

    def num_exact_tokens(self, sequence: str) -> int:
        """The sequence's first tokens whose keys and values are what a native cache would hold."""
        state = self._sequences[sequence]
        return min(state.exact_tokens, state.num_computed)

    def set_fidelity(self, sequence: str, fidelity: str) -> bool:
        """How a running sequence is served from its next step on. False: it has cold pages, restore or preempt it first.

        What was computed within bounds stays as it is: `truncate` it to `num_exact_tokens` for an answer that is native's.
        """
        _check_fidelity(fidelity)
        state = self._sequences[sequence]
        if fidelity != "bounded" and self.tables.lacks_exact_pages(state.block_ids).any():
            return False
        if state.exact_tokens >= state.num_computed:
            state.exact_tokens = state.num_computed if fidelity == "bounded" else _ALL
        state.fidelity = fidelity
        state.tiered = self._may_be_tiered(fidelity, len(state.blocks) * self.config.page_size, state.settings)
        if state.tiered and self._keeper is not None:
            self._keeper.begin(state)
        return True

    def forget(self, identity: str) -> None:
        """Drops everything kept for reuse: the model behind it has changed. No sequence may be running."""
        assert not self._sequences
        self._empty(self.blocks.forget())
        self._salt = self._salt_of(identity)

    def close(self) -> None:
        """Gives the warm store back. No sequence may be read afterwards."""
        self.tables.close()

    # -- a step --------------------------------------------------------------------------------------------------------

    def batch(self, spans: Listing[Span]) -> PagedBatch:
        """The tables of one step, for the attention backend."""
        states = [self._sequences[span.sequence] for span in spans]
        tiers = self._tiers(spans, states) if self.adaptive else None
        starts = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum([span.stop - span.start for span in spans], out=starts[1:])
        batch = self._paged_batch(states, starts, [span.stop for span in spans], tiers)
        self._step = (list(spans), batch)
        return batch

    def keep_checkpoints(self, spans: Listing[Span], layer: int, hidden: Tensor) -> None:
        """Keeps what flowed into one of `checkpoint_layers` for the tokens of a step, `[tokens, hidden]`."""
        boundary, size = layer // self.tables.window_layers - 1, self.config.page_size
        row = 0
        single: list[tuple[int, int, int]] = []
        for span in spans:
            state = self._sequences[span.sequence]
            if state.tiered and span.stop - span.start == 1:
                index, offset = divmod(span.start, size)
                single.append((state.blocks[index], offset, row))
            elif state.tiered:
                for index in range(span.start // size, (span.stop - 1) // size + 1):
                    begin, end = max(span.start, index * size), min(span.stop, (index + 1) * size)
                    part = hidden[row + begin - span.start : row + end - span.start]
                    self.tables.keep_checkpoint(state.blocks[index], boundary, begin - index * size, part)
            row += span.stop - span.start
        if single:
            blocks, offsets, rows = np.array(single, dtype=np.int64).T
            self.tables.keep_checkpoint_rows(blocks, boundary, offsets, hidden, rows)

    # -- local recompute -----------------------------------------------------------------------------------------------

    def cold_blocks(self, sequence: str) -> list[BlockOf]:
        """The sequence's blocks that have cold pages, oldest first."""
        state = self._sequences[sequence]
        lacking = np.flatnonzero(self.tables.lacks_exact_pages(state.block_ids))
        return [BlockOf(sequence, int(index), state.blocks[index]) for index in lacking]

    def cold_hits(self, batch: PagedBatch, layer: int) -> list[BlockOf]:
        """The blocks whose cold pages the last call of the backend hit in `layer`."""
        spans, _ = self._step
        cold = {(sequence, block) for sequence, _, block in self._cold_hits(batch, layer)}
        found = [(spans[sequence].sequence, block) for sequence, block in sorted(cold)]
        return [BlockOf(name, index, self._sequences[name].blocks[index]) for name, index in found]

    def cold_hit_pages(self, batch: PagedBatch, layer: int) -> list[tuple[int, int, int]]:
        """Those pages themselves: (block id, layer, KV head)."""
        spans, _ = self._step
        hits = self._cold_hits(batch, layer)
        return [(self._sequences[spans[sequence].sequence].blocks[block], layer, head) for sequence, head, block in hits]

    def restores(self, targets: Iterable[BlockOf], stop: int) -> list[RestorePass]:
        """How to restore blocks up to layer `stop`, in passes that each fit the staging slots."""
        return self.trigger.passes(targets, stop, lambda block, boundary: self.tables.checkpoint(block, boundary) is not None)

    def cold_windows(self, target: BlockOf) -> list[int]:
        """The windows in which a block has no warm copy, in order."""
        return [int(window) for window in np.flatnonzero(self.tables.cold_units([target.block])[0])]

    def begin_restore(self, plan: RestorePass) -> Restore:
        """Lends slots to the pages that the pass will write, and gives what it runs on."""
        layers, heads, size = plan.stop - plan.first, self.shape.kv_heads, self.config.page_size
        staging = self.tables.staging
        assert len(plan.targets) * layers * heads <= len(staging), "a restore pass is larger than its staging"
        slots = staging[: len(plan.targets) * layers * heads].reshape(len(plan.targets), layers, heads)
        lent = tuple(
            self.tables.lend_slots(target.block, plan.first, plan.stop, slots[i]) for i, target in enumerate(plan.targets)
        )
        states = [self._sequences[target.sequence] for target in plan.targets]
        starts = np.arange(len(states) + 1, dtype=np.int32) * size
        ends = [(target.index + 1) * size for target in plan.targets]
        batch = self._paged_batch(states, starts, ends, self._tiers_for_restore(len(states)))
        boundary = plan.first // self.tables.window_layers - 1
        parts = [self.tables.checkpoint(target.block, boundary) for target in plan.targets] if plan.first else []
        hidden = torch.cat([part for part in parts if part is not None]) if parts else None
        inexact = tuple(
            self._first_inexact(state.blocks[: target.index]) != _ALL for state, target in zip(states, plan.targets, strict=True)
        )
        return Restore(plan, batch, hidden, lent, inexact)

    def finish_restore(self, restore: Restore, *, hot: Listing[tuple[int, int, int]] = ()) -> int:
        """Takes the lent slots back and keeps what was restored: warm where a whole unit fits the store, and the pages `hot`.

        `hot` are (block, layer, KV head). Returns how many pages that were cold are exact now.
        """
        plan, tables = restore.plan, self.tables
        slots = [tables.slots(target.block, plan.first, plan.stop) for target in plan.targets]
        self.abandon_restore(restore)
        restored = 0
        for target, own, inexact in zip(plan.targets, slots, restore.inexact, strict=True):
            kept = self._keep_restored(target.block, own, plan, [page for page in hot if page[0] == target.block])
            if kept and inexact:
                self._mark_inexact(target.block)
            restored += kept
        return restored

    def _mark_inexact(self, block: int) -> None:
        """A block now holds what was computed over an inexact context: nobody may take it for a native cache's."""
        self._inexact[block] = True
        for state in self._sequences.values():
            if state.bounded and block in state.blocks:
                state.exact_tokens = min(state.exact_tokens, state.blocks.index(block) * self.config.page_size)

    def abandon_restore(self, restore: Restore) -> None:
        """Takes the lent slots back; everything is as it was before `begin_restore`."""
        for target, lent in zip(restore.plan.targets, restore.lent, strict=True):
            self.tables.return_slots(target.block, restore.plan.first, restore.plan.stop, lent)

    def count_restore(self, sequences: Iterable[str], *, blocks: int, pages: int, seconds: float) -> None:
        """Takes a step's restores into the figures: the sequences that they were for, what they took, the pages made exact."""
        assert self._keeper is not None
        stats = self._keeper.stats
        names = set(sequences)
        stats.recompute_steps += len(names)
        stats.restored_blocks += blocks
        stats.restored_pages += pages
        stats.restore_seconds += seconds
        for name in names & self._sequences.keys():
            self._sequences[name].use.recompute_steps += 1
        if blocks:
            self.costs.measured_recompute(seconds / blocks)

    def count_uncovered(self, hits: Iterable[BlockOf]) -> None:
        """Cold blocks that were hit in this step and are served by their sketch."""
        assert self._keeper is not None
        for hit in hits:
            self._keeper.stats.uncovered_hits += 1
            self._sequences[hit.sequence].use.uncovered_hits += 1

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance."""
        self.blocks.check_invariants()
        self.tables.check_invariants()
        owners = np.zeros_like(self.blocks.owners)
        for state in self._sequences.values():
            np.add.at(owners, state.block_ids, 1)
            assert state.sealed <= len(state.blocks)
            assert len(set(state.blocks)) == len(state.blocks), "a sequence has one block twice"
            tiered = self.tables.is_tiered(state.block_ids)
            assert not tiered[state.sealed :].any(), "a block that is not sealed is tiered"
            assert (tiered | self.tables.is_exact(state.block_ids)).all(), "a sequence's block is empty"
            if not state.bounded:
                assert not self.tables.lacks_exact_pages(state.block_ids).any(), "exact service, but cold pages"
        assert (owners == self.blocks.owners).all(), "owners and sequences disagree"
        ids = np.arange(self.blocks.num_blocks)
        parked = self.tables.is_parked(ids)
        assert parked.tolist() == [self.blocks.is_parked(block) for block in ids.tolist()], "blocks and tables disagree"
        empty = ~(self.tables.is_exact(ids) | self.tables.is_tiered(ids) | parked)
        idle = self.blocks.idle
        assert not empty[idle].any(), "an idle block is empty"
        held = (self.blocks.owners > 0) | np.isin(np.arange(self.blocks.num_blocks), idle)
        assert (held == ~empty).all(), "a free block holds bytes"
        assert self.pool.used_bytes <= self.pool.capacity_bytes
        if self.config.cache_max_bytes is not None:
            assert self.pool.capacity_bytes <= self.config.cache_max_bytes, "the cache is above its ceiling"
        if self.tables.warm is not None:
            assert self.warm_bytes <= self.warm_capacity_bytes, "the warm store is above its limit"

    # -- details: admission --------------------------------------------------------------------------------------------

    def _new_state(
        self,
        num_tokens: int,
        *,
        reuse: bool,
        fidelity: str | None,
        tolerance: float | None,
        settings: CacheConfig | None = None,
    ) -> Sequence:
        settings = settings or self.config
        fidelity = fidelity or settings.fidelity
        _check_fidelity(fidelity)
        state = Sequence(self._next_number(), settings, reuse and settings.prefix_reuse, fidelity)
        state.tolerance = settings.attention_tolerance if tolerance is None else tolerance
        state.prompt_tokens = num_tokens
        state.tiered = self._may_be_tiered(fidelity, num_tokens, settings)
        return state

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _may_be_tiered(self, fidelity: str, num_tokens: int, settings: CacheConfig) -> bool:
        if not self.adaptive or fidelity == "native" or self._is_short(num_tokens, settings):
            return False
        return fidelity == "bounded" or self.tables.warm is not None

    def _is_short(self, num_tokens: int, settings: CacheConfig) -> bool:
        exact = self._exact_blocks_alone() * self.config.page_size
        return num_tokens <= min(settings.min_context, exact)

    def _become_tiered(self, state: Sequence, num_tokens: int) -> None:
        """A sequence that has grown beyond `min_context` may be demoted from now on."""
        if self.adaptive and not state.tiered and self._may_be_tiered(state.fidelity, num_tokens, state.settings):
            state.tiered = True
            if state.bounded:
                state.exact_tokens = min(state.exact_tokens, state.num_computed)
            assert self._keeper is not None
            self._keeper.begin(state)

    def _find(self, token_ids: Listing[int], *, exactly: bool) -> list[int]:
        """The blocks of the longest reusable prefix, as they are now."""
        hashes: list[bytes] = []
        extend_hashes(hashes, self._salt, token_ids, self.config.page_size)
        return self._usable(self.blocks.find(self._reusable(hashes, len(token_ids))), exactly=exactly)

    def _usable(self, found: list[int], *, exactly: bool) -> list[int]:
        """What is served exactly cannot use cold pages: from the first block that has any, it is computed anew."""
        if not exactly or not found or not self.adaptive:
            return found
        count = self._first_inexact(found)
        return found if count == _ALL else found[:count]

    def _first_inexact(self, blocks: Listing[int]) -> int:
        """Index of the first block that has cold pages or was computed within bounds; `_ALL`: there is none."""
        if not blocks:
            return _ALL
        bad = np.flatnonzero(self.tables.lacks_exact_pages(blocks) | self._inexact[np.asarray(blocks, dtype=np.int64)])
        return int(bad[0]) if len(bad) else _ALL

    def _tokens_by_tier(self, found: Listing[int]) -> dict[str, int]:
        """Tokens of these blocks: exact, tiered or parked with all pages, with cold pages."""
        exact, cold = self.tables.is_exact(found), self.tables.lacks_exact_pages(found)
        blocks = {"hot": exact, "warm": ~exact & ~cold, "cold": cold}
        return {tier: int(those.sum()) * self.config.page_size for tier, those in blocks.items()}

    def _reusable(self, hashes: Listing[bytes], num_tokens: int) -> Listing[bytes]:
        return hashes[: (num_tokens - 1) // self.config.page_size]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _pinned_blocks(self, *, reading: bool) -> int:
        """Blocks of a tiered sequence that are exact at any time: the first, the recent, the open one, and those being read."""
        return 1 + RECENT_BLOCKS + 1 + (-(-self._max_chunk // self.config.page_size) if reading else 0)

    def _footprint(self, num_blocks: int, state: Sequence, *, reading: bool = True) -> int:
        """Bytes of the pool that a sequence of `num_blocks` wants, with as many hot pages as it may have.

        `reading`: what it needs at the most while its prompt grows to that length, instead of what it keeps while it decodes.
        """
        pinned = self._pinned_blocks(reading=reading)
        if not state.tiered or num_blocks <= pinned:
            return num_blocks * self.pool.block_bytes
        tiered = num_blocks - pinned
        stays_exact = reading or not state.bounded  # what is read exactly, and cannot wait warm
        if stays_exact and (self.tables.warm is None or self.tables.warm.num_slots < num_blocks * self.tables.num_windows):
            return num_blocks * self.pool.block_bytes
        windowed = tiered * len(self.shape.windowed_layers) * self.shape.kv_heads  # pages that keep their slots
        return (
            pinned * self.pool.block_bytes
            + tiered * self.pool.sketch_bytes
            + (int(state.settings.hot_max_share * tiered) * self.pool.block_bytes if state.bounded else 0)
            + windowed * self.pool.page_bytes
        )

    def _available_bytes(self, *, without: Listing[str] = ()) -> int:
        """Bytes that could be handed out: free frames, room in others, idle blocks; less what is promised to those that run.

        Promised is what a prompt has yet to take, and a decoding sequence's share of hot pages at the length that it has now. Its
        growth is not.
        """
        available = self._free_bytes() + self.idle_bytes
        for name, state in self._sequences.items():
            if state.tiered and name not in without:
                missing = max(0, self._wanted_bytes(state) - int(self.tables.device_bytes(state.block_ids).sum()))
                # What a decoding sequence misses are hot pages: those of a shared block are hot for all that read it.
                share = (1 / self.blocks.owners[state.block_ids]).mean() if state.prompt_done else 1
                available -= int(share * missing)
        return available

    def _free_bytes(self) -> int:
        """Bytes of free frames, and room in others."""
        frames = self.pool.frames
        free = frames.num_free_frames * self.pool.frame_bytes
        for role, size in self._unit_bytes().items():
            free += (frames.num_available(role) - frames.num_free_frames * frames.units_per_frame[role]) * size
        return free

    def _wanted_bytes(self, state: Sequence) -> int:
        if state.prompt_done:
            return self._footprint(len(state.blocks), state, reading=False)
        return self._footprint(self._blocks_for(state.prompt_tokens), state)

    def _unit_bytes(self) -> dict[Role, int]:
        sizes = {Role.EXACT: self.pool.block_bytes}
        if self.adaptive:
            sizes |= {Role.SKETCH: self.pool.sketch_bytes, Role.PAGE: self.pool.page_bytes}
        return sizes

    # -- details: room -------------------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> list[int] | None:
        """`count` exact blocks. None: no room; nothing changed but what was idle."""
        if count == 0:
            return []
        if not self._make_room({Role.EXACT: count}, count):
            return None
        blocks = self.blocks.allocate(count)
        assert blocks is not None
        made = self.tables.make_exact(blocks)
        assert made
        if self._keeper is not None:
            self._keeper.recycle(blocks)
        return blocks

    def _make_room(self, units: dict[Role, int], block_ids: int) -> bool:
        """Makes the pool able to hand out these units, and `block_ids` free ids.

        In this order: idle blocks are parked, the least recently used first; units are moved together, so that frames become
        free; idle blocks are evicted; blocks of running sequences that are due are demoted; hot pages are cooled.
        """
        steps: list[Callable[[], bool]] = [self._evict]
        if self._keeper is not None:
            steps = [self._give_way, self._compact, self._evict, self._keeper.demote_all_due, self._shed]
        while not self._has_room(units, block_ids):
            if self.blocks.num_free < block_ids and self._evict(parked=True):
                continue
            if not any(step() for step in steps):
                return False
        return True

    def _fetch_parked(self, found: Listing[int], *, exact: bool) -> bool:
        """Brings those of a sequence's blocks back that are parked. False: no room."""
        parked = [block for block in found if self.blocks.is_parked(block)]
        if not parked:
            return True
        assert self._keeper is not None
        windowed = len(self.shape.windowed_layers) * self.shape.kv_heads
        tiered = {Role.SKETCH: 1, Role.PAGE: windowed}
        for block in parked:
            if not exact and self._make_room(tiered, 0) and self._keeper.fetch(block, exact=False):
                continue
            # Asked to be exact, or there are values that cannot be sketched.
            if not (self._make_room({Role.EXACT: 1}, 0) and self._keeper.fetch(block, exact=True)):
                return False
        return True

    def _has_room(self, units: dict[Role, int], block_ids: int) -> bool:
        if self.blocks.num_free < block_ids:
            return False
        frames = self.pool.frames
        frames_needed = 0
        for role, count in units.items():
            per_frame = frames.units_per_frame[role]
            holes = frames.num_available(role) - frames.num_free_frames * per_frame
            frames_needed += -(-max(0, count - holes) // per_frame)
        return frames_needed <= frames.num_free_frames

    def _make_room_for_tiers(self, state: Sequence) -> None:
        """Idle blocks give way to the sketches that a sequence's next demotions take, and to the hot pages that it has not yet.

        Where pages are moved after a step, nothing gives way any more; without this, idle blocks would keep what runs exact.
        """
        if not state.tiered or self.blocks.next_idle is None:
            return
        due = max(0, int((~self.tables.is_tiered(state.block_ids)).sum()) - self._pinned_blocks(reading=False))
        pages = max(0, self._max_hot_pages([state]) - self._num_hot_pages([state]))
        partly_used = len(Role) * self.pool.frame_bytes  # what moving units together may leave
        enough = due * self.pool.sketch_bytes + pages * self.pool.page_bytes + partly_used
        left = _GIVEN_WAY_A_STEP
        while not self._has_room({Role.SKETCH: due, Role.PAGE: pages}, 0):
            if self._free_bytes() >= enough and self._compact():
                continue
            if left == 0 or not (self._give_way() or self._evict()):
                return
            left -= 1

    def _max_hot_pages(self, states: Iterable[Sequence]) -> int:
        """Of sequences that are served exactly none is needed."""
        assert self._keeper is not None
        bounded = ((state, int(self.tables.is_tiered(state.block_ids).sum())) for state in states if state.bounded)
        return sum(self._keeper.max_hot(state, tiered) for state, tiered in bounded)

    def _num_hot_pages(self, states: Iterable[Sequence]) -> int:
        return sum(self.tables.count_hot(state.block_ids[self.tables.is_tiered(state.block_ids)]) for state in states)

    def _give_way(self) -> bool:
        """The least recently used idle block gives its memory: it is parked, or evicted if it is not worth keeping."""
        assert self._keeper is not None
        block = self.blocks.next_idle
        if block is None:
            return False
        if not self.blocks.is_kept(block):
            return self._evict()
        return self._keeper.park(block) or self._keeper.demote_idle(block)

    def _shed(self) -> bool:
        """Cools the weakest hot pages: all, where one bounded sequence runs; where several do, until half of their share is left.

        With fewer, each step hits pages by the hundred, which costs all of them more than it takes the last in rank to wait.
        """
        assert self._keeper is not None
        bounded = [state for state in self._sequences.values() if state.bounded]
        if len(bounded) > 1 and self._num_hot_pages(bounded) <= self._max_hot_pages(bounded) / 2:
            return False
        return self._keeper.shed()

    def _compact(self) -> bool:
        before = self.pool.frames.num_free_frames
        for role in self._unit_bytes():
            self.tables.compact(role)
        return self.pool.frames.num_free_frames > before

    def _evict(self, *, parked: bool = False) -> bool:
        block = self.blocks.evict(parked=parked)
        if block is None:
            return False
        self._empty([block])
        return True

    def _make_room_for_copy(self, source: Sequence) -> bool:
        blocks = source.block_ids
        tiered = self.tables.is_tiered(blocks)
        units = {Role.EXACT: int((~tiered).sum())}
        if tiered.any():
            units |= {Role.SKETCH: int(tiered.sum()), Role.PAGE: int(self.tables.hot_pages(blocks[tiered]).sum())}
        return self._make_room(units, len(blocks))

    def _give_back(self, blocks: Listing[int]) -> None:
        """Blocks of a tiered sequence are worth keeping: most of them are in the warm store already."""
        keep = self.adaptive and bool(self.tables.is_tiered(blocks).any())
        self._empty(self.blocks.release(blocks, keep=keep))

    def _empty(self, blocks: Listing[int]) -> None:
        """These blocks are free: their content must never be read again."""
        self.tables.free(blocks)

    def _seal(self, block: int, digest: bytes, *, exact: bool) -> None:
        """Makes a block findable; in place of another one with the same content if that has lost pages or is less exact."""
        self._inexact[block] = not exact
        other = self.blocks.find_one(digest)
        if other is not None and self.adaptive and exact and self._first_inexact([other]) == 0:
            freed = self.blocks.supersede(block, digest)
            if freed is not None:
                self._empty([freed])
        else:
            self.blocks.seal(block, digest)

    # -- details: batches ----------------------------------------------------------------------------------------------

    def _paged_batch(
        self, states: Listing[Sequence], starts: NDArray[np.int32], lengths: Listing[int], tiers: Tiers | None
    ) -> PagedBatch:
        rows = np.zeros((len(states), max(len(state.blocks) for state in states)), dtype=np.int32)
        for row, state in zip(rows, states, strict=True):
            row[: len(state.blocks)] = state.blocks
        return PagedBatch(
            pages=self.pool.pages,
            page_table=self.pool.page_table,
            block_tables=torch.from_numpy(rows),
            query_starts=torch.from_numpy(starts),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            page_size=self.config.page_size,
            head_dim=self.shape.head_dim,
            tiers=tiers,
        )

    def _tiers(self, spans: Listing[Span], states: Listing[Sequence]) -> Tiers | None:
        """None: no sequence of the step has a tiered block or is watched, so the step is a native one."""
        assert self._keeper is not None
        probes = [self._probes(span, state) for span, state in zip(spans, states, strict=True)]
        has_tiers = any(
            len(state.blocks) > 1 and (state.tiered or self.tables.is_tiered(state.block_ids).any()) for state in states
        )
        if not has_tiers and not any(probes):
            return None
        for state, count in zip(states, probes, strict=True):
            if count:
                state.rows_seen += count
                state.watched = np.flatnonzero(self.tables.is_tiered(state.block_ids))
        report = TierReport(
            masses=self._keeper.masses,
            frequencies=self._keeper.frequencies,
            errors=torch.zeros(len(states), 3, dtype=torch.float64),
        )
        return self._tiers_with(
            [self._tolerance(span, state) for span, state in zip(spans, states, strict=True)],
            probes,
            [state.row if state.row is not None else 0 for state in states],
            report,
        )

    def _tolerance(self, span: Span, state: Sequence) -> float:
        """A prompt is read exactly to its last token, unless it begins with cold pages."""
        if not state.bounded or (span.start < state.exact_tokens and span.stop - span.start == 1):
            return _EXACT
        return state.tolerance

    def _probes(self, span: Span, state: Sequence) -> int:
        """How many of the span's tokens are among the last of their prompt."""
        if not state.bounded or state.row is None or span.stop - span.start < 2:
            return 0
        return max(0, span.stop - max(span.start, state.prompt_tokens - PROBE_TOKENS))

    def _tiers_for_restore(self, sequences: int) -> Tiers:
        assert self._keeper is not None
        report = TierReport(
            masses=self._keeper.masses,
            frequencies=self._keeper.frequencies,
            errors=torch.zeros(sequences, 3, dtype=torch.float64),
        )
        # Blocks are parts of a prompt: whatever the tolerance, they read cold pages through the sketch and all others exactly.
        return self._tiers_with([1.0] * sequences, [0] * sequences, [0] * sequences, report)

    def _tiers_with(self, tolerances: Listing[float], probes: Listing[int], rows: Listing[int], report: TierReport) -> Tiers:
        return Tiers(
            arena=self.pool.arena,
            sketch_bits=self.config.sketch_bits,
            sketch_keys=self.pool.sketch_keys,
            sketch_values=self.pool.sketch_values,
            sketch_stride=self.pool.sketch_stride,
            warm=self.tables.warm_address,
            window_layers=self.tables.window_layers,
            tolerances=torch.tensor(tolerances, dtype=torch.float32),
            skip_share=self.config.skip_share,
            probes=torch.tensor(probes, dtype=torch.int32),
            report_rows=torch.tensor(rows, dtype=torch.int32),
            report=report,
        )

    def _cold_hits(self, batch: PagedBatch, layer: int) -> list[tuple[int, int, int]]:
        """(sequence, KV head, block) of the cold pages that the last call of the backend hit in `layer`."""
        hits = batch.tiers.report.hits if batch.tiers is not None else []
        if not hits:
            return []
        latest = hits[-1].numpy()
        if latest[0, 1] != layer or not latest[:, 4].any():
            return []
        return [(sequence, head, block) for sequence, _, head, block, is_cold in latest.tolist() if is_cold]

    # -- details: restoring --------------------------------------------------------------------------------------------

    def make_room_for_restored(self) -> bool:
        """Whether the warm store can take one more unit, once idle blocks have given way."""
        return self._keeper is not None and self._keeper.make_unit_room()

    def _keep_restored(self, block: int, slots: Integers, plan: RestorePass, hot: Listing[tuple[int, int, int]]) -> int:
        """Of one block: whole cold units go to the warm store, else the pages `hot` get slots. Returns how many became exact."""
        tables, kept = self.tables, 0
        for window in range(plan.first // tables.window_layers, -(-plan.stop // tables.window_layers)):
            begin, end = window * tables.window_layers, self.trigger.window_end(window * tables.window_layers)
            if plan.stop < end or tables.warm_slot[block, window] >= 0:
                continue
            if not self.costs.reading_pays:
                continue  # it is cheaper to recompute it again than to read it
            sources = self.pool.slot_addresses(slots[begin - plan.first : end - plan.first])
            if self.make_room_for_restored() and tables.save_unit(block, window, sources):
                kept += sources.size
        for _, layer, head in hot:
            if self.pool.page_table[block, layer, head] == NO_PAGE and self._has_room({Role.PAGE: 1}, 0):
                kept += tables.adopt_page(block, layer, head, int(slots[layer - plan.first, head]))
        return kept

    def _allowed_warm_bytes(self) -> int:
        if not self.adaptive or self.config.warm_store == "none":
            return 0
        if self.config.warm_bytes is not None:
            return self.config.warm_bytes
        limit = _WARM_CEILINGS * self.pool.capacity_bytes
        if self.config.warm_store == "ram":
            limit = min(limit, max(0, int(_RAM_SHARE * available_bytes()) - self.pool.capacity_bytes))
        return limit

    def _exact_blocks_alone(self) -> int:
        staging = len(self.tables.staging)
        return (self.pool.frames.num_frames - -(-staging // self.pool.frame_pages)) * self.pool.frame_blocks

    def _check_shape(self) -> None:
        if not self.adaptive:
            return
        if self.shape.head_dim % 16:
            raise ConfigError(
                f"cache mode 'adaptive' needs a head size that is a multiple of 16, and this model's is {self.shape.head_dim}; "
                "serve it with mode 'native'"
            )
        if len(self.shape.windowed_layers) == self.shape.layers:
            raise ConfigError(
                "cache mode 'adaptive' has nothing to tier in this model: every layer has a sliding window; serve it with mode "
                "'native'"
            )

    def _salt_of(self, identity: str) -> bytes:
        parts = (_LAYOUT_VERSION, identity, self.config.page_dtype, str(self.config.page_size))
        return hashlib.sha256("\0".join(parts).encode()).digest()


def _warm_dir(config: CacheConfig) -> Path:
    return Path(config.warm_dir) if config.warm_dir is not None else Path(tempfile.gettempdir())


def _check_fidelity(fidelity: str) -> None:
    if fidelity not in FIDELITIES:
        raise ConfigError(f"fidelity={fidelity!r} is not one of {', '.join(FIDELITIES)}")
