"""Who owns which block, under any order of events."""

import os
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vera.cache.blocks import Blocks, chain_hash, extend_hashes

NUM_BLOCKS = 12


class BlockLife(RuleBasedStateMachine):
    """Sequences come, grow, seal, share a prefix and go; the books must balance after each event."""

    def __init__(self):
        super().__init__()
        self.blocks = Blocks(NUM_BLOCKS)
        self.sequences: list[tuple[list[int], list[bytes], int]] = []  # blocks, hashes of the text it writes, sealed

    @rule(text=st.integers(0, 3), length=st.integers(1, 6))
    def begin(self, text, length):
        hashes = []
        extend_hashes(hashes, bytes([text]), list(range(length)), 1)
        found = self.blocks.find(hashes[:-1])
        self.blocks.share(found)
        while self.blocks.num_free < length - len(found) and self.blocks.evict() is not None:
            pass
        fresh = self.blocks.allocate(length - len(found))
        if fresh is None:
            self.blocks.release(found)
        else:
            self.sequences.append((found + fresh, hashes, len(found)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def seal(self, data):
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        blocks, hashes, sealed = self.sequences[index]
        if sealed < len(blocks):
            self.blocks.seal(blocks[sealed], hashes[sealed])
            self.sequences[index] = blocks, hashes, sealed + 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fail(self, data):
        blocks, _, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.blocks.unseal(blocks)
        self.blocks.release(blocks)
        self.sequences = [(others, hashes, len(others)) for others, hashes, _ in self.sequences]  # sealed for good

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        blocks, _, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.blocks.release(blocks)

    @rule()
    def forget(self):
        self.blocks.forget()
        self.sequences = [(blocks, hashes, len(blocks)) for blocks, hashes, _ in self.sequences]  # sealed for good

    @invariant()
    def books_balance(self):
        self.blocks.check_invariants()
        owned = {block for blocks, _, _ in self.sequences for block in blocks}
        assert self.blocks.num_free + self.blocks.num_idle == NUM_BLOCKS - len(owned)

    @invariant()
    def found_blocks_hold_what_was_asked_for(self):
        for blocks, hashes, sealed in self.sequences:
            for block, digest in zip(blocks[:sealed], hashes[:sealed], strict=True):
                if (found := self.blocks.find([digest])) and found == [block]:
                    assert self.blocks.is_sealed(block)


TestBlockLife = BlockLife.TestCase
TestBlockLife.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_no_room_changes_nothing():
    blocks = Blocks(4)
    blocks.allocate(3)
    assert blocks.allocate(2) is None
    assert blocks.num_free == 1


def test_recycled_block_is_no_longer_found_under_its_old_hash():
    blocks = Blocks(1)
    [block] = blocks.allocate(1)
    blocks.seal(block, b"old")
    blocks.release([block])
    assert blocks.find([b"old"]) == [block]
    assert blocks.evict() == block
    assert blocks.allocate(1) == [block]
    assert blocks.find([b"old"]) == []


def test_found_blocks_survive_an_eviction_once_shared():
    blocks = Blocks(4)
    held = blocks.allocate(4)
    for block, digest in zip(held, (b"a", b"b", b"c", b"d"), strict=True):
        blocks.seal(block, digest)
    blocks.release(held)
    found = blocks.find([b"a", b"b"])
    blocks.share(found)
    assert {blocks.evict(), blocks.evict()} == set(held) - set(found)
    assert blocks.evict() is None
    assert blocks.find([b"a", b"b"]) == found
    assert blocks.find([b"c"]) == []


def test_the_end_of_a_sequence_is_evicted_before_its_beginning():
    blocks = Blocks(3)
    held = blocks.allocate(3)
    for block, digest in zip(held, (b"a", b"b", b"c"), strict=True):
        blocks.seal(block, digest)
    blocks.release(held)
    blocks.evict()
    assert len(blocks.find([b"a", b"b", b"c"])) == 2


def test_a_block_can_take_the_place_of_another_with_the_same_content():
    blocks = Blocks(3)
    old, new, reader = blocks.allocate(3)
    blocks.seal(old, b"a")
    blocks.release([old])
    assert blocks.supersede(new, b"a") == old  # idle, so it is free now
    assert blocks.find([b"a"]) == [new]
    assert blocks.supersede(reader, b"a") is None  # owned: it stays with its owner
    blocks.check_invariants()


def test_hash_depends_on_everything_before_the_block():
    assert chain_hash(b"salt", [1, 2]) != chain_hash(b"other", [1, 2])
    assert chain_hash(chain_hash(b"salt", [1]), [2]) != chain_hash(chain_hash(b"salt", [3]), [2])


@pytest.mark.parametrize("seeds", [("0", "1"), ("random", "random")])
def test_hashes_are_equal_in_every_process(seeds):
    code = "from vera.cache.blocks import chain_hash; print(chain_hash(b'salt', [1, 2, 70000]).hex())"

    def digest(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout

    assert digest(seeds[0]) == digest(seeds[1])
