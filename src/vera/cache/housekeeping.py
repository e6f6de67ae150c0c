"""What happens to pages after a step: hit pages become hot, sealed blocks are demoted, heat is read, cold units are released.

Decisions are `features`' and `placement`'s, bytes are moved by `tiers`; here is when, and within which limits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from vera.attention.protocol import TierReport
from vera.cache.blocks import Blocks
from vera.cache.features import Heat, HeatSummary, summarise
from vera.cache.placement import RecomputeController, coldest_units, due, promotions_and_demotions, unit_scores, weakest
from vera.cache.sequence import Sequence, Span
from vera.cache.tiers import TierTables
from vera.config import CacheConfig

RECENT_BLOCKS = 1
"""Sealed blocks at a sequence's end that stay exact, besides the open one."""
HYSTERESIS = 0.04
"""A hot page stays until its score is this much below the threshold."""
FREQUENCY_WEIGHT = 0.7
"""Share of the access frequency in the heat score. What a page costs when it is not hot is hits, and hits foretell hits."""
HALF_LIFE_TOKENS = 256
ENOUGH_NEED = 2
"""A page that was needed this often since heat was last read is worth a slot; the first time it is served from where it is."""
PROMOTIONS_A_STEP = 8
"""Pages of one sequence that become hot in one step because they were hit, where others give way to them."""
FILLS_A_STEP = 32
"""The same, where there is room for them."""
RANKINGS_A_STEP = 4
"""Sequences whose hot pages one step ranks."""
RECALIBRATIONS_A_STEP = 2
MOVES_A_RECALIBRATION = 256
"""Pages of a decoding sequence that become hot when heat is read; hits see to the rest."""
RESERVED_BLOCKS = 8
"""Of each tiered sequence: blocks whose disk space and fresh memory are taken while prompts are read, when steps are long."""
_SHED_SHARE = 0.1
_RANKED_PARTS = 8

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TierRates:
    """Ratios of the counters of `TierStats`: the one definition of each. None: what they are taken of did not happen."""

    exact_read_share: float | None
    """pages_exact / (pages_exact + pages_sketched)"""
    values_skipped_share: float | None
    """values_skipped / (pages_exact + pages_sketched)"""
    hits_per_step: float | None
    """hits / decode_steps"""
    recompute_share: float | None
    """recompute_steps / decode_steps"""
    uncovered_per_step: float | None
    """uncovered_hits / decode_steps"""


