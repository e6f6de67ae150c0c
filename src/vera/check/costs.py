"""What pages of a model cost here: reading one exactly, reading one by its sketch, computing a block of them anew.

Each is measured through the cache and the attention backend that serve requests, over made-up pages.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vera.attention import make_backend
from vera.attention.protocol import AttentionBackend, LayerAttention, PagedBatch
from vera.cache import AdaptiveCache, CacheShape, Span
from vera.cache.memory import available_bytes
from vera.check.rates import Timing, timed
from vera.config import CacheConfig
from vera.models import LoadedModel, ModelSpec

_MIB = 2**20
_LAYERS = 2
"""Of the cache whose pages are read: what one page costs does not depend on how many layers there are."""
_SEQUENCES = 8
_PAGES_BYTES = 96 * _MIB
"""Exact pages that are read, so that they do not all lie in the last-level cache."""
_SLOW_PAGES_BYTES = 4 * _MIB
"""The same in plain torch, which takes some hundred times longer."""
_CONTEXT_TOKENS = 2048
"""Before the block that is computed anew."""
_RECOMPUTE_BYTES = 256 * _MIB
"""At the most, of the pages before it."""
_MIN_ROWS = 65
"""As in restores: fewer rows take another matrix product."""


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Of one page: a block's keys and values for one layer and one KV head, read by one token's query heads, on all threads."""

    exact: Timing
    sketch: Timing | None
    """None: pages of this shape cannot be sketched."""
    recompute: Timing | None
    """Of one block in one window of layers, 2,048 tokens after its sequence's start; None: it cannot be recomputed."""
    window_layers: int
    unit_bytes: int
    """The exact copy of such a window's pages of a block."""
    no_kernel: str | None = None
    """Why all this ran in plain torch; None: the native kernel serves the model."""

    @property
    def is_unsteady(self) -> bool:
        """Runs of the same took unlike times."""
        return any(timing.is_unsteady for timing in (self.exact, self.sketch, self.recompute) if timing is not None)


