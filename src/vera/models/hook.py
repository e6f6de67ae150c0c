"""The one attention function of ours that transformers calls: it hands each layer's queries, keys and values to a callable.

transformers looks attention functions up by name. A model set to `VERA_ATTENTION` calls `vera_attention` in every layer, and
because no mask function is registered under that name, no mask is built: causality and windows are the callable's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from vera.attention.protocol import LayerAttention
from vera.errors import ModelError

VERA_ATTENTION = "vera"


class LayerHook(Protocol):
    """What a step does in each layer, in place of the model's own attention."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        """The attention output `[tokens, query_heads, head_dim]` of the new tokens of one layer.

        `query` is `[tokens, query_heads, head_dim]`, `key` and `value` are `[tokens, kv_heads, head_dim]`: float32, already
        rotated, views with a contiguous last dimension. They are the caller's to read until the call returns.
        """
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass carries through transformers to the attention function."""

    attend: LayerHook
    options: tuple[LayerAttention, ...]
    """One a layer, as learned by the probe."""


def vera_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    vera_step: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by transformers with `[1, heads, tokens, head_dim]`; returns `[1, tokens, heads, head_dim]`."""
    if vera_step is None:
        raise ModelError(
            "this model was handed to Vera and runs only through it; to call it directly again, "
            "use module.set_attn_implementation('sdpa') first"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = vera_step.attend(layer, flat(query), flat(key), flat(value), vera_step.options[layer])
    return output.to(query.dtype).unsqueeze(0), None


def flat(heads: Tensor) -> Tensor:
    """`[1, heads, tokens, head_dim]` as `[tokens, heads, head_dim]` float32, last dimension contiguous; a view if it can be."""
    rows = heads.squeeze(0).transpose(0, 1)
    rows = rows.float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()


AttentionInterface.register(VERA_ATTENTION, vera_attention)
