"""What a model needs of a cache, before there is an engine that has one."""

from __future__ import annotations

from vera.cache import CacheShape
from vera.models import LoadedModel


def shape_of(model: LoadedModel) -> CacheShape:
    """For sizes only: it does not say which layers have a sliding window."""
    spec = model.spec
    return CacheShape(layers=spec.num_layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, hidden_size=spec.hidden_size)
