"""Attention without a cache: each sequence of a flattened batch is whole and attends to itself. The probe's yardstick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vera.attention.protocol import LayerAttention


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """A `LayerHook` for a flattened batch of whole sequences of these `lengths`, in order. Slow and plain on purpose."""

    lengths: Sequence[int]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        parts = zip(*(torch.split(heads, list(self.lengths)) for heads in (query, key, value)), strict=True)
        return torch.cat([dense_attention(q, k, v, options) for q, k, v in parts])


def dense_attention(query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
    """Causal attention of one sequence: `[tokens, query_heads, head_dim]` from heads of the same tokens."""
    group = query.shape[1] // key.shape[1]
    keys, values = (heads.repeat_interleave(group, dim=1) for heads in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query, keys) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logits = logits.masked_fill(~visible(query.shape[0], options.window), -math.inf)
    if options.sinks is not None:
        sinks = options.sinks[:, None, None].expand(-1, query.shape[0], 1)
        weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(logits, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).contiguous()


def visible(tokens: int, window: int | None) -> Tensor:
    """`[tokens, tokens]` bool: row q sees column k."""
    position = torch.arange(tokens)
    age = position[:, None] - position[None, :]
    return (age >= 0) if window is None else (age >= 0) & (age < window)
