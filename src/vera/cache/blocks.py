"""Who owns which block: integers only.

A block is `page_size` consecutive tokens of one sequence. It is in exactly one of three states:

    free    holds nothing
    owned   `owners[block] >= 1` sequences read it; only its first owner ever wrote it
    idle    no owner, but it is sealed and in the prefix index: found again by hash, until it is evicted

An idle block may be *parked*: it has given its fast memory back. It stays so with its next owner until that one fetches it.

A *sealed* block is full and its keys and values are final; only sealed blocks are in the index and only they are shared.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The identity of a full block: its tokens and, through `parent`, everything before it.

    The first block's parent is the salt. SHA-256 over little-endian 32-bit ids, so equal in every process.
    """
    return hashlib.sha256(parent + np.asarray(token_ids, dtype="<u4").tobytes()).digest()


def extend_hashes(hashes: list[bytes], salt: bytes, token_ids: Sequence[int], page_size: int) -> None:
    """Appends the hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
    for block in range(len(hashes), len(token_ids) // page_size):
        parent = hashes[-1] if hashes else salt
        hashes.append(chain_hash(parent, token_ids[block * page_size : (block + 1) * page_size]))


_KEEPING_PAYS = 0.1
"""Share of idle blocks that must be found again for keeping them to pay. To the warm store and back a block takes a hundredth of
the time that it takes to compute, or a fifth where the store's file has to grow for it; less with larger models."""
_EXPLORED = 16
"""While keeping does not pay, one chain of so many is kept all the same."""


class Reuse:
    """Whether idle blocks that nobody has asked for yet are worth keeping where that costs something.

    A moving average over the blocks that are kept: 1 for each that is found, 0 for each that becomes idle. It starts at 1 and
    falls to `_KEEPING_PAYS` within three windows of blocks that nobody finds; then only some chains are kept, and one of them
    that is found raises it again. A block that was found once is worth keeping whatever the average says.
    """

    def __init__(self, window: int) -> None:
        """`window`: blocks that the average goes back."""
        self.share = 1.0
        self._weight = 1 / max(1, window)
        self._passed_over = 0

    def keeps(self) -> bool:
        """Whether the next chain that becomes idle shall be kept."""
        if self.share >= _KEEPING_PAYS:
            return True
        self._passed_over = (self._passed_over + 1) % _EXPLORED
        return self._passed_over == 0

    def observe(self, *, found: bool) -> None:
        """A kept block became idle, or was found."""
        self.share += self._weight * (found - self.share)


