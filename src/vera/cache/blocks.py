"""Who owns which block: integers only.

A block is `page_size` consecutive tokens of one sequence. It is in exactly one of three states:

    free    holds nothing
    owned   `owners[block] >= 1` sequences read it; only its first owner ever wrote it
    idle    no owner, but it is sealed and in the prefix index: found again by hash, until it is evicted

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


class Blocks:
    """Ownership of `num_blocks` blocks and the prefix index over them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners = np.zeros(num_blocks, dtype=np.int32)
        # A stack: the block freed last is handed out first, so memory that was never needed is never touched.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> list[int]:
        """The idle blocks, the least recently used one first."""
        return list(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """`count` free blocks, with one owner each. None: there are not so many, nothing changed."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self.owners[blocks] = 1
        return blocks

    def evict(self) -> int | None:
        """Frees the least recently used idle block and returns it (its content is void). None: no block is idle."""
        if not self._idle:
            return None
        block, _ = self._idle.popitem(last=False)
        del self._index[self._hash_of.pop(block)]
        self._free.append(block)
        return block

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
            self.owners[block] += 1
            self._idle.pop(block, None)

    def seal(self, block: int, digest: bytes) -> None:
        """Makes an owned, full and written block findable. If another block has this content already, that one stays."""
        assert self.owners[block] >= 1 and block not in self._hash_of
        if digest not in self._index:
            self._index[digest] = block
            self._hash_of[block] = digest

    def supersede(self, block: int, digest: bytes) -> int | None:
        """Makes `block` the one found for `digest`, in place of another. Returns that one if it was idle: it is free now."""
        assert self.owners[block] >= 1 and block not in self._hash_of
        before = self._index.pop(digest)
        del self._hash_of[before]
        self._index[digest] = block
        self._hash_of[block] = digest
        if before not in self._idle:
            return None
        del self._idle[before]
        self._free.append(before)
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

    def release(self, blocks: Sequence[int]) -> list[int]:
        """One owner less for each; `blocks` in sequence order. Returns those that became free (their content is void)."""
        freed = []
        # From the end: the tail of a sequence becomes older than its beginning, which more sequences share.
        for block in reversed(blocks):
            assert self.owners[block] >= 1
            self.owners[block] -= 1
            if self.owners[block] == 0:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)
                    freed.append(block)
        return freed

    def forget(self) -> list[int]:
        """Empties the prefix index. Owned blocks stay with their owners; idle ones become free and are returned."""
        freed = list(self._idle)
        self._free.extend(freed)
        self._idle.clear()
        self._index.clear()
        self._hash_of.clear()
        return freed

    def check_invariants(self) -> None:
        """Raises AssertionError if any block is lost, owned twice over, or findable under a wrong hash."""
        free, idle = set(self._free), set(self._idle)
        owned = set(np.flatnonzero(self.owners).tolist())
        assert (self.owners >= 0).all(), "a block has fewer than no owners"
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & idle or free & owned or idle & owned), "a block is in two states"
        assert len(free) + len(idle) + len(owned) == self.num_blocks, "a block is lost"
        assert idle <= set(self._hash_of), "an idle block is not in the index"
        assert not free & set(self._hash_of), "a free block is in the index"
        assert {block: digest for digest, block in self._index.items()} == self._hash_of, "index and hashes disagree"
