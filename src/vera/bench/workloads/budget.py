"""The memory ceiling that both caches get."""

from __future__ import annotations

import math

from vera.bench.workloads.facts import Facts

_SPARE_SHARE = 0.25
"""Beyond one longest sequence a ceiling has room for this share of it: frames that are not full, and what is read meanwhile."""


def blocks_of(facts: Facts, tokens: int) -> int:
    return -(-tokens // facts.block_tokens)


def useful_tokens(facts: Facts, concurrency: int | None) -> int:
    """Tokens that are of use at the same time: of the longest sequences as many as run together, or all that come back."""
    longest = sorted(facts.sequence_tokens, reverse=True)
    return sum(longest[:concurrency])


def default_ceiling(facts: Facts, *, concurrency: int | None, share: float) -> int:
    """What a native cache needs for `share` of the tokens that are of use at the same time, and at least one sequence's room."""
    blocks = math.ceil(share * blocks_of(facts, useful_tokens(facts, concurrency)))
    return max(blocks, least_blocks(facts)) * facts.block_bytes


def ceiling_for(facts: Facts, sequences: float) -> int:
    """What a native cache needs for so many of the longest sequences, and at least one sequence's room."""
    blocks = math.ceil(sequences * blocks_of(facts, max(facts.sequence_tokens)))
    return max(blocks, least_blocks(facts)) * facts.block_bytes


def least_blocks(facts: Facts) -> int:
    """Below this the longest sequence cannot be served."""
    return math.ceil((1 + _SPARE_SHARE) * blocks_of(facts, max(facts.sequence_tokens))) + 1
