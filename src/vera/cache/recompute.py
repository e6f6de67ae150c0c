"""When cold pages are hit: which blocks are restored, from where, and in what order (特征重计算触发器).

Pure decisions. A restore runs the decoder layers from the first layer of a window up to the layer that is needed, for the tokens
of some blocks alone. Window 0 begins with the token ids; a later one with a checkpoint of what flowed into its first layer, or,
where a block has none, with the nearest earlier window that can be begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockOf:
    """The block at `index` of a running sequence; `block` is its id."""

    sequence: str
    index: int
    block: int


@dataclass(frozen=True, slots=True)
class RestorePass:
    """Blocks that are restored together: layers `first` to `stop`, oldest positions first."""

    targets: tuple[BlockOf, ...]
    first: int
    stop: int


class RecomputeTrigger:
    """Decides within a budget a step. Blocks that it turns away are remembered, and first in line in the next step's budget."""

    def __init__(self, budget: int, window_layers: int, num_layers: int) -> None:
        """`budget`: most blocks that one step restores."""
        self._budget = budget
        self._window_layers = window_layers
        self._num_layers = num_layers
        self._left = budget
        self._pending: dict[int, tuple[BlockOf, int]] = {}

    def begin_step(self) -> list[tuple[BlockOf, int]]:
        """A new step with a new budget. Returns what the last one left over: blocks, and the layer that each was hit in."""
        self._left = self._budget
        pending = sorted(self._pending.values(), key=lambda entry: entry[0].index)
        self._pending.clear()
        return pending

    def choose(self, hits: Iterable[BlockOf], layer: int) -> list[BlockOf]:
        """Of the blocks hit in `layer`, those to restore now, in position order; the oldest first where not all can be."""
        wanted = sorted({hit.block: hit for hit in hits}.values(), key=lambda hit: hit.index)
        chosen, rest = wanted[: self._left], wanted[self._left :]
        self._left -= len(chosen)
        if self._budget:
            self._pending |= {hit.block: (hit, layer) for hit in rest}
        return chosen

    def forget(self, sequence: str) -> None:
        """The sequence is gone: nothing is restored for it."""
        self._pending = {block: entry for block, entry in self._pending.items() if entry[0].sequence != sequence}

    def passes(self, targets: Iterable[BlockOf], stop: int, has_checkpoint: Callable[[int, int], bool]) -> list[RestorePass]:
        """How to restore `targets` up to layer `stop` (not included): those that begin at the same layer together, as many at a
        time as the budget has.

        `has_checkpoint(block, boundary)`: there is one for the first layer of window `boundary + 1`.
        """
        groups: dict[int, list[BlockOf]] = {}
        for target in targets:
            window = (stop - 1) // self._window_layers
            while window > 0 and not has_checkpoint(target.block, window - 1):
                window -= 1
            groups.setdefault(window * self._window_layers, []).append(target)
        passes = []
        for first, group in sorted(groups.items()):
            group.sort(key=lambda target: target.index)
            cuts = range(0, len(group), self._budget)
            passes += [RestorePass(tuple(group[cut : cut + self._budget]), first, stop) for cut in cuts]
        return passes

    def window_end(self, layer: int) -> int:
        """The layer after the last one of the window that `layer` belongs to."""
        return self.window_end_of(layer // self._window_layers)

    def window_end_of(self, window: int) -> int:
        """The layer after the last one of a window."""
        return min((window + 1) * self._window_layers, self._num_layers)


@dataclass(slots=True)
class Costs:
    """Moving averages of what getting an exact unit back costs here, in seconds; None before the first measurement."""

    read_seconds: float | None = None
    recompute_seconds: float | None = None

    def measured_read(self, seconds: float) -> None:
        self.read_seconds = _average(self.read_seconds, seconds)

    def measured_recompute(self, seconds: float) -> None:
        self.recompute_seconds = _average(self.recompute_seconds, seconds)

    @property
    def reading_pays(self) -> bool:
        """A warm copy is worth its memory: reading it costs less than recomputing it, or nobody knows yet."""
        if self.read_seconds is None or self.recompute_seconds is None:
            return True
        return self.read_seconds <= self.recompute_seconds


def _average(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