class Blocks:
    """Ownership of `num_blocks` blocks and the prefix index over them."""

    def __init__(self, num_blocks: int, *, reuse_window: int | None = None) -> None:
        """`reuse_window`: blocks from which it is learnt whether idle ones are worth keeping. None: as many as there are."""
        self.num_blocks = num_blocks
        self.reuse = Reuse(num_blocks if reuse_window is None else reuse_window)
        self.owners = np.zeros(num_blocks, dtype=np.int32)
        # A stack: the block freed last is handed out first, so memory that was never needed is never touched.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._parked: OrderedDict[int, None] = OrderedDict()
        """Idle blocks that are parked."""
        self._is_parked = np.zeros(num_blocks, dtype=np.bool_)
        self._was_found = np.zeros(num_blocks, dtype=np.bool_)
        self._is_kept = np.zeros(num_blocks, dtype=np.bool_)
        self._on_trial = np.zeros(num_blocks, dtype=np.bool_)
        """Blocks that `reuse` has seen become idle, and not yet found."""
        self._index: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle) + len(self._parked)

    @property
    def idle(self) -> list[int]:
        """The idle blocks: those that are parked, then the others, each with the least recently used one first."""
        return [*self._parked, *self._idle]

    @property
    def idle_in_place(self) -> list[int]:
        """Those of them that are not parked."""
        return list(self._idle)

    @property
    def next_idle(self) -> int | None:
        """The least recently used idle block that is not parked."""
        return next(iter(self._idle), None)

    def is_parked(self, block: int) -> bool:
        return bool(self._is_parked[block])

    def is_kept(self, block: int) -> bool:
        """An idle block is worth keeping where that costs something."""
        return bool(self._is_kept[block])

    def allocate(self, count: int) -> list[int] | None:
        """`count` free blocks, with one owner each. None: there are not so many, nothing changed."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self.owners[blocks] = 1
        return blocks

    def evict(self, *, parked: bool = False) -> int | None:
        """Frees the least recently used idle block and returns it (its content is void). None: no block is idle.

        Of those that are parked, or of the others.
        """
        idle = self._parked if parked else self._idle
        if not idle:
            return None
        block, _ = idle.popitem(last=False)
        del self._index[self._hash_of.pop(block)]
        self._set_free(block)
        return block

    def park(self, block: int) -> None:
        """An idle block has given its fast memory back."""
        del self._idle[block]
        self._parked[block] = None
        self._is_parked[block] = True

    def fetch(self, block: int) -> None:
        """A parked block that has an owner again is back in fast memory."""
        assert self.owners[block] >= 1 and self._is_parked[block]
        self._is_parked[block] = False

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The sealed blocks of the longest known prefix of `hashes`. Changes nothing and pins nothing: `share` at once."""
        found = []
        for digest in hashes:
            if (block := self._index.get(digest)) is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each of these sealed blocks."""
        for block in blocks:
            if self.owners[block] == 0:
                del self._queue_of(block)[block]
            self.owners[block] += 1

    def note_found(self, blocks: Sequence[int]) -> None:
        """These shared blocks were of use: a sequence begins with them."""
        for block in blocks:
            if self._on_trial[block]:
                self.reuse.observe(found=True)
                self._on_trial[block] = False
            self._was_found[block] = True

    def seal(self, block: int, digest: bytes) -> None:
        """Makes an owned, full and written block findable. If another block has this content already, that one stays."""
        assert self.owners[block] >= 1 and block not in self._hash_of
        if digest not in self._index:
            self._index[digest] = block
            self._hash_of[block] = digest
            self._was_found[block] = False

    def supersede(self, block: int, digest: bytes) -> int | None:
        """Makes `block` the one found for `digest`, in place of another. Returns that one if it was idle: it is free now."""
        assert self.owners[block] >= 1 and block not in self._hash_of
        before = self._index.pop(digest)
        del self._hash_of[before]
        self._index[digest] = block
        self._hash_of[block] = digest
        self._was_found[block] = self._was_found[before]
        if self.owners[before] > 0:
            return None
        del self._queue_of(before)[before]
        self._set_free(before)
        return before

    def find_one(self, digest: bytes) -> int | None:
        """The block that has this content, if there is one."""
        return self._index.get(digest)

    def unseal(self, blocks: Sequence[int]) -> None:
        """Takes owned blocks out of the index, whoever else owns them: what they hold is in doubt."""
        for block in blocks:
            assert self.owners[block] >= 1
            if (digest := self._hash_of.pop(block, None)) is not None:
                del self._index[digest]

    def is_sealed(self, block: int) -> bool:
        return block in self._hash_of

    def release(self, blocks: Sequence[int], *, keep: bool = False) -> list[int]:
        """One owner less for each; `blocks` in sequence order. Returns those that became free (their content is void).

        `keep`: those that become idle are worth keeping; else it is decided by what became of others.
        """
        freed, idle = [], []
        # From the end: the tail of a sequence becomes older than its beginning, which more sequences share.
        for block in reversed(blocks):
            assert self.owners[block] >= 1
            self.owners[block] -= 1
            if self.owners[block] == 0:
                if block in self._hash_of:
                    self._queue_of(block)[block] = None
                    idle.append(block)
                else:
                    self._set_free(block)
                    freed.append(block)
        self._judge(idle, keep=keep)
        return freed

    def _judge(self, idle: Sequence[int], *, keep: bool) -> None:
        """Whether blocks that became idle together are worth keeping."""
        new = [block for block in idle if not self._was_found[block] and not self._on_trial[block]]
        kept = bool(new) and (keep or self.reuse.keeps())
        self._is_kept[idle] = True
        self._is_kept[new] = kept
        if kept and not keep:
            for _ in new:
                self.reuse.observe(found=False)
            self._on_trial[new] = True

    def _queue_of(self, block: int) -> OrderedDict[int, None]:
        """Where a block is while it is idle."""
        return self._parked if self._is_parked[block] else self._idle

    def _set_free(self, block: int) -> None:
        self._is_parked[block] = self._on_trial[block] = False
        self._free.append(block)

    def forget(self) -> list[int]:
        """Empties the prefix index. Owned blocks stay with their owners; idle ones become free and are returned."""
        freed = self.idle
        for block in freed:
            self._set_free(block)
        self._idle.clear()
        self._parked.clear()
        self._index.clear()
        self._hash_of.clear()
        return freed

    def check_invariants(self) -> None:
        """Raises AssertionError if any block is lost, owned twice over, or findable under a wrong hash."""
        free, idle = set(self._free), set(self.idle)
        assert len(idle) == self.num_idle and not self._is_parked[self.idle_in_place].any(), "an idle block is parked and not"
        assert self._is_parked[list(self._parked)].all() and not self._is_parked[self._free].any(), "parked blocks are lost"
        owned = set(np.flatnonzero(self.owners).tolist())
        assert (self.owners >= 0).all(), "a block has fewer than no owners"
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & owned or idle & owned), "a block is in two states"
        assert len(free) + len(idle) + len(owned) == self.num_blocks, "a block is lost"
        assert idle <= set(self._hash_of), "an idle block is not in the index"
        assert not free & set(self._hash_of), "a free block is in the index"
        assert {block: digest for digest, block in self._index.items()} == self._hash_of, "index and hashes disagree"
