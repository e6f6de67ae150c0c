"""Random batches over tiered pages, with the exact keys and values beside them, for the tests of the attention backends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vera.attention.protocol import NO_PAGE, AttentionBackend, LayerAttention, PagedBatch, TierReport, Tiers
from vera.attention.sketch import SketchFormat, read_keys, read_values, sketch_pages

LAYERS = 5
LAYER = 3
_ALIGNMENT = 64


@dataclass(frozen=True)
class TierCase:
    """A batch in which all but the new tokens are written, the new tokens' tensors, and the truth about every page."""

    batch: PagedBatch
    tiers: Tiers
    query: Tensor
    key: Tensor
    value: Tensor
    options: LayerAttention
    exact: Tensor
    """`[num_blocks, kv_heads, 2, page_size * head_dim]`: the pages of `LAYER` with the new tokens written; the rest is NaN."""
    warm: Tensor
    """The bytes that the warm addresses point into."""
    format: SketchFormat

    def run(self, backend: AttentionBackend, *, again: bool = False) -> tuple[Tensor, TierReport]:
        """The output, and a fresh report; leaves the case as it was."""
        arena = self.tiers.arena.clone()
        pages = arena.view(self.batch.pages.dtype).view(self.batch.pages.shape)
        report = fresh_report(self.tiers.report)
        batch = replace(self.batch, pages=pages, tiers=replace(self.tiers, arena=arena, report=report))
        return backend.attend(batch, LAYER, self.query, self.key, self.value, self.options, again=again), report

    def native(self, backend: AttentionBackend) -> Tensor:
        """The output of the same batch with a slot for every page and without tiers."""
        num_blocks, kv_heads = self.exact.shape[:2]
        page_table = torch.full((num_blocks, LAYERS, kv_heads), NO_PAGE, dtype=torch.int32)
        page_table[:, LAYER] = torch.arange(num_blocks * kv_heads, dtype=torch.int32).view(num_blocks, kv_heads)
        batch = replace(self.batch, pages=self.exact.flatten(0, 1).clone(), page_table=page_table, tiers=None)
        return backend.attend(batch, LAYER, self.query, self.key, self.value, self.options)

    def only(self, sequence: int) -> TierCase:
        """The same sequence alone in its batch, reading the same pages."""
        start, end = self.batch.query_starts[sequence : sequence + 2].tolist()
        one = slice(sequence, sequence + 1)
        tiers = replace(
            self.tiers,
            tolerances=self.tiers.tolerances[one].clone(),
            probes=self.tiers.probes[one].clone(),
            report_rows=self.tiers.report_rows[one].clone(),
            report=replace(self.tiers.report, errors=self.tiers.report.errors[one].clone()),
        )
        batch = replace(
            self.batch,
            block_tables=self.batch.block_tables[one].clone(),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=self.batch.context_lens[one].clone(),
            tiers=tiers,
        )
        rows = (tensor[start:end] for tensor in (self.query, self.key, self.value))
        return TierCase(batch, tiers, *rows, self.options, self.exact, self.warm, self.format)

    def with_options(self, options: LayerAttention) -> TierCase:
        return replace(self, options=options)

    def with_tiers(self, **changes: object) -> TierCase:
        """The same case with other entries in its tiers."""
        tiers = replace(self.tiers, **changes)  # type: ignore[arg-type]
        return replace(self, tiers=tiers, batch=replace(self.batch, tiers=tiers))

    def with_tolerance(self, tolerance: float) -> TierCase:
        return self.with_tiers(tolerances=torch.full_like(self.tiers.tolerances, tolerance))

    def norm(self, sequence: int) -> Tensor:
        """`N` of each KV head: float32 `[kv_heads]`."""
        blocks = self.blocks(sequence)
        sketched = self.exact[blocks[self.tiers.sketch_keys[blocks] != NO_PAGE]].float()
        values = sketched[:, :, 1].unflatten(2, (-1, self.batch.head_dim))
        return values.norm(dim=-1).amax(dim=-1).mean(dim=0)

    def blocks(self, sequence: int) -> Tensor:
        """`[blocks]` int64: the blocks of one sequence."""
        count = -(-int(self.batch.context_lens[sequence]) // self.batch.page_size)
        return self.batch.block_tables[sequence, :count].long()

    def by_sketch(self, sequence: int) -> Tensor:
        """`[blocks, kv_heads]` bool: the page has a sketch and no slot."""
        blocks = self.blocks(sequence)
        return (self.tiers.sketch_keys[blocks] != NO_PAGE)[:, None] & (self.batch.page_table[blocks, LAYER] == NO_PAGE)

    def cold(self, sequence: int) -> Tensor:
        """`[blocks, kv_heads]` bool: the page has no slot and no warm address."""
        blocks = self.blocks(sequence)
        released = self.tiers.warm[blocks, LAYER // self.tiers.window_layers] == 0
        return released[:, None] & (self.batch.page_table[blocks, LAYER] == NO_PAGE)

    def keys_and_values(self, sequence: int, by_sketch: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 keys and values `[kv_heads, tokens, head_dim]`; by sketch where `by_sketch`, `[blocks, kv_heads]`, is true."""
        exact = self.exact[self.blocks(sequence)].float()
        keys = exact[:, :, 0].unflatten(2, (self.batch.head_dim, -1)).transpose(2, 3)
        values = exact[:, :, 1].unflatten(2, (-1, self.batch.head_dim))
        key_parts, value_parts, _ = sketch_pages(self.exact[self.blocks(sequence)][by_sketch], self.format)
        keys[by_sketch] = read_keys(key_parts, self.format).transpose(1, 2)
        values[by_sketch] = read_values(value_parts, self.format)
        length = int(self.batch.context_lens[sequence])
        return (keys.transpose(0, 1).flatten(1, 2)[:, :length], values.transpose(0, 1).flatten(1, 2)[:, :length])

    def dense(self, sequence: int, by_sketch: Tensor | None = None) -> Tensor:
        """Attention of the sequence's new tokens over its pages as `keys_and_values` gives them; None: over exact pages."""
        start, end = self.batch.query_starts[sequence : sequence + 2].tolist()
        if by_sketch is None:
            by_sketch = torch.zeros_like(self.by_sketch(sequence))
        keys, values = self.keys_and_values(sequence, by_sketch)
        length = keys.shape[1]
        visible = torch.arange(length) <= torch.arange(length - (end - start), length)[:, None]
        output = torch.nn.functional.scaled_dot_product_attention(
            self.query[start:end].transpose(0, 1), keys, values, attn_mask=visible, scale=self.options.scale, enable_gqa=True
        )
        return output.transpose(0, 1)


def fresh_report(report: TierReport) -> TierReport:
    """An empty report of the same shapes."""
    return TierReport(
        masses=torch.zeros_like(report.masses),
        frequencies=torch.zeros_like(report.frequencies),
        errors=torch.zeros_like(report.errors),
    )


def make_tier_case(
    sequences: list[tuple[int, int, float]],
    *,
    hot_share: float = 0.2,
    cold_share: float = 0.2,
    hot_sketches: bool = True,
    first_exact: int = 1,
    last_exact: int = 1,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    bits: int = 4,
    window_layers: int = 2,
    skip_share: float = 0.0,
    probes: list[int] | None = None,
    concentration: float = 6.0,
    aligned_share: float = 0.02,
    options: LayerAttention | None = None,
    seed: int = 0,
) -> TierCase:
    """`sequences` are (context length, new tokens, tolerance).

    The first `first_exact` and the last `last_exact` blocks of each sequence, and all that new tokens are written to, are hot
    and have no sketch. All others have a sketch: `hot_share` of their pages have a slot too, `cold_share` of the blocks are
    released, the rest has warm addresses. Without `hot_sketches`, blocks whose pages are all hot have no sketch.
    `aligned_share` of the keys point along a query of their KV head, such that their logit is about `concentration`. Pages and
    sketches lie scattered in one arena. Only `LAYER` is filled; whatever no one may read is 0xFF bytes, which is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length, _, _ in sequences]
    num_blocks, max_blocks = sum(counts) + 2, max(counts) + 1
    sequence_blocks = torch.randperm(num_blocks, generator=generator)[: sum(counts)].split(counts)
    block_tables = torch.full((len(sequences), max_blocks), 2**31 - 1, dtype=torch.int32)
    new_tokens = torch.tensor([0] + [new for _, new, _ in sequences])
    query_starts = new_tokens.cumsum(0).int()
    tokens = int(new_tokens.sum())
    options = options or LayerAttention(scale=head_dim**-0.5)
    query = torch.randn(tokens, kv_heads * group, head_dim, generator=generator)
    key, value = torch.randn(2, tokens, kv_heads, head_dim, generator=generator)

    exact = torch.full((num_blocks, kv_heads, 2, page_size * head_dim), float("nan"), dtype=dtype)
    sealed = torch.zeros(num_blocks, dtype=torch.bool)
    for index, ((length, new, _), blocks) in enumerate(zip(sequences, sequence_blocks, strict=True)):
        block_tables[index, : len(blocks)] = blocks
        keys, values = torch.randn(2, kv_heads, len(blocks) * page_size, head_dim, generator=generator)
        new_queries = query[query_starts[index] : query_starts[index + 1]]
        _align(keys, new_queries, concentration / options.scale, aligned_share, generator)
        keys[:, length - new :], values[:, length - new :] = float("nan"), float("nan")
        keys = keys.view(kv_heads, len(blocks), page_size, head_dim).transpose(2, 3)
        exact[blocks] = torch.stack([keys.flatten(2), values.reshape(keys.shape).flatten(2)], dim=2).transpose(0, 1).to(dtype)
        sealed[blocks[first_exact : max(first_exact, min(len(blocks) - last_exact, (length - new) // page_size))]] = True

    cold = sealed & (torch.rand(num_blocks, generator=generator) < cold_share)
    hot = ~sealed[:, None] | (torch.rand(num_blocks, kv_heads, generator=generator) < hot_share)
    sketched = sealed & (~hot.all(dim=1) | hot_sketches)
    fmt = SketchFormat(page_size, head_dim, bits)
    arena, page_table, sketch_keys, sketch_values, stride = _fill_arena(exact, hot, sketched, fmt, generator)
    warm, addresses = _fill_warm(exact, sealed & ~cold, window_layers, generator)
    for index, (length, new, _) in enumerate(sequences):
        positions = torch.arange(length - new, length)
        blocks, offsets = block_tables[index, positions // page_size].long(), (positions % page_size)[:, None]
        rows = slice(int(query_starts[index]), int(query_starts[index + 1]))
        heads = torch.arange(kv_heads)
        exact[:, :, 0].view(num_blocks, kv_heads, head_dim, page_size)[blocks[:, None], heads, :, offsets] = key[rows].to(dtype)
        exact[:, :, 1].view(num_blocks, kv_heads, page_size, head_dim)[blocks[:, None], heads, offsets] = value[rows].to(dtype)

    report_shape = (len(sequences) + 1, LAYERS, kv_heads, max_blocks)
    tiers = Tiers(
        arena=arena,
        sketch_bits=bits,
        sketch_keys=sketch_keys,
        sketch_values=sketch_values,
        sketch_stride=stride,
        warm=addresses,
        window_layers=window_layers,
        tolerances=torch.tensor([tolerance for _, _, tolerance in sequences], dtype=torch.float32),
        skip_share=skip_share,
        probes=torch.tensor(probes or [0] * len(sequences), dtype=torch.int32),
        report_rows=torch.randperm(len(sequences) + 1, generator=generator)[: len(sequences)].int(),
        report=TierReport(
            masses=torch.zeros(report_shape),
            frequencies=torch.zeros(report_shape),
            errors=torch.zeros(len(sequences), 3, dtype=torch.float64),
        ),
    )
    batch = PagedBatch(
        pages=arena.view(dtype).view(-1, 2, page_size * head_dim),
        page_table=page_table,
        block_tables=block_tables,
        query_starts=query_starts,
        context_lens=torch.tensor([length for length, _, _ in sequences], dtype=torch.int32),
        page_size=page_size,
        head_dim=head_dim,
        tiers=tiers,
    )
    return TierCase(batch, tiers, query, key, value, options, exact, warm, fmt)


def _align(keys: Tensor, queries: Tensor, product: float, share: float, generator: torch.Generator) -> None:
    """Turns a share of the keys, `[kv_heads, tokens, head_dim]`, towards some query of their head, with this dot product."""
    if not len(queries):
        return
    kv_heads, tokens, head_dim = keys.shape
    chosen = torch.rand(kv_heads, tokens, generator=generator) < share
    heads = chosen.nonzero()[:, 0]
    candidates = queries.view(len(queries), kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    targets = candidates[heads, torch.randint(candidates.shape[1], (len(heads),), generator=generator)]
    keys[chosen] = keys[chosen] * 0.2 + targets * product / targets.square().sum(dim=1, keepdim=True)


def _fill_arena(
    exact: Tensor, hot: Tensor, sketched: Tensor, fmt: SketchFormat, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """The arena, `page_table`, `sketch_keys`, `sketch_values` and `sketch_stride`.

    The arena is made of equal regions in random order. One region holds as many pages as the sketch parts of a block need.
    """
    num_blocks, kv_heads, _, half_page = exact.shape
    page_bytes = 2 * half_page * exact.element_size()
    stride = -(-max(fmt.key_bytes, fmt.value_bytes) // _ALIGNMENT) * _ALIGNMENT
    region_pages = -(-LAYERS * kv_heads * stride // page_bytes)
    num_hot, num_sketched = int(hot.sum()), int(sketched.sum())
    page_regions = -(-num_hot // region_pages) + 1
    regions = torch.randperm(page_regions + 2 * num_sketched, generator=generator)
    arena = torch.full((len(regions) * region_pages * page_bytes,), 0xFF, dtype=torch.uint8)

    free = (regions[:page_regions, None] * region_pages + torch.arange(region_pages)).flatten()
    slots = free[torch.randperm(len(free), generator=generator)][:num_hot]
    arena.view(exact.dtype).view(-1, 2, half_page)[slots] = exact[hot]
    page_table = torch.full((num_blocks, LAYERS, kv_heads), NO_PAGE, dtype=torch.int32)
    page_table[:, LAYER][hot] = slots.int()

    key_parts, value_parts, unusable = sketch_pages(exact[sketched].flatten(0, 1), fmt)
    assert unusable == 0
    tables = []
    for parts, starts in zip((key_parts, value_parts), regions[page_regions:].view(2, num_sketched), strict=True):
        starts = starts * region_pages * page_bytes
        for head in range(kv_heads):
            bytes_at = starts[:, None] + (LAYER * kv_heads + head) * stride + torch.arange(parts.shape[1])
            arena[bytes_at] = parts.view(num_sketched, kv_heads, parts.shape[1])[:, head]
        table = torch.full((num_blocks,), NO_PAGE, dtype=torch.int64)
        table[sketched] = starts
        tables.append(table)
    return arena, page_table, tables[0], tables[1], stride


def _fill_warm(exact: Tensor, kept: Tensor, window_layers: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The warm buffer with the pages of the blocks that are kept there, and the addresses as in `Tiers.warm`."""
    num_blocks, kv_heads, _, half_page = exact.shape
    windows = -(-LAYERS // window_layers)
    window, place = divmod(LAYER, window_layers)
    layers = min(window_layers, LAYERS - window * window_layers)
    count = int(kept.sum())
    warm = torch.full((count + 1, layers, kv_heads, 2, half_page), float("nan"), dtype=exact.dtype)
    places = torch.randperm(count, generator=generator)
    warm[places, place] = exact[kept]
    addresses = torch.zeros((num_blocks, windows), dtype=torch.int64)
    addresses[kept, window] = warm.data_ptr() + places * warm[0].nbytes
    return warm, addresses
