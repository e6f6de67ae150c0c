"""What every backend refuses: tensors that are not what `protocol` says. Cheap enough to run for each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vera.attention.protocol import NO_PAGE, PAGE_DTYPES, LayerAttention, PagedBatch, Tiers
from vera.attention.sketch import SketchFormat


def check_batch(batch: PagedBatch) -> None:
    """Raises ValueError for a wrong dtype, shape or layout, of the tiers too. Does not look at the ids in the tables."""
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
    if batch.tiers is not None:
        check_tiers(batch, batch.tiers)


def check_tiers(batch: PagedBatch, tiers: Tiers) -> None:
    """Raises ValueError for tables of a wrong dtype or shape, and for sketches and report rows that lie outside their memory.

    The rest of `batch` has been checked. Whether warm addresses are valid cannot be told.
    """
    num_blocks, layers, kv_heads = batch.page_table.shape
    sequences, max_blocks = batch.block_tables.shape
    if tiers.window_layers < 1:
        raise ValueError(f"window_layers={tiers.window_layers} must be at least 1")
    if not 0 <= tiers.skip_share <= 1:
        raise ValueError(f"skip_share={tiers.skip_share} must be from 0 to 1")
    _check_table("sketch_keys", tiers.sketch_keys, [num_blocks], torch.int64)
    _check_table("sketch_values", tiers.sketch_values, [num_blocks], torch.int64)
    _check_table("warm", tiers.warm, [num_blocks, -(-layers // tiers.window_layers)], torch.int64)
    _check_table("tolerances", tiers.tolerances, [sequences], torch.float32)
    _check_table("probes", tiers.probes, [sequences])
    _check_table("report_rows", tiers.report_rows, [sequences])
    if not bool(tiers.tolerances.isfinite().all()):
        raise ValueError(f"tolerances are {tiers.tolerances.tolist()}; they must be finite, negative for exact service")
    if bool((tiers.probes < 0).any()):
        raise ValueError(f"probes are {tiers.probes.tolist()}; they must not be below 0")
    _check_arena(batch, tiers)
    _check_report(tiers, [layers, kv_heads], sequences, max_blocks)


def _check_arena(batch: PagedBatch, tiers: Tiers) -> None:
    """That the pages and all sketches lie within the arena."""
    arena, pages = tiers.arena, batch.pages
    _check_table("arena", arena, [None], torch.uint8)
    if not arena.data_ptr() <= pages.data_ptr() <= pages.data_ptr() + pages.nbytes <= arena.data_ptr() + arena.nbytes:
        raise ValueError(f"pages are not a view of the arena of {arena.nbytes} bytes")
    if bool(((tiers.sketch_keys == NO_PAGE) != (tiers.sketch_values == NO_PAGE)).any()):
        raise ValueError("sketch_keys and sketch_values are not NO_PAGE for the same blocks")
    if not bool((tiers.sketch_keys != NO_PAGE).any()):
        return
    fmt = SketchFormat(batch.page_size, batch.head_dim, tiers.sketch_bits)
    _, layers, kv_heads = batch.page_table.shape
    last = (layers * kv_heads - 1) * tiers.sketch_stride
    for name, starts, size in (
        ("sketch_keys", tiers.sketch_keys, fmt.key_bytes),
        ("sketch_values", tiers.sketch_values, fmt.value_bytes),
    ):
        if tiers.sketch_stride < size:
            raise ValueError(f"sketch_stride={tiers.sketch_stride} is below the {size} bytes of a sketch's part in {name}")
        if not NO_PAGE <= int(starts.min()) <= int(starts.max()) <= arena.nbytes - last - size:
            raise ValueError(
                f"{name} lie from byte {int(starts.min())} to {int(starts.max())}; they must be NO_PAGE or from 0 to "
                f"{arena.nbytes - last - size}, so that all layers' sketches end within the arena of {arena.nbytes} bytes"
            )


def _check_report(tiers: Tiers, heads: list[int | None], sequences: int, max_blocks: int) -> None:
    """`heads` are the layers and KV heads of the batch."""
    report = tiers.report
    _check_table("report.masses", report.masses, [None, *heads, None], torch.float32)
    if report.masses.shape[3] < max_blocks:
        raise ValueError(f"report.masses has room for {report.masses.shape[3]} blocks; block_tables holds {max_blocks}")
    _check_table("report.frequencies", report.frequencies, list(report.masses.shape), torch.float32)
    _check_table("report.errors", report.errors, [sequences, 3], torch.float64)
    _check_table("report.pages_read", report.pages_read, [4], torch.int64)
    rows, bounded = report.masses.shape[0], tiers.report_rows[tiers.tolerances >= 0]
    if bounded.numel() and not 0 <= int(bounded.min()) <= int(bounded.max()) < rows:
        raise ValueError(f"report_rows are {tiers.report_rows.tolist()}; those in use must be from 0 to {rows - 1}")


def check_call(
    batch: PagedBatch, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention, *, tokens: int
) -> None:
    """Raises ValueError for tensors of a wrong dtype or shape, IndexError for a layer that the page table lacks.

    `tokens` is `batch.tokens`, which the caller has at hand.
    """
    check_rows(batch, query, key, value, tokens=tokens)
    check_layer(layer, options, layers=batch.page_table.shape[1], query_heads=query.shape[1])


def check_rows(batch: PagedBatch, query: Tensor, key: Tensor, value: Tensor, *, tokens: int) -> None:
    """What `check_call` asks of tensors: the same for all layers whose tensors are alike."""
    kv_heads = batch.page_table.shape[2]
    _check_rows("query", query, tokens, None, batch.head_dim)
    _check_rows("key", key, tokens, kv_heads, batch.head_dim)
    _check_rows("value", value, tokens, kv_heads, batch.head_dim)
    query_heads = query.shape[1]
    if query_heads == 0 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads")


def check_layer(layer: int, options: LayerAttention, *, layers: int, query_heads: int) -> None:
    """What `check_call` asks besides."""
    if not 0 <= layer < layers:
        raise IndexError(f"layer={layer} is outside the {layers} layers of page_table")
    if options.window is not None and options.window < 1:
        raise ValueError(f"window={options.window} must be at least 1, or None")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap={options.softcap} must be above 0, or None")
    sinks = options.sinks
    if sinks is not None and (sinks.shape != (query_heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        raise ValueError(
            f"sinks are {sinks.dtype} of shape {list(sinks.shape)}; they must be a contiguous float32 [{query_heads}]"
        )


def _check_table(name: str, table: Tensor, shape: Sequence[int | None], dtype: torch.dtype = torch.int32) -> None:
    fits = table.dim() == len(shape) and all(want is None or have == want for have, want in zip(table.shape, shape, strict=True))
    if not fits or table.dtype != dtype or not table.is_cpu or not table.is_contiguous():
        wanted = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"{name} is {table.dtype} of shape {list(table.shape)}; "
            f"it must be a contiguous {str(dtype).removeprefix('torch.')} {wanted} on the CPU"
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
