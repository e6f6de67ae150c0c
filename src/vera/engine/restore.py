"""Local recompute: a few decoder layers over a few blocks, so that cold pages are exact again in the step that needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vera.attention.protocol import AttentionBackend, LayerAttention, PagedBatch
from vera.cache import AdaptiveCache, BlockOf, Restore
from vera.models import LoadedModel

_MIN_ROWS = 65
"""Fewer rows take another matrix product, whose rounding differs in the last bit from that of a prompt's."""


class Restorer:
    """Restores what the cache's recompute trigger chooses. Called between layers of a step, and between steps."""

    def __init__(
        self, model: LoadedModel, backend: AttentionBackend, cache: AdaptiveCache, tokens_of: Callable[[str], Sequence[int]]
    ) -> None:
        """`tokens_of` gives the token ids of a running sequence."""
        self._model = model
        self._backend = backend
        self._cache = cache
        self._tokens_of = tokens_of
        self._served: set[str] = set()
        self._blocks = 0
        self._pages = 0
        self._seconds = 0.0
        self._began = 0.0
        self.running = False
        """A restore is under way: layers run that are not the step's."""

    def begin_step(self) -> None:
        """Restores what the last step left to its sketch, if what is restored now can be kept until it is needed."""
        self._served, self._blocks, self._pages, self._seconds = set(), 0, 0, 0.0
        self._began = time.perf_counter()
        trigger = self._cache.trigger
        together: dict[int, list[BlockOf]] = {}
        for target, layer in trigger.begin_step(can_keep=self._cache.costs.reading_pays and self._cache.make_room_for_restored()):
            together.setdefault(trigger.window_end(layer), []).append(target)
        for stop, targets in together.items():
            self._run(targets, stop - 1, hot=[])

    def restore_hits(self, batch: PagedBatch, layer: int) -> bool:
        """Restores the cold pages that `layer` has just hit, within the step's budget. True: pages are exact that were not."""
        cold = self._cache.cold_hits(batch, layer)
        if not cold:
            return False
        chosen = self._cache.trigger.choose(cold, layer)
        covered = {target.block for target in chosen}
        self._cache.count_uncovered([hit for hit in cold if hit.block not in covered])
        if not chosen:
            return False
        if self._run(chosen, layer, hot=self._cache.cold_hit_pages(batch, layer)) == 0:
            self._cache.count_uncovered([hit for hit in cold if hit.block in covered])
            return False
        self._served |= {hit.sequence for hit in cold if hit.block in covered}
        return True

    def restore_all(self, sequence: str) -> bool:
        """The closure: every cold page of a sequence, oldest block first, so that each sees an exact context. False: no room."""
        if not len(self._cache.tables.staging):
            return not self._cache.cold_blocks(sequence)
        for target in self._cache.cold_blocks(sequence):
            for window in self._cache.cold_windows(target):
                layers = range(window * self._cache.tables.window_layers, self._cache.trigger.window_end_of(window))
                hot = [(target.block, layer, head) for layer in layers for head in range(self._cache.shape.kv_heads)]
                for plan in self._cache.restores([target], layers.stop):
                    self._pass(self._cache.begin_restore(plan), hot)
        return not self._cache.cold_blocks(sequence)

    def end_step(self) -> float:
        """Counts what was restored before the step and within it; returns the seconds that took."""
        seconds = self._seconds
        self._cache.trigger.end_step(seconds=time.perf_counter() - self._began, restore_seconds=seconds, blocks=self._blocks)
        if self._served:
            self._cache.count_restore(self._served, blocks=self._blocks, pages=self._pages, seconds=seconds)
        self._served, self._blocks, self._pages, self._seconds = set(), 0, 0, 0.0
        return seconds

    def _run(self, targets: list[BlockOf], layer: int, *, hot: list[tuple[int, int, int]]) -> int:
        """Restores blocks up to `layer`, or to the end of its window if the warm store can take whole units then."""
        start = time.perf_counter()
        whole = self._cache.costs.reading_pays and self._cache.make_room_for_restored()
        stop = self._cache.trigger.window_end(layer) if whole else layer + 1
        restored = sum(self._pass(self._cache.begin_restore(plan), hot) for plan in self._cache.restores(targets, stop))
        if restored:
            self._served |= {target.sequence for target in targets}
        self._blocks += len(targets)
        self._pages += restored
        self._seconds += time.perf_counter() - start
        return restored

    def _pass(self, restore: Restore, hot: list[tuple[int, int, int]]) -> int:
        plan, size = restore.plan, restore.batch.page_size
        token_ids: list[int] = []
        positions: list[int] = []
        for target in plan.targets:
            begin = target.index * size
            token_ids += self._tokens_of(target.sequence)[begin : begin + size]
            positions += range(begin, begin + size)
        rows = len(token_ids)
        padding = max(0, _MIN_ROWS - rows)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
            output = torch.zeros(query.shape, dtype=torch.float32)
            output[:rows] = self._backend.attend(restore.batch, layer, query[:rows], key[:rows], value[:rows], options)
            return output

        hidden = restore.hidden
        if hidden is not None and padding:
            hidden = torch.cat([hidden, torch.zeros(padding, hidden.shape[1])])
        self.running = True
        try:
            self._model.run_layers(
                torch.tensor(token_ids + [0] * padding),
                torch.tensor(positions + [0] * padding),
                attend,
                first=plan.first,
                stop=plan.stop,
                hidden=hidden,
            )
        except BaseException:
            self._cache.abandon_restore(restore)
            raise
        finally:
            self.running = False
        return self._cache.finish_restore(restore, hot=hot)
