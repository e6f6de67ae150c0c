"""When cold pages are hit: which blocks are restored, from where, and in what order (特征重计算触发器).

Pure decisions. A restore runs the decoder layers from the first layer of a window up to the layer that is needed, for the tokens
of some blocks alone. Window 0 begins with the token ids; a later one with a checkpoint of what flowed into its first layer, or,
where a block has none, with the nearest earlier window that can be begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_PATIENCE_STEPS = 16
"""A block that was not hit again for so long is no longer wanted."""


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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A block that was hit and not restored: the layer of the last such hit, how many there were, and the step of the last."""

    target: BlockOf
    layer: int
    times: int
    step: int


class RecomputeTrigger:
    """Decides within a budget a step, and a share of all time. Blocks that it turns away are remembered for the next step.

    Restoring a block takes about as long as half a decode step of a full batch, so a limit for each step alone would either slow
    every step down or allow none. Time that is not used is saved up, as far as one step's budget can use it at once; a restore
    may overdraw what is there, and then none is made until that is made up for.
    """

    def __init__(self, budget: int, window_layers: int, num_layers: int, *, time_share: float = 1.0) -> None:
        """`budget`: most blocks that one step restores. `time_share`: most of the time that restores take; 0: none
        is made; 1: no such limit."""
        self._budget = budget
        self._window_layers = window_layers
        self._num_layers = num_layers
        self._time_share = time_share
        self._left = budget
        self._step = 0
        self._saved_seconds = 0.0
        self._promised_seconds = 0.0
        self._block_seconds = 0.0
        """What one block took last; 0 before the first."""
        self._pending: dict[int, _Waiting] = {}

    def limit(self, budget: int, *, time_share: float) -> None:
        """Takes another budget and share, from the next step on."""
        self._budget, self._time_share = budget, time_share

    def begin_step(self, *, can_keep: bool) -> list[tuple[BlockOf, int]]:
        """A new step with a new budget. Returns the blocks to restore before it, and the layer that each was hit in last.

        Of those that wait, the ones hit most often come first. None is restored, and none waits on, where what is restored now
        cannot be kept until it is needed.
        """
        self._step += 1
        self._left = self._budget
        if not can_keep:
            self._pending.clear()
            return []
        waiting = [entry for entry in self._pending.values() if self._step - entry.step <= _PATIENCE_STEPS]
        waiting.sort(key=lambda entry: (-entry.times, entry.target.index))
        allowed = self._allowed()
        self._promise(len(waiting[:allowed]))
        self._pending = {entry.target.block: entry for entry in waiting[allowed:]}
        return [(entry.target, entry.layer) for entry in waiting[:allowed]]

    def end_step(self, *, seconds: float, restore_seconds: float, blocks: int) -> None:
        """What the step took, and of that its `blocks` restores."""
        if blocks:
            self._block_seconds = restore_seconds / blocks
        saved = self._saved_seconds + self._promised_seconds + self._time_share * seconds - restore_seconds
        self._saved_seconds = min(saved, self._budget * self._block_seconds)
        self._promised_seconds = 0.0

    def choose(self, hits: Iterable[BlockOf], layer: int) -> list[BlockOf]:
        """Of the blocks hit in `layer`, those to restore now, in position order; the oldest first where not all can be."""
        wanted = sorted({hit.block: hit for hit in hits}.values(), key=lambda hit: hit.index)
        allowed = self._allowed()
        chosen, rest = wanted[:allowed], wanted[allowed:]
        self._promise(len(chosen))
        for hit in chosen:
            self._pending.pop(hit.block, None)
        for hit in rest if self._budget else ():
            before = self._pending.get(hit.block)
            self._pending[hit.block] = _Waiting(hit, layer, 1 + (before.times if before else 0), self._step)
        return chosen

    def _promise(self, blocks: int) -> None:
        self._left -= blocks
        self._saved_seconds -= blocks * self._block_seconds
        self._promised_seconds += blocks * self._block_seconds

    def _allowed(self) -> int:
        """How many blocks may be restored now."""
        if self._time_share >= 1:
            return self._left
        if self._saved_seconds < 0 or not self._time_share:
            return 0
        if not self._block_seconds:  # the first one shows what it takes
            return min(self._left, 1) if self._left == self._budget else 0
        return min(self._left, 1 + int(self._saved_seconds / self._block_seconds))

    def forget(self, sequence: str) -> None:
        """The sequence is gone: nothing is restored for it."""
        self._pending = {block: waiting for block, waiting in self._pending.items() if waiting.target.sequence != sequence}

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
