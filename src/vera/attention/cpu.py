"""Paged attention by the native kernel (`native/`): pages are read where they lie, in float16, bfloat16 or float32.

Pages that are read by their sketch cost products of small integers: queries and weights are rounded to 8 bits (to 15 where
sketches have 8 bits), which adds a few percent to the error that the sketch itself has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vera import _native
from vera.attention.checks import check_batch, check_layer, check_rows
from vera.attention.protocol import LayerAttention, PagedBatch, Tiers
from vera.attention.sketch import SketchFormat

_LARGEST_WINDOW = 2**30  # longer than any context, and safe to add to a position in 32 bits
_PAGE_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


_OUTPUT_BYTES_AT_ONCE = 2**20
"""Outputs of several layers are one piece of memory up to this size."""


@dataclass(slots=True)
class _PreparedBatch:
    batch: PagedBatch
    """Keeps the tensors alive that `native` has the addresses of."""
    native: _native.Batch
    tokens: int
    layers: int
    given: tuple[object, ...] = ()
    """What queries, keys and values were like when they were last found right: as a rule the same in all layers."""
    outputs: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    """For queries like those given."""


class CpuAttention:
    """Runs on torch's own threads, as many as `torch.get_num_threads()`.

    A sequence's results do not depend on the rest of the batch or on the number of threads, to the last bit.
    """

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        """`isa` is one of `available_isas()`. None: what the environment variable VERA_CPU_ISA asks for, else the best one.

        Raises ValueError for one that is unknown or that this CPU lacks.
        """
        self._kernels = _native.Attention(isa or "")
        self._prepared: _PreparedBatch | None = None

    @property
    def isa(self) -> str:
        """The instruction set in use: `avx512vnni`, `avx512`, `avx2` or `portable`."""
        return str(self._kernels.isa)

    @property
    def seconds(self) -> float:
        """Time spent in the kernel so far."""
        return float(self._kernels.seconds)

    @property
    def decode_seconds(self) -> float:
        """Time spent so far in those calls in which every sequence had one new token at most."""
        return float(self._kernels.decode_seconds)

    @property
    def decode_bytes_read(self) -> int:
        """Bytes of keys and values that those calls read."""
        return int(self._kernels.decode_bytes_read)

    def attend(
        self,
        batch: PagedBatch,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: LayerAttention,
        *,
        again: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.attend`.

        Raises ValueError and IndexError for what `PagedBatch` does not allow, before anything is written. Without tiers, the
        tables of a batch are checked when it is first seen and must not change while it is in use. With tiers, `page_table`
        and the tables of the tiers may change between calls.
        """
        prepared = self._prepare(batch)
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        given = (
            *(query.shape, query_strides, query.dtype, query.is_cpu),
            *(key.shape, key_strides, key.dtype, key.is_cpu),
            *(value.shape, value_strides, value.dtype, value.is_cpu),
        )
        if given != prepared.given:
            check_rows(batch, query, key, value, tokens=prepared.tokens)
            prepared.given, prepared.outputs = given, _outputs(query, prepared.layers)
        check_layer(layer, options, layers=prepared.layers, query_heads=query.shape[1])
        output = next(prepared.outputs)
        hits = self._kernels.attend(
            prepared.native,
            layer,
            query.shape[1],
            (query.data_ptr(), query_strides[0], query_strides[1]),
            (key.data_ptr(), key_strides[0], key_strides[1]),
            (value.data_ptr(), value_strides[0], value_strides[1]),
            output.data_ptr(),
            options.scale,
            min(options.window or 0, _LARGEST_WINDOW),
            options.softcap or 0.0,
            0 if options.sinks is None else options.sinks.data_ptr(),
            torch.get_num_threads(),
            again,
        )
        if hits and batch.tiers is not None:
            batch.tiers.report.hits.append(torch.tensor(hits, dtype=torch.int32))
        return output

    def _prepare(self, batch: PagedBatch) -> _PreparedBatch:
        """The kernel's own form of the batch, made once a step."""
        prepared = self._prepared  # a local, because another thread may put its own batch here meanwhile
        if prepared is None or prepared.batch is not batch:
            prepared = self._prepared = _PreparedBatch(
                batch, _native_batch(batch), batch.tokens, layers=batch.page_table.shape[1]
            )
        return prepared


