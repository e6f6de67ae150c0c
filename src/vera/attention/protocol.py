"""What a model's attention asks of the cache: the nouns that every attention backend shares.

One step runs a *flattened* batch: the new tokens of all sequences, one after another, `[tokens]`. In each layer the new
keys and values are first written to their pages, then every new token attends to all the pages of its own sequence up to
and including itself. A backend does both from one `PagedBatch`, which stays the same for all layers of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

NO_PAGE = -1
"""In a page table: this block has no exact page for this layer and head."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends, as the model's own code asked for it."""

    scale: float
    """Factor on the logits (often `1 / sqrt(head_dim)`, but Gemma differs)."""
    window: int | None = None
    """Sliding window: a token sees itself and the `window - 1` tokens before it. None: all."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)` (Gemma 2)."""
    sinks: Tensor | None = None
    """`[query_heads]` float32: one extra logit a head that takes part in the softmax and has no value (GPT-OSS)."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The pages that one step reads and writes: integers on the host, bytes in the pool. Backends modify only `pages`.

    The tokens of sequence `s` are rows `query_starts[s]` to `query_starts[s + 1]` of the flattened batch; their positions
    are the last ones below `context_lens[s]`. Token position `p` lives in block `block_tables[s, p // page_size]`, at
    offset `p % page_size` of page `page_table[block, layer, kv_head]`.
    """

    pages: Tensor
    """`[num_pages, 2, page_size * head_dim]`, float16, bfloat16 or float32. `[page, 0]` is the keys as
    `[head_dim, page_size]` (channel-major: 64 neighbouring tokens of one channel are one vector load), `[page, 1]` the values
    as `[page_size, head_dim]`."""
    page_table: Tensor
    """`[num_blocks, layers, kv_heads]` int32: the slot in `pages`, or NO_PAGE."""
    block_tables: Tensor
    """`[sequences, max_blocks]` int32; entries past a sequence's last block are undefined and never read."""
    query_starts: Tensor
    """`[sequences + 1]` int32, ascending, from 0 to `tokens`."""
    context_lens: Tensor
    """`[sequences]` int32: tokens in the cache once this step's are written."""
    page_size: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return int(self.query_starts[-1])


class AttentionBackend(Protocol):
    """Writes and reads pages. Whatever it is, its results equal `reference.ReferenceAttention` up to rounding."""

    name: str

    def attend(self, batch: PagedBatch, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        """Writes the new keys and values to their pages, then returns the attention output of every new token.

        `query` is `[tokens, query_heads, head_dim]`, `key` and `value` `[tokens, kv_heads, head_dim]`, float32, last
        dimension contiguous (the others may be strided), keys and queries already rotated. Query head `h` reads KV head
        `h // (query_heads // kv_heads)`. Returns `[tokens, query_heads, head_dim]` float32, contiguous.
        """
        ...


PAGE_DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
