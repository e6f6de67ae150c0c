"""What every backend refuses: tensors that are not what `protocol` says. Cheap enough to run for each layer."""

from __future__ import annotations

import torch
from torch import Tensor

from vera.attention.protocol import PAGE_DTYPES, LayerAttention, PagedBatch


def check_batch(batch: PagedBatch) -> None:
    """Raises ValueError for a wrong dtype, shape or layout. Does not look at the ids in the tables."""
    pages = batch.pages
    if pages.dtype not in PAGE_DTYPES.values():
        raise ValueError(f"pages are {pages.dtype}; they must be one of {', '.join(PAGE_DTYPES)}")
    half_page = batch.page_size * batch.head_dim
    if pages.dim() != 3 or pages.shape[1:] != (2, half_page) or not pages.is_contiguous():
        raise ValueError(
            f"pages have shape {list(pages.shape)}, strides {list(pages.stride())}; "
            f"they must be a contiguous [num_pages, 2, {half_page}]"
        )
    sequences = batch.context_lens.numel()
    _check_table("page_table", batch.page_table, [None, None, None])
    _check_table("block_tables", batch.block_tables, [sequences, None])
    _check_table("query_starts", batch.query_starts, [sequences + 1])
    _check_table("context_lens", batch.context_lens, [sequences])


def check_call(
    batch: PagedBatch, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention, *, tokens: int
) -> None:
    """Raises ValueError for tensors of a wrong dtype or shape, IndexError for a layer that the page table lacks.

    `tokens` is `batch.tokens`, which the caller has at hand.
    """
    _, layers, kv_heads = batch.page_table.shape
    if not 0 <= layer < layers:
        raise IndexError(f"layer={layer} is outside the {layers} layers of page_table")
    _check_rows("query", query, tokens, None, batch.head_dim)
    _check_rows("key", key, tokens, kv_heads, batch.head_dim)
    _check_rows("value", value, tokens, kv_heads, batch.head_dim)
    query_heads = query.shape[1]
    if query_heads == 0 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads")
    if options.window is not None and options.window < 1:
        raise ValueError(f"window={options.window} must be at least 1, or None")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap={options.softcap} must be above 0, or None")
    sinks = options.sinks
    if sinks is not None and (sinks.shape != (query_heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        raise ValueError(
            f"sinks are {sinks.dtype} of shape {list(sinks.shape)}; they must be a contiguous float32 [{query_heads}]"
        )


def _check_table(name: str, table: Tensor, shape: list[int | None]) -> None:
    fits = table.dim() == len(shape) and all(want is None or have == want for have, want in zip(table.shape, shape, strict=True))
    if not fits or table.dtype != torch.int32 or not table.is_cpu or not table.is_contiguous():
        wanted = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"{name} is {table.dtype} of shape {list(table.shape)}; it must be a contiguous int32 {wanted} on the CPU"
        )


def _check_rows(name: str, rows: Tensor, tokens: int, heads: int | None, head_dim: int) -> None:
    shape = rows.shape
    fits = len(shape) == 3 and shape[0] == tokens and heads in (None, shape[1]) and shape[2] == head_dim
    if not fits or rows.dtype != torch.float32 or not rows.is_cpu or rows.stride(2) != 1:
        wanted = [tokens, "heads" if heads is None else heads, head_dim]
        raise ValueError(
            f"{name} is {rows.dtype} of shape {list(shape)}, strides {list(rows.stride())}; "
            f"it must be float32 {wanted} on the CPU with a contiguous last dimension"
        )
