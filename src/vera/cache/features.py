"""How much each page matters: heat, from what attending to it has shown (特征统计模块).

Heat (热度) has two dimensions, both 1 for an average page of the sequence:

    contribution   the page's attention mass, a mean over the rows that attended, times the number of blocks
    frequency      how often the page was hit since it was last looked at, relative to the average page of the sequence; from
                   `ENOUGH_HITS` on, more hits say no more

Each is kept as a moving average, and the score in [0, 1] is their weighted mean after `x / (1 + x)`: an average page scores 0.5,
one of 2.3 times the average 0.7. Statistics decide where pages are kept, never whether an answer is right.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

HISTOGRAM_BINS = 20

ENOUGH_HITS = 4.0
"""A page that was hit this often since it was last looked at is as frequent as can be. The sink and its like are hit by every
row and would make everything else look never used: of 64 prompt queries each hits 2-4% of the pages, and together they hit 12%.
Hot by these, pages are hit 6-12 times a step right after the prompt; hot by attention mass alone, 25 times (docs/log.md)."""

_MAX_FREQUENCY = 99.0
"""Where the score no longer tells pages apart (0.99 of 1). Hits can be so rare that one is thousands of times the average;
without a limit such a page would take a dozen half lives to be forgotten."""

_UNSEEN = -2
_NOBODY = -1

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
_Pages = Integers | tuple[Integers, Integers, Integers]


def score(contribution: ArrayLike, frequency: ArrayLike, weight: float) -> Floats:
    """Heat score in [0, 1] of pages; 0.5 is an average page. `weight` in [0, 1] is the share that frequency has in it."""
    r, f = np.asarray(contribution, dtype=np.float32), np.asarray(frequency, dtype=np.float32)
    return np.asarray((1 - weight) * (r / (1 + r)) + weight * (f / (1 + f)), dtype=np.float32)


def histogram(scores: Floats) -> tuple[int, ...]:
    """Pages per `HISTOGRAM_BINS` equal parts of [0, 1]: the heat distribution."""
    counts, _ = np.histogram(scores, bins=HISTOGRAM_BINS, range=(0.0, 1.0))
    return tuple(counts.tolist())


@dataclass(frozen=True, slots=True)
class HeatSummary:
    """The heat distribution of some pages, and how many of them each tier holds. Every page is in exactly one tier."""

    num_hot: int
    num_warm: int
    num_cold: int
    histogram: tuple[int, ...]
    """Pages per score from 0 to 1, in `HISTOGRAM_BINS` equal parts."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def summarise(scores: Floats, hot: Flags, released: Flags) -> HeatSummary:
    """Counts the pages of `scores`, `[blocks, layers, kv_heads]`; the masks are of that shape or broadcast to it.

    A page with an exact copy in fast memory (`hot`) is hot even where its unit is `released`; of the others, those are cold.
    """
    hot, released = np.broadcast_to(hot, scores.shape), np.broadcast_to(released, scores.shape)
    num_hot, num_cold = int(hot.sum()), int((released & ~hot).sum())
    return HeatSummary(num_hot, scores.size - num_hot - num_cold, num_cold, histogram(scores))


