"""Engines with an adaptive cache over tiny models: blocks of 16 tokens, sequences above 64 tokens are tiered, all poisoned."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache as once
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engines import PAGE, loaded, reference_model, tokens_of
from vera.cache import CacheShape
from vera.cache.tiers import block_overhead_bytes
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.engine.request import Update
from vera.models import LoadedModel

BACKENDS = ("cpu", pytest.param("reference", marks=pytest.mark.soak))


@once
def tiered_model(family: str = "llama", context: int = 512) -> LoadedModel:
    """The weights of `engines.shared_model`, but a shorter context: statistics of 4,096 tokens would dwarf the pages."""
    return loaded(family, max_position_embeddings=context)


def tiered_engine(
    model: LoadedModel | None = None,
    *,
    frames: int = 64,
    warm_blocks: float | None = None,
    max_num_seqs: int = 4,
    cache: dict[str, Any] | None = None,
    **config: Any,
) -> Engine:
    """An engine whose cache has `frames` frames (of one exact block each, if below 128) and two windows of layers.

    `warm_blocks`: how many blocks the warm store has room for, checkpoints included; None: as many as there is use for.
    """
    model = model or tiered_model()
    settings: dict[str, Any] = {
        "mode": "adaptive",
        "page_size": PAGE,
        "page_dtype": "float32",
        "poison": True,
        "min_context": 64,
        "recompute_layer_limit": 2,
        "recompute_time_share": 1.0,
        "warm_store": "ram",
        "cold_drop_step": 8,
        "recalibrate_every": 8,
        **(cache or {}),
    }
    shape = shape_of(model)
    if warm_blocks is not None:
        settings["warm_bytes"] = int(warm_blocks * warm_block_bytes(shape, CacheConfig(**settings)))
    settings["cache_max_bytes"] = ceiling_of(shape, CacheConfig(**settings), frames, max_num_seqs, model.spec.max_context)
    values = {"max_batch_tokens": 80, "attention_backend": "reference", **config}
    engine = Engine(model, EngineConfig(cache=CacheConfig(**settings), max_num_seqs=max_num_seqs, **values))
    weakref.finalize(engine, engine.cache.tables.close)  # a file that nobody closes is a warning, so an error
    return engine


def shape_of(model: LoadedModel) -> CacheShape:
    spec = model.spec
    return CacheShape(
        layers=spec.num_layers,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        windowed_layers=tuple(layer for layer, window in enumerate(spec.windows) if window is not None),
    )


def warm_block_bytes(shape: CacheShape, config: CacheConfig) -> int:
    """What a block takes in the warm store if it is all there."""
    windows = -(-shape.layers // config.recompute_layer_limit)
    return shape.block_bytes(config) + (windows - 1) * config.page_size * shape.hidden_size * 4


def ceiling_of(shape: CacheShape, config: CacheConfig, frames: int, max_sequences: int, max_tokens: int) -> int:
    """Bytes that give a pool this many frames: tables and statistics count towards the ceiling."""
    block_bytes = shape.block_bytes(config)
    ids = max(1, block_bytes // shape.sketch_bytes(config))
    pages = shape.layers * shape.kv_heads
    overhead = block_overhead_bytes(shape, config) + 16 * pages + 4 * pages + 16
    statistics = 8 * max_sequences * pages * (-(-max_tokens // config.page_size) + 1)
    return frames * (block_bytes + ids * overhead) + statistics


def step(engine: Engine) -> list[Update]:
    """One step, after which the books are checked."""
    updates = engine.step()
    check(engine)
    return updates


def check(engine: Engine) -> None:
    """What has to be true at every instant."""
    engine.check_invariants()
    cache = engine.cache
    assert cache.pool.used_bytes <= cache.pool.capacity_bytes <= engine.config.cache.cache_max_bytes
    assert 0 <= cache.used_bytes <= cache.capacity_bytes
    limit = engine.config.cache.warm_bytes
    if limit is not None and engine.config.cache.warm_store != "none":
        assert cache.warm_bytes <= limit


def run_until(engine: Engine, request_id: str, num_tokens: int) -> list[int]:
    """Steps until the request has made `num_tokens` tokens; its tokens."""
    tokens: list[int] = []
    for _ in range(2000):
        if len(tokens) >= num_tokens:
            return tokens
        tokens += tokens_of([update for update in step(engine) if update.request_id == request_id])
    raise AssertionError(f"{request_id} made {len(tokens)} of {num_tokens} tokens in 2000 steps")


def evict_all(engine: Engine) -> None:
    """Forgets every block that is kept for reuse; nothing may be running."""
    engine.cache.forget("nothing of before")


def assert_nothing_is_held(engine: Engine) -> None:
    """With no sequence and nothing kept for reuse, all memory is free but the staging of restores."""
    evict_all(engine)
    check(engine)
    cache = engine.cache
    pool, tables = cache.pool, cache.tables
    held = -(-len(tables.staging) // pool.frame_pages)
    assert pool.frames.num_free_frames == pool.frames.num_frames - held, "frames leak"
    assert cache.warm_bytes == 0, "warm slots or checkpoints leak"
    assert cache.blocks.num_free == cache.blocks.num_blocks, "blocks leak"
    assert (tables.warm_slot < 0).all() and (tables.checkpoint_slot < 0).all()


def is_native_answer(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Each token is what transformers alone makes of those before it, so all are `engines.reference_tokens`: one pass tells."""
    if not tokens:
        return True
    with torch.inference_mode():
        logits = reference_model()(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == list(tokens)


def page_bytes_of(engine: Engine, block: int) -> NDArray[np.uint8]:
    """`[layers, kv_heads, page_bytes]`: the exact bytes of a block that has no cold page."""
    cache = engine.cache
    shape, size = cache.shape, cache.pool.page_bytes
    pages = np.zeros((shape.layers, shape.kv_heads, size), dtype=np.uint8)
    for layer in range(shape.layers):
        addresses = cache.tables.exact_addresses(np.array([block], dtype=np.int64), layer)[0]
        for head, address in enumerate(addresses.tolist()):
            assert address, f"layer {layer}, head {head} is cold"
            pages[layer, head] = np.frombuffer(ctypes.string_at(address, size), dtype=np.uint8)
    return pages


def release_units(engine: Engine, blocks: Sequence[int], windows: Sequence[int]) -> None:
    """Makes these units cold, hot pages and all, as the cache itself would over time."""
    tables = engine.cache.tables
    layers = engine.cache.shape.layers
    for block in blocks:
        for window in windows:
            if tables.warm_slot[block, window] >= 0:
                tables.release_unit(int(block), int(window))
            span = range(window * tables.window_layers, min((window + 1) * tables.window_layers, layers))
            pages = np.array([(block, layer, head) for layer in span for head in range(engine.cache.shape.kv_heads)])
            tables.cool(pages[:, 0], pages[:, 1], pages[:, 2])


def as_numbers(pages: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(pages.copy()).view(dtype)
