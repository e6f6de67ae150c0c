"""Paged attention in plain torch: the truth that the other backends are tested against, and what serves without a compiler."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from vera.attention.checks import check_batch, check_call
from vera.attention.protocol import NO_PAGE, LayerAttention, PagedBatch


class ReferenceAttention:
    """Dense attention, one sequence after another, in float32."""

    name = "reference"

    def attend(self, batch: PagedBatch, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        """See `AttentionBackend.attend`. Raises ValueError and IndexError for what `PagedBatch` does not allow."""
        check_batch(batch)
        check_call(batch, layer, query, key, value, options, tokens=batch.tokens)
        output = torch.empty(query.shape, dtype=torch.float32)
        starts, lengths = batch.query_starts.tolist(), batch.context_lens.tolist()
        spans = list(pairwise(starts))
        tables = [
            _Sequence(batch, layer, index, end - start, lengths[index], options) for index, (start, end) in enumerate(spans)
        ]
        for sequence, (start, end) in zip(tables, spans, strict=True):
            sequence.write(key[start:end], value[start:end])
        for sequence, (start, end) in zip(tables, spans, strict=True):
            if end > start:
                output[start:end] = sequence.attend(query[start:end])
        return output


class _Sequence:
    """One sequence's pages in one layer, from the first block that its new tokens see."""

    def __init__(self, batch: PagedBatch, layer: int, index: int, new_tokens: int, length: int, options: LayerAttention) -> None:
        size = batch.page_size
        _check_lengths(index, new_tokens, length, batch.block_tables.shape[1] * size)
        self.options = options
        self.page_size = size
        self.length = length
        self.first_new = length - new_tokens
        first_visible = 0 if options.window is None else max(0, self.first_new + 1 - options.window)
        self.first_block = first_visible // size if new_tokens else -(-length // size)
        self.slots = _page_slots(batch, layer, index, self.first_block, -(-length // size))
        self.keys = batch.pages[:, 0].view(-1, batch.head_dim, size)
        self.values = batch.pages[:, 1].view(-1, size, batch.head_dim)

    def write(self, key: Tensor, value: Tensor) -> None:
        """`key` and `value` are `[new_tokens, kv_heads, head_dim]`; rounds them to the dtype of the pages."""
        positions = torch.arange(self.first_new, self.length)
        slots = self.slots[positions // self.page_size - self.first_block]
        offsets = (positions % self.page_size)[:, None]
        self.keys[slots, :, offsets] = key.to(self.keys.dtype)
        self.values[slots, offsets] = value.to(self.values.dtype)

    def attend(self, query: Tensor) -> Tensor:
        """`query` is `[new_tokens, query_heads, head_dim]`, and so is the result."""
        keys, values = self._gather()
        new_tokens, query_heads, head_dim = query.shape
        grouped = query.reshape(new_tokens, keys.shape[0], -1, head_dim)
        logits = torch.einsum("tkgd,kds->kgts", grouped, keys) * self.options.scale
        if (cap := self.options.softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits.masked_fill(~self._visible(), float("-inf"))
        if (sinks := self.options.sinks) is not None:
            column = sinks.view(*logits.shape[:2], 1, 1).expand(-1, -1, new_tokens, 1)
            weights = torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(logits, dim=-1)
        return torch.einsum("kgts,ksd->tkgd", weights, values).reshape(new_tokens, query_heads, head_dim)

    def _gather(self) -> tuple[Tensor, Tensor]:
        """Keys `[kv_heads, head_dim, tokens]` and values `[kv_heads, tokens, head_dim]` in float32, written tokens only.

        What lies behind the last written token may be NaN, which no mask can undo: it is cut off before any arithmetic.
        """
        written = self.length - self.first_block * self.page_size
        keys = self.keys[self.slots].permute(1, 2, 0, 3).flatten(2)[:, :, :written]
        values = self.values[self.slots].permute(1, 0, 2, 3).flatten(1, 2)[:, :written]
        return keys.float(), values.float()

    def _visible(self) -> Tensor:
        """`[new_tokens, tokens]`: which of the gathered tokens each new token attends to."""
        query = torch.arange(self.first_new, self.length)[:, None]
        token = torch.arange(self.first_block * self.page_size, self.length)
        visible = token <= query
        return visible if self.options.window is None else visible & (token > query - self.options.window)


def _check_lengths(index: int, new_tokens: int, length: int, capacity: int) -> None:
    if new_tokens < 0:
        raise ValueError(f"sequence {index}: query_starts falls by {-new_tokens}; it must ascend")
    if not new_tokens <= length <= capacity:
        raise ValueError(
            f"sequence {index}: context_lens={length} must lie between its {new_tokens} new tokens "
            f"and the {capacity} that block_tables holds"
        )


def _page_slots(batch: PagedBatch, layer: int, index: int, first_block: int, end_block: int) -> Tensor:
    """`[blocks, kv_heads]` int64: where the pages of the sequence's blocks from `first_block` on are."""
    blocks = batch.block_tables[index, first_block:end_block].long()
    num_blocks, num_pages = batch.page_table.shape[0], batch.pages.shape[0]
    if bad := blocks[(blocks < 0) | (blocks >= num_blocks)].tolist():
        raise IndexError(f"sequence {index}: block {bad[0]} is outside the {num_blocks} blocks of page_table")
    slots = batch.page_table[blocks, layer].long()
    if bad := slots[(slots < 0) | (slots >= num_pages)].tolist():
        problem = "is NO_PAGE, but the block is needed" if bad[0] == NO_PAGE else f"is outside the {num_pages} pages of the pool"
        raise IndexError(f"sequence {index}, layer {layer}: page_table entry {bad[0]} {problem}")
    return slots