def _outputs(query: Tensor, layers: int) -> Iterator[Tensor]:
    """Contiguous tensors like `query`, without end; small ones are made together."""
    at_once = max(1, min(layers, _OUTPUT_BYTES_AT_ONCE // max(1, 4 * math.prod(query.shape))))
    shape = (at_once, *query.shape)
    while True:
        yield from query.new_empty(shape).unbind()


def _native_batch(batch: PagedBatch) -> _native.Batch:
    check_batch(batch)
    num_blocks, layers, kv_heads = batch.page_table.shape
    sequences, max_blocks = batch.block_tables.shape
    return _native.Batch(
        pages=batch.pages.data_ptr(),
        num_pages=batch.pages.shape[0],
        page_type=_PAGE_TYPES[batch.pages.dtype],
        page_table=batch.page_table.data_ptr(),
        num_blocks=num_blocks,
        layers=layers,
        kv_heads=kv_heads,
        block_tables=batch.block_tables.data_ptr(),
        sequences=sequences,
        max_blocks=max_blocks,
        query_starts=batch.query_starts.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        page_size=batch.page_size,
        head_dim=batch.head_dim,
        tiers=None if batch.tiers is None else _native_tiers(batch.tiers),
    )


def _native_tiers(tiers: Tiers) -> _native.Tiers:
    report = tiers.report
    return _native.Tiers(
        arena=tiers.arena.data_ptr(),
        arena_bytes=tiers.arena.numel(),
        sketch_bits=tiers.sketch_bits,
        sketch_keys=tiers.sketch_keys.data_ptr(),
        sketch_values=tiers.sketch_values.data_ptr(),
        sketch_stride=tiers.sketch_stride,
        warm=tiers.warm.data_ptr(),
        windows=tiers.warm.shape[1],
        window_layers=tiers.window_layers,
        tolerances=tiers.tolerances.data_ptr(),
        skip_share=tiers.skip_share,
        probes=tiers.probes.data_ptr(),
        report_rows=tiers.report_rows.data_ptr(),
        masses=report.masses.data_ptr(),
        frequencies=report.frequencies.data_ptr(),
        num_report_rows=report.masses.shape[0],
        report_blocks=report.masses.shape[3],
        errors=report.errors.data_ptr(),
        pages_read=report.pages_read.data_ptr(),
    )


def available_isas() -> list[str]:
    """The instruction sets that this build has and this CPU runs, best first."""
    return list(_native.available_isas())


def sketch_pages(
    pages: Tensor, key_parts: Tensor, value_parts: Tensor, sketch_format: SketchFormat, dtype: torch.dtype, isa: str | None = None
) -> int:
    """Writes the sketches of exact pages to where their two parts shall lie: `sketch.sketch_pages`, by addresses.

    `pages`, `key_parts` and `value_parts` are `[n]` int64 addresses; the exact pages are of `dtype`, laid out as in
    `PagedBatch.pages`. Runs on torch's threads. Returns how many sketches hold a number that is not finite, and so are of no
    use. Raises ValueError for sizes that cannot be sketched and for tensors that are not contiguous int64 of one length.
    """
    count = _check_addresses(pages, key_parts, value_parts)
    return _native.sketch_pages(
        pages.data_ptr(),
        key_parts.data_ptr(),
        value_parts.data_ptr(),
        count,
        _PAGE_TYPES[dtype],
        sketch_format.page_size,
        sketch_format.head_dim,
        sketch_format.bits,
        torch.get_num_threads(),
        isa or "",
    )


def copy_bytes(sources: Tensor, targets: Tensor, size: int) -> None:
    """Copies `size` bytes from each source to the target at the same place, both `[n]` int64 addresses, on torch's threads.

    What is copied must not overlap. Raises ValueError for tensors that are not contiguous int64 of one length.
    """
    count = _check_addresses(sources, targets)
    _native.copy_bytes(sources.data_ptr(), targets.data_ptr(), count, size, torch.get_num_threads())


def _check_addresses(*lists: Tensor) -> int:
    """Returns the number of addresses in each list."""
    count = lists[0].numel()
    for addresses in lists:
        if addresses.dtype != torch.int64 or addresses.shape != (count,) or not addresses.is_contiguous():
            raise ValueError(
                f"addresses are {addresses.dtype} of shape {list(addresses.shape)}; they must be a contiguous int64 [{count}]"
            )
    return count


def plain_sum(buffer: Tensor, num_threads: int | None = None) -> int:
    """Sum of the buffer's 64-bit words modulo 2^64, on the kernel's threads: the yardstick for memory bandwidth.

    Reads all bytes of the contiguous `buffer` once, up to the last whole word.
    """
    if not buffer.is_contiguous():
        raise ValueError(f"buffer of shape {list(buffer.shape)}, strides {list(buffer.stride())} must be contiguous")
    return int(_native.plain_sum(buffer.data_ptr(), buffer.nbytes, num_threads or torch.get_num_threads()))


def threads_runtime() -> str:
    """The OpenMP library whose threads the kernel runs on (torch's), or `std::thread`."""
    return str(_native.threads_runtime())


def advise_hugepages(buffer: Tensor) -> bool:
    """Asks for huge pages behind a large buffer, before it is first written. False: the system refused, no harm done."""
    return bool(_native.advise_hugepages(buffer.data_ptr(), buffer.nbytes))