def measure_costs(model: LoadedModel, config: CacheConfig) -> PageCosts:
    """One to two seconds for a small model. `config`: an adaptive one."""
    spec = model.spec
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        backend = make_backend("auto", group=spec.num_query_heads // spec.num_kv_heads)
    exact = _exact_page(spec, backend, config)
    window_layers = window_layers_of(spec, config)
    return PageCosts(
        exact=exact,
        sketch=_sketched_page(spec, backend, config, exact.least) if spec.head_dim % 16 == 0 else None,
        recompute=_recompute(model, backend, config, window_layers) if model.has_windows else None,
        window_layers=window_layers,
        unit_bytes=CacheShape(window_layers, spec.num_kv_heads, spec.head_dim).block_bytes(config),
        no_kernel="; ".join(str(warning.message) for warning in told) or None,
    )


def window_layers_of(spec: ModelSpec, config: CacheConfig) -> int:
    """Layers that are recomputed together."""
    windows = -(-spec.num_layers // config.recompute_layer_limit)
    return -(-spec.num_layers // windows)


# -- reading -----------------------------------------------------------------------------------------------------------


def _exact_page(spec: ModelSpec, backend: AttentionBackend, config: CacheConfig) -> Timing:
    shape, blocks = _page_shape(spec, backend, config)
    settings = CacheConfig(
        cache_max_bytes=(_SEQUENCES * (blocks + 1) + 16) * shape.block_bytes(config),
        page_size=config.page_size,
        page_dtype=config.page_dtype,
        prefix_reuse=False,
    )
    with _cache(shape, settings, blocks * config.page_size) as cache:
        timing, _ = _decode(cache, spec, backend, blocks)
    return _scaled(timing, 1 / (_SEQUENCES * (blocks + 1) * shape.kv_heads * shape.layers))


def _sketched_page(spec: ModelSpec, backend: AttentionBackend, config: CacheConfig, exact_seconds: float) -> Timing:
    """No page is hit and no value left out: what a sketch costs at the most."""
    shape, blocks = _page_shape(spec, backend, config)
    block_bytes = shape.block_bytes(config)
    settings = CacheConfig(
        mode="adaptive",
        cache_max_bytes=2 * (_SEQUENCES * (blocks + 1) + 16) * block_bytes + 16 * _MIB,
        page_size=config.page_size,
        page_dtype=config.page_dtype,
        sketch_bits=config.sketch_bits,
        prefix_reuse=False,
        min_context=0,
        attention_tolerance=1.0,
        hot_max_share=0.0,
        skip_share=0.0,
        recompute_budget=0,
        warm_store="ram",
        warm_bytes=(_SEQUENCES * (blocks + 1) + 16) * (block_bytes + 4096),
    )
    with _cache(shape, settings, blocks * config.page_size) as cache:
        timing, batch = _decode(cache, spec, backend, blocks)
    assert batch.tiers is not None
    exact, sketched, *_ = batch.tiers.report.pages_read.tolist()
    pages = _SEQUENCES * (blocks + 1) * shape.kv_heads * shape.layers
    num_sketched = pages * sketched / (exact + sketched)
    beside = (pages - num_sketched) * exact_seconds
    least = timing.seconds / 10  # what little is read exactly cannot be nearly all
    without = (max(seconds - beside, least) for seconds in (timing.seconds, timing.least, timing.most))
    return _scaled(Timing(*without), 1 / num_sketched)


def _page_shape(spec: ModelSpec, backend: AttentionBackend, config: CacheConfig) -> tuple[CacheShape, int]:
    """The cache's shape and the full blocks of each sequence."""
    shape = CacheShape(layers=_LAYERS, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
    most = _PAGES_BYTES if backend.name == "cpu" else _SLOW_PAGES_BYTES
    budget = min(most, available_bytes() // 16)
    return shape, min(1024, max(8, budget // _SEQUENCES // shape.block_bytes(config)))


@contextmanager
def _cache(shape: CacheShape, settings: CacheConfig, num_tokens: int) -> Iterator[AdaptiveCache]:
    """A cache in which `_SEQUENCES` prompts of `num_tokens` have been read, of pages that are all alike."""
    cache = AdaptiveCache(
        shape, settings, identity="check", max_sequences=_SEQUENCES, max_tokens=num_tokens + 1, max_chunk=num_tokens
    )
    tokens = [0] * num_tokens
    with closing(cache):
        _fill(cache)
        for name in _names():
            admitted = cache.admit(name, tokens) is not None and cache.reserve(name, num_tokens)
            assert admitted, "the cache was made for these sequences"
            cache.batch([Span(name, 0, num_tokens)])
            cache.observe()
            cache.commit(name, tokens, num_tokens)
            cache.settle()
        yield cache


def _names() -> list[str]:
    return [f"sequence {number}" for number in range(_SEQUENCES)]


def _fill(cache: AdaptiveCache) -> None:
    """Every page holds the same random numbers."""
    pages = cache.pool.pages
    pages.copy_(torch.randn((1, *pages.shape[1:]), generator=torch.Generator().manual_seed(0)) * 0.5)


def _decode(cache: AdaptiveCache, spec: ModelSpec, backend: AttentionBackend, blocks: int) -> tuple[Timing, PagedBatch]:
    """The attention of one decode step, all layers together, and the batch whose report says what was read."""
    position = blocks * cache.config.page_size
    for name in _names():
        reserved = cache.reserve(name, position + 1)
        assert reserved, "the cache was made for these sequences"
    batch = cache.batch([Span(name, position, position + 1) for name in _names()])
    query = torch.randn(_SEQUENCES, spec.num_query_heads, spec.head_dim, generator=torch.Generator().manual_seed(1))
    new = torch.zeros(_SEQUENCES, spec.num_kv_heads, spec.head_dim)
    options = LayerAttention(scale=1 / math.sqrt(spec.head_dim))

    def attend() -> None:
        for layer in range(_LAYERS):
            backend.attend(batch, layer, query, new, new, options)

    return timed(attend, repeats=15), batch


def _scaled(timing: Timing, factor: float) -> Timing:
    return Timing(timing.seconds * factor, timing.least * factor, timing.most * factor)


# -- recomputing -------------------------------------------------------------------------------------------------------


def _recompute(model: LoadedModel, backend: AttentionBackend, config: CacheConfig, window_layers: int) -> Timing:
    """The first window's layers for one block's tokens, as a restore runs them."""
    spec, size = model.spec, config.page_size
    shape = CacheShape(layers=window_layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
    before = min(_CONTEXT_TOKENS, spec.max_context - size, _RECOMPUTE_BYTES // shape.block_bytes(config) * size)
    context = max(0, before // size * size)
    settings = CacheConfig(
        cache_max_bytes=(context // size + 2) * shape.block_bytes(config),
        page_size=size,
        page_dtype=config.page_dtype,
        prefix_reuse=False,
    )
    cache = AdaptiveCache(shape, settings, identity="check", max_sequences=1, max_tokens=context + size)
    with closing(cache):
        _fill(cache)
        admitted = cache.admit("block", [0] * (context + size)) is not None
        assert admitted, "the cache was made for this sequence"
        batch = cache.batch([Span("block", context, context + size)])
        return timed(lambda: _run_window(model, backend, batch, context, window_layers), repeats=5, seconds=1.0)


def _run_window(model: LoadedModel, backend: AttentionBackend, batch: PagedBatch, context: int, window_layers: int) -> None:
    rows = batch.tokens
    padding = max(0, _MIN_ROWS - rows)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        output = torch.zeros(query.shape, dtype=torch.float32)
        output[:rows] = backend.attend(batch, layer, query[:rows], key[:rows], value[:rows], options)
        return output

    positions = torch.cat([torch.arange(context, context + rows), torch.zeros(padding, dtype=torch.int64)])
    token_ids = torch.zeros(rows + padding, dtype=torch.int64)
    model.run_layers(token_ids, positions, attend, first=0, stop=window_layers, hidden=None)