@dataclass(slots=True)
class TierStats:
    """What happened to pages. Counters only grow."""

    promoted_pages: int = 0
    hit_promotions: int = 0
    cooled_pages: int = 0
    demoted_blocks: int = 0
    parked_pages: int = 0
    """Exact pages of idle blocks that left fast memory for the warm store."""
    fetched_pages: int = 0
    """Pages of parked blocks that came back exact."""
    released_units: int = 0
    recalibrations: int = 0
    broken_pages: int = 0
    """Pages that could not be sketched because they hold a value that is not finite; their blocks stay exact."""
    pages_exact: int = 0
    """Pages read exactly by bounded decode steps, their own hits among them."""
    pages_sketched: int = 0
    """Pages read by their sketch in those steps."""
    values_skipped: int = 0
    """Pages of those steps whose values were left out."""
    hits: int = 0
    """Pages that error control asked for, cold ones among them."""
    cold_hits: int = 0
    uncovered_hits: int = 0
    """Cold blocks that a layer hit and that were left to their sketch, once for each layer."""
    decode_steps: int = 0
    """Steps times bounded sequences."""
    recompute_steps: int = 0
    """Those of them in which a cold page was restored."""
    restored_blocks: int = 0
    restored_pages: int = 0
    """Cold pages that are exact since."""
    restore_seconds: float = 0.0
    heat: deque[HeatSummary] = field(default_factory=lambda: deque(maxlen=64))
    """The latest heat distributions, one a recalibration."""

    def snapshot(self) -> TierStats:
        """A copy that the steps to come leave as it is."""
        return replace(self, heat=self.heat.copy())

    def since(self, earlier: TierStats) -> TierStats:
        """What was counted after `earlier`, a snapshot of the same statistics. The heat distributions are simply the latest."""
        counters = [counter.name for counter in fields(self) if counter.name != "heat"]
        return TierStats(heat=self.heat.copy(), **{name: getattr(self, name) - getattr(earlier, name) for name in counters})

    @property
    def rates(self) -> TierRates:
        """Of all that was counted; of a part of it with `since`."""
        reads, steps = self.pages_exact + self.pages_sketched, self.decode_steps
        return TierRates(
            exact_read_share=self.pages_exact / reads if reads else None,
            values_skipped_share=self.values_skipped / reads if reads else None,
            hits_per_step=self.hits / steps if steps else None,
            recompute_share=self.recompute_steps / steps if steps else None,
            uncovered_per_step=self.uncovered_hits / steps if steps else None,
        )


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What reading warm pages took."""

    pages: int
    seconds: float


class Housekeeper:
    """Moves pages between tiers on behalf of the cache. Owns heat and statistics; the sequences and blocks are the cache's."""

    def __init__(
        self,
        config: CacheConfig,
        tables: TierTables,
        blocks: Blocks,
        sequences: Mapping[str, Sequence],
        *,
        max_sequences: int,
        max_blocks: int,
        can_recompute: bool,
    ) -> None:
        """`max_blocks`: of one sequence. `can_recompute`: cold pages can be restored, so units may be released."""
        shape = tables.pool.shape
        self.stats = TierStats()
        self._config = config
        self._tables = tables
        self._blocks = blocks
        self._sequences = sequences
        self._can_recompute = can_recompute
        self.heat = Heat(
            tables.pool.num_blocks,
            shape.layers,
            shape.kv_heads,
            half_life_tokens=HALF_LIFE_TOKENS,
            frequency_weight=FREQUENCY_WEIGHT,
        )
        statistics = (max_sequences, shape.layers, shape.kv_heads, max_blocks)
        self.masses, self.frequencies = torch.zeros(statistics), torch.zeros(statistics)
        self._rows = list(range(max_sequences - 1, -1, -1))
        unlimited = tables.warm is None
        self.controller = RecomputeController(
            config.recompute_target, max_cold_share=1.0 if unlimited else 0.5, cold_drop_step=config.cold_drop_step
        )
        if unlimited:
            self.controller.cold_limit = 1.0
        self._steps_at_last_scan = 0
        self._unsketchable: set[int] = set()

    def change_settings(self, config: CacheConfig) -> None:
        """Takes other settings for what concerns all sequences together."""
        self._config = config
        self.controller.retarget(config.recompute_target, cold_drop_step=config.cold_drop_step)

    # -- sequences come and go -----------------------------------------------------------------------------------------

    def begin(self, state: Sequence) -> None:
        """Keeps statistics for a sequence that may be tiered, if a row is left."""
        if state.row is None and self._rows:
            state.row = self._rows.pop()
            self.masses[state.row].zero_()
            self.frequencies[state.row].zero_()
        self._warm_up(state)

    def _warm_up(self, state: Sequence) -> None:
        """The pages of a sequence's first block are hot, also where it waited warm while nobody read it."""
        if state.blocks and self._tables.sketch_unit[state.blocks[0]] >= 0:
            shape = self._tables.pool.shape
            layers, heads = np.divmod(np.arange(shape.layers * shape.kv_heads, dtype=np.int64), shape.kv_heads)
            self._tables.promote(np.full_like(layers, state.blocks[0]), layers, heads)

    def end(self, state: Sequence) -> None:
        if state.row is not None:
            self.heat.leave(state.block_ids, state.number)
            self._rows.append(state.row)
            state.row = None

    def inherit(self, source: Sequence, copy: Sequence) -> None:
        """The copy's pages are as hot as those of the sequence that it was made from."""
        self.heat.copy(source.block_ids, copy.block_ids, reader=copy.number)
        if source.row is not None and copy.row is not None:
            self.masses[copy.row] = self.masses[source.row]
            self.frequencies[copy.row] = self.frequencies[source.row]
            copy.rows_seen, copy.watched = source.rows_seen, source.watched
        self._reserve(RESERVED_BLOCKS * len(self._sequences))  # the next copy may take what waits
        places = dict(zip(source.blocks, copy.blocks, strict=True))
        kept = source.weakest[[int(block) in places for block in source.weakest[:, 0]]]
        copy.weakest = np.column_stack([[places[int(block)] for block in kept[:, 0]], kept[:, 1:]]).astype(np.int64)

    def recycle(self, blocks: Listing[int]) -> None:
        """These block ids hold something new."""
        self.heat.reset(np.asarray(blocks, dtype=np.int64))
        self._unsketchable.difference_update(blocks)

    # -- after a step --------------------------------------------------------------------------------------------------

    def observe(self, spans: Listing[Span], report: TierReport, block_tables: NDArray[np.int32]) -> ReadCost:
        """Takes in what a step has shown, before its results are final: pages that are hit again and again become hot.

        `block_tables` are those of the step's batch. Returns what making them hot took.
        """
        self._count(spans, report)
        return self._promote_hits(spans, report, block_tables)

    def settle(self, spans: Listing[Span]) -> None:
        """Everything that is due after a step, within the limits of one step."""
        states = [self._sequences[span.sequence] for span in spans if span.sequence in self._sequences]
        decoding = [state for state in states if state.tiered and state.prompt_done]
        for state in states:
            if state.tiered and not state.prompt_done and (demoted := self._demote_due(state, limit=None)):
                self._reserve(demoted + 1)
        if not self._recalibrate_due(spans, decoding) or self._num_due(decoding) > len(decoding):
            self._demote_decoding(decoding)
        self._scan_if_due()

    def _count(self, spans: Listing[Span], report: TierReport) -> None:
        exact, sketched, skipped, cold = report.pages_read.tolist()
        stats = self.stats
        stats.pages_exact += exact
        stats.pages_sketched += sketched
        stats.values_skipped += skipped
        stats.cold_hits += cold
        for span, (error_sum, error_max, error_count) in zip(spans, report.errors.tolist(), strict=True):
            if error_count and (state := self._sequences.get(span.sequence)) is not None:
                use = state.use
                use.decode_steps += 1
                use.error_sum += error_sum
                use.error_max = max(use.error_max, error_max)
                use.error_count += int(error_count)
                state.rows_seen += 1
                stats.decode_steps += 1

    def _promote_hits(self, spans: Listing[Span], report: TierReport, block_tables: NDArray[np.int32]) -> ReadCost:
        """Warm pages become hot if they were needed before, or if there is room; a sequence's weakest ones give way to them.

        Looks at the hits, and of the sequences that have any at 12 bytes a block, whatever the number of their pages.
        """
        if not report.hits:
            return ReadCost(0, 0.0)
        hits = torch.cat(report.hits).numpy()
        self.stats.hits += len(hits)
        states = [self._sequences.get(span.sequence) for span in spans]
        for state, count in zip(states, np.bincount(hits[:, 0], minlength=len(states)).tolist(), strict=True):
            if state is not None:
                state.use.hits += count
        known = np.array([state is not None for state in states])
        hits = hits[(hits[:, 4] == 0) & known[hits[:, 0]]]
        needed = self._times_needed(states, hits)
        order = np.lexsort((-needed, hits[:, 0]))
        hits, needed = hits[order], needed[order]
        place = np.arange(len(hits)) - np.searchsorted(hits[:, 0], hits[:, 0])  # among those of its sequence
        room = self._room_for_hot(states, block_tables, np.flatnonzero(np.bincount(hits[:, 0])))
        chosen = (place < PROMOTIONS_A_STEP) & (needed >= ENOUGH_NEED) | (place < np.minimum(room, FILLS_A_STEP)[hits[:, 0]])
        wanted = np.bincount(hits[chosen, 0], minlength=len(states))
        room += self._make_way(states, wanted - room)
        chosen &= place < room[hits[:, 0]]
        sequences, layers, heads, indices = hits[chosen, :4].T.astype(np.int64)
        start = time.perf_counter()
        promoted = self._tables.promote(*self._tables.distinct(block_tables[sequences, indices].astype(np.int64), layers, heads))
        self.stats.hit_promotions += promoted
        return ReadCost(promoted, time.perf_counter() - start)

    def _times_needed(self, states: Listing[Sequence | None], hits: NDArray[np.int32]) -> NDArray[np.float32]:
        """`[hits]`: how often each was needed since heat was last read, this time included; 0 where no statistics are kept."""
        rows = np.array([-1 if state is None or state.row is None else state.row for state in states])[hits[:, 0]]
        needed = self.frequencies.numpy()[rows, hits[:, 1], hits[:, 2], hits[:, 3]]
        return np.where(rows >= 0, needed, np.float32(0))

    def _room_for_hot(self, states: Listing[Sequence | None], block_tables: NDArray[np.int32], those: Integers) -> Integers:
        """`[sequences]`: how many more pages of each may be hot, below 0 if there are too many; 0 but for `those`."""
        room = np.zeros(len(states), dtype=np.int64)
        if not len(those):
            return room
        asking = [state for state in (states[row] for row in those.tolist()) if state is not None]
        lengths = np.array([len(state.blocks) for state in asking])
        blocks = block_tables[those, : lengths.max()]
        tiered = (self._tables.sketch_unit[blocks] >= 0) & (np.arange(blocks.shape[1]) < lengths[:, None])
        most = [self.max_hot(state, count) for state, count in zip(asking, tiered.sum(axis=1).tolist(), strict=True)]
        room[those] = most - (self._tables.num_hot[blocks] * tiered).sum(axis=1)
        return room

    def _make_way(self, states: Listing[Sequence | None], excess: Integers) -> Integers:
        """Cools the weakest pages of sequences that have this many too many; returns how many of each, `[sequences]`."""
        rankings = RANKINGS_A_STEP
        going: list[Integers] = []
        rows = np.flatnonzero(excess > 0)
        for row in rows.tolist():
            state = states[row]
            assert state is not None
            if len(state.weakest) < excess[row] and rankings > 0:
                rankings -= 1
                self._rank(state, at_least=2 * int(excess[row]))
            taken, state.weakest = state.weakest[: excess[row]], state.weakest[excess[row] :]
            going.append(taken)
        if not going:
            return np.zeros(len(states), dtype=np.int64)
        owners, pages = np.repeat(rows, [len(taken) for taken in going]), np.concatenate(going)
        hot = self._tables.are_hot(pages)  # some may have been cooled since
        self._cool(pages[hot])
        return np.bincount(owners[hot], minlength=len(states))

    def _rank(self, state: Sequence, *, at_least: int = 1) -> None:
        """Lists the hot pages that give way first: those least needed since heat was last read, of equals the coolest.

        Only the weakest part of them, so that the rest is looked at again with what has been seen by then.
        """
        blocks = state.block_ids
        tiered = np.flatnonzero(self._tables.is_tiered(blocks))
        tiered = tiered[tiered > 0]  # the first block does not give way
        indices, layers, heads = np.nonzero(self._tables.hot_pages(blocks[tiered]) & self._tables.tierable)
        indices = tiered[indices]
        pages = np.column_stack([blocks[indices], layers, heads])
        if state.row is None or not len(pages):
            return
        needed = self.frequencies[state.row].numpy()[layers, heads, indices]
        standing = needed + self.heat.page_scores(pages[:, 0], layers, heads)
        state.weakest = pages[weakest(standing, max(at_least, -(-len(pages) // _RANKED_PARTS)))]

    def max_hot(self, state: Sequence, tiered_blocks: int) -> int:
        """Pages of a sequence's tiered blocks that may be hot; those of its first block do not count."""
        pages = self._tables.tierable_pages
        pinned = pages if self._tables.sketch_unit[state.blocks[0]] >= 0 else 0
        return int(state.settings.hot_max_share * tiered_blocks * pages) + pinned

    def _cool(self, pages: Integers) -> int:
        """Pages whose slot is their only exact copy stay hot while somebody reads them exactly."""
        only_copy = self._tables.warm_slot[pages[:, 0], pages[:, 1] // self._tables.window_layers] < 0
        if only_copy.any():
            needed = self._needed_exact()
            pages = pages[~(only_copy & np.array([int(block) in needed for block in pages[:, 0]]))]
        cooled = self._tables.cool(pages[:, 0], pages[:, 1], pages[:, 2])
        self.stats.cooled_pages += cooled
        return cooled

    # -- demotion ------------------------------------------------------------------------------------------------------

    def _demote_decoding(self, states: Listing[Sequence]) -> None:
        """Demotes as many blocks as keep up with what is sealed: sequences that grow in step seal theirs at the same time."""
        left = 1 + len(states) // self._config.page_size
        for state in states:
            if left <= 0:
                return
            left -= self._demote_due(state, limit=left)

    @staticmethod
    def _num_due(states: Listing[Sequence]) -> int:
        """Blocks that are old enough to be demoted."""
        return sum(max(0, state.sealed - RECENT_BLOCKS - state.demoted) for state in states)

    def demote_all_due(self) -> bool:
        """Demotes whatever may be, because room is needed now. False: nothing could be."""
        tiered = [state for state in self._sequences.values() if state.tiered]
        for state in tiered:
            state.demoted = 1  # what was passed over for a reader that has gone since
        return sum(self._demote_due(state, limit=None) for state in tiered) > 0

    def _demote_due(self, state: Sequence, *, limit: int | None) -> int:
        """Demotes the sequence's blocks that are old enough, oldest first; returns how many."""
        done = 0
        stop = state.sealed - RECENT_BLOCKS
        while state.demoted < stop and (limit is None or done < limit):
            block = state.blocks[state.demoted]
            if self._tables.exact_unit[block] >= 0 and self._may_demote(block):
                if not self._demote(state, state.demoted):
                    break
                done += 1
            state.demoted += 1
        return done

    def _may_demote(self, block: int) -> bool:
        """No sequence that reads this block wants it exact in fast memory, or needs it so."""
        if block in self._unsketchable:
            return False
        if self._blocks.owners[block] <= 1:
            return True
        return all(state.tiered for state in self._sequences.values() if block in state.blocks)

    def _readers(self, block: int, state: Sequence) -> list[Sequence]:
        """The sequences that read a block of `state`, itself among them."""
        if self._blocks.owners[block] <= 1:
            return [state]
        return [other for other in self._sequences.values() if block in other.blocks]

    @staticmethod
    def _reads_exactly(state: Sequence) -> bool:
        return not state.bounded or not state.prompt_done

    def _demote(self, state: Sequence, index: int) -> bool:
        """False: it cannot be now, because the pool or the warm store has no room."""
        block = state.blocks[index]
        exact_needed = any(self._reads_exactly(reader) for reader in self._readers(block, state))
        if not self.make_warm_room() and (exact_needed or not self._may_be_cold()):
            return False
        must_save = exact_needed or not self._may_be_cold()
        return self._demote_block(block, self._hot_at_demotion(state, index), must_save=must_save)

    def _demote_block(self, block: int, hot: NDArray[np.bool_], *, must_save: bool) -> bool:
        """Demotes a block, or remembers that it cannot be sketched. False: the pool or the warm store has no room."""
        broken = self._tables.demote(block, hot, must_save=must_save)
        if broken is None:
            return False
        if broken:
            self.stats.broken_pages += broken
            self._unsketchable.add(block)
        else:
            self.stats.demoted_blocks += 1
        return True

    def _hot_at_demotion(self, state: Sequence, index: int) -> NDArray[np.bool_]:
        """`[layers, kv_heads]`: the pages of a block that stay hot, by what was seen of them since the statistics were read."""
        shape = self._tables.pool.shape
        if state.row is None or not state.prompt_done or state.rows_seen == 0:
            return np.zeros((shape.layers, shape.kv_heads), dtype=bool)
        masses = self.masses.numpy()[state.row, :, :, index]
        contribution = masses * np.float32(len(state.blocks) / state.rows_seen)
        hot: NDArray[np.bool_] = contribution / (1 + contribution) >= state.settings.hot_score_threshold
        return hot

    def demote_idle(self, block: int) -> bool:
        """Takes the exact bytes of an idle block as far as they are not needed to bring it back: it waits warm.

        False: nothing was gained.
        """
        tables = self._tables
        if tables.exact_unit[block] >= 0:
            if block in self._unsketchable or not self.make_warm_room():
                return False
            shape = tables.pool.shape
            nothing_hot = np.zeros((shape.layers, shape.kv_heads), dtype=bool)
            return self._demote_block(block, nothing_hot, must_save=True) and bool(tables.is_tiered([block])[0])
        hot = np.argwhere(tables.hot_pages([block])[0])
        warm = tables.warm_slot[block, hot[:, 0] // tables.window_layers] >= 0
        return self._cool(np.column_stack([np.full(int(warm.sum()), block), hot[warm]])) > 0

    def park(self, block: int) -> bool:
        """Leaves an idle block to the warm store alone, where those parked longest give way. False: it cannot be."""
        if block in self._unsketchable:
            return False
        tables = self._tables
        exact, hot = tables.exact_unit[block] >= 0, tables.count_hot(np.array([block]))
        if exact:
            self._evict_parked(tables.num_windows)
        if not tables.park(block):
            return False
        self.stats.parked_pages += self._block_pages if exact else hot
        self._blocks.park(block)
        return True

    def fetch(self, block: int, *, exact: bool) -> bool:
        """Brings a parked block back for its owner, exact or tiered. False: the pool has no room, or it must be exact."""
        broken = self._tables.fetch(block, exact=exact)
        if broken:
            self.stats.broken_pages += broken
            self._unsketchable.add(block)
        if broken != 0:
            return False
        self.stats.fetched_pages += self._block_pages if exact else 0
        self._blocks.fetch(block)
        return True

    # -- warm and cold -------------------------------------------------------------------------------------------------

    @property
    def _block_pages(self) -> int:
        return self._tables.pool.shape.layers * self._tables.pool.shape.kv_heads

    def make_warm_room(self) -> bool:
        """A block's units can all be saved; releases colder ones to make it so, if they may be."""
        warm, windows = self._tables.warm, self._tables.num_windows
        if warm is None:
            return False
        self._evict_parked(windows)
        if warm.num_slots - warm.num_used < windows:
            self._release_coldest(windows)
        return warm.num_slots - warm.num_used >= windows

    def make_unit_room(self) -> bool:
        """The warm store can take one more unit; parked blocks give way to it."""
        self._evict_parked(1)
        return self._tables.has_warm_room

    def _evict_parked(self, count: int) -> None:
        """Evicts parked blocks, those parked longest first, until the warm store has room for `count` units or none is left."""
        warm = self._tables.warm
        while warm is not None and warm.num_slots - warm.num_used < count:
            block = self._blocks.evict(parked=True)
            if block is None:
                return
            self._tables.free([block])

    def _may_be_cold(self) -> bool:
        tiered, cold = self._unit_counts()
        windows = self._tables.num_windows
        allowed = int(self.controller.cold_limit * (tiered + windows))
        return self._can_recompute and cold + windows <= allowed

    def _unit_counts(self) -> tuple[int, int]:
        """Units of tiered blocks, and those of them that are cold."""
        tiered = self._tables.sketch_unit >= 0
        return int(tiered.sum()) * self._tables.num_windows, int((self._tables.warm_slot[tiered] < 0).sum())

    def _scan_if_due(self) -> None:
        """Releases cold units ahead of need, so that what the running sequences seal until the next scan finds room."""
        steps = self.stats.decode_steps
        if steps - self._steps_at_last_scan < self._config.cold_drop_step:
            return
        self._steps_at_last_scan = steps
        warm = self._tables.warm
        if warm is None or not self._can_recompute:
            return
        growth = self._config.cold_drop_step // self._config.page_size + len(self._sequences)
        self._evict_parked(growth * self._tables.num_windows)
        missing = growth * self._tables.num_windows - (warm.num_slots - warm.num_used)
        num_units, num_cold = self._unit_counts()
        self.controller.observe(
            steps,
            self.stats.recompute_steps + self.stats.uncovered_hits,  # what should have been restored counts as well
            num_units=num_units,
            num_cold=num_cold,
            short=missing > 0 or num_cold > 0,
        )
        if missing > 0:
            self._release_coldest(missing)

    def _release_coldest(self, count: int) -> None:
        """Releases the coldest units that may be, at most `count`."""
        if not self._can_recompute:
            return
        num_units, num_cold = self._unit_counts()
        count = min(count, self.controller.num_releasable(num_units, num_cold, short=True))
        if count <= 0:
            return
        tiered = np.flatnonzero(self._tables.sketch_unit >= 0)
        candidates = self._tables.warm_slot[tiered] >= 0
        keep = self._needed_exact()
        candidates[[int(block) in keep for block in tiered]] = False
        scores = unit_scores(self.heat.scores(tiered), self._tables.window_layers)
        for row, window in coldest_units(scores, candidates, count):
            self._tables.release_unit(int(tiered[row]), window)
            self.stats.released_units += 1

    def _needed_exact(self) -> Collection[int]:
        """Blocks that a running sequence reads exactly."""
        return {block for state in self._sequences.values() if self._reads_exactly(state) for block in state.blocks}

    def _reserve(self, blocks: int) -> None:
        """Makes room for a few blocks to come easy to have: at most `RESERVED_BLOCKS` for each tiered sequence wait so."""
        tiered = sum(state.tiered for state in self._sequences.values())
        self._tables.reserve(blocks, limit=RESERVED_BLOCKS * tiered)

    # -- heat ----------------------------------------------------------------------------------------------------------

    def _recalibrate_due(self, spans: Listing[Span], decoding: Listing[Sequence]) -> int:
        """How many decoding sequences were."""
        left = RECALIBRATIONS_A_STEP
        just_done = {span.sequence for span in spans if span.stop - span.start > 1}
        for name in just_done:
            state = self._sequences.get(name)
            if state is not None and state.tiered and state.prompt_done:
                self._demote_due(state, limit=None)
                self.recalibrate(state)
        for state in decoding:
            generated = state.num_computed - state.prompt_tokens
            if left > 0 and state.rows_seen and due(generated, state.settings.recalibrate_every, state.number):
                self.recalibrate(state, max_moves=MOVES_A_RECALIBRATION)
                left -= 1
        return RECALIBRATIONS_A_STEP - left

    def recalibrate(self, state: Sequence, *, max_moves: int | None = None) -> None:
        """Reads a sequence's statistics into heat and places its pages by score; at most `max_moves` become hot."""
        if state.row is None:
            return
        blocks = state.block_ids
        masses, frequencies = (array[state.row, :, :, : len(blocks)] for array in (self.masses, self.frequencies))
        self.heat.absorb(
            blocks,
            masses.numpy(),
            frequencies.numpy(),
            rows=state.rows_seen,
            reader=state.number,
            watched=np.isin(np.arange(len(blocks)), state.watched),
        )
        masses.zero_()
        frequencies.zero_()
        state.rows_seen = 0
        self.stats.recalibrations += 1
        state.watched = np.flatnonzero(self._tables.is_tiered(blocks))
        tiered = blocks[state.watched]
        if len(tiered):
            self._place(state, tiered, max_moves)

    def _place(self, state: Sequence, tiered: Integers, max_moves: int | None) -> None:
        scores, hot = self.heat.scores(tiered), self._tables.hot_pages(tiered)
        pinned = np.where(tiered == state.blocks[0], np.inf, 0.0).astype(np.float32)[:, None, None]
        moves = promotions_and_demotions(
            scores + pinned,
            hot,
            threshold=state.settings.hot_score_threshold,
            max_hot=self.max_hot(state, len(tiered)),
            hysteresis=HYSTERESIS,
        )
        demote, promote = moves.demote, moves.promote[:max_moves]
        self._cool(np.column_stack([tiered[demote[:, 0]], demote[:, 1:]]))
        self.stats.promoted_pages += self._tables.promote(tiered[promote[:, 0]], promote[:, 1], promote[:, 2])
        hot = self._tables.hot_pages(tiered)
        released = np.repeat(self._tables.cold_units(tiered), self._tables.window_layers, axis=1)[:, : hot.shape[1], None]
        self.stats.heat.append(summarise(scores, hot, released))
        self._rank(state)

    def shed(self) -> bool:
        """Cools a share of all hot pages, the weakest ones; those without a warm copy only if no others are left. False: none."""
        tables = self._tables
        tiered = np.flatnonzero(tables.sketch_unit >= 0)
        warm = np.repeat(tables.warm_slot[tiered] >= 0, tables.window_layers, axis=1)[:, : tables.pool.shape.layers, None]
        candidates = tables.hot_pages(tiered) & tables.tierable
        hot = candidates & warm
        if not hot.any() and self._can_recompute:
            hot = candidates
        pages = np.argwhere(hot)
        if not len(pages):
            return False
        order = weakest(self.heat.scores(tiered)[hot], max(1, int(_SHED_SHARE * len(pages))))
        chosen = pages[order]
        return self._cool(np.column_stack([tiered[chosen[:, 0]], chosen[:, 1:]])) > 0
