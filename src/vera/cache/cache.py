"""The KV cache: the only door to blocks and pages.

A sequence is known by its id. Its life here: `admit` (prefix look-up, room for its tokens), then for each step `reserve`
and, once the model has run, `commit`; at the end `release`. Nothing but this module writes block tables.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vera.attention.protocol import PagedBatch
from vera.cache.blocks import Blocks, extend_hashes
from vera.cache.pool import CacheShape, PagePool
from vera.config import CacheConfig

_LAYOUT_VERSION = "vera-pages-1"


@dataclass(slots=True)
class _Sequence:
    """The blocks of one sequence, in order; the first `sealed` of them are full and will not change."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
    hashes: list[bytes] = field(default_factory=list)
    sealed: int = 0
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence in a step: positions `start` to `stop`."""

    sequence: str
    start: int
    stop: int


class PagedCache:
    """Exact pages in one pool, shared between sequences by prefix."""

    def __init__(self, shape: CacheShape, config: CacheConfig, *, identity: str) -> None:
        """`identity` is what makes keys and values differ besides tokens and page format: weights and rope settings."""
        self.config = config
        self.shape = shape
        self.pool = PagePool(shape, config)
        self.blocks = Blocks(self.pool.num_blocks)
        self._sequences: dict[str, _Sequence] = {}
        self._salt = self._salt_of(identity)

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Tokens of all sequences together that fit, if none were shared."""
        return self.blocks.num_blocks * self.config.page_size

    @property
    def capacity_bytes(self) -> int:
        return self.pool.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that running sequences own."""
        return (self.blocks.num_blocks - self.blocks.num_available) * self.pool.block_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of blocks that are kept for reuse and can be evicted at any time."""
        return self.blocks.num_idle * self.pool.block_bytes

    def num_tokens_reusable(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens a new sequence would find in the cache now."""
        return len(self._find(token_ids)) * self.config.page_size

    # -- the life of a sequence ----------------------------------------------------------------------------------------

    def admit(self, sequence: str, token_ids: Sequence[int], *, headroom: int = 0, reuse: bool = True) -> int | None:
        """Takes in a sequence and finds room for all of `token_ids`; returns how many of them are in the cache already.

        Always leaves at least one token to compute, because logits come from computing. `headroom` blocks must stay
        available beyond the need. With `reuse` off nothing is looked up (prompt log-probabilities need every position).
        None: no room, nothing changed.
        """
        assert sequence not in self._sequences
        state = _Sequence(reuse=reuse and self.config.prefix_reuse)
        found: list[int] = []
        if state.reuse:
            extend_hashes(state.hashes, self._salt, token_ids, self.config.page_size)
            found = self.blocks.find(self._reusable(state.hashes, len(token_ids)))
        self.blocks.share(found)  # pinned before anything is evicted to make room
        needed = self._blocks_for(len(token_ids)) - len(found)
        fresh = self._allocate(needed) if needed + headroom <= self.blocks.num_available else None
        if fresh is None:
            self.blocks.release(found)
            return None
        state.blocks.extend(found)
        state.blocks.extend(fresh)
        state.sealed = len(found)
        self._sequences[sequence] = state
        return len(found) * self.config.page_size

    def would_fit(self, token_ids: Sequence[int], *, without: Sequence[str], headroom: int = 0, reuse: bool = True) -> bool:
        """Whether `admit` would succeed if the sequences `without` were released. Changes nothing."""
        shares = np.zeros_like(self.blocks.owners)
        for sequence in without:
            np.add.at(shares, np.asarray(self._sequences[sequence].blocks, dtype=np.int64), 1)
        unowned = self.blocks.owners == shares  # what `allocate` could then hand out
        found = self._find(token_ids) if reuse and self.config.prefix_reuse else []
        unowned[found] = False  # these would be shared, not handed out
        return self._blocks_for(len(token_ids)) - len(found) + headroom <= int(unowned.sum())

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
        return True

    def commit(self, sequence: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Seals the blocks that are full now that the first `num_computed` of `token_ids` are in the cache."""
        state = self._sequences[sequence]
        full = num_computed // self.config.page_size
        if full > state.sealed and state.reuse:
            extend_hashes(state.hashes, self._salt, token_ids[: full * self.config.page_size], self.config.page_size)
            for i in range(state.sealed, full):
                self.blocks.seal(state.blocks[i], state.hashes[i])
        state.sealed = max(state.sealed, full)

    def release(self, sequence: str, *, discard: bool = False) -> None:
        """Ends a sequence. Its sealed blocks stay findable until their memory is needed, unless they are to be discarded."""
        state = self._sequences.pop(sequence)
        if discard:
            self.blocks.unseal(state.blocks)
        self._void(self.blocks.release(state.blocks))

    def duplicate(self, sequence: str, copy: str) -> bool:
        """`copy` becomes a sequence with the same content in blocks of its own. False: no room, nothing changed."""
        source = self._sequences[sequence]
        fresh = self._allocate(len(source.blocks))
        if fresh is None:
            return False
        self.pool.copy(source.blocks, fresh)
        self._sequences[copy] = _Sequence(array("i", fresh), [], source.sealed, reuse=False)
        return True

    def forget(self, identity: str) -> None:
        """Drops everything kept for reuse: the model behind it has changed. No sequence may be running."""
        assert not self._sequences
        self._void(self.blocks.forget())
        self._salt = self._salt_of(identity)

    def batch(self, spans: Sequence[Span]) -> PagedBatch:
        """The block tables of one step, for the attention backend."""
        tables = [self._sequences[span.sequence].blocks for span in spans]
        rows = np.zeros((len(spans), max(map(len, tables))), dtype=np.int32)
        for row, table in zip(rows, tables, strict=True):
            row[: len(table)] = table
        starts = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum([span.stop - span.start for span in spans], out=starts[1:])
        return PagedBatch(
            pages=self.pool.pages,
            page_table=self.pool.page_table,
            block_tables=torch.from_numpy(rows),
            query_starts=torch.from_numpy(starts),
            context_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
            page_size=self.config.page_size,
            head_dim=self.shape.head_dim,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance."""
        self.blocks.check_invariants()
        owners = np.zeros_like(self.blocks.owners)
        for state in self._sequences.values():
            np.add.at(owners, np.asarray(state.blocks, dtype=np.int64), 1)
            assert state.sealed <= len(state.blocks)
            assert len(set(state.blocks)) == len(state.blocks), "a sequence has one block twice"
        assert (owners == self.blocks.owners).all(), "owners and sequences disagree"

    # -- details -------------------------------------------------------------------------------------------------------

    def _find(self, token_ids: Sequence[int]) -> list[int]:
        """The blocks of the longest reusable prefix, as they are now."""
        hashes: list[bytes] = []
        extend_hashes(hashes, self._salt, token_ids, self.config.page_size)
        return self.blocks.find(self._reusable(hashes, len(token_ids)))

    def _reusable(self, hashes: Sequence[bytes], num_tokens: int) -> Sequence[bytes]:
        return hashes[: (num_tokens - 1) // self.config.page_size]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _allocate(self, count: int) -> list[int] | None:
        blocks = self.blocks.allocate(count)
        if blocks is not None:
            self._void(blocks)
        return blocks

    def _void(self, blocks: Sequence[int]) -> None:
        """The content of these blocks must never be read again."""
        if self.config.poison and blocks:
            self.pool.poison(blocks)

    def _salt_of(self, identity: str) -> bytes:
        parts = (_LAYOUT_VERSION, identity, self.config.page_dtype, str(self.config.page_size))
        return hashlib.sha256("\0".join(parts).encode()).digest()
