"""Audits: now and then one layer of a bounded step is also computed exactly, so that "no drift" is a measurement."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from vera.attention.protocol import LayerAttention, PagedBatch
from vera.cache import AdaptiveCache, Span

KEPT = 4096


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Errors of one sequence's attention output in one layer, a mean over its query heads, relative to the value norms."""

    request_id: str
    layer: int
    true_error: float
    estimated_error: float

    @property
    def ratio(self) -> float | None:
        """True by estimated error; None where nothing was estimated, because every page was read exactly."""
        return self.true_error / self.estimated_error if self.estimated_error else None


class Auditor:
    """Chooses what is audited and keeps the latest results. After each recalibration one layer of the next step is looked at."""

    def __init__(self, cache: AdaptiveCache, num_layers: int, *, seed: int = 0) -> None:
        self.every_step = False
        """Audit a layer of every step, for a measurement."""
        self.results: deque[AuditResult] = deque(maxlen=KEPT)
        self.num_audits = 0
        self._cache = cache
        self._num_layers = num_layers
        self._random = torch.Generator().manual_seed(seed)
        self._recalibrations = 0
        self._chosen: tuple[int, int] | None = None
        self._before = (0.0, 0)

    def begin_step(self, batch: PagedBatch) -> None:
        """Decides whether and where this step is audited."""
        self._chosen = None
        stats = self._cache.tier_stats
        if stats is None or batch.tiers is None:
            return
        due = self.every_step or stats.recalibrations > self._recalibrations
        lengths = batch.query_starts.diff()
        bounded = ((batch.tiers.tolerances >= 0) & (lengths == 1)).nonzero().flatten()
        if due and len(bounded):
            self._recalibrations = stats.recalibrations
            self._chosen = (int(bounded[self._draw(len(bounded))]), self._draw(self._num_layers))

    def before(self, batch: PagedBatch, layer: int) -> None:
        """Call before each layer's attention."""
        if self._chosen is not None and self._chosen[1] == layer:
            self._before = self._estimates(batch)

    def after(
        self, batch: PagedBatch, spans: list[Span], layer: int, query: Tensor, output: Tensor, options: LayerAttention
    ) -> None:
        """Call after each layer's attention, with what it was given and gave."""
        if self._chosen is None or self._chosen[1] != layer:
            return
        row, _ = self._chosen
        total, count = (now - then for now, then in zip(self._estimates(batch), self._before, strict=True))
        exact = self._cache.exact_pages(spans[row].sequence, layer, spans[row].stop)
        if exact is None or not count:
            return
        token = int(batch.query_starts[row + 1]) - 1
        true_error = _relative_error(query[token], output[token], *exact, options)
        self.results.append(AuditResult(spans[row].sequence, layer, true_error, total / count))
        self.num_audits += 1

    def _estimates(self, batch: PagedBatch) -> tuple[float, int]:
        """Sum and number of the estimated errors of the chosen sequence so far in this step."""
        assert batch.tiers is not None and self._chosen is not None
        total, _, count = batch.tiers.report.errors[self._chosen[0]].tolist()
        return total, int(count)

    def _draw(self, stop: int) -> int:
        return int(torch.randint(stop, (), generator=self._random))


def _relative_error(query: Tensor, output: Tensor, keys: Tensor, values: Tensor, norms: Tensor, options: LayerAttention) -> float:
    """Mean over query heads of the distance between `output` and exact attention, by the mean of `norms` of its KV head.

    `query` and `output` are `[query_heads, head_dim]`, `keys` and `values` `[kv_heads, tokens, head_dim]`, `norms` `[kv_heads]`.
    """
    kv_heads = keys.shape[0]
    grouped = query.reshape(kv_heads, -1, query.shape[-1])
    logits = torch.einsum("kgd,ksd->kgs", grouped, keys) * options.scale
    if (cap := options.softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    if options.sinks is not None:
        column = options.sinks.view(kv_heads, -1, 1)
        weights = torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(logits, dim=-1)
    exact = torch.einsum("kgs,ksd->kgd", weights, values)
    distance = (output.reshape(exact.shape) - exact).norm(dim=-1) / norms[:, None]
    mean = float(distance.mean())
    return mean if math.isfinite(mean) else math.inf
