"""Random paged batches for the tests of the attention backends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vera.attention.protocol import AttentionBackend, LayerAttention, PagedBatch

LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class Case:
    """A batch in which all but the new tokens are written, the new tokens' tensors, and how the layer attends."""

    batch: PagedBatch
    query: Tensor
    key: Tensor
    value: Tensor
    options: LayerAttention

    def run(self, backend: AttentionBackend) -> tuple[Tensor, Tensor]:
        """The output and the pages afterwards; leaves the case as it was."""
        batch = replace(self.batch, pages=self.batch.pages.clone())
        return backend.attend(batch, LAYER, self.query, self.key, self.value, self.options), batch.pages

    def only(self, sequence: int) -> Case:
        """The same sequence alone in its batch, reading the same pages."""
        start, end = self.batch.query_starts[sequence : sequence + 2].tolist()
        batch = replace(
            self.batch,
            block_tables=self.batch.block_tables[sequence : sequence + 1].clone(),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=self.batch.context_lens[sequence : sequence + 1].clone(),
        )
        return replace(self, batch=batch, query=self.query[start:end], key=self.key[start:end], value=self.value[start:end])


def make_case(
    sequences: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    options: LayerAttention | None = None,
    seed: int = 0,
) -> Case:
    """`sequences` are (context length, new tokens). Pages lie scattered in the pool; whatever is not written is NaN."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // page_size) for length, _ in sequences]
    num_blocks, max_blocks = sum(blocks) + 2, max(blocks) + 1
    num_pages = num_blocks * LAYERS * kv_heads + 3
    pages = torch.full((num_pages, 2, page_size * head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(num_pages, generator=generator)[: num_blocks * LAYERS * kv_heads]
    page_table = slots.view(num_blocks, LAYERS, kv_heads).int()
    block_ids = torch.randperm(num_blocks, generator=generator).int()
    block_tables = torch.full((len(sequences), max_blocks), 2**31 - 1, dtype=torch.int32)
    taken = 0
    for index, count in enumerate(blocks):
        block_tables[index, :count] = block_ids[taken : taken + count]
        taken += count
    new_tokens = torch.tensor([0] + [new for _, new in sequences])
    tokens = int(new_tokens.sum())

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    case = Case(
        batch=PagedBatch(
            pages=pages,
            page_table=page_table,
            block_tables=block_tables,
            query_starts=new_tokens.cumsum(0).int(),
            context_lens=torch.tensor([length for length, _ in sequences], dtype=torch.int32),
            page_size=page_size,
            head_dim=head_dim,
        ),
        query=random(tokens, kv_heads * group, head_dim),
        key=random(tokens, kv_heads, head_dim),
        value=random(tokens, kv_heads, head_dim),
        options=options or LayerAttention(scale=head_dim**-0.5),
    )
    for index, (length, new) in enumerate(sequences):
        positions = torch.arange(length - new)
        blocks_of = block_tables[index, positions // page_size].long()
        at, offsets = page_table[blocks_of, LAYER].long(), (positions % page_size)[:, None]
        pages[:, 0].view(-1, head_dim, page_size)[at, :, offsets] = random(length - new, kv_heads, head_dim).to(dtype)
        pages[:, 1].view(-1, page_size, head_dim)[at, offsets] = random(length - new, kv_heads, head_dim).to(dtype)
    return case
