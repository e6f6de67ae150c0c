"""What has to be known of a model before its cache is tuned: a job for a process of its own."""

from __future__ import annotations

from typing import Any

from vera.bench.shape import shape_of
from vera.cache.memory import available_bytes
from vera.config import CacheConfig
from vera.models import load_model


def look(*, model: str, batch: int, tokens: int, page_dtype: str, page_size: int) -> dict[str, Any]:
    """The model's name and layers, what a native cache takes for `batch` sequences of `tokens`, and the memory that is free."""
    free = available_bytes()
    loaded = load_model(model)
    config = CacheConfig(page_dtype=page_dtype, page_size=page_size)
    return {
        "model_name": loaded.spec.name,
        "num_layers": loaded.spec.num_layers,
        "native_bytes": batch * shape_of(loaded).native_bytes(config, tokens),
        "available_bytes": free,
    }