class Heat:
    """The heat of every page of the cache, by block id. Written when a sequence's statistics are read, not every step.

    A block that several sequences read is as hot as the reader that sees most of it finds it: each reader may raise a page, and
    only the one that last raised it (its *holder*) may let it sink, until it leaves.
    """

    def __init__(self, num_blocks: int, layers: int, kv_heads: int, *, half_life_tokens: float, frequency_weight: float) -> None:
        """An observation counts half as much once its reader has seen `half_life_tokens` further rows (decoded tokens)."""
        assert half_life_tokens > 0 and 0 <= frequency_weight <= 1
        self.half_life_tokens = half_life_tokens
        self.frequency_weight = frequency_weight
        self._contribution = _MovingAverage((num_blocks, layers, kv_heads))
        self._frequency = _MovingAverage((num_blocks, layers, kv_heads))

    @property
    def num_bytes(self) -> int:
        return self._contribution.num_bytes + self._frequency.num_bytes

    def absorb(
        self,
        blocks: Integers,
        masses: Floats,
        frequencies: Floats,
        *,
        rows: int,
        reader: int,
        watched: Flags | None = None,
    ) -> None:
        """Takes in what one sequence saw of its blocks since it was last asked.

        `blocks` `[n]` are all blocks of the sequence, in order; `masses` and `frequencies`, `[layers, kv_heads, n]`, are sums
        over `rows` decode rows or probes (none: nothing was seen, nothing changes). `reader`, from 0 up, is the sequence's number
        and stays the same until `leave`. The first observation of a block is taken as it is. `watched`, `[n]`, are the blocks
        whose pages could be hit at all (None: all of them); of the others the frequency stays unknown.
        """
        if rows == 0:
            return
        kept = 0.5 ** (rows / self.half_life_tokens)
        self._contribution.absorb(blocks, np.moveaxis(relative_masses(masses, rows), -1, 0), kept, reader)
        could_be_hit = np.ones(len(blocks), dtype=bool) if watched is None else watched
        if could_be_hit.any():
            hits = relative_hits(frequencies[:, :, could_be_hit])
            self._frequency.absorb(blocks[could_be_hit], np.moveaxis(hits, -1, 0), kept, reader)

    def leave(self, blocks: Integers, reader: int) -> None:
        """The sequence reads these blocks no more: what it held up may sink from now on."""
        self._contribution.leave(blocks, reader)
        self._frequency.leave(blocks, reader)

    def reset(self, blocks: Integers) -> None:
        """These block ids hold something new: nothing is known of them."""
        self._contribution.reset(blocks)
        self._frequency.reset(blocks)

    def copy(self, sources: Integers, targets: Integers, *, reader: int) -> None:
        """The blocks at `targets` hold what those at `sources` do: they are as hot, and `reader` holds them up."""
        self._contribution.copy(sources, targets, reader)
        self._frequency.copy(sources, targets, reader)

    def scores(self, blocks: Integers) -> Floats:
        """`[n, layers, kv_heads]`. Pages of unknown frequency score by contribution alone; those never seen as average ones."""
        return self._scores(blocks)

    def page_scores(self, blocks: Integers, layers: Integers, heads: Integers) -> Floats:
        """The same of single pages, `[n]`."""
        return self._scores((blocks, layers, heads))

    def _scores(self, at: _Pages) -> Floats:
        contribution, frequency = self._contribution.values[at], self._frequency.values[at]
        both = score(contribution, frequency, self.frequency_weight)
        return np.where(self._frequency.is_unseen(at), score(contribution, frequency, 0.0), both)


def relative_masses(masses: Floats, rows: int) -> Floats:
    """Mean attention mass per row times the number of blocks: 1 is an average page. `masses` is `[layers, kv_heads, n]`."""
    return masses * np.float32(masses.shape[-1] / rows)


def relative_hits(frequencies: Floats) -> Floats:
    """Hits, up to `ENOUGH_HITS`, by those of the average page of the sequence; at most `_MAX_FREQUENCY`.

    Where no page was hit all are 0, as an unhit page is in any other period.
    """
    hits = np.minimum(frequencies, np.float32(ENOUGH_HITS))
    average = hits.mean(dtype=np.float64)
    if average == 0:
        return np.zeros_like(hits)
    return np.asarray(np.minimum(hits / np.float32(average), _MAX_FREQUENCY))


class _MovingAverage:
    """One dimension of heat: each page's exponential average and its holder, `[num_blocks, layers, kv_heads]`."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.values = np.ones(shape, dtype=np.float32)
        self._holders = np.full(shape, _UNSEEN, dtype=np.int32)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self._holders.nbytes

    def absorb(self, blocks: Integers, observed: Floats, kept: float, reader: int) -> None:
        values, holders = self.values[blocks], self._holders[blocks]
        average = np.where(holders == _UNSEEN, observed, kept * values + (1 - kept) * observed)
        may_write = (holders < 0) | (holders == reader) | (observed > values)
        self.values[blocks] = np.where(may_write, average, values)
        self._holders[blocks] = np.where(may_write, reader, holders)

    def is_unseen(self, at: _Pages) -> Flags:
        unseen: Flags = self._holders[at] == _UNSEEN
        return unseen

    def leave(self, blocks: Integers, reader: int) -> None:
        holders = self._holders[blocks]
        self._holders[blocks] = np.where(holders == reader, _NOBODY, holders)

    def copy(self, sources: Integers, targets: Integers, reader: int) -> None:
        self.values[targets] = self.values[sources]
        self._holders[targets] = np.where(self._holders[sources] == _UNSEEN, _UNSEEN, reader)

    def reset(self, blocks: Integers) -> None:
        self.values[blocks] = 1.0
        self._holders[blocks] = _UNSEEN
