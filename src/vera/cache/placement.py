"""Which pages are kept where: the cache scheduler's decisions (缓存调度器).

Pure functions of heat scores: they say what should move and move nothing. Pages are `[blocks, layers, kv_heads]`; the unit that
is released is a block x window of layers, `[blocks, windows]`. A block here is a row of the array handed in, rows being ordered
from old to new. Of equals the one with the lower index, so the older one, gives way; the same input always gives the same moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages that should change tier, each a row (block, layer, KV head); disjoint."""

    promote: Integers
    """`[promotions, 3]`, hottest first: where room runs out on the way, the rest can be left."""
    demote: Integers
    """`[demotions, 3]`, coolest first."""


def promotions_and_demotions(scores: Floats, hot: Flags, *, threshold: float, max_hot: int, hysteresis: float) -> Moves:
    """The moves after which the hot pages are those that score `threshold` or more, at most `max_hot`, the hottest ones.

    Pages that are hot now stand `hysteresis` higher than they score: they leave below `threshold - hysteresis` only, and give
    their place only to a page that scores that much more. A pinned page comes in with the score infinity.
    """
    standing = np.where(hot, scores + hysteresis, scores).ravel()
    will_be_hot = standing >= threshold
    worthy = np.flatnonzero(will_be_hot)
    will_be_hot[worthy[_lowest(standing[worthy], worthy.size - max_hot)]] = False
    is_hot = hot.ravel()
    promote, demote = np.flatnonzero(will_be_hot & ~is_hot), np.flatnonzero(is_hot & ~will_be_hot)
    flat = scores.ravel()
    return Moves(
        promote=_pages(promote[_ascending(flat[promote])[::-1]], scores.shape),
        demote=_pages(demote[_ascending(flat[demote])], scores.shape),
    )


def weakest(scores: Floats, count: int) -> Integers:
    """The indices of the `count` lowest of `scores`, `[pages]`, lowest first; all of them if there are not so many."""
    lowest = _lowest(scores, count)
    return lowest[_ascending(scores[lowest])]


def unit_scores(scores: Floats, window_layers: int) -> Floats:
    """`[blocks, windows]`: the score of the hottest page of each unit. The last window may have fewer layers."""
    starts = np.arange(0, scores.shape[1], window_layers)
    return np.asarray(np.maximum.reduceat(scores.max(axis=2), starts, axis=1))


def coldest_units(unit_scores: Floats, candidates: Flags, count: int) -> list[tuple[int, int]]:
    """At most `count` units to release, (block, window), coldest first; only `candidates`, `[blocks, windows]`.

    Pinned units, and those that are released already, are no candidates.
    """
    eligible = np.flatnonzero(candidates)
    chosen = eligible[weakest(unit_scores.ravel()[eligible], count)]
    blocks, windows = np.unravel_index(chosen, candidates.shape)
    return list(zip(blocks.tolist(), windows.tolist(), strict=True))


def due(num_tokens: int, every: int, stagger: int) -> bool:
    """Whether a sequence that now has `num_tokens` generated tokens is to be recalibrated: at one count of each `every`.

    Which one depends on `stagger`, the sequence's number: sequences that grow in step, one token each, take turns. Golden-ratio
    hashing spreads consecutive numbers most evenly (Knuth, The Art of Computer Programming, volume 3, section 6.4).
    """
    phase = (stagger * 2654435769 % 2**32) * every >> 32
    return num_tokens > 0 and (num_tokens + phase) % every == 0


class RecomputeController:
    """Steers how much may be cold, so that the recompute share stays in a band (召回占比).

    The recompute share is that of a sequence's decode steps in which at least one cold page was restored. Below the band,
    `cold_limit` rises if memory is short; above it, it falls. One move changes it by a factor that cannot carry the share from
    one side of the band to the other, as long as the share grows no faster than the square of what is cold.
    """

    _START = 0.1
    """Measured at 8k tokens: with the coldest 10% released, 4-6% of the steps hit a cold page, less than any useful band."""
    _LEAST = 0.001
    """Below this share the limit is 0: a thousandth of all units is hardly one."""
    _MAX_FACTOR = 1.25

    def __init__(self, target: tuple[float, float], *, max_cold_share: float, cold_drop_step: int) -> None:
        """`target`: the band, two shares. `cold_drop_step`: decode steps, of all sequences together, between two moves."""
        assert 0 <= max_cold_share <= 1
        self.retarget(target, cold_drop_step=cold_drop_step)
        self.cold_limit = min(self._START, max_cold_share)
        """Share of the units that may be cold, from 0 to `max_cold_share`."""
        self._max_cold_share = max_cold_share
        self._decode_steps = 0
        self._recompute_steps = 0

    def retarget(self, target: tuple[float, float], *, cold_drop_step: int) -> None:
        """Takes another band and another distance between moves; the limit stays where it is."""
        assert 0 <= target[0] < target[1] <= 1 and cold_drop_step >= 1
        self._low, self._high = target
        self.factor = min(self._MAX_FACTOR, math.sqrt(self._high / self._low)) if self._low else self._MAX_FACTOR
        self._cold_drop_step = cold_drop_step

    def observe(self, decode_steps: int, recompute_steps: int, *, num_units: int, num_cold: int, short: bool) -> None:
        """Moves the limit if `cold_drop_step` decode steps have passed since it was last looked at.

        `decode_steps` and `recompute_steps` count since the start; a step that served `s` sequences counts `s` times.
        `num_cold` of `num_units` units are cold now; `short`: memory has no room for what should be kept.
        """
        steps = decode_steps - self._decode_steps
        if steps < self._cold_drop_step:
            return
        share = (recompute_steps - self._recompute_steps) / steps
        self._decode_steps, self._recompute_steps = decode_steps, recompute_steps
        allowed = self._allowed(num_units)
        # A move is made only where the last one has taken effect: until then the share says nothing about the limit as it is.
        if share < self._low and short and num_cold * self.factor >= allowed:
            self.cold_limit = min(max(self.cold_limit * self.factor, self._LEAST), self._max_cold_share)
        elif share > self._high and num_cold <= allowed * self.factor:
            lowered = self.cold_limit / self.factor
            self.cold_limit = lowered if lowered >= self._LEAST else 0.0

    def num_releasable(self, num_units: int, num_cold: int, *, short: bool) -> int:
        """How many more units may be released now; none while memory has room."""
        return max(0, self._allowed(num_units) - num_cold) if short else 0

    def _allowed(self, num_units: int) -> int:
        return int(self.cold_limit * num_units)


def _lowest(scores: Floats, count: int) -> Integers:
    """The indices of the `count` lowest, ascending; of equals the first ones. A selection, which costs less than sorting."""
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    if count >= scores.size:
        return np.arange(scores.size)
    limit = np.partition(scores, count - 1)[count - 1]
    taken = scores < limit
    taken[np.flatnonzero(scores == limit)[: count - int(taken.sum())]] = True
    return np.flatnonzero(taken)


def _ascending(scores: Floats) -> Integers:
    """The order of `scores` from low to high, equals by index."""
    return np.argsort(scores, kind="stable")


def _pages(indices: Integers, shape: tuple[int, ...]) -> Integers:
    """`[n, 3]`: the (block, layer, KV head) that flat indices stand for."""
    return np.stack(np.unravel_index(indices, shape), axis=1).astype(np.int64)
